"""Walks: which column tiles a row tile visits, and the element mask inside a partial one.

A walk is a pytree of small integer arrays. Outside a kernel its leaves are arrays, inside they are references;
`visit` and `visible` are written for the latter. A trailing pad of zeros in any array means "absent".
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from workload.masks import IntervalMask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowIntervals:
    """Element mask: row i sees column j iff starts[r, i] <= j < ends[r, i] for some r; int32 [R, padded rows]."""

    starts: jax.Array
    ends: jax.Array

    def visible(self, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile."""
        rows = pl.ds(row * tile.rows, tile.rows)
        j = column * tile.columns + lax.broadcasted_iota(jnp.int32, (tile.rows, tile.columns), 1)
        seen = None
        for r in range(self.starts.shape[0]):
            inside = (self.starts[r, rows][:, None] <= j) & (j < self.ends[r, rows][:, None])
            seen = inside if seen is None else seen | inside
        return seen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunWalk:
    """A static mask's walk: runs [begin, end) of full and of partial column tiles, int32 [row tiles, runs]."""

    full_begin: jax.Array
    full_end: jax.Array
    partial_begin: jax.Array
    partial_end: jax.Array
    elements: RowIntervals

    def visit(self, head, row, step, carry):
        """Folds step(column, carry, masked) over the column tiles of a row tile; one mask serves all heads."""
        del head
        for begin, end, masked in (
            (self.full_begin, self.full_end, False),
            (self.partial_begin, self.partial_end, True),
        ):

            def run(r, carry, begin=begin, end=end, masked=masked):
                body = lambda column, carry: step(column, carry, masked)  # noqa: E731
                return lax.fori_loop(begin[row, r], end[row, r], body, carry)

            carry = lax.fori_loop(0, begin.shape[1], run, carry) if begin.shape[1] > 1 else run(0, carry)
        return carry

    def visible(self, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile."""
        return self.elements.visible(row, column, tile)


def run_walk(mask: IntervalMask, rows: int, columns: int, device=None, *, hide_padding: bool = False) -> RunWalk:
    """The walk of an interval mask at a tile size; O(q_len).

    Args:
      mask: rows own the tiles; hand in `mask.transpose()` for keys as rows.
      rows, columns: tile size.
      hide_padding: whether rows past the last one must be masked too, for a kernel that sums over rows.
    """
    short = max(rows, -(-mask.q_len // rows) * rows) - mask.q_len
    starts, ends = (np.pad(x, ((0, 0), (0, short))) for x in (mask.starts, mask.ends))
    whole = dataclasses.replace(mask, starts=starts, ends=ends)
    runs = (whole if hide_padding or not mask.q_len else mask).tile_runs(rows, columns)
    bounds = (runs.full_begin, runs.full_end, runs.partial_begin, runs.partial_end)
    return jax.device_put(RunWalk(*bounds, RowIntervals(starts, ends)), device)
