"""Tile classes of an interval mask, as runs: exact, without a dense picture, O(q_len) work and memory."""

import dataclasses

import numpy as np

from workload.errors import integer

EMPTY, PARTIAL, FULL = 0, 1, 2
CHUNK_ROWS = 1 << 16  # rows that are taken at a time: temporaries stay small and in cache


@dataclasses.dataclass(frozen=True, eq=False)
class TileRuns:
    """Which key tiles each query tile visits, as ascending disjoint half-open runs [begin, end) of tiles.

    Attributes:
      full_begin, full_end: int32 [q_tiles, F]; every cell of these tiles is visible.
      partial_begin, partial_end: int32 [q_tiles, P]; some cell is visible, some is not.
      tile_q, tile_k: tile sizes in tokens.
      k_tiles: number of key tiles, the last one may be ragged.

    An absent run is (0, 0) and stands last. A tile that is in no run is empty. A ragged last key
    tile is never full (its keys beyond kv_len are not visible); rows beyond q_len are not counted.
    """

    full_begin: np.ndarray
    full_end: np.ndarray
    partial_begin: np.ndarray
    partial_end: np.ndarray
    tile_q: int
    tile_k: int
    k_tiles: int

    @property
    def full_count(self) -> np.ndarray:
        """Full tiles of each query tile, int64 [q_tiles]."""
        return (self.full_end - self.full_begin).sum(axis=1, dtype=np.int64)

    @property
    def partial_count(self) -> np.ndarray:
        """Partial tiles of each query tile, int64 [q_tiles]."""
        return (self.partial_end - self.partial_begin).sum(axis=1, dtype=np.int64)

    @property
    def visited_area(self) -> int:
        """Cells of all visited tiles: what a tiled kernel computes; waste is this over the mask's area."""
        return int((self.full_count + self.partial_count).sum()) * self.tile_q * self.tile_k

    def padded(self, full_runs: int, partial_runs: int) -> "TileRuns":
        """The same runs with exactly F and P slots (for stacking across ranks)."""
        def pad(x, n, label):
            if x.shape[1] > n:
                raise ValueError(f"{label}: {n} < {x.shape[1]} runs that the mask needs")
            return np.pad(x, ((0, 0), (0, n - x.shape[1])))
        return dataclasses.replace(
            self,
            full_begin=pad(self.full_begin, full_runs, "full_runs"),
            full_end=pad(self.full_end, full_runs, "full_runs"),
            partial_begin=pad(self.partial_begin, partial_runs, "partial_runs"),
            partial_end=pad(self.partial_end, partial_runs, "partial_runs"),
        )

    def classes(self) -> np.ndarray:
        """The block bitmap, int8 [q_tiles, k_tiles] of EMPTY, PARTIAL, FULL (for pictures and tests)."""
        tile = np.arange(self.k_tiles)
        out = np.zeros((len(self.full_begin), self.k_tiles), np.int8)
        for begin, end, value in (
            (self.partial_begin, self.partial_end, PARTIAL),
            (self.full_begin, self.full_end, FULL),
        ):
            for r in range(begin.shape[1]):
                out[(tile >= begin[:, r, None]) & (tile < end[:, r, None])] = value
        return out


