"""Which tokens each rank holds: contiguous, zigzag, striped, balanced, for any length and world.

Every rank's positions ascend. Lengths that do not divide leave some ranks shorter; local arrays have the
longest rank's length and the rest is padding, which no mask shows to anybody: no token is ever dropped.
"""

import dataclasses
import heapq
from functools import cached_property

import numpy as np

from workload.errors import ascending, integer
from workload.topology import Topology

KINDS = ("contiguous", "zigzag", "striped", "balanced")


@dataclasses.dataclass(frozen=True, eq=False)
class Sharding:
    """The tokens of each rank.

    Attributes:
      positions: per rank, its ascending global positions; together each of 0..total-1 once.
      total: number of tokens.
      kind: one of `KINDS`, or "custom".

    Raises ValueError where a token is missing or held twice.
    """

    positions: tuple[np.ndarray, ...]
    total: int
    kind: str = "custom"

    def __post_init__(self):
        object.__setattr__(self, "total", integer("total", self.total))
        positions = tuple(ascending("positions", p, self.total) for p in self.positions)
        object.__setattr__(self, "positions", positions)
        held = np.zeros(self.total, np.int64)
        for p in positions:
            held[p] += 1
        if (held != 1).any():
            raise ValueError(f"positions: token {int(np.argmax(held != 1))} is held {held[held != 1][0]} times")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.positions)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each rank, int64 [world]."""
        return np.array([len(p) for p in self.positions], np.int64)

    @property
    def length(self) -> int:
        """Length of every local array: the longest rank's (1 at least)."""
        return max(1, int(self.lengths.max(initial=0)))

    @cached_property
    def table(self) -> np.ndarray:
        """Global positions by rank, int64 [world, length], -1 where there is padding (for rotary embeddings)."""
        out = np.full((self.world, self.length), -1, np.int64)
        for row, p in zip(out, self.positions, strict=True):
            row[: len(p)] = p
        return out

    @cached_property
    def inverse(self) -> np.ndarray:
        """Where each token went: int64 [total], places in the flattened `table`."""
        flat = self.table.reshape(-1)
        out = np.empty(self.total, np.int64)
        out[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        return out

    def shard(self, x: np.ndarray, axis: int = 1) -> np.ndarray:
        """[.., total, ..] to [.., world * length, ..] in rank order; padding is zero.

        >>> s = Sharding((np.array([0, 3]), np.array([1, 2, 4])), 5)
        >>> s.shard(np.arange(1, 6), 0).tolist()
        [1, 4, 0, 2, 3, 5]
        """
        x = np.asarray(x)
        if x.shape[axis] != self.total:
            raise ValueError(f"x: axis {axis} has {x.shape[axis]} tokens, the sharding {self.total}")
        flat, shape = self.table.reshape(-1), list(x.shape)
        shape[axis] = len(flat)
        out = np.zeros(shape, x.dtype)
        np.moveaxis(out, axis, 0)[flat >= 0] = np.moveaxis(x, axis, 0)[flat[flat >= 0]]
        return out

    def unshard(self, x: np.ndarray, axis: int = 1) -> np.ndarray:
        """The inverse of `shard`: [.., world * length, ..] to [.., total, ..]."""
        x = np.asarray(x)
        if x.shape[axis] != self.table.size:
            raise ValueError(f"x: axis {axis} has {x.shape[axis]} places, the sharding {self.table.size}")
        return np.take(x, self.inverse, axis=axis)


def make_sharding(
    kind: str, total: int, topology: Topology, *, granule: int = 1, mask=None, chunks: int = 8
) -> Sharding:
    """The sharding of a kind over a topology.

    The kind decides what each ring index holds (balance is the ring's affair: a head exchange is balanced by itself);
    a ring index' tokens are cut in order among its `ulysses` ranks, so that the exchange restores ascending order.

    Args:
      kind: "contiguous"; "zigzag" (chunks r and 2R-1-r of 2R); "striped" (granule by granule, round robin);
        "balanced" (chunks to the least loaded rank, largest area first, equal counts).
      granule: tokens that stay together: a dynamic mask's block size, or a stripe's width.
      mask: for "balanced": the areas of its rows, which are the tokens.
      chunks: for "balanced": chunks per ring index.

    >>> t = Topology(world=2)
    >>> [p.tolist() for p in make_sharding("zigzag", 8, t).positions]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if kind not in KINDS:
        raise ValueError(f"sharding: {kind!r} is none of {', '.join(KINDS)}")
    for label, n, low in (("total", total, 0), ("granule", granule, 1), ("chunks", chunks, 1)):
        integer(label, n, low)
    ring = topology.ring
    if kind == "balanced":
        if mask is None:
            raise ValueError("mask: balanced needs it")
        if mask.q_len != total:
            raise ValueError(f"mask: has {mask.q_len} rows, total is {total}")
        unit, owner = _balanced(mask.row_area, ring, granule, chunks)
    else:
        unit = granule
        units = -(-total // granule)
        owner = {"contiguous": _contiguous, "zigzag": _zigzag, "striped": _striped}[kind](units, ring)
    tokens = np.repeat(owner, unit)[:total]
    order = np.argsort(tokens, kind="stable")
    shards = np.split(order, np.cumsum(np.bincount(tokens, minlength=ring))[:-1])
    return Sharding(_slices(shards, topology, granule), total, kind)


def shardings(kind: str, mask, topology: Topology, *, granule: int = 1, chunks: int = 8) -> tuple[Sharding, Sharding]:
    """The shardings of a mask's rows and of its keys: one and the same where q_len == kv_len.

    Keys of a rectangular problem are of the same kind, contiguous for "balanced": rows alone decide the balance.
    """
    rows = make_sharding(kind, mask.q_len, topology, granule=granule, mask=mask, chunks=chunks)
    if mask.q_len == mask.kv_len:
        return rows, rows
    kind = "contiguous" if kind == "balanced" else kind
    return rows, make_sharding(kind, mask.kv_len, topology, granule=granule)


def _contiguous(units: int, ring: int) -> np.ndarray:
    return np.repeat(np.arange(ring), _even(units, ring))


def _zigzag(units: int, ring: int) -> np.ndarray:
    chunk = np.arange(2 * ring)
    return np.repeat(np.minimum(chunk, 2 * ring - 1 - chunk), _even(units, 2 * ring))


def _striped(units: int, ring: int) -> np.ndarray:
    return np.arange(units) % ring


def _even(units: int, parts: int) -> np.ndarray:
    """Sizes of `parts` consecutive parts that differ by one at most."""
    return np.diff(np.arange(parts + 1) * units // parts)


def _balanced(weight: np.ndarray, ring: int, granule: int, chunks: int) -> tuple[int, np.ndarray]:
    """(chunk size, owner of each chunk): largest first to the least loaded ring index that has room.

    Every ring index takes the same number of chunks. Its load exceeds the mean by at most the largest chunk's area
    where room does not bind (Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    total = len(weight)
    size = max(1, -(-total // (ring * chunks * granule))) * granule
    area = np.add.reduceat(weight, np.arange(0, total, size)) if total else np.zeros(0, np.int64)
    room = np.full(ring, -(-len(area) // ring))
    owner = np.empty(len(area), np.int64)
    heap = [(0, r) for r in range(ring)]
    for c in np.argsort(-area, kind="stable"):
        load, r = heapq.heappop(heap)
        owner[c], room[r] = r, room[r] - 1
        if room[r]:
            heapq.heappush(heap, (load + int(area[c]), r))
    return size, owner


def _slices(shards, topology: Topology, granule: int) -> tuple[np.ndarray, ...]:
    """Cuts each ring index' tokens in order among its ulysses ranks, in whole granules, the first ranks full."""
    longest = max(len(s) for s in shards)
    size = max(1, -(-longest // (topology.ulysses * granule))) * granule
    out = [np.zeros(0, np.int64)] * topology.world
    for r, tokens in enumerate(shards):
        for u in range(topology.ulysses):
            out[topology.rank(r, u)] = tokens[u * size : (u + 1) * size]
    return tuple(out)
