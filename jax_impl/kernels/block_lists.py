"""Block masks as the tile lists that kernels walk: q-major, and transposed for dk/dv; built on the device.

A `BlockMask` of uniform blocks becomes, per mask head and row tile, the ascending list of column tiles that some
row of it sees. Tiles divide blocks, so 128 blocks serve a kernel of 64 tiles. All of it is jit-able and
deterministic: sums and scatters to places that are all different.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.walks import ListWalk, RowIntervals
from workload.block_masks import BlockMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileLists:
    """Per mask head and row tile, the column tiles it walks, those that need no element mask first.

    Attributes:
      full: int32 [heads, row tiles], how many lead that are visible in every cell (a ragged one never is).
      counts: int32 [heads, row tiles], how many are listed.
      indices: int32 [heads, row tiles, longest], zero after counts.
    """

    full: jax.Array
    counts: jax.Array
    indices: jax.Array


@functools.partial(jax.jit, static_argnames=("block", "rows", "columns"))
def tile_lists(counts, indices, limits, *, block: int, rows: int, columns: int) -> TileLists:
    """Lists of `rows` x `columns` tiles of a mask's lists of block x block.

    Args:
      counts, indices: int32 [heads, q_blocks], [heads, q_blocks, max_count], as in `BlockMask`.
      limits: int32 [q_len], ascending: how many leading keys a row may see at all (kv_len unless causal).
      rows, columns: tile sizes that divide `block`.
    """
    pieces, tiles = block // columns, -(-limits.shape[0] // rows)
    column = (indices[..., None] * pieces + jnp.arange(pieces, dtype=jnp.int32)).reshape(*indices.shape[:2], -1)
    column, counts = (jnp.repeat(x, block // rows, axis=1)[:, :tiles] for x in (column, counts))
    first = jnp.arange(tiles) * rows
    least, most = limits[first], limits[jnp.minimum(first + rows, limits.shape[0]) - 1]
    listed = jnp.arange(column.shape[2]) < counts[:, :, None] * pieces
    listed &= column * columns < most[:, None]
    full = listed & ((column + 1) * columns <= least[:, None])
    count = lambda x: x.sum(axis=2, dtype=jnp.int32)  # noqa: E731
    return TileLists(count(full), count(listed), jnp.where(listed, column, 0))


@functools.partial(jax.jit, static_argnames=("column_tiles", "longest"))
def transposed(lists: TileLists, *, column_tiles: int, longest: int | None = None) -> TileLists:
    """The lists by column tile: which row tiles walk it, ascending, those that see all of it first.

    Args:
      column_tiles: how many there are.
      longest: slots of the result, at least its longest list; all row tiles by default.
    """
    # Head by head: a picture of all heads at once would be the largest array of a long problem.
    by_key = functools.partial(_transposed_head, column_tiles=column_tiles, longest=longest)
    return TileLists(*jax.lax.map(lambda x: by_key(*x), (lists.full, lists.counts, lists.indices)))


def _transposed_head(full, counts, indices, *, column_tiles: int, longest: int | None):
    """full, counts [column tiles] and indices [column tiles, longest] of one head's lists."""
    tiles, slots = indices.shape
    longest = tiles if longest is None else longest
    row, slot = jnp.indices((tiles, slots), dtype=jnp.int32)
    # What is not listed goes to one column tile too many, which is cut off.
    column = jnp.where(slot < counts[:, None], indices, column_tiles)
    seen = 1 + (slot < full[:, None]).astype(jnp.int8)
    picture = jnp.zeros((column_tiles + 1, tiles), jnp.int8).at[column, row].set(seen)[:-1]
    whole, part = picture == 2, picture == 1
    leading = whole.sum(axis=1, dtype=jnp.int32)
    rank = jnp.where(whole, jnp.cumsum(whole, axis=1), leading[:, None] + jnp.cumsum(part, axis=1)) - 1
    column, row = jnp.indices(picture.shape, dtype=jnp.int32)
    lists = jnp.zeros((column_tiles, longest), jnp.int32)
    lists = lists.at[column, jnp.where(picture > 0, rank, longest)].set(row, mode="drop")
    return leading, (picture > 0).sum(axis=1, dtype=jnp.int32), lists


def query_walk(mask: BlockMask, q_heads: int, rows: int, columns: int, device=None) -> ListWalk:
    """The walk with tiles of `rows` queries as rows; the mask has uniform blocks that the tiles divide."""
    lists = _lists(mask, rows, columns, device)
    ends = _padded(mask.limits, rows)
    return _walk(lists, np.zeros_like(ends), ends, q_heads, device)


def key_walk(mask: BlockMask, q_heads: int, rows: int, columns: int, device=None) -> ListWalk:
    """The walk with tiles of `rows` keys as rows and `columns` queries as columns."""
    lists = _lists(mask, columns, rows, device)
    by_key = transposed(lists, column_tiles=max(1, -(-mask.kv_len // rows)))
    longest = max(1, int(by_key.counts.max()))
    by_key = dataclasses.replace(by_key, indices=by_key.indices[:, :, :longest])
    starts = np.searchsorted(mask.limits, np.arange(mask.kv_len), side="right").astype(np.int32)
    ends = np.full_like(starts, mask.q_len)
    return _walk(by_key, _padded(starts, rows), _padded(ends, rows), q_heads, device)


def _lists(mask: BlockMask, rows: int, columns: int, device) -> TileLists:
    build: Callable = functools.partial(tile_lists, block=mask.block, rows=rows, columns=columns)
    return build(*(jax.device_put(x, device) for x in (mask.counts, mask.indices, mask.limits)))


def _padded(x: np.ndarray, multiple: int) -> np.ndarray:
    """[n] to int32 [1, whole tiles], zeros at the end."""
    return np.pad(x, (0, -len(x) % multiple))[None]


def _walk(lists: TileLists, starts, ends, q_heads, device) -> ListWalk:
    elements = jax.device_put(RowIntervals(starts, ends), device)
    return ListWalk(lists.full, lists.counts, lists.indices, elements, q_heads)
