"""Block masks as the tile lists that kernels walk: q-major, and transposed for dk/dv; built on the device.

A `BlockMask` becomes, per mask head and row tile, the ascending list of column tiles that some row of it sees.
Where tiles divide uniform blocks, lists of blocks are repeated and cut up; under other blocks a tile is listed where
listed blocks cover a cell of it, and elements are masked by the blocks of their row and column. All of it is jit-able
and deterministic: sums and scatters to places that are all different.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.walks import BlockElements, ListWalk, RowIntervals
from workload.block_masks import BlockMask
from workload.local_masks import pad_mask


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
    tiles = indices.shape[0]
    return _ranked(_picture(full, counts, indices, column_tiles).T, tiles if longest is None else longest)


@functools.partial(jax.jit, static_argnames=("column_tiles",))
def paired(lists: TileLists, *, column_tiles: int) -> tuple[TileLists, TileLists]:
    """Lists of an even number of row tiles as (what both tiles of a pair walk, what each of them walks alone).

    Args:
      column_tiles: how many there are.
    """
    def head(full, counts, indices):
        both = _picture(full, counts, indices, column_tiles).reshape(-1, 2, column_tiles)
        shared = both.min(axis=1)  # partial where either is
        alone = jnp.where(shared[:, None] > 0, 0, both).reshape(-1, column_tiles)
        return _ranked(shared, column_tiles), _ranked(alone, column_tiles)

    shared, alone = jax.lax.map(lambda x: head(*x), (lists.full, lists.counts, lists.indices))
    return TileLists(*shared), TileLists(*alone)


@jax.jit
def within(lists: TileLists, first, last) -> TileLists:
    """The lists of the column tiles from `first` to before `last`. In every list full ones ascend, and the others."""
    place = jnp.arange(lists.indices.shape[2])
    full, rest = place < lists.full[..., None], place >= lists.full[..., None]
    rest &= place < lists.counts[..., None]
    before, inside = lists.indices < first, (lists.indices >= first) & (lists.indices < last)
    count = lambda x: x.sum(axis=2, dtype=jnp.int32)  # noqa: E731
    leading, following = count(full & inside), count(rest & inside)
    of_full, of_rest = count(full & before), lists.full + count(rest & before) - leading
    at = place + jnp.where(place < leading[..., None], of_full[..., None], of_rest[..., None])
    listed = place < (leading + following)[..., None]
    indices = jnp.take_along_axis(lists.indices, jnp.where(listed, at, 0), axis=2)
    return TileLists(leading, leading + following, jnp.where(listed, indices, 0))


def _picture(full, counts, indices, column_tiles: int):
    """0 (empty), 1 (partial) and 2 (full), int8 [row tiles, column tiles], of one head's lists."""
    tiles, slots = indices.shape
    row, slot = jnp.indices((tiles, slots), dtype=jnp.int32)
    # What is not listed goes to one column tile too many, which is cut off.
    column = jnp.where(slot < counts[:, None], indices, column_tiles)
    seen = 1 + (slot < full[:, None]).astype(jnp.int8)
    return jnp.zeros((tiles, column_tiles + 1), jnp.int8).at[row, column].set(seen)[:, :-1]


def _ranked(picture, longest: int):
    """full, counts, indices of a picture [row tiles, column tiles] of 0 (empty), 1 (partial) and 2 (full)."""
    whole, part = picture == 2, picture == 1
    leading = whole.sum(axis=1, dtype=jnp.int32)
    rank = jnp.where(whole, jnp.cumsum(whole, axis=1), leading[:, None] + jnp.cumsum(part, axis=1)) - 1
    row, column = jnp.indices(picture.shape, dtype=jnp.int32)
    lists = jnp.zeros((picture.shape[0], longest), jnp.int32)
    lists = lists.at[row, jnp.where(picture > 0, rank, longest)].set(column, mode="drop")
    return leading, (picture > 0).sum(axis=1, dtype=jnp.int32), lists


def _some(mask: BlockMask) -> BlockMask:
    """The mask with a row that sees nothing and a key that nobody sees, where it has none: lists have tiles."""
    return pad_mask(mask, max(1, mask.q_len), max(1, mask.kv_len))


def divides(mask: BlockMask, *tiles: int) -> bool:
    """Whether the mask has uniform blocks that all of these tile sizes divide."""
    return mask.block is not None and not any(mask.block % n for n in tiles)


def query_walk(mask: BlockMask, q_heads: int, rows: int, columns: int, device=None) -> ListWalk:
    """The walk with tiles of `rows` queries as rows, under blocks of any size."""
    mask = _some(mask)
    ends = _padded(mask.limits, rows)
    elements = jax.device_put(RowIntervals(np.zeros_like(ends), ends), device)
    if divides(mask, rows, columns):
        return _walk(_lists(mask, rows, columns, device), elements, q_heads)
    lists = covered_lists(*_coverage(mask, device), rows=rows, columns=columns, by_key=False)
    blocks = _block_elements(mask.q_block_ids(), mask.kv_block_ids(), mask.block_bitmap(), rows, columns, device)
    return _walk(_shortened(lists), dataclasses.replace(blocks, intervals=elements), q_heads)


