"""Mask policies of the Hopper kernels: which column tiles a row tile visits, and what is seen inside one.

A pass walks row tiles; each visits column tiles. In the forward and the dq pass rows are queries and columns are keys;
in the key-major pass rows are keys and columns are queries. A policy answers, inside the kernel, four questions:

    row_tile(refs, head, place)         which row tile the grid's place works on (heaviest first)
    walk(refs, head, tile)              the column tiles that it visits, partial ones first
    load_rows(refs, head, row0, rows)   what the element test needs of a tile's rows
    seen(state, head, place)            the element test of a partial tile, bool [rows, columns]

and, if it likes, in which order the thread blocks of a key-major pass run (`block`), which partial tiles each half of a
row tile sees (`spans`) and what numbers of the columns its element test reads (`column_values`).

`refs` are the arrays of `operands()` in device memory, `head` is a `Head` and `place` a `Place`. A policy is a pytree,
so its arrays are data and its tile sizes are static. `scores` and `score_gradient` are identities unless the policy
changes logits (see flex.py).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from workload.masks import IntervalMask
from workload.tiles import TileRuns

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
    """First row and first column of a [rows, columns] tile of logits.

    values: the policy's `column_values` of the tile, in shared memory.
    """

    row0: jax.Array
    column0: jax.Array
    rows: int
    columns: int
    values: tuple[jax.Ref, ...] = ()

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
class GatheredPlace(Place):
    """The place of a tile whose columns are pieces of equal length, gathered side by side.

    starts: the first column of each piece; `column0` is that of the first.
    """

    starts: tuple[jax.Array, ...] = ()

    def index(self, axis: int) -> jax.Array:
        if axis == 0:
            return super().index(axis)
        column = plgpu.broadcasted_iota(jnp.int32, (self.rows, self.columns), 1, layout=TILE)
        piece, out = self.columns // len(self.starts), column + self.column0
        for j, start in enumerate(self.starts[1:], 1):
            out = jnp.where(column < j * piece, out, column + (start - j * piece))
        return out


@dataclasses.dataclass(frozen=True)
class Walk:
    """The column tiles of one row tile.

    Attributes:
      partial, total: int32 counts; steps 0 .. partial - 1 are partial tiles, the rest full ones.
      column: step -> index of its column tile.
      span: half of the row tile -> the partial steps, from one to before another, that it sees something at; or None.
    """

    partial: jax.Array
    total: jax.Array
    column: Callable[[jax.Array], jax.Array]
    span: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None


class Policy:
    """What a kernel asks of a mask; see the module's text. Subclasses are frozen pytree dataclasses."""

    row_tokens: int
    column_tokens: int
    changes_scores = False
    heads_differ = False  # whether query heads that share keys visit different column tiles
    values = 0  # how many vectors `column_values` returns
    share_blocks = 0  # thread blocks of a forward that `share` tells what to do
    spans = None  # `Walk.span` of every half of a row tile, where walks tell
    orders_blocks = False  # whether `block` (in a key-major pass) or `share` (in the forward) says what blocks do when

    def operands(self) -> tuple[jax.Array, ...]:
        """Arrays that the kernel reads from device memory."""
        return ()

    def column_values(self, refs) -> tuple:
        """Vectors in device memory, an int32 a column, that are loaded together with a column tile."""
        del refs
        return ()

    def row_tile(self, refs, head, place):
        """Row tile that the grid's `place` works on."""
        del refs, head
        return place

    def block(self, refs, number):
        """1 + (row tile * parts + part) * kv heads + kv head of the thread block that comes as this number, or 0 where
        it has nothing to do."""
        raise NotImplementedError

    def share(self, refs, block, field):
        """Of a thread block of the forward: how many items it has (field 0), and which, from field 1 on.

        An item is (row tile * batch + batch entry) * query heads + query head.
        """
        raise NotImplementedError

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
    return (_by_bits if place.columns == 128 else _by_comparison)(state, place)


def _by_comparison(state, place: Place) -> jax.Array:
    """Two comparisons an element and interval."""
    column = place.index(1)
    inside = ((column >= place.by_row(start)) & (column < place.by_row(end)) for start, end in state)
    return functools.reduce(jnp.logical_or, inside)


