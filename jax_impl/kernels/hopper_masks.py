"""Mask policies of the Hopper kernels: which column tiles a row tile visits, and what is seen inside one.

A pass walks row tiles; each visits column tiles. In the forward and the dq pass rows are queries and columns are keys;
in the key-major pass rows are keys and columns are queries. A policy answers, inside the kernel, four questions:

    row_tile(refs, head, place)         which row tile the grid's place works on (heaviest first)
    walk(refs, head, tile)              the column tiles that it visits, partial ones first
    load_rows(refs, head, row0, rows)   what the element test needs of a tile's rows
    seen(state, head, place)            the element test of a partial tile, bool [rows, columns]

`refs` are the arrays of `operands()` in device memory, `head` is a `Head` and `place` a `Place`. A policy is a pytree,
so its arrays are data and its tile sizes are static. `scores` and `score_gradient` are identities unless the policy
changes logits (see flex.py).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from workload.masks import IntervalMask

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Head:
    """Where a tile stands besides its rows and columns: batch entry, query head and kv head, int32 scalars."""

    batch: jax.Array
    q: jax.Array
    kv: jax.Array


@dataclasses.dataclass(frozen=True)
class Place:
    """First row and first column of a [rows, columns] tile of logits."""

    row0: jax.Array
    column0: jax.Array
    rows: int
    columns: int

    def index(self, axis: int) -> jax.Array:
        """Global row (axis 0) or column (axis 1) of each element, int32 [rows, columns]."""
        start = self.column0 if axis else self.row0
        return plgpu.broadcasted_iota(jnp.int32, (self.rows, self.columns), axis, layout=TILE) + start

    def by_row(self, x: jax.Array) -> jax.Array:
        """[rows] to [rows, columns]."""
        return lax.broadcast_in_dim(x, (self.rows, self.columns), [0])

    def by_column(self, x: jax.Array) -> jax.Array:
        """[columns] to [rows, columns]."""
        return lax.broadcast_in_dim(x, (self.rows, self.columns), [1])


@dataclasses.dataclass(frozen=True)
class Walk:
    """The column tiles of one row tile.

    Attributes:
      partial, total: int32 counts; steps 0 .. partial - 1 are partial tiles, the rest full ones.
      column: step -> index of its column tile.
    """

    partial: jax.Array
    total: jax.Array
    column: Callable[[jax.Array], jax.Array]


class Policy:
    """What a kernel asks of a mask; see the module's text. Subclasses are frozen pytree dataclasses."""

    row_tokens: int
    column_tokens: int
    changes_scores = False
    one_walk = False  # whether all heads visit the same tiles

    def operands(self) -> tuple[jax.Array, ...]:
        """Arrays that the kernel reads from device memory."""
        return ()

    def row_tile(self, refs, head, place):
        """Row tile that the grid's `place` works on."""
        del refs, head
        return place

    def walk(self, refs, head, tile) -> Walk:
        """The column tiles that this row tile visits."""
        raise NotImplementedError

    def load_rows(self, refs, head, row0, rows: int):
        """Whatever `seen` needs of rows row0 .. row0 + rows - 1."""
        raise NotImplementedError

    def seen(self, state, head, place: Place) -> jax.Array:
        """bool [rows, columns]: which elements of a partial tile are visible."""
        raise NotImplementedError

    def scores(self, s, head, place: Place) -> jax.Array:
        """Natural-log logits from scaled ones."""
        del head, place
        return s

    def score_gradient(self, s, ds, head, place: Place) -> jax.Array:
        """Cotangent of the scaled logits from that of `scores`' result."""
        del s, head, place
        return ds


def _in_intervals(state, place: Place) -> jax.Array:
    """Elements whose column lies in one of their row's half-open intervals."""
    column, out = place.index(1), None
    for start, end in state:
        inside = (column >= place.by_row(start)) & (column < place.by_row(end))
        out = inside if out is None else out | inside
    return out


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intervals(Policy):
    """Rows see the columns of at most R intervals each; tiles come as runs, O(rows + rows / tile) metadata.

    Attributes:
      starts, ends: int32 [R, rows padded to whole tiles]; (0, 0) is absent.
      partial, full: int32 [2, tiles, P], [2, tiles, F]: begins and ends of the runs of column tiles; (0, 0) absent.
      order: int32 [tiles]: 1 + the row tile to work on at each place of the grid, heaviest first; 0 means the place
        itself.
      row_tokens, column_tokens: tile sizes.
    """

    starts: jax.Array
    ends: jax.Array
    partial: jax.Array
    full: jax.Array
    order: jax.Array
    row_tokens: int = dataclasses.field(metadata={"static": True})
    column_tokens: int = dataclasses.field(metadata={"static": True})

    one_walk = True

    def operands(self):
        return self.starts, self.ends, self.partial, self.full, self.order

    def row_tile(self, refs, head, place):
        chosen = refs[4][place]
        return jnp.where(chosen == 0, place, chosen - 1)

    def walk(self, refs, head, tile):
        partial, full = (
            [(ref[0, tile, r], ref[1, tile, r]) for r in range(ref.shape[2])] for ref in (refs[2], refs[3])
        )

        def column(n):
            (begin, end), *others = partial + full
            out, n = begin + n, n - (end - begin)
            for begin, end in others:
                out, n = jnp.where(n >= 0, begin + n, out), n - (end - begin)
            return out

        steps = sum(end - begin for begin, end in partial)
        return Walk(steps, steps + sum(end - begin for begin, end in full), column)

    def load_rows(self, refs, head, row0, rows):
        def load(ref, r):
            return plgpu.load(ref.at[r, pl.ds(row0, rows)], layout=ROW, optimized=False)

        return tuple((load(refs[0], r), load(refs[1], r)) for r in range(refs[0].shape[0]))

    def seen(self, state, head, place):
        return _in_intervals(state, place)


def intervals(mask: IntervalMask, row_tokens: int, column_tokens: int, device=None) -> Intervals:
    """The policy of a row-interval mask for one pair of tile sizes; a key-major pass hands in `mask.transpose()`."""
    runs = mask.tile_runs(row_tokens, column_tokens)
    tiles = len(runs.full_begin)
    pad = ((0, 0), (0, tiles * row_tokens - mask.q_len))
    # A tile that an element test has to pass costs about half as much again as a full one.
    order = np.argsort(-(2 * runs.full_count + 3 * runs.partial_count), kind="stable") + 1
    arrays = (
        np.pad(mask.starts, pad),
        np.pad(mask.ends, pad),
        np.stack([runs.partial_begin, runs.partial_end]),
        np.stack([runs.full_begin, runs.full_end]),
        order.astype(np.int32),
    )
    return Intervals(*(jax.device_put(x, device) for x in arrays), row_tokens, column_tokens)
