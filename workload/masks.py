"""The static masks: per query row, at most R disjoint ascending intervals of visible keys.

One object, `IntervalMask`, makes everything else: the dense picture, the exact area, the
transpose, FlashMask's column bounds, the tile runs and classes, and the restriction to any
(query shard, key shard) pair. The twelve builders below it follow the definitions of the
published benchmark; a row of a rectangular problem stands at key position
i + kv_len - q_len (bottom-right) and is empty where that position is negative, except in `full`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from workload.columns import ColumnBounds, column_bounds
from workload.errors import ascending, integer, length
from workload.tiles import TileRuns, tile_runs

Intervals = tuple[np.ndarray, np.ndarray]
CHUNK_ROWS = 1 << 16  # rows that are normalised at a time: temporaries stay small and in cache


@dataclasses.dataclass(frozen=True)
class Regular:
    """What a kernel that knows only regular masks needs to be handed this mask.

    Attributes:
      causal: whether row i sees no key after its own position (bottom-right aligned).
      window: (left, right) inclusive bounds around the row's position, None where unbounded.
      cu_seqlens_q, cu_seqlens_kv: int32 [documents + 1] offsets of each document's queries and
        keys, or None where the mask has no documents. Inside a document causality and windows
        are bottom-right aligned again.
    """

    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_kv: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class IntervalMask:
    """A static mask: row i sees key j iff starts[r, i] <= j < ends[r, i] for some r.

    Attributes:
      starts, ends: int32 [R, q_len]; disjoint, ascending, not touching; an absent interval is
        (kv_len, kv_len) and stands after the present ones.
      kv_len: number of keys.
      name: pattern name, one of `STATIC_MASKS`, or "custom" for derived masks.
      params: the parameters the pattern was built with, none larger than its lengths have a use for.
      regular: hand-over to regular kernels, or None where the pattern is heterogeneous.

    Build it with a pattern function or `from_intervals`, which normalises and validates.
    """

    starts: np.ndarray
    ends: np.ndarray
    kv_len: int
    name: str = "custom"
    params: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    regular: Regular | None = None

    heads = 1  # one mask for all heads; dynamic masks have one per head

    def __getstate__(self):  # a view of a dict is neither pickled nor copied
        return {**vars(self), "params": dict(self.params)}

    def __setstate__(self, state):
        vars(self).update(state, params=MappingProxyType(state["params"]))

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return self.starts.shape[1]

    @property
    def intervals(self) -> int:
        """R, the largest number of intervals of a row that this object can hold."""
        return self.starts.shape[0]

    @property
    def area(self) -> int:
        """Number of visible cells, an exact Python integer."""
        return int(self.row_area.sum())

    @property
    def row_area(self) -> np.ndarray:
        """Visible keys of each row, int64 [q_len]."""
        return (self.ends - self.starts).sum(axis=0, dtype=np.int64)

    @property
    def density(self) -> float:
        """area / (q_len * kv_len)."""
        return self.area / max(1, self.q_len * self.kv_len)

    def dense_rows(self, begin: int, end: int, head: int = 0) -> np.ndarray:
        """The element mask of rows begin..end-1, bool [end - begin, kv_len]."""
        del head  # one mask for all heads
        return visible(
            self.starts, self.ends, np.arange(begin, end)[:, None], np.arange(self.kv_len)[None, :]
        )

    def dense(self) -> np.ndarray:
        """The element mask, bool [q_len, kv_len]."""
        return self.dense_rows(0, self.q_len)

    def transpose(self) -> "IntervalMask":
        """Per key, the ascending intervals of query rows that see it (two at most for the patterns)."""
        starts, ends = _transpose(self.starts, self.ends, self.kv_len)
        return IntervalMask(starts, ends, self.q_len, f"{self.name}^T")

    def padded(self, intervals: int) -> "IntervalMask":
        """The same mask holding exactly `intervals` intervals a row (for stacking across ranks)."""
        extra = intervals - self.intervals
        if extra < 0:
            raise ValueError(f"intervals: {intervals} < {self.intervals} that the mask holds")
        fill = np.full((extra, self.q_len), self.kv_len, np.int32)
        return dataclasses.replace(
            self, starts=np.concatenate([self.starts, fill]), ends=np.concatenate([self.ends, fill])
        )

    def restrict(self, q_positions: np.ndarray, kv_positions: np.ndarray) -> "IntervalMask":
        """The local mask of a (query shard, key shard) pair: the sharding law.

        Args:
          q_positions, kv_positions: ascending global positions that the shards hold.

        Row p of the result is row q_positions[p] of this mask, its intervals counted in places
        of kv_positions: an interval of keys is an interval of any ascending subset, so R never grows.
        """
        q_positions = ascending("q_positions", q_positions, self.q_len)
        kv_positions = ascending("kv_positions", kv_positions, self.kv_len)
        starts = np.searchsorted(kv_positions, self.starts[:, q_positions])
        ends = np.searchsorted(kv_positions, self.ends[:, q_positions])
        return from_intervals(starts, ends, len(kv_positions), name="custom", params={"of": self.name})

    def tile_runs(self, tile_q: int, tile_k: int) -> TileRuns:
        """Which key tiles each query tile visits, as runs of full and of partial tiles."""
        return tile_runs(self.starts, self.ends, self.kv_len, tile_q, tile_k)

    def column_bounds(self) -> ColumnBounds:
        """FlashMask's column form; raises `Unsupported` where it cannot say this mask."""
        return column_bounds(self)


