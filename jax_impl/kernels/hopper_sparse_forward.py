"""Block-sparse forward pass on Hopper: the schedule of hopper_forward.py over lists of key pieces.

Each of two consumer warpgroups owns 64 rows. What they share decides how often a key tile is loaded: two halves of a
128 block of queries ("rows") or two query heads under one list ("heads") share every key tile; else ("none") each
follows its own list with a ring of its own. A step takes one tile of 128 keys: one piece of 128 or two of 64, so that
blocks of 64 keep the tensor cores as busy as long ones. Keys and values alternate in one ring. Under a policy
(flex_sparse) the lists say which pieces are visited, the policy what is seen in them and what logits become.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import COMPILER, LOG2E, drain, heads_side_by_side, shared_tile
from jax_impl.kernels.hopper_lists import NEVER, Lists
from jax_impl.kernels.hopper_masks import ROW, TILE, GatheredPlace, Head, Policy

CONSUMERS = 2
ROWS = 64  # of a consumer


@dataclasses.dataclass(frozen=True)
class SparseTiles:
    """The schedule of the sparse forward kernel.

    Attributes:
      pieces: pieces of a step.
      slots: tiles that all rings hold together.
      registers: of a consumer and of the producer thread.
      l2_bytes: keys and values of the heads that run side by side should fit in this much cache.
    """

    pieces: int = 2
    slots: int = 6
    registers: tuple[int, int] = (240, 24)
    l2_bytes: int = 24 << 20


def shared_by(lists: Lists, q_heads: int, kv_heads: int) -> str:
    """What the two consumers of a thread block share a list by: "rows", "heads" or "none"."""
    if lists.rows == CONSUMERS * ROWS:
        return "rows"
    return "heads" if lists.heads < q_heads and q_heads // kv_heads % CONSUMERS == 0 else "none"


def sparse_forward(q, k, v, lists: Lists, scale: float, tiles: SparseTiles, *, out_dtype=None,
                   policy: Policy | None = None):
    """Attention of q over the listed pieces of k and v.

    Args:
      q: [batch, q_len, q_heads, head_dim], bfloat16 or float16; k, v: [batch, kv_len, kv_heads, head_dim]; in the
        layout of the lists.
      lists: rows are queries, in tiles of 64 or 128; an even number of tiles where they are of 64.
      scale: > 0.
      out_dtype: of out; q's by default.
      policy: the element test, and logits changed; its operands begin with those of the lists.

    Returns: out [batch, tiles * rows, q_heads, head_dim], lse float32 [batch, q_heads, tiles * rows], natural log.
    """
    batch, _, q_heads, dim = q.shape
    kv_heads, padded = k.shape[2], lists.tiles * lists.rows
    out_dtype, sharing = jnp.dtype(out_dtype or q.dtype), shared_by(lists, q_heads, k.shape[2])
    side = heads_side_by_side(q_heads, kv_heads, 4 * k.shape[1] * dim, tiles.l2_bytes)
    rings = CONSUMERS if sharing == "none" else 1
    side, sections = (side // CONSUMERS if sharing == "heads" else side), q_heads // side
    kernel = _Forward(tiles, lists.rows, lists.piece, sharing, rings, scale, q_heads, kv_heads, dim, side,
                      lists.heads, q.dtype, out_dtype, policy)
    slots, bar = tiles.slots // rings * rings, plgpu.Barrier
    values = policy.values if policy else 0
    of_values = {"values_s": [plgpu.SMEM((slots, kernel.columns), jnp.int32) for _ in range(values)]} if values else {}
    out, lse = plgpu.kernel(
        kernel.body,
        out_type=[
            jax.ShapeDtypeStruct((batch, padded, q_heads, dim), out_dtype),
            jax.ShapeDtypeStruct((batch, q_heads, padded), jnp.float32),
        ],
        scratch_types={
            "q_s": shared_tile((CONSUMERS, ROWS, dim), q.dtype),
            "kv_s": shared_tile((slots, tiles.pieces * lists.piece, dim), q.dtype),
            "lse_s": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            "q_ready": bar(num_barriers=CONSUMERS),
            "ready": bar(num_arrivals=tiles.pieces * (1 + values), num_barriers=slots),
            "free": bar(num_arrivals=CONSUMERS // rings, num_barriers=slots),
            **of_values,
        },
        grid=(batch, sections, lists.tiles // rings, side),
        grid_names=("batch", "section", "place", "side"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_sparse_forward",
    )(q, k, v, *(policy or lists).operands())
    return out, lse


@dataclasses.dataclass(frozen=True)
class ListRefs:
    """`Lists.operands` in device memory."""

    full: jax.Ref
    counts: jax.Ref
    indices: jax.Ref
    order: jax.Ref
    starts: jax.Ref
    ends: jax.Ref
    bound: jax.Ref


def list_refs(refs) -> ListRefs:
    """The lists at the front of a policy's arrays."""
    return ListRefs(*refs[: len(dataclasses.fields(ListRefs))])