def key_walk(mask: BlockMask, q_heads: int, rows: int, columns: int, device=None) -> ListWalk:
    """The walk with tiles of `rows` keys as rows and `columns` queries as columns, under blocks of any size."""
    mask = _some(mask)
    starts = np.searchsorted(mask.limits, np.arange(mask.kv_len), side="right").astype(np.int32)
    ends = np.full_like(starts, mask.q_len)
    elements = jax.device_put(RowIntervals(_padded(starts, rows), _padded(ends, rows)), device)
    if divides(mask, rows, columns):
        lists = transposed(_lists(mask, columns, rows, device), column_tiles=max(1, -(-mask.kv_len // rows)))
        return _walk(_shortened(lists), elements, q_heads)
    lists = covered_lists(*_coverage(mask, device), rows=rows, columns=columns, by_key=True)
    bitmap = mask.block_bitmap().swapaxes(1, 2)
    blocks = _block_elements(mask.kv_block_ids(), mask.q_block_ids(), bitmap, rows, columns, device)
    return _walk(_shortened(lists), dataclasses.replace(blocks, intervals=elements), q_heads)


@functools.partial(jax.jit, static_argnames=("rows", "columns", "by_key"))
def covered_lists(counts, indices, limits, q_bounds, kv_bounds, kv_tokens, *, rows: int, columns: int, by_key: bool):
    """`TileLists` of blocks that tiles do not divide: a tile is listed where listed blocks cover a cell of it.

    Args:
      counts, indices, limits: as in `tile_lists`.
      q_bounds, kv_bounds: int32 [heads, blocks + 1], as in `BlockMask`.
      kv_tokens: bool [kv_len], which gives kv_len a shape.
      rows, columns: tile sizes; rows are of queries, or of keys where `by_key`.

    With A[i, n] the tokens that query tile i has in block n and B likewise for keys, A bitmap B^T counts the
    covered cells of every tile; the products are of integers below 2^24, so exact in float32.
    """
    q_tile, kv_tile = (columns, rows) if by_key else (rows, columns)
    q_tiles, kv_tiles = (max(1, -(-x.shape[0] // n)) for x, n in ((limits, q_tile), (kv_tokens, kv_tile)))
    first = jnp.minimum(jnp.arange(q_tiles) * q_tile, limits.shape[0] - 1)
    least, most = limits[first], limits[jnp.minimum(first + q_tile, limits.shape[0]) - 1]
    begin = jnp.arange(kv_tiles) * kv_tile
    exact = functools.partial(jnp.matmul, precision="highest")

    def head(counts, indices, q_bounds, kv_bounds):
        kv_blocks = kv_bounds.shape[0] - 1
        block = jnp.where(jnp.arange(indices.shape[1]) < counts[:, None], indices, kv_blocks)
        bitmap = jnp.zeros((indices.shape[0], kv_blocks + 1)).at[jnp.arange(indices.shape[0])[:, None], block].set(1.0)
        of_rows, of_keys = _tokens(q_bounds, q_tiles, q_tile), _tokens(kv_bounds, kv_tiles, kv_tile)
        covered = exact(exact(of_rows, bitmap[:, :-1]), of_keys.T)
        some = (covered > 0) & (begin < most[:, None])
        every = (covered == of_rows.sum(axis=1, keepdims=True) * kv_tile) & (begin + kv_tile <= least[:, None])
        picture = some.astype(jnp.int8) + (some & every)
        picture = picture.T if by_key else picture
        return _ranked(picture, picture.shape[1])

    return TileLists(*jax.lax.map(lambda x: head(*x), (counts, indices, q_bounds, kv_bounds)))


def _tokens(bounds, tiles: int, size: int):
    """How many tokens each tile has in each block, float32 [tiles, blocks]."""
    begin = jnp.arange(tiles)[:, None] * size
    shared = jnp.minimum(begin + size, bounds[None, 1:]) - jnp.maximum(begin, bounds[None, :-1])
    return jnp.maximum(shared, 0).astype(jnp.float32)


def _coverage(mask: BlockMask, device):
    tokens = np.ones(mask.kv_len, bool)
    arrays = (mask.counts, mask.indices, mask.limits, mask.q_bounds, mask.kv_bounds, tokens)
    return jax.device_put(arrays, device)


def _block_elements(row_blocks, column_blocks, bitmap, rows: int, columns: int, device) -> BlockElements:
    """The element mask of blocks; numbers count from 1, so that padding is block 0, which nothing sees."""
    row_blocks, column_blocks = (
        np.pad(x + 1, ((0, 0), (0, max(n, -(-x.shape[1] // n) * n) - x.shape[1])))
        for x, n in ((row_blocks, rows), (column_blocks, columns))
    )
    bitmap = np.pad(bitmap, ((0, 0), (1, 0), (1, 0))).astype(np.int8)
    return jax.device_put(BlockElements(row_blocks, column_blocks, bitmap, None), device)


def _lists(mask: BlockMask, rows: int, columns: int, device) -> TileLists:
    build: Callable = functools.partial(tile_lists, block=mask.block, rows=rows, columns=columns)
    return build(*(jax.device_put(x, device) for x in (mask.counts, mask.indices, mask.limits)))


def _shortened(lists: TileLists) -> TileLists:
    """The same lists without the slots that none uses."""
    longest = max(1, int(lists.counts.max()))
    return dataclasses.replace(lists, indices=lists.indices[:, :, :longest])


def _padded(x: np.ndarray, multiple: int) -> np.ndarray:
    """[n] to int32 [1, whole tiles], zeros at the end."""
    return np.pad(x, (0, max(multiple, -(-len(x) // multiple) * multiple) - len(x)))[None]


def _walk(lists: TileLists, elements, q_heads) -> ListWalk:
    return ListWalk(lists.full, lists.counts, lists.indices, elements, q_heads)
