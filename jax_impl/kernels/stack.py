"""Operands of several ranks as one pytree with a leading rank axis, so that one program serves all ranks."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from workload.errors import Unsupported


def stack_operands(operands: Sequence[Any]) -> Any:
    """Zero-pads every array to the largest shape among the ranks and stacks them: leaves [ranks, ...], NumPy.

    The kernel contract makes a trailing pad of zeros mean "absent".

    Args:
      operands: one `prepare` result per rank, of one kernel and one problem shape.

    Raises: `Unsupported` where their static parts differ, which no single program can serve.
    """
    leaves, trees = zip(*(jax.tree.flatten(x) for x in operands), strict=True)
    if any(t != trees[0] for t in trees):
        raise Unsupported("stack_operands", "the static parts of the ranks' kernel operands differ")
    return jax.tree.unflatten(trees[0], [_stack([np.asarray(x) for x in ranks]) for ranks in zip(*leaves, strict=True)])


def alike(operands: Sequence[Any], kinds: Sequence[Hashable] | None = None, *, fixed: bool = True) -> list[Any]:
    """The same operands, zero-padded to equal shapes, since operands of equal shapes share one compilation.

    How many runs of tiles a row of tiles has depends on the mask, and so does how many intervals a row has: the one is
    in the last axes of the arrays and costs a kernel next to nothing, the other is in axes before.

    Args:
      operands: `prepare` results, of any masks, as NumPy arrays.
      kinds: what else must be equal for two of them to be made alike, one for each.
      fixed: whether only the last axes are padded, and operands that differ in others are not alike.
    """
    flat = [jax.tree.flatten(x) for x in operands]
    keys = [(kind, tree, tuple((x.dtype, x.shape[:-1] if fixed else x.ndim) for x in leaves))
            for kind, (leaves, tree) in zip(kinds or [None] * len(flat), flat, strict=True)]
    widest: dict[Hashable, list[np.ndarray]] = {}
    for key, (leaves, _) in zip(keys, flat, strict=True):
        sizes = [np.array(x.shape, int) for x in leaves]
        widest[key] = [np.maximum(*pair) for pair in zip(widest.get(key, sizes), sizes, strict=True)]
    return [jax.tree.unflatten(tree, [_widened(x, n) for x, n in zip(leaves, widest[key], strict=True)])
            for key, (leaves, tree) in zip(keys, flat, strict=True)]


def _widened(x: np.ndarray, shape: np.ndarray) -> np.ndarray:
    return np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    shape = np.max([x.shape for x in arrays], axis=0).astype(int)
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, x in zip(out, arrays, strict=True):
        row[tuple(slice(0, n) for n in x.shape)] = x
    return out