@dataclasses.dataclass(frozen=True)
class Walk:
    """The pieces that one row tile visits, `pieces` a step.

    Attributes:
      refs: the lists; head: the mask's head; tile: the row tile; full, total: its pieces; pieces: of a step, static.
    """

    refs: ListRefs
    head: jax.Array
    tile: jax.Array
    full: jax.Array
    total: jax.Array
    pieces: int

    @property
    def steps(self):
        """Steps in all."""
        return lax.div(self.total + (self.pieces - 1), jnp.int32(self.pieces))

    @property
    def full_steps(self):
        """Leading steps that need no element test."""
        return lax.div(self.full, jnp.int32(self.pieces))

    def index(self, n, j: int):
        """The j-th piece of step n; past the list's end it is some piece, which `room` makes invisible."""
        return self.refs.indices[self.head, self.tile, jnp.minimum(n * self.pieces + j, self.total - 1)]

    def span(self, n, j: int):
        """(first token, tokens) of the j-th piece of step n; no tokens past the list's end."""
        piece = self.index(n, j)
        start, end = self.refs.starts[self.head, piece], self.refs.ends[self.head, piece]
        return start, jnp.where(n * self.pieces + j < self.total, end - start, 0)

    def each_piece(self, step, carry=None):
        """Folds step(masked, n, carry) -> carry over all pieces n, the full ones first."""
        carry = lax.fori_loop(0, self.full, functools.partial(step, False), carry)
        return lax.fori_loop(self.full, self.total, functools.partial(step, True), carry)


def walk_of(refs: ListRefs, head, tile, pieces: int) -> Walk:
    """The walk of a row tile under one of the mask's heads."""
    return Walk(refs, head, tile, refs.full[head, tile], refs.counts[head, tile], pieces)