def visible(starts, ends, i, j):
    """Elementwise predicate on global indices; works on arrays of NumPy, JAX and PyTorch alike.

    Args:
      starts, ends: integer [R, q_len].
      i, j: broadcastable integer arrays of query rows and keys.
    """
    seen = (starts[0][i] <= j) & (j < ends[0][i])
    for r in range(1, len(starts)):
        seen = seen | ((starts[r][i] <= j) & (j < ends[r][i]))
    return seen


def from_intervals(
    starts: np.ndarray,
    ends: np.ndarray,
    kv_len: int,
    *,
    name: str = "custom",
    params: Mapping[str, Any] | None = None,
    regular: Regular | None = None,
) -> IntervalMask:
    """Normalises raw intervals (any order, overlapping, empty or out of range) to an `IntervalMask`.

    Args:
      starts, ends: integer [R, q_len], or [q_len] for R = 1; end <= start is an empty interval.
      kv_len: number of keys; intervals are clipped to it.

    Raises: ValueError on shapes that differ and on what is no integer.

    >>> m = from_intervals([[4, 0]], [[9, 0]], 6)
    >>> m.area, m.dense().sum(axis=1).tolist()
    (2, [2, 0])
    """
    starts, ends = (_integers(label, x) for label, x in (("starts", starts), ("ends", ends)))
    kv_len = length("kv_len", kv_len)
    if starts.shape != ends.shape:
        raise ValueError(f"ends: shape {ends.shape} differs from starts' {starts.shape}")
    begins, stops = np.empty(starts.shape, np.int32), np.empty(starts.shape, np.int32)
    for at in range(0, starts.shape[1], CHUNK_ROWS):
        rows = np.s_[:, at : at + CHUNK_ROWS]
        begins[rows], stops[rows] = _normalise(starts[rows], ends[rows], kv_len)
    used = max(1, int((stops > begins).any(axis=1).sum()))
    return IntervalMask(begins[:used], stops[:used], kv_len, name, MappingProxyType(dict(params or {})), regular)


def _integers(label: str, x) -> np.ndarray:
    """[R, q_len] or [q_len] as [R, q_len], of integral values, wide enough to be compared with any length."""
    out = np.atleast_2d(np.asarray(x))
    whole = out.dtype.kind in "iu" or (out.dtype.kind == "f" and (out == np.floor(out)).all())
    if out.ndim != 2 or not whole:
        raise ValueError(f"{label}: must be integers [intervals, q_len], got {out.dtype} {out.shape}")
    return out.astype(np.promote_types(out.dtype, np.int32), copy=False)