def tile_runs(starts: np.ndarray, ends: np.ndarray, kv_len: int, tile_q: int, tile_k: int) -> TileRuns:
    """Runs of full and partial key tiles per query tile; see `TileRuns`.

    Args:
      starts, ends: int32 [R, q_len], normalised (disjoint, ascending, empty ones start == end).
      tile_q, tile_k: tile sizes, >= 1.
    """
    for label, n in (("tile_q", tile_q), ("tile_k", tile_k)):
        integer(label, n, 1)
    k_tiles = -(-kv_len // tile_k)
    step = max(1, CHUNK_ROWS // tile_q) * tile_q
    chunks = [
        _runs(starts[:, at : at + step], ends[:, at : at + step], k_tiles, tile_q, tile_k)
        for at in range(0, max(1, starts.shape[1]), step)
    ]
    full_begin, full_end, partial_begin, partial_end = (_stacked(parts) for parts in zip(*chunks, strict=True))
    return TileRuns(full_begin, full_end, partial_begin, partial_end, tile_q, tile_k, k_tiles)


def _runs(starts, ends, k_tiles, tile_q, tile_k):
    """full_begin, full_end, partial_begin, partial_end of some whole query tiles."""
    q_len = starts.shape[1]
    q_tiles = -(-q_len // tile_q)
    rows = np.full(q_tiles, tile_q)
    if q_tiles:
        rows[-1] = q_len - (q_tiles - 1) * tile_q
    some = ends > starts
    touched = _coverage(_by_tile(starts // tile_k, some, q_tiles, tile_q, k_tiles),
                        _by_tile(-(-ends // tile_k), some, q_tiles, tile_q, k_tiles), 1, k_tiles)
    inner, outer = -(-starts // tile_k), ends // tile_k
    whole = some & (outer > inner)
    full = _coverage(_by_tile(inner, whole, q_tiles, tile_q, k_tiles),
                     _by_tile(outer, whole, q_tiles, tile_q, k_tiles), rows, k_tiles)
    return *_trim(*full), *_trim(*_subtract(touched, full, k_tiles))


def _stacked(parts):
    """Run slots of consecutive query tiles, one below the other, padded to the widest."""
    width = max(x.shape[1] for x in parts)
    return np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in parts])


def _by_tile(values, keep, q_tiles, tile_q, fill):
    """[R, q_len] to sorted [q_tiles, R * tile_q]; entries not kept become `fill`, past every tile."""
    values = np.where(keep, values, fill).astype(np.int32)
    pad = q_tiles * tile_q - values.shape[1]
    values = np.pad(values, ((0, 0), (0, pad)), constant_values=fill)
    values = values.reshape(len(values), q_tiles, tile_q).transpose(1, 0, 2).reshape(q_tiles, len(values) * tile_q)
    return np.sort(values, axis=1)


def _coverage(begins, ends, at_least, limit):
    """Maximal runs of tiles that at least `at_least` of each row's intervals cover.

    begins, ends: sorted [n, m]. With the k-th smallest begin b and at_least = c, coverage reaches c
    at begin k iff fewer than k + 2 - c intervals ended by b; the run lasts to the end after which fewer remain.
    """
    n, m = begins.shape
    if not m:
        return np.zeros((n, 0), np.int32), np.zeros((n, 0), np.int32)
    need = np.broadcast_to(np.asarray(at_least), (n,))[:, None]
    order = np.arange(m)[None, :]
    # Tile t is covered by #(begins <= t) - #(ends <= t). It is >= need on [begins[k], ends[k - need + 1])
    # for every k >= need - 1, and nowhere else (both lists sorted).
    index = order - need + 1
    lo = np.where(index >= 0, begins, limit)
    hi = np.take_along_axis(ends, np.maximum(index, 0), axis=1)
    hi = np.where(index >= 0, np.maximum(hi, lo), limit)
    reach = np.maximum.accumulate(np.where(hi > lo, hi, 0), axis=1)
    before = np.pad(reach[:, :-1], ((0, 0), (1, 0)))
    opens = (hi > lo) & (lo > before) | ((hi > lo) & (before == 0) & (np.cumsum(hi > lo, axis=1) == 1))
    slot = np.cumsum(opens, axis=1) - 1
    width = max(1, int(slot.max(initial=-1)) + 1)
    begin, end = np.zeros((n, width), np.int32), np.zeros((n, width), np.int32)
    row, col = np.nonzero(opens)
    begin[row, slot[row, col]] = lo[row, col]
    row, col = np.nonzero(hi > lo)
    np.maximum.at(end, (row, slot[row, col]), hi[row, col])
    return begin, end


def _subtract(a, b, limit):
    """Runs of a that are outside the runs of b (b is inside a): both [n, runs], absent as (0, 0)."""
    absent = b[1] <= b[0]
    b_begin, b_end = np.where(absent, limit, b[0]), np.where(absent, limit, b[1])
    n = len(a[0])
    edges_lo = np.concatenate([np.zeros((n, 1), np.int32), b_end], axis=1)
    edges_hi = np.concatenate([b_begin, np.full((n, 1), limit, np.int32)], axis=1)
    width = a[0].shape[1] * edges_lo.shape[1]
    lo = np.maximum(a[0][:, :, None], edges_lo[:, None, :]).reshape(n, width)
    hi = np.minimum(a[1][:, :, None], edges_hi[:, None, :]).reshape(n, width)
    return np.where(hi > lo, lo, 0), np.where(hi > lo, hi, 0)


def _trim(begin, end):
    """Moves absent runs last, drops slots that no row uses, absent runs as (0, 0)."""
    some = end > begin
    order = np.argsort(np.where(some, begin, np.iinfo(np.int32).max), axis=1, kind="stable")
    begin, end, some = (np.take_along_axis(x, order, 1) for x in (begin, end, some))
    width = max(1, int(some.sum(axis=1).max(initial=0)))
    cut = lambda x: np.ascontiguousarray(np.where(some, x, 0)[:, :width], dtype=np.int32)  # noqa: E731
    return cut(begin), cut(end)
