"""Block masks as the Hopper kernels read them: per row tile a list of column pieces, built on the device.

A piece is at most `piece` tokens of one block, a row tile at most `rows` tokens of one block. Where blocks are no
multiples of them (odd sizes, variable blocks), q, k and v are laid out anew with every block starting on a tile
of its own; `Layout` does that, and undoes it. Lists are those of `block_lists.TileLists`: full pieces first.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.block_lists import TileLists, paired, transposed, within
from workload.block_masks import BlockMask

NEVER = np.int32(2**30)  # a row bound past every token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lists:
    """What one pass reads of a dynamic mask. A trailing pad of zeros in any array means "absent".

    Attributes:
      full, counts: int32 [heads, tiles], listed pieces that need no element test, and all of them.
      indices: int32 [heads, tiles, longest], the pieces, full ones first.
      order: int32 [heads, tiles], 1 + the tile to work on at each place, longest list first; 0 is the place itself.
      starts, ends: int32 [heads, pieces], the tokens of a piece.
      bound: int32 [heads, tiles * rows]; a row of queries sees the keys before it, a row of keys is seen by the queries
        from it on.
      rows, piece: sizes of a row tile and a piece, static.
      by_key: whether rows are keys, static.
    """

    full: jax.Array
    counts: jax.Array
    indices: jax.Array
    order: jax.Array
    starts: jax.Array
    ends: jax.Array
    bound: jax.Array
    rows: int = dataclasses.field(metadata={"static": True})
    piece: int = dataclasses.field(metadata={"static": True})
    by_key: bool = dataclasses.field(metadata={"static": True})

    def operands(self) -> tuple[jax.Array, ...]:
        """Arrays that a kernel reads from device memory, in the order of `ListRefs`."""
        return self.full, self.counts, self.indices, self.order, self.starts, self.ends, self.bound

    @property
    def heads(self) -> int:
        """Masks held: 1, kv_heads or q_heads."""
        return self.counts.shape[0]

    @property
    def tiles(self) -> int:
        """Row tiles."""
        return self.counts.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the tokens of one axis stand when every block starts on a tile of its own.

    Attributes:
      token: int32 [heads, padded], 1 + the token at each place, 0 for none.
      place: int32 [heads, length], the place of each token.
    """

    token: jax.Array
    place: jax.Array

    def spread(self, x: jax.Array, fill=0) -> jax.Array:
        """[batch, length, n, ...] to [batch, padded, n, ...], `fill` between blocks; heads divides n."""
        return _take(x, self.token - 1, fill)

    def gather(self, x: jax.Array) -> jax.Array:
        """The inverse of `spread`."""
        return _take(x, self.place, 0)


