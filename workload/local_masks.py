"""Masks made to fit a rank: some heads of a mask, and padding up to the shapes that all ranks share."""

import dataclasses

import numpy as np

from workload.block_masks import BlockMask
from workload.masks import IntervalMask


def select_heads(mask, heads: np.ndarray | None):
    """The mask of these heads alone, in this order; None keeps it as it is."""
    if heads is None:
        return mask
    return dataclasses.replace(
        mask, **{name: getattr(mask, name)[heads] for name in ("q_bounds", "kv_bounds", "counts", "indices")}
    )


def pad_mask(mask, q_len: int, kv_len: int):
    """The mask with rows that see nothing and keys that nobody sees behind it, up to these lengths."""
    rows, keys = q_len - mask.q_len, kv_len - mask.kv_len
    if rows < 0 or keys < 0:
        raise ValueError(f"q_len, kv_len: {q_len}, {kv_len} are less than the mask's {mask.q_len}, {mask.kv_len}")
    if not rows and not keys:
        return mask
    if isinstance(mask, BlockMask):
        return _pad_blocks(mask, rows, keys)
    starts, ends = (
        np.pad(np.where(mask.ends > mask.starts, x, kv_len), ((0, 0), (0, rows)), constant_values=kv_len)
        for x in (mask.starts, mask.ends)
    )
    return IntervalMask(starts.astype(np.int32), ends.astype(np.int32), kv_len, "custom")


def _pad_blocks(mask: BlockMask, rows: int, keys: int) -> BlockMask:
    """One more query block that lists nothing, one more key block that nobody lists."""
    def bounds(x, more):
        return np.concatenate([x, x[:, -1:] + more], axis=1)
    def places(x, more):
        return np.concatenate([x, np.arange(1, more + 1) + far])
    far = max(mask.q_positions.max(initial=0), mask.kv_positions.max(initial=0))
    return dataclasses.replace(
        mask,
        q_bounds=bounds(mask.q_bounds, rows),
        kv_bounds=bounds(mask.kv_bounds, keys),
        counts=np.pad(mask.counts, ((0, 0), (0, 1))),
        indices=np.pad(mask.indices, ((0, 0), (0, 1), (0, 0))),
        q_positions=places(mask.q_positions, rows),
        kv_positions=places(mask.kv_positions, keys),
        block=None,
        name="variable_block",
    )
