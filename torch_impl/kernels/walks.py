"""Walks: which tiles a tile of rows visits, and the intervals that mask a partial one; its twin is jax_impl's."""

import dataclasses
import heapq

import numpy as np
import torch

from workload.masks import IntervalMask
from workload.tiles import TileRuns, tile_runs


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a pass is launched: `rows` of the tile a program owns, `cols` of the tiles it visits, warps, stages.

    registers: the most a thread may take, so that more programs share a multiprocessor; None leaves it to the compiler.
    """

    rows: int
    cols: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """The launch options as Triton names them."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclasses.dataclass(frozen=True)
class RunWalk:
    """What one pass reads of a mask.

    Attributes:
      starts, ends: int32 [R, rows], the intervals of each owned row.
      full_begin, full_end: int32 [tiles, F], partial_begin, partial_end: int32 [tiles, P], the runs.
      order: int32 [tiles], heaviest tile first; loads: on the host, the tiles that each of these visits.
      launch: the tile sizes the runs are counted in, and how to launch.
    """

    starts: torch.Tensor
    ends: torch.Tensor
    full_begin: torch.Tensor
    full_end: torch.Tensor
    partial_begin: torch.Tensor
    partial_end: torch.Tensor
    order: torch.Tensor
    launch: Launch
    loads: np.ndarray

    def arguments(self) -> tuple:
        """Pointers in the kernels' order."""
        runs = (self.full_begin, self.full_end, self.partial_begin, self.partial_end)
        return (self.starts, self.ends, *runs, self.order, self.full_begin.shape[1], self.partial_begin.shape[1])


def ragged_runs(mask: IntervalMask, rows: int, cols: int) -> TileRuns:
    """The mask's tile runs, where rows past its end count as empty: no tile that holds them is full.

    A kernel that sums over rows then masks what it read past the edge.
    """
    short = ((0, 0), (0, -mask.q_len % rows))
    starts, ends = (np.pad(x, short, constant_values=mask.kv_len) for x in (mask.starts, mask.ends))
    return tile_runs(starts, ends, mask.kv_len, rows, cols)


def run_walk(mask: IntervalMask, launch: Launch, device=None) -> RunWalk:
    """The walk of an interval mask in a launch's tiles; O(q_len).

    Args:
      mask: its rows own the tiles; hand in `mask.transpose()` for keys as rows.
    """
    runs = ragged_runs(mask, launch.rows, launch.cols)
    loads = runs.full_count + runs.partial_count
    order = np.argsort(-loads, kind="stable").astype(np.int32)
    arrays = (mask.starts, mask.ends, runs.full_begin, runs.full_end, runs.partial_begin, runs.partial_end, order)
    return RunWalk(*(torch.as_tensor(np.ascontiguousarray(x), device=device) for x in arrays), launch, loads[order])


def head_by_head(loads: np.ndarray, heads: int, slots: int) -> int:
    """How many of the heaviest tiles can go head after head, the others last and with all heads side by side.

    Programs that are at tiles of one head share what they read in the cache; but the last head's heaviest tile must not
    end alone: the others are the fewest whose work, over all heads, outlasts it on all slots.

    Args:
      loads: of the tiles, descending; slots: programs that run at a time.

    >>> head_by_head(np.array([4, 4, 4, 4, 4]), 8, 4), head_by_head(np.array([9, 2, 2, 2, 2]), 4, 3)
    (4, 1)
    """
    if not len(loads):
        return 0
    work = np.cumsum(loads[::-1], dtype=np.int64) * heads
    return max(0, len(loads) - int(np.searchsorted(work, slots * int(loads[0]))) - 1)


def longest_load(jobs: np.ndarray, slots: int) -> float:
    """When the last of `jobs` ends, each going in turn to the slot that is free first: Graham's list schedule.

    >>> longest_load(np.array([3, 2, 2]), 2)
    4.0
    """
    free = [0.0] * slots
    for job in jobs:
        heapq.heapreplace(free, free[0] + float(job))
    return max(free)