def _take(x, index, fill):
    """x [batch, s, n, ...] at index [heads, t] along s; what is negative reads as fill."""
    if index.shape[0] == 1:
        at = jnp.where(index[0] < 0, x.shape[1], index[0])
        return jnp.take(x, at, axis=1, mode="fill", fill_value=fill)
    at = jnp.repeat(jnp.where(index < 0, x.shape[1], index), x.shape[2] // index.shape[0], axis=0).T
    at = at.reshape(1, *at.shape, *(1,) * (x.ndim - 3))
    return jnp.take_along_axis(x, at, axis=1, mode="fill", fill_value=fill)


def layout(bounds: np.ndarray, tile: int, tiles: int) -> Layout:
    """The layout of blocks with these first tokens (int32 [heads, blocks + 1], none longer than a tile)."""
    heads, length = len(bounds), int(bounds[0, -1])
    token, place = np.zeros((heads, tiles * tile), np.int32), np.zeros((heads, length), np.int32)
    for h, b in enumerate(bounds):
        block = np.searchsorted(b[1:], np.arange(length), side="right")
        place[h] = block * tile + np.arange(length) - b[block]
        token[h, place[h]] = 1 + np.arange(length)
    return Layout(token, place)


@functools.partial(jax.jit, static_argnames=("piece", "ordered"))
def piece_lists(counts, indices, starts, ends, least, *, piece: int, ordered: bool) -> TileLists:
    """A mask's lists with the full pieces in front.

    Args:
      counts, indices: int32 [heads, tiles], [heads, tiles, longest], ascending.
      starts, ends: int32 [heads, pieces].
      least: int32 [heads, tiles], how many leading keys the first row of a tile may see.
      ordered: whether full pieces lead by themselves: where only the last piece can be short.
    """
    listed = jnp.arange(indices.shape[2]) < counts[:, :, None]
    heads = jnp.arange(indices.shape[0])[:, None, None]
    begin, end = starts[heads, indices], ends[heads, indices]
    full = listed & (end - begin == piece) & (end <= least[:, :, None])
    if not ordered:
        order = jnp.argsort(jnp.where(full, 0, 1) + (~listed), axis=2, stable=True)
        indices = jnp.take_along_axis(indices, order, axis=2)
    count = lambda x: x.sum(axis=2, dtype=jnp.int32)  # noqa: E731
    return TileLists(count(full), count(listed), jnp.where(listed, indices, 0))


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A mask cut into tiles of at most `q_tile` queries and pieces of at most `kv_tile` keys, and its layouts.

    Attributes:
      mask: the refined mask.
      q_layout, kv_layout: None where tokens stay where they are.
      even: whether the number of row tiles is made even, either way.
    """

    mask: BlockMask
    q_tile: int
    kv_tile: int
    even: bool
    q_layout: Layout | None
    kv_layout: Layout | None

    @property
    def q_tiles(self) -> int:
        """Row tiles of queries, an empty one at the end included."""
        return self.mask.q_blocks + (self.mask.q_blocks % 2 if self.even else 0)

    @property
    def kv_tiles(self) -> int:
        """Row tiles of keys, likewise."""
        return self.mask.kv_blocks + (self.mask.kv_blocks % 2 if self.even else 0)

    @property
    def q_bounds(self) -> np.ndarray:
        """Bounds of the row tiles of queries, int32 [heads, q_tiles + 1]."""
        return _with_tiles(self.mask.q_bounds, self.q_tiles)

    @property
    def kv_bounds(self) -> np.ndarray:
        """Bounds of the row tiles of keys, likewise."""
        return _with_tiles(self.mask.kv_bounds, self.kv_tiles)


def _with_tiles(bounds: np.ndarray, tiles: int) -> np.ndarray:
    return np.pad(bounds, ((0, 0), (0, tiles + 1 - bounds.shape[1])), mode="edge")


def pieces(mask: BlockMask, q_tile: int, kv_tile: int, even: bool) -> Pieces:
    """Cuts a mask; tokens are laid out anew unless the tiles divide blocks of one size."""
    plain = mask.block is not None and mask.block % max(q_tile, kv_tile) == 0
    fine = mask if plain and mask.block == q_tile == kv_tile else mask.refine(q_tile, kv_tile)
    cut = Pieces(fine, q_tile, kv_tile, even, None, None)
    if plain:
        return cut
    layouts = (layout(fine.q_bounds, q_tile, cut.q_tiles), layout(fine.kv_bounds, kv_tile, cut.kv_tiles))
    return dataclasses.replace(cut, q_layout=layouts[0], kv_layout=layouts[1])


def listed(cut: Pieces, device=None) -> TileLists:
    """The pieces of keys that each row tile of queries lists: what both ways are made of."""
    mask, more = cut.mask, cut.q_tiles - cut.mask.q_blocks
    first_row = np.minimum(cut.q_bounds[:, :-1], max(0, mask.q_len - 1))
    least = mask.limits[first_row] if mask.q_len else np.zeros_like(first_row)
    counts, indices = (np.pad(x, ((0, 0), (0, more), (0, 0))[: x.ndim]) for x in (mask.counts, mask.indices))
    put = functools.partial(jax.device_put, device=device)
    return piece_lists(put(counts), put(indices), *_spans(cut.kv_bounds, device), put(least), piece=cut.kv_tile,
                       ordered=mask.block is not None)


def by_query(cut: Pieces, lists: TileLists, device=None) -> Lists:
    """The lists of a cut mask, rows being queries; lists: those `listed`."""
    limits = np.pad(cut.mask.limits, (0, 1))
    return _lists(lists, *_spans(cut.kv_bounds, device), jax.device_put(
        _by_row(cut.q_bounds, cut.q_tile, limits.astype(np.int32)), device), cut.q_tile, cut.kv_tile, False)


def by_key(cut: Pieces, lists: TileLists, device=None) -> Lists:
    """The lists of a cut mask, rows being keys; lists: those `listed`, which are transposed on the device."""
    mask, lists = cut.mask, _short(transposed(lists, column_tiles=cut.kv_tiles))
    first = np.pad(np.searchsorted(mask.limits, np.arange(mask.kv_len), side="right"), (0, 1), constant_values=NEVER)
    return _lists(lists, *_spans(cut.q_bounds, device), jax.device_put(
        _by_row(cut.kv_bounds, cut.kv_tile, first.astype(np.int32)), device), cut.kv_tile, cut.q_tile, True)


def _spans(bounds: np.ndarray, device) -> tuple[jax.Array, jax.Array]:
    """First tokens of the pieces, and the tokens after the last."""
    return jax.device_put((bounds[:, :-1], bounds[:, 1:]), device)


def _short(lists: TileLists) -> TileLists:
    """The lists without slots that none fills."""
    return TileLists(lists.full, lists.counts, lists.indices[:, :, : max(1, int(lists.counts.max()))])


def by_pairs(lists: Lists) -> tuple[Lists, Lists]:
    """Lists of an even number of row tiles as those of tiles twice as long, of what both halves list, and the rest."""
    sides = paired(TileLists(lists.full, lists.counts, lists.indices), column_tiles=lists.starts.shape[1])
    out = []
    for side, rows in zip(sides, (2 * lists.rows, lists.rows), strict=True):
        out.append(_lists(_short(side), lists.starts, lists.ends, lists.bound, rows, lists.piece, lists.by_key))
    return out[0], out[1]


def in_ranges(lists: Lists, ranges: int) -> tuple[Lists, ...]:
    """The lists of each of so many ranges of pieces, as even as can be and in their order; all of one shape."""
    if ranges == 1:
        return (lists,)
    bounds = [n * lists.starts.shape[1] // ranges for n in range(ranges + 1)]
    whole = TileLists(lists.full, lists.counts, lists.indices)
    parts = [within(whole, *ends) for ends in itertools.pairwise(bounds)]
    longest = max(1, *(int(part.counts.max()) for part in parts))
    parts = [dataclasses.replace(part, indices=part.indices[:, :, :longest]) for part in parts]
    return tuple(_lists(part, lists.starts, lists.ends, lists.bound, lists.rows, lists.piece, lists.by_key)
                 for part in parts)


def _lists(lists: TileLists, starts, ends, bound, rows, piece, by_key) -> Lists:
    order = jnp.argsort(-lists.counts, axis=1, stable=True).astype(jnp.int32) + 1
    return Lists(lists.full, lists.counts, lists.indices, order, starts, ends, bound, rows, piece, by_key)


def _by_row(bounds: np.ndarray, tile: int, values: np.ndarray) -> np.ndarray:
    """values [length + 1] at the token of each place [heads, tiles * tile]; the last one where there is no token."""
    at = bounds[:, :-1, None] + np.arange(tile)
    at = np.where(at < bounds[:, 1:, None], at, len(values) - 1)
    return values[at].reshape(len(bounds), -1)