def _normalise(starts: np.ndarray, ends: np.ndarray, kv_len: int) -> Intervals:
    """Clips to the keys, sorts each row's intervals, merges those that touch, moves empty ones last."""
    starts, ends = np.clip(starts, 0, kv_len), np.clip(ends, 0, kv_len)
    empty = ends <= starts
    starts[empty] = ends[empty] = kv_len
    if len(starts) == 1:
        return starts, ends
    starts, ends = _sorted(starts, ends)
    for r in range(1, len(starts)):  # merge slot r into the last slot that it touches
        for t in range(r - 1, -1, -1):
            touch = (starts[r] <= ends[t]) & (ends[r] > starts[r]) & (ends[t] > starts[t])
            ends[t] = np.where(touch, np.maximum(ends[t], ends[r]), ends[t])
            starts[r], ends[r] = np.where(touch, kv_len, starts[r]), np.where(touch, kv_len, ends[r])
    return _sorted(starts, ends)


def _sorted(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    order = np.argsort(starts, axis=0, kind="stable")
    return np.take_along_axis(starts, order, 0), np.take_along_axis(ends, order, 0)


def _difference_runs(a: Intervals, b: Intervals, kv_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(column, row) of every cell of a that is not in b, row by row: both int32 [cells], by column."""
    pieces = []
    rows = np.arange(a[0].shape[1], dtype=np.int32)
    edges_lo = [np.zeros_like(rows), *b[1]]
    edges_hi = [*b[0], np.full_like(rows, kv_len)]
    for s, e in zip(*a, strict=True):
        for lo, hi in zip(edges_lo, edges_hi, strict=True):
            left, right = np.maximum(s, lo), np.minimum(e, hi)
            keep = right > left
            pieces.append((left[keep], (right - left)[keep], rows[keep]))
    left, length, row = (np.concatenate(x) for x in zip(*pieces, strict=True))
    begin = np.cumsum(length, dtype=np.int64) - length
    col = np.repeat((left - begin).astype(np.int32), length) + np.arange(length.sum(), dtype=np.int32)
    row = np.repeat(row, length)
    order = np.lexsort((row, col))
    return col[order], row[order]


def _transpose(starts: np.ndarray, ends: np.ndarray, kv_len: int) -> Intervals:
    """Row intervals of each key: a run starts where row i sees it and row i-1 does not."""
    nothing = np.full((len(starts), 1), kv_len, np.int32)
    now = tuple(np.concatenate([x, nothing], axis=1) for x in (starts, ends))
    before = tuple(np.concatenate([nothing, x], axis=1) for x in (starts, ends))
    col, first = _difference_runs(now, before, kv_len)
    _, last = _difference_runs(before, now, kv_len)
    count = np.bincount(col, minlength=kv_len)
    slot = np.arange(len(col)) - np.repeat(np.cumsum(count) - count, count)
    q_len = starts.shape[1]
    out = np.full((2, max(1, int(count.max(initial=0))), kv_len), q_len, np.int32)
    out[0, slot, col], out[1, slot, col] = first, last
    return out[0], out[1]


# ---- the twelve patterns -------------------------------------------------------------------------


def _positions(q_len: int, kv_len: int) -> np.ndarray:
    for label, n in (("q_len", q_len), ("kv_len", kv_len)):
        length(label, n)
    return np.arange(q_len, dtype=np.int32) + np.int32(kv_len - q_len)


def _at_most(label: str, value: int, enough: int, low: int = 0) -> int:
    """A parameter as an int, cut where more of it says nothing more: kernels compute with it in 32 bits."""
    return min(integer(label, value, low), int(enough))


def _moved(position: np.ndarray, by: int, kv_len: int) -> np.ndarray:
    """position + by within 0..kv_len; no sum leaves 32 bits, as `position + by` would."""
    return np.clip(position + np.int64(by), 0, kv_len).astype(np.int32)


def _lengths(label: str, lengths: Sequence[int], kv_len: int) -> np.ndarray:
    out = np.asarray(lengths)
    if out.ndim != 1 or (out.size and out.dtype.kind not in "iu"):
        raise ValueError(f"{label}: must be a flat sequence of integers")
    if (out < 0).any() or out.sum() != kv_len:
        raise ValueError(f"{label}: must be >= 0 and sum to kv_len {kv_len}, sum is {out.sum()}")
    return out.astype(np.int64)


def _segments(lengths: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Index, start and end of the segment that each position stands in (first segment if negative)."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    index = np.searchsorted(bounds, np.maximum(position, 0), side="right") - 1
    index = np.minimum(index, max(0, len(lengths) - 1))
    if not len(lengths):
        zero = np.zeros_like(position)
        return zero, zero, zero
    return index, bounds[index].astype(np.int32), bounds[index + 1].astype(np.int32)


def _make(name: str, position: np.ndarray, kv_len: int, pairs, *, regular=None, **params) -> IntervalMask:
    """Intervals at row positions; rows before the first key are empty."""
    starts, ends = (
        np.stack([np.broadcast_to(np.asarray(x, np.int32), position.shape) for x in bound])
        for bound in zip(*pairs, strict=True)
    )
    ends[:, position < 0] = 0
    return from_intervals(starts, ends, kv_len, name=name, params=params, regular=regular)


def _cu_seqlens(lengths: np.ndarray, q_len: int, kv_len: int) -> dict[str, Any]:
    """Offsets of each document's queries and keys; rows before the first key form a document without keys."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    shift = kv_len - q_len
    q_bounds = np.clip(bounds - shift, 0, q_len)
    if shift < 0:
        q_bounds, bounds = np.concatenate([[0], q_bounds]), np.concatenate([[0], bounds])
    return {"cu_seqlens_q": tuple(q_bounds.tolist()), "cu_seqlens_kv": tuple(bounds.tolist())}


def full(q_len: int, kv_len: int) -> IntervalMask:
    """Every row sees every key. Area q_len * kv_len."""
    starts = np.zeros_like(_positions(q_len, kv_len))
    ends = np.full_like(starts, kv_len)
    return from_intervals(starts, ends, kv_len, name="full", regular=Regular())


def causal(q_len: int, kv_len: int) -> IntervalMask:
    """Row i sees j <= i. Area T(T+1)/2 on a square.

    >>> causal(4, 4).area
    10
    """
    p = _positions(q_len, kv_len)
    return _make("causal", p, kv_len, [(0, p + 1)], regular=Regular(causal=True))


def full_document(q_len: int, kv_len: int, lengths: Sequence[int]) -> IntervalMask:
    """Row i sees the keys of its own document. Area sum l^2. `lengths` sums to kv_len."""
    p, lengths = _positions(q_len, kv_len), _lengths("lengths", lengths, kv_len)
    _, s, e = _segments(lengths, p)
    regular = Regular(**_cu_seqlens(lengths, q_len, kv_len))
    return _make("full_document", p, kv_len, [(s, e)], regular=regular, lengths=lengths)


def causal_document(q_len: int, kv_len: int, lengths: Sequence[int]) -> IntervalMask:
    """Row i sees j <= i of its own document. Area sum l(l+1)/2."""
    p, lengths = _positions(q_len, kv_len), _lengths("lengths", lengths, kv_len)
    _, s, _ = _segments(lengths, p)
    regular = Regular(causal=True, **_cu_seqlens(lengths, q_len, kv_len))
    return _make("causal_document", p, kv_len, [(s, p + 1)], regular=regular, lengths=lengths)


def full_sliding_window(q_len: int, kv_len: int, window: int) -> IntervalMask:
    """Row i sees abs(i - j) <= window (inclusive both sides). Area T(2w+1) - w(w+1) for w < T."""
    p, w = _positions(q_len, kv_len), _at_most("window", window, q_len + kv_len)
    regular, pairs = Regular(window=(w, w)), [(_moved(p, -w, kv_len), _moved(p, w + 1, kv_len))]
    return _make("full_sliding_window", p, kv_len, pairs, regular=regular, window=w)


def causal_sliding_window(q_len: int, kv_len: int, window: int) -> IntervalMask:
    """Row i sees 0 <= i - j <= window (window + 1 tokens). Area T(w+1) - w(w+1)/2 for w < T."""
    p, w = _positions(q_len, kv_len), _at_most("window", window, q_len + kv_len)
    regular, pairs = Regular(causal=True, window=(w, 0)), [(_moved(p, -w, kv_len), p + 1)]
    return _make("causal_sliding_window", p, kv_len, pairs, regular=regular, window=w)


def shared_question(q_len: int, kv_len: int, groups: Sequence[Sequence[int]]) -> IntervalMask:
    """Groups of a question and its answers: an answer sees its question and itself, causally.

    Args:
      groups: for each group [question, answer, answer, ...] lengths; all sum to kv_len.
    """
    p = _positions(q_len, kv_len)
    try:
        groups = [tuple(g) for g in groups]
    except TypeError:
        raise ValueError(f"groups: {groups!r} is no sequence of groups of lengths") from None
    if not all(groups):
        raise ValueError("groups: each group needs at least a question")
    lengths = _lengths("groups", [n for g in groups for n in g], kv_len)
    segment, s, _ = _segments(lengths, p)
    question = np.repeat(np.cumsum([0] + [len(g) for g in groups])[:-1], [len(g) for g in groups])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    of = question[segment] if len(question) else segment
    q_start, q_end = bounds[of], bounds[np.minimum(of + 1, len(bounds) - 1)]
    pairs = [(q_start, np.minimum(q_end, p + 1)), (s, p + 1)]
    return _make("shared_question", p, kv_len, pairs, groups=tuple(tuple(map(int, g)) for g in groups))


def global_sliding_window(q_len: int, kv_len: int, global_tokens: int, window: int) -> IntervalMask:
    """Row i sees j iff i < g or j < g or abs(i - j) <= window."""
    p, w = _positions(q_len, kv_len), _at_most("window", window, q_len + kv_len)
    g = _at_most("global_tokens", global_tokens, kv_len)
    pairs = [(0, np.where(p < g, kv_len, g)), (_moved(p, -w, kv_len), _moved(p, w + 1, kv_len))]
    return _make("global_sliding_window", p, kv_len, pairs, global_tokens=g, window=w)


def causal_blockwise(q_len: int, kv_len: int, blocks: Sequence[int]) -> IntervalMask:
    """Demonstrations attend causally within themselves, the last block that is not empty causally to everything."""
    p, lengths = _positions(q_len, kv_len), _lengths("blocks", blocks, kv_len)
    index, s, _ = _segments(lengths, p)
    s = np.where(index == np.flatnonzero(lengths).max(initial=-1), 0, s)
    return _make("causal_blockwise", p, kv_len, [(s, p + 1)], blocks=lengths)


def prefix_lm_causal(q_len: int, kv_len: int, prefix: int) -> IntervalMask:
    """Row i sees j <= i or j < prefix."""
    p, n = _positions(q_len, kv_len), _at_most("prefix", prefix, kv_len)
    return _make("prefix_lm_causal", p, kv_len, [(0, np.maximum(p + 1, n))], prefix=n)


def prefix_lm_document(q_len: int, kv_len: int, lengths: Sequence[int], prefixes: Sequence[int]) -> IntervalMask:
    """Prefix LM inside each document, which has a prefix length of its own, 0 <= prefix <= length."""
    p, lengths = _positions(q_len, kv_len), _lengths("lengths", lengths, kv_len)
    prefixes = _integers("prefixes", prefixes)[0].astype(np.int64)
    if prefixes.shape != lengths.shape or (prefixes < 0).any() or (prefixes > lengths).any():
        raise ValueError("prefixes: one per document, 0 <= prefix <= length")
    index, s, _ = _segments(lengths, p)
    prefix = prefixes[index].astype(np.int32) if len(prefixes) else s
    pairs = [(s, np.maximum(p + 1, s + prefix))]
    return _make("prefix_lm_document", p, kv_len, pairs, lengths=lengths, prefixes=prefixes)


def block_causal_document(q_len: int, kv_len: int, lengths: Sequence[int], block: int) -> IntervalMask:
    """Inside a document, row i sees every block up to and with its own (blocks count from its start)."""
    p, lengths = _positions(q_len, kv_len), _lengths("lengths", lengths, kv_len)
    b = _at_most("block", block, max(1, kv_len), low=1)
    _, s, e = _segments(lengths, p)
    end = s + ((np.maximum(p, 0) - s).astype(np.int64) // b + 1) * b
    return _make("block_causal_document", p, kv_len, [(s, np.minimum(end, e))], lengths=lengths, block=b)


STATIC_MASKS: Mapping[str, Callable[..., IntervalMask]] = MappingProxyType(
    {
        f.__name__: f
        for f in (
            full,
            causal,
            full_document,
            causal_document,
            full_sliding_window,
            causal_sliding_window,
            shared_question,
            global_sliding_window,
            causal_blockwise,
            prefix_lm_causal,
            prefix_lm_document,
            block_causal_document,
        )
    }
)
REGULAR_MASKS = tuple(STATIC_MASKS)[:6]
