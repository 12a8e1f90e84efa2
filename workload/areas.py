"""Visible cells between every pair of shards, without building the local masks: what a schedule weighs.

A row's visible keys are intervals. Keys of an owner inside [a, b) number F(b) - F(a), F counting its keys before
a place; summed over a shard's rows that takes sorted ends and prefix sums, O(rows log rows + runs) a shard, where a
run is a stretch of keys of one owner.
"""

import numpy as np

from workload.block_masks import BlockMask

Weighted = tuple[np.ndarray, np.ndarray, np.ndarray]


def row_intervals(mask, rows: np.ndarray, head: int = 0) -> Weighted:
    """(starts, ends, weights), flat: the keys that these rows of a head see, an interval standing for `weight` rows."""
    if not isinstance(mask, BlockMask):
        starts, ends = mask.starts[:, rows].reshape(-1), mask.ends[:, rows].reshape(-1)
        return starts, ends, np.ones(len(starts), np.int64)
    begin, end = (np.searchsorted(rows, mask.q_bounds[head, x]) for x in (slice(None, -1), slice(1, None)))
    held = np.flatnonzero(end > begin)  # a shard has few of the blocks
    place, slot = np.nonzero(np.arange(mask.indices.shape[2]) < mask.counts[head, held, None])
    block = held[place]
    key = mask.indices[head, block, slot]
    starts, ends = mask.kv_bounds[head, key], mask.kv_bounds[head, key + 1]
    if not mask.causal:
        return starts, ends, (end - begin)[block]
    whole = ends <= mask.limits[rows[begin[block]]]
    cut = np.flatnonzero(~whole)  # blocks on the diagonal: row by row, up to each row's limit
    count = (end - begin)[block[cut]]
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(begin[block[cut]], count)
    first, last = np.repeat(starts[cut], count), np.repeat(ends[cut], count)
    last = np.maximum(np.minimum(last, mask.limits[rows[place]]), first)
    return (
        np.concatenate([starts[whole], first]),
        np.concatenate([ends[whole], last]),
        np.concatenate([(end - begin)[block[whole]], np.ones(len(first), np.int64)]),
    )


class Owners:
    """Who owns each key; counts, per owner, the keys that weighted intervals hold."""

    def __init__(self, shards: list[np.ndarray], total: int):
        self.count = len(shards)
        self.total = total
        owner = np.empty(total, np.int64)
        for r, tokens in enumerate(shards):
            owner[tokens] = r
        change = np.flatnonzero(np.diff(owner)) + 1
        self.bounds = np.concatenate([[0], change, [total]]).astype(np.int64)
        self.run_owner = owner[self.bounds[:-1]] if total else np.zeros(0, np.int64)
        width = int(self.bounds[1]) if total else 1
        striped = len(self.run_owner) > 8 * self.count
        periodic = striped and np.array_equal(owner, np.arange(total) // width % self.count)
        self.stripe = width if periodic else 0  # keys of a stripe, 0 where keys are not dealt round robin

    def cells(self, starts: np.ndarray, ends: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Keys of each owner inside the intervals, times their weights: int64 [owners]."""
        if self.stripe:
            return self._below_striped(ends, weights) - self._below_striped(starts, weights)
        covered = self._integral(starts, weights) - self._integral(ends, weights)
        out = np.zeros(self.count, np.int64)
        np.add.at(out, self.run_owner, np.diff(covered))
        return out

    def _integral(self, points: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """sum of weight * max(0, bound - point) at each run bound."""
        order = np.argsort(points, kind="stable")
        points, weights = points[order].astype(np.int64), weights[order]
        before = np.searchsorted(points, self.bounds)
        count = np.concatenate([[0], np.cumsum(weights)])[before]
        moment = np.concatenate([[0], np.cumsum(weights * points)])[before]
        return count * self.bounds - moment

    def _below_striped(self, points: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """sum of weight * (keys of each owner below the point), stripes of `stripe` keys dealt round robin."""
        stripe, inside = np.divmod(points.astype(np.int64), self.stripe)
        lap, owner = np.divmod(stripe, self.count)
        laps = int((weights * lap).sum()) * self.stripe
        whole, part = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        np.add.at(whole, owner, weights)
        np.add.at(part, owner, weights * inside)
        later = whole.sum() - np.cumsum(whole)  # points whose stripe stands after this owner's
        return laps + later * self.stripe + part


def area_matrix(mask, row_shards: list[np.ndarray], key_shards: list[np.ndarray], heads=None) -> np.ndarray:
    """Visible cells between row shard r and key shard s, summed over `heads` of the mask: int64 [rows, keys].

    Equal to mask.restrict(row_shards[r], key_shards[s]).area (a test compares), at a fraction of its price.
    """
    owners = Owners(key_shards, mask.kv_len)
    heads = range(mask.heads) if heads is None else heads
    out = np.zeros((len(row_shards), len(key_shards)), np.int64)
    for r, rows in enumerate(row_shards):
        for h in heads:
            out[r] += owners.cells(*row_intervals(mask, rows, h))
    return out


def tiles_seen(mask, rows: np.ndarray, tile: int) -> np.ndarray:
    """Which tiles of `tile` keys hold one that some of these rows see: bool [tiles]."""
    change = np.zeros(-(-mask.kv_len // tile) + 1, np.int64)
    for h in range(mask.heads):
        starts, ends, _ = row_intervals(mask, rows, h)
        some = ends > starts
        np.add.at(change, starts[some] // tile, 1)
        np.add.at(change, -(-ends[some] // tile), -1)
    return np.cumsum(change)[:-1] > 0


def keys_needed(mask, rows: np.ndarray, own: np.ndarray, heads) -> int:
    """How many keys outside `own` some of these rows sees under some of the mask's `heads`."""
    parts = [row_intervals(mask, rows, h) for h in heads]
    starts, ends = (np.concatenate([p[x] for p in parts]).astype(np.int64) for x in (0, 1))
    some = ends > starts
    order = np.argsort(starts[some], kind="stable")
    starts, ends = starts[some][order], np.maximum.accumulate(ends[some][order])
    fresh = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    starts = np.maximum(starts, fresh)
    ends = np.maximum(starts, ends)
    inside = np.searchsorted(own, ends) - np.searchsorted(own, starts)
    return int((ends - starts - inside).sum())