def _by_bits(state, place: Place) -> jax.Array:
    """One test of a bit an element, however many intervals there are: fewer instructions, but more registers.

    A thread holds columns 8 b + 2 t + i (i < 2) of a row, at most 128; bit 2 b + i of a word says whether one is seen.
    """
    column = plgpu.broadcasted_iota(jnp.int32, (place.rows, place.columns), 1, layout=TILE)

    def from_there(bound):
        ahead = place.by_row(bound - place.column0) - (column & 6)
        before = 2 * (ahead >> 3) + jnp.minimum(ahead & 7, 2)  # how many of the thread's columns lie before the bound
        return lax.shift_left(jnp.full_like(column, -1), jnp.clip(before, 0, 32))

    words = (from_there(start) & ~from_there(end) for start, end in state)
    bit = lax.shift_left(jnp.full_like(column, 1), 2 * (column >> 3) + (column & 1))
    return (functools.reduce(jnp.bitwise_or, words) & bit) != 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intervals(Policy):
    """Rows see the columns of at most R intervals each; tiles come as runs, O(rows + rows / tile) metadata.

    Attributes:
      starts, ends: int32 [R, rows padded to whole tiles]; (0, 0) is absent.
      partial, full: int32 [2, tiles, P], [2, tiles, F]: begins and ends of the runs of column tiles; (0, 0) absent.
      order: int32 [tiles]: 1 + the row tile to work on at each place of the grid, heaviest first; 0 means the place
        itself. Where orders_blocks, int32 [thread blocks], see `Policy.block`, or [thread blocks, fields], see
        `Policy.share`.
      row_tokens, column_tokens: tile sizes.
      orders_blocks: whether this is the policy of a key-major pass or of the forward, whose blocks are ordered.
      spans: int32 [tiles, 2, 2]: `Walk.span` of both halves of each tile, or None.
    """

    starts: jax.Array
    ends: jax.Array
    partial: jax.Array
    full: jax.Array
    order: jax.Array
    row_tokens: int = dataclasses.field(metadata={"static": True})
    column_tokens: int = dataclasses.field(metadata={"static": True})
    orders_blocks: bool = dataclasses.field(default=False, metadata={"static": True})
    spans: jax.Array | None = None

    def operands(self):
        spans = () if self.spans is None else (self.spans,)
        return self.starts, self.ends, self.partial, self.full, self.order, *spans

    def row_tile(self, refs, head, place):
        chosen = refs[4][place]
        return jnp.where(chosen == 0, place, chosen - 1)

    def block(self, refs, number):
        return refs[4][number]

    @property
    def share_blocks(self):
        """Thread blocks of a forward whose blocks are ordered."""
        return self.order.shape[0]

    def share(self, refs, block, field):
        return refs[4][block, field]

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
        span = None if self.spans is None else lambda half: (refs[5][tile, half, 0], refs[5][tile, half, 1])
        return Walk(steps, steps + sum(end - begin for begin, end in full), column, span)

    def load_rows(self, refs, head, row0, rows):
        def load(ref, r):
            return plgpu.load(ref.at[r, pl.ds(row0, rows)], layout=ROW, optimized=False)

        return tuple((load(refs[0], r), load(refs[1], r)) for r in range(refs[0].shape[0]))

    def seen(self, state, head, place):
        return _in_intervals(state, place)


def intervals(
    mask: IntervalMask, row_tokens: int, column_tokens: int, device=None, order=None, halves: bool = False
) -> Intervals:
    """The policy of a row-interval mask for one pair of tile sizes; a key-major pass hands in `mask.transpose()`.

    Args:
      order: (mask, weights of its row tiles) -> what the policy's `order` is where it orders thread blocks.
      halves: whether walks are to tell what each half of a row tile sees.
    """
    runs = mask.tile_runs(row_tokens, column_tokens)
    tiles = len(runs.full_begin)
    pad = ((0, 0), (0, tiles * row_tokens - mask.q_len))
    # A tile that an element test has to pass costs about half as much again as a full one.
    weight = 2 * runs.full_count + 3 * runs.partial_count
    ordered = order(mask, weight) if order and mask.q_len else np.argsort(-weight, kind="stable") + 1
    arrays = (
        np.pad(mask.starts, pad),
        np.pad(mask.ends, pad),
        np.stack([runs.partial_begin, runs.partial_end]),
        np.stack([runs.full_begin, runs.full_end]),
        ordered.astype(np.int32),
    )
    spans = jax.device_put(_spans(*arrays[:2], runs), device) if halves else None
    arrays = (jax.device_put(x, device) for x in arrays)
    return Intervals(*arrays, row_tokens, column_tokens, order is not None, spans)


def _spans(starts: np.ndarray, ends: np.ndarray, runs: TileRuns) -> np.ndarray:
    """`Intervals.spans` of intervals [R, rows of whole tiles]: the partial steps between a half's outermost columns."""
    starts, ends = (x.reshape(len(x), len(runs.full_begin), 2, runs.tile_q // 2) for x in (starts, ends))
    seen, none = starts < ends, runs.k_tiles
    behind = np.where(seen, -(-ends // runs.tile_k), 0).max(axis=(0, 3), initial=0)
    first = np.where(seen, starts // runs.tile_k, none).min(axis=(0, 3), initial=none)
    columns = np.stack([np.minimum(first, behind), behind], axis=2)
    ranges = zip(runs.partial_begin.T[:, :, None, None], runs.partial_end.T[:, :, None, None], strict=True)
    return sum((np.clip(columns, *run) - run[0] for run in ranges), np.zeros_like(columns)).astype(np.int32)