def row_tile(refs: ListRefs, head, place):
    """The row tile at a place of the grid."""
    chosen = refs.order[head, place]
    return jnp.where(chosen == 0, place, chosen - 1)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The kernel's body and what it closes over."""

    tiles: SparseTiles
    rows: int
    piece: int
    sharing: str
    rings: int
    scale: float
    q_heads: int
    kv_heads: int
    dim: int
    side: int
    mask_heads: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    policy: Policy | None = None

    @property
    def changes_scores(self) -> bool:
        """Whether a policy changes logits."""
        return self.policy is not None and self.policy.changes_scores

    @property
    def unit(self) -> float:
        """What the logits that the softmax sees are to be multiplied by."""
        return 1.0 if self.changes_scores else self.scale

    @property
    def slots(self) -> int:
        """Tiles of one ring."""
        return self.tiles.slots // self.rings

    @property
    def columns(self) -> int:
        """Keys of a step."""
        return self.tiles.pieces * self.piece

    def body(self, q_g, k_g, v_g, *refs, **scratch):
        """One thread block: two warpgroups, of one query head or of two."""
        *mask_refs, out_g, lse_g = refs
        s, refs = _Scratch(q_g, k_g, v_g, out_g, lse_g, **scratch), list_refs(mask_refs)
        values = self.policy.column_values(mask_refs) if self.policy else ()
        batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
        q_head = lax.axis_index("section") * self.side + lax.axis_index("side")
        q_head = q_head * CONSUMERS if self.sharing == "heads" else q_head
        kv_head = lax.div(q_head, jnp.int32(self.q_heads // self.kv_heads))
        mask_head = lax.div(q_head * self.mask_heads, jnp.int32(self.q_heads))
        place = lax.axis_index("place") * self.rings
        walks = [walk_of(refs, mask_head, row_tile(refs, mask_head, place + r), self.tiles.pieces)
                 for r in range(self.rings)]
        pl.when(warpgroup == CONSUMERS)(lambda: _produce(self, s, walks, batch, kv_head, values))

        def consume(walk, ring):
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            head = q_head + (warpgroup if self.sharing == "heads" else 0)
            row0 = walk.tile * self.rows + (warpgroup * ROWS if self.sharing == "rows" else 0)
            if self.policy is None:
                state = plgpu.load(refs.bound.at[mask_head, pl.ds(row0, ROWS)], layout=ROW, optimized=False)
            else:
                state = self.policy.load_rows(mask_refs, Head(batch, head, kv_head), row0, ROWS)
            _Consumer(self, s, walk, ring, Head(batch, head, kv_head), warpgroup, row0, state).run()

        if self.rings == 1:
            pl.when(warpgroup < CONSUMERS)(lambda: consume(walks[0], 0))
        else:
            choose = functools.partial(jnp.where, warpgroup == 0)
            mine = Walk(refs, mask_head, *(choose(getattr(walks[0], x), getattr(walks[1], x))
                                           for x in ("tile", "full", "total")), self.tiles.pieces)
            pl.when(warpgroup < CONSUMERS)(lambda: consume(mine, warpgroup))


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Device-memory and shared-memory references of a thread block (_g and _s) and its barriers."""

    q_g: jax.Ref
    k_g: jax.Ref
    v_g: jax.Ref
    out_g: jax.Ref
    lse_g: jax.Ref
    q_s: jax.Ref
    kv_s: jax.Ref
    lse_s: jax.Ref
    q_ready: jax.Ref
    ready: jax.Ref
    free: jax.Ref
    values_s: list[jax.Ref] = dataclasses.field(default_factory=list)


def _key_turn(n):
    """Position of the keys of step n in the ring's sequence K0 K1 V0 K2 V1 ... ."""
    return jnp.maximum(2 * n - 1, 0)


def _value_turn(n, steps):
    """Position of the values of step n; the last ones follow where no more keys come."""
    return 2 * n + jnp.where(n + 1 < steps, 2, 1)


def _produce(kernel: _Forward, s: _Scratch, walks: list[Walk], batch, kv_head, values):
    """Fills the rings: keys one step ahead of values, since the values of a step are wanted one step later."""
    plgpu.set_max_registers(kernel.tiles.registers[1], action="decrease")
    slots, piece = jnp.int32(kernel.slots), kernel.piece
    most = functools.reduce(jnp.maximum, (w.steps for w in walks))

    def load(ring: int, turn, gmem, pieces):
        slot = ring * slots + lax.rem(turn, slots)
        pl.when(turn >= slots)(lambda: plgpu.barrier_wait(s.free.at[slot]))
        for j, index in enumerate(pieces):
            part = s.kv_s.at[slot, pl.ds(j * piece, piece)] if len(pieces) > 1 else s.kv_s.at[slot]
            plgpu.copy_gmem_to_smem(gmem.at[batch, pl.ds(index * piece, piece), kv_head], part, s.ready.at[slot])
            for of_column, smem in zip(values, s.values_s, strict=True):
                plgpu.copy_gmem_to_smem(
                    of_column.at[pl.ds(index * piece, piece)], smem.at[slot, pl.ds(j * piece, piece)], s.ready.at[slot])

    def step(n, previous):
        following = []
        for ring, walk in enumerate(walks):
            pieces = [walk.index(jnp.clip(n, 0, jnp.maximum(walk.steps - 1, 0)), j) for j in range(walk.pieces)]
            pl.when(n < walk.steps)(functools.partial(load, ring, _key_turn(n), s.k_g, pieces))
            values = functools.partial(load, ring, _value_turn(n - 1, walk.steps), s.v_g, previous[ring])
            pl.when((n > 0) & (n <= walk.steps))(values)
            following.append(pieces)
        return following

    none = [[jnp.int32(0)] * w.pieces for w in walks]
    pl.when(most > 0)(lambda: (lax.fori_loop(0, most + 1, step, none), None)[1])
    for ring, walk in enumerate(walks):
        drain(2 * walk.steps, kernel.slots, s.free, first=ring * kernel.slots)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: online softmax over the steps of its rows.

    state: what the element test needs of the rows: how many leading keys each sees, or what the policy loaded.
    """

    kernel: _Forward
    s: _Scratch
    walk: Walk
    ring: jax.Array | int
    head: Head
    warpgroup: jax.Array
    row0: jax.Array
    state: Any
    q: jax.Array | None = None

    def run(self):
        """Loads q into registers, which halves what a product of logits reads, runs the steps, writes out and lse."""
        s, kernel = self.s, self.kernel
        rows, mine = pl.ds(self.row0, ROWS), self.warpgroup
        plgpu.copy_gmem_to_smem(s.q_g.at[self.head.batch, rows, self.head.q], s.q_s.at[mine], s.q_ready.at[mine])
        plgpu.barrier_wait(s.q_ready.at[mine])
        steps = dataclasses.replace(self, q=plgpu.load(s.q_s.at[mine], layout=TILE))._all_steps
        acc, top, weight = pl.run_scoped(steps, plgpu.ACC((ROWS, kernel.dim), jnp.float32))
        some = weight > 0
        inverse = jnp.where(some, 1.0 / jnp.where(some, weight, 1.0), 0.0)
        out = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
        lse = top * kernel.unit + jnp.log2(jnp.where(some, weight, 1.0)) / LOG2E
        s.lse_s[mine] = jnp.where(some, lse, -jnp.inf)
        if kernel.out_dtype.itemsize == 2:
            s.q_s[mine] = out.astype(kernel.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.lse_s.at[mine], s.lse_g.at[self.head.batch, self.head.q, rows])
        if kernel.out_dtype.itemsize == 2:
            plgpu.copy_smem_to_gmem(s.q_s.at[mine], s.out_g.at[self.head.batch, rows, self.head.q])
        else:
            s.out_g[self.head.batch, rows, self.head.q] = out
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _all_steps(self, acc_ref):
        kernel, steps, full = self.kernel, self.walk.steps, self.walk.full_steps
        row = functools.partial(jnp.full, (ROWS,))
        top = plgpu.layout_cast(row(-jnp.inf, jnp.float32), ROW)
        weight = plgpu.layout_cast(row(0.0, jnp.float32), ROW)
        p = plgpu.layout_cast(jnp.zeros((ROWS, kernel.columns), kernel.dtype), TILE)
        carry = lax.cond(steps > 0, lambda c: self._first(c), lambda c: c, (top, weight, p))
        carry = lax.fori_loop(1, full, functools.partial(self._step, acc_ref, masked=False), carry)
        first_partial = jnp.maximum(1, full)
        top, weight, p = lax.fori_loop(
            first_partial, steps, functools.partial(self._step, acc_ref, masked=True), carry)

        @pl.when(steps > 0)
        def _():
            slot = self._product(acc_ref, p, steps - 1)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.s.free.at[slot])

        return acc_ref[...], top, weight

    def _slot(self, turn):
        return self.ring * self.kernel.slots + lax.rem(turn, jnp.int32(self.kernel.slots))

    def _logits(self, s_ref, slot):
        plgpu.wgmma(s_ref, self.q, self.s.kv_s.at[slot].transpose((1, 0)))

    def _product(self, acc_ref, p, n):
        slot = self._slot(_value_turn(n, self.walk.steps))
        plgpu.barrier_wait(self.s.ready.at[slot])
        plgpu.wgmma(acc_ref, p, self.s.kv_s.at[slot])
        return slot

    def _first(self, carry):
        """Step 0: logits and softmax only."""
        slot = self._slot(jnp.int32(0))
        plgpu.barrier_wait(self.s.ready.at[slot])

        def issue(s_ref):
            self._logits(s_ref, slot)
            return s_ref[...]

        logits = pl.run_scoped(issue, plgpu.ACC((ROWS, self.kernel.columns), jnp.float32))
        top, weight, p, _ = self._softmax(self._logits_seen(logits, 0, slot, True), *carry[:2], masked=True)
        return top, weight, p.astype(self.kernel.dtype)

    def _step(self, acc_ref, n, carry, *, masked: bool):
        """Logits of step n and, under its softmax, the product of step n - 1."""
        s, (top, weight, p) = self.s, carry
        slot, value_slot = self._slot(_key_turn(n)), self._slot(_value_turn(n - 1, self.walk.steps))
        plgpu.barrier_wait(s.ready.at[slot])

        def issue(s_ref):
            self._logits(s_ref, slot)
            self._product(acc_ref, p, n - 1)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)

        logits = pl.run_scoped(issue, plgpu.ACC((ROWS, self.kernel.columns), jnp.float32))
        top, weight, p, alpha = self._softmax(self._logits_seen(logits, n, slot, masked), top, weight, masked=masked)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.free.at[value_slot])
        acc_ref[...] = acc_ref[...] * lax.broadcast_in_dim(alpha, acc_ref.shape, [0])
        return top, weight, p.astype(self.kernel.dtype)

    def _seen(self, n):
        """Elements of step n that are visible, bool [rows, columns]."""
        shape, out = (ROWS, self.kernel.columns), None
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        for j in range(self.walk.pieces):
            start, tokens = self.walk.span(n, j)
            last = jnp.minimum(self.state - start, tokens) + j * self.kernel.piece
            inside = column < lax.broadcast_in_dim(last, shape, [0])
            inside = inside if j == 0 else inside & (column >= j * self.kernel.piece)
            out = inside if out is None else out | inside
        return out

    def _place(self, n, slot) -> GatheredPlace:
        """Where step n stands; a piece past the list's end stands behind all keys."""
        walk, columns = self.walk, self.kernel.columns
        starts = tuple(jnp.where(n * walk.pieces + j < walk.total, walk.index(n, j) * self.kernel.piece, NEVER)
                       for j in range(walk.pieces))
        return GatheredPlace(self.row0, starts[0], ROWS, columns, tuple(x.at[slot] for x in self.s.values_s), starts)

    def _logits_seen(self, logits, n, slot, masked: bool):
        """The logits of step n under the mask, -inf where nothing is seen; frees the keys' slot."""
        policy, free = self.kernel.policy, functools.partial(plgpu.barrier_arrive, self.s.free.at[slot])
        if policy is None:
            free()
            return jnp.where(self._seen(n), logits, -jnp.inf) if masked else logits
        place = self._place(n, slot) if masked or policy.changes_scores else None
        if policy.changes_scores:
            logits = policy.scores(logits * self.kernel.scale, self.head, place)
        if masked:
            logits = jnp.where(policy.seen(self.state, self.head, place), logits, -jnp.inf)
        free()
        return logits

    def _softmax(self, logits, top, weight, *, masked: bool):
        """(new top in logit units, new weight, p float32, factor of the old accumulator)."""
        base = self.kernel.unit * LOG2E
        new_top = jnp.maximum(top, logits.max(axis=1))
        # A row that has seen nothing yet keeps -inf; zero stands in for it, so that its exponents are -inf, not NaN.
        hidden = masked or self.kernel.changes_scores
        reference = jnp.where(new_top == -jnp.inf, 0.0, new_top) if hidden else new_top
        # The difference first: a fused top * base - reference * base is not 0 where top stays as it was, and a weight
        # that is 1 + 1e-7 at every step had lse off by 2e-5 after 512 of them.
        alpha = jnp.exp2((top - reference) * base)
        reference = reference * base
        p = jnp.exp2(logits * base - lax.broadcast_in_dim(reference, logits.shape, [0]))
        return new_top, weight * alpha + p.sum(axis=1), p, alpha
