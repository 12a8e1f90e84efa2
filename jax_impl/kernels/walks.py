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

    def visible(self, head, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile; one mask serves all heads."""
        del head
        rows = pl.ds(row * tile.rows, tile.rows)
        j = column * tile.columns + lax.broadcasted_iota(jnp.int32, (tile.rows, tile.columns), 1)

        def inside(r):
            return (self.starts[r, rows][:, None] <= j) & (j < self.ends[r, rows][:, None])

        # Two at most for the patterns, both ways; other masks may have many, which are no code to unroll.
        first, intervals = inside(0), self.starts.shape[0]
        if intervals <= 2:
            return first if intervals == 1 else first | inside(1)
        return lax.fori_loop(1, intervals, lambda r, seen: seen | inside(r), first)


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

    def visible(self, head, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile."""
        return self.elements.visible(head, row, column, tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockElements:
    """Element mask of blocks of any size: a row sees a column iff their blocks say so, and its intervals too.

    Attributes:
      row_block, column_block: int32 [heads, padded rows], [heads, padded columns]; block 0 is padding.
      bitmap: int8 [heads, row blocks + 1, column blocks + 1].
      intervals: what a causal mask leaves of a row.
    """

    row_block: jax.Array
    column_block: jax.Array
    bitmap: jax.Array
    intervals: RowIntervals | None

    def visible(self, head, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile under the mask of a mask head."""
        shape = (tile.rows, tile.columns)
        row_block = self.row_block[head, pl.ds(row * tile.rows, tile.rows)][:, None]
        column_block = self.column_block[head, pl.ds(column * tile.columns, tile.columns)][None, :]
        listed = self.bitmap[head, jnp.broadcast_to(row_block, shape), jnp.broadcast_to(column_block, shape)]
        return (listed != 0) & self.intervals.visible(head, row, column, tile)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListWalk:
    """A dynamic mask's walk: per mask head and row tile, a list of column tiles, the full ones first.

    Attributes:
      full, counts: int32 [heads, row tiles], listed tiles that need no element mask, and all of them.
      indices: int32 [heads, row tiles, longest].
      elements: the element mask inside the others.
      q_heads: query heads, which share the lists evenly; static.
    """

    full: jax.Array
    counts: jax.Array
    indices: jax.Array
    elements: RowIntervals | BlockElements
    q_heads: int = dataclasses.field(metadata={"static": True})

    def visit(self, head, row, step, carry):
        """Folds step(column, carry, masked) over the column tiles that a query head's row tile lists."""
        h = self._of(head)
        for begin, end, masked in ((0, self.full[h, row], False), (self.full[h, row], self.counts[h, row], True)):
            body = lambda n, carry, masked=masked: step(self.indices[h, row, n], carry, masked)  # noqa: E731
            carry = lax.fori_loop(begin, end, body, carry)
        return carry

    def visible(self, head, row, column, tile):
        """bool [tile.rows, tile.columns] of one tile for a query head."""
        return self.elements.visible(self._of(head), row, column, tile)

    def _of(self, head):
        """The mask head of a query head."""
        return head * self.counts.shape[0] // self.q_heads


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
