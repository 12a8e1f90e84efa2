"""The key-major backward pass on Hopper: dk and dv in registers, dq added to device memory, five products a tile.

A thread block owns a tile of keys; its two consumer warpgroups hold dk and dv of 64 keys each. Transposed logits and
their gradients (rows are keys, columns are queries) feed the products from registers, and dS goes through shared
memory once, for dq, of which each warpgroup computes a half and adds it to a float32 buffer by TMA
(FlashAttention-3's backward, Shah et al., 2024, appendix B.1). lse and delta are added to the logits and their
gradients by the tensor cores (hopper_statistics.py). Without dq the same kernel is the deterministic one: nothing is
added in an order of chance, and hopper_dq.py computes dq on its own.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import (
    COMPILER,
    LOG2E,
    drain,
    load_values,
    round_up,
    shared_tile,
    split_number,
    value_tiles,
)
from jax_impl.kernels.hopper_masks import COLUMN, TILE, Head, Place, Policy
from jax_impl.kernels.hopper_statistics import TERMS, ones, statistics

CONSUMERS = 2  # each holds dk and dv of 64 keys: 128 accumulator registers a thread at head_dim 128
ROWS = 64


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes of the key-major kernel.

    Attributes:
      columns: queries of a tile, 64 or 128; 128 is for head_dim 64, where dq is halved by rows instead of columns.
      stages: depth of the query and dout rings.
      registers: of a consumer and of the producer thread.
      side: kv heads that run side by side, or None for all; few where their queries, douts and dq are met in no
        common order and should stay in the cache.
      split: thread blocks among which the query heads of a tile's group are divided; they add to float32 dk and dv.
        Not in the deterministic form.
    """

    columns: int = 64
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    side: int | None = None
    split: int = 1

    @property
    def row_tokens(self) -> int:
        """Keys of a thread block."""
        return CONSUMERS * ROWS


def key_major(
    q, k, v, dout, lse, delta, policy: Policy, scale: float, tiles: BackwardTiles, *, grad_dtype, with_dq: bool,
    total=None,
):
    """dk, dv and, if asked for, dq in float32, yet to be scaled.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype.
      lse, delta: float32 [batch, q_heads, q_len padded to whole tiles]; lse in base 2, +inf where empty or padded.
      policy: rows are keys in tiles of `tiles.row_tokens`, columns are queries in tiles of `tiles.columns`.
      scale: > 0.
      grad_dtype: of dk and dv.
      total: dq of other keys, as this function returns it, that this one is added to.

    Returns: (dq float32 [batch, q_len padded to whole tiles, q_heads, head_dim], or None), dk, dv.
    """
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    padded, columns, grad_dtype = round_up(kv_len, tiles.row_tokens), tiles.columns, jnp.dtype(grad_dtype)
    side = math.gcd(tiles.side or kv_heads, kv_heads)
    split = math.gcd(tiles.split, q_heads // kv_heads) if with_dq else 1
    kernel = _KeyMajor(policy, tiles, scale, q_heads // kv_heads, split, dim, side, kv_heads,
                       padded // tiles.row_tokens, q.dtype, grad_dtype, with_dq)
    grad = jax.ShapeDtypeStruct((batch, padded, kv_heads, dim), grad_dtype)
    stages, dtype, bar = tiles.stages, q.dtype, plgpu.Barrier
    sums_of_terms = statistics(None if policy.changes_scores else lse * (-1.0 / (scale * LOG2E)), -delta)
    scratch = {
        "k_s": shared_tile((tiles.row_tokens, dim), dtype),
        "v_s": shared_tile((tiles.row_tokens, dim), dtype),
        "q_s": shared_tile((stages, columns, dim), dtype),
        "do_s": shared_tile((stages, columns, dim), dtype),
        "statistics_s": shared_tile((stages, columns, TERMS), jnp.bfloat16),
        "kv_ready": bar(num_arrivals=2),
        "column_s": plgpu.SMEM((stages,), jnp.int32),
        "values_s": value_tiles(policy, tiles),
        "q_ready": bar(num_arrivals=3 + policy.changes_scores + policy.values, num_barriers=stages),
        "do_ready": bar(num_barriers=stages),
        "q_free": bar(num_arrivals=CONSUMERS, num_barriers=stages),
        "do_free": bar(num_arrivals=CONSUMERS, num_barriers=stages),
    }
    if policy.changes_scores:
        scratch["lse_s"] = plgpu.SMEM((stages, columns), jnp.float32)
    buffers = []
    if with_dq:
        scratch |= {
            "ds_s": shared_tile((2, tiles.row_tokens, columns), dtype),
            "sum_s": shared_tile((CONSUMERS, *kernel.part), jnp.float32),
            "ds_ready": bar(num_arrivals=CONSUMERS),
        }
        if total is None:
            total = jnp.zeros((batch, round_up(q_len, columns), q_heads, dim), jnp.float32)
        sums = [jnp.zeros(grad.shape, jnp.float32) for _ in range(2 if split > 1 else 0)]
        buffers = [jax.new_ref(x) for x in (total, *sums)]
    grads = plgpu.kernel(
        kernel.body,
        out_type=[grad, grad] if split == 1 else [],
        scratch_types=scratch,
        grid=(batch, kv_heads * split * kernel.places),
        grid_names=("batch", "block"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_key_major",
    )(q, k, v, dout, lse, sums_of_terms, *buffers, *policy.operands())
    dq, *sums = (x[...] for x in buffers) if with_dq else (None,)
    return dq, *(x[:, :kv_len].astype(grad_dtype) for x in sums or grads)


@dataclasses.dataclass(frozen=True)
class _KeyMajor:
    """The kernel's body and what it closes over."""

    policy: Policy
    tiles: BackwardTiles
    scale: float
    group: int
    split: int
    dim: int
    side: int
    kv_heads: int
    places: int
    dtype: jnp.dtype
    grad_dtype: jnp.dtype
    with_dq: bool

    @property
    def part(self) -> tuple[int, int]:
        """What a warpgroup computes of a tile's dq: half of its columns, or half of its rows where there are 128."""
        halves = self.tiles.columns // ROWS
        return (ROWS, self.dim if halves == 2 else self.dim // 2)

    def body(self, q_g, k_g, v_g, do_g, lse_g, statistics_g, *refs, **scratch):
        """One thread block: a tile of keys of one kv head, over all query heads of its group."""
        refs = list(refs)
        dq_g = refs.pop(0) if self.with_dq else None
        if self.split > 1:
            dk_g, dv_g, *mask_refs = refs
        else:
            *mask_refs, dk_g, dv_g = refs
        first, tile = self._block(mask_refs)
        s = _Scratch(q_g, k_g, v_g, do_g, lse_g, statistics_g, dq_g, dk_g, dv_g, **scratch)
        walk = _Walk(self, mask_refs, first, tile)
        warpgroup = lax.axis_index("warpgroup")
        # Where parts are added a block that visits nothing has nothing to do; elsewhere it writes zeros.
        works = walk.steps() > 0 if self.split > 1 else True
        pl.when((warpgroup == CONSUMERS) & works)(lambda: _produce(self, s, walk))

        @pl.when((warpgroup < CONSUMERS) & works)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            _Consumer(self, s, walk, warpgroup).run()

    def _block(self, mask_refs):
        """(first query head, key tile) of this thread block."""
        number = lax.axis_index("block")
        if self.policy.orders_blocks:
            number, kv_head = split_number(self.policy.block(mask_refs, number), self.kv_heads)
            place, part = split_number(number, self.split)
        else:
            number, side = split_number(number, self.side)
            number, place = split_number(number, self.places)
            section, part = split_number(number, self.split)
            kv_head = section * self.side + side
        first = Head(lax.axis_index("batch"), kv_head * self.group + part * (self.group // self.split), kv_head)
        return first, place if self.policy.orders_blocks else self.policy.row_tile(mask_refs, first, place)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The (query head, query tile) pairs that a tile of keys visits, head by head."""

    kernel: _KeyMajor
    refs: list
    first: Head
    tile: jax.Array

    def head(self, g):
        """The g-th query head of this block's share of the group."""
        return Head(self.first.batch, self.first.q + g, self.first.kv)

    @property
    def heads(self) -> int:
        """Query heads of this block's share of the group."""
        return self.kernel.group // self.kernel.split

    def steps(self):
        """How many pairs there are, or as many as the first head has where all have as many."""
        policy = self.kernel.policy
        if policy.one_walk:
            return policy.walk(self.refs, self.first, self.tile).total
        return sum(policy.walk(self.refs, self.head(g), self.tile).total for g in range(self.heads))

    def each(self, visit, carry):
        """Folds visit(step, index of the query tile as a function, head, masked, carry) -> carry over all pairs.

        step counts over all heads. Returns (the number of steps, carry).
        """

        policy = self.kernel.policy
        shared = policy.walk(self.refs, self.first, self.tile) if policy.one_walk else None

        def one_head(g, state):
            base, carry = state
            head = self.head(g)
            walk = shared or policy.walk(self.refs, head, self.tile)

            def step(masked, n, carry):
                return visit(base + n, lambda: walk.column(n), head, masked, carry)

            carry = lax.fori_loop(0, walk.partial, functools.partial(step, True), carry)
            carry = lax.fori_loop(walk.partial, walk.total, functools.partial(step, False), carry)
            return base + walk.total, carry

        # Of a loop of one turn ptxas keeps less in uniform registers, a tenth more instructions a step: so that none is
        # seen to be one, the tile's sign, which is always 0, is added to the number of turns.
        heads = self.heads + lax.shift_right_logical(self.tile, jnp.int32(31))
        return lax.fori_loop(0, heads, one_head, (jnp.int32(0), carry))


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Device-memory and shared-memory references of a thread block (_g and _s) and its barriers."""

    q_g: jax.Ref
    k_g: jax.Ref
    v_g: jax.Ref
    do_g: jax.Ref
    lse_g: jax.Ref
    statistics_g: jax.Ref
    dq_g: jax.Ref | None
    dk_g: jax.Ref
    dv_g: jax.Ref
    k_s: jax.Ref
    v_s: jax.Ref
    q_s: jax.Ref
    do_s: jax.Ref
    statistics_s: jax.Ref
    column_s: jax.Ref
    values_s: list[jax.Ref]
    kv_ready: jax.Ref
    q_ready: jax.Ref
    do_ready: jax.Ref
    q_free: jax.Ref
    do_free: jax.Ref
    lse_s: jax.Ref | None = None
    ds_s: jax.Ref | None = None
    sum_s: jax.Ref | None = None
    ds_ready: jax.Ref | None = None


def _produce(kernel: _KeyMajor, s: _Scratch, walk: _Walk):
    """Loads the keys and values once, then keeps the rings of queries and douts full."""
    plgpu.set_max_registers(kernel.tiles.registers[1], action="decrease")
    stages, batch = jnp.int32(kernel.tiles.stages), walk.first.batch
    keys = pl.ds(walk.tile * kernel.tiles.row_tokens, kernel.tiles.row_tokens)
    plgpu.copy_gmem_to_smem(s.k_g.at[batch, keys, walk.first.kv], s.k_s, s.kv_ready)
    plgpu.copy_gmem_to_smem(s.v_g.at[batch, keys, walk.first.kv], s.v_s, s.kv_ready)

    def load(step, column, head, *_):
        slot, column = lax.rem(step, stages), column()
        queries = pl.ds(column * kernel.tiles.columns, kernel.tiles.columns)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.q_free.at[slot]))
        plgpu.copy_gmem_to_smem(s.q_g.at[batch, queries, head.q], s.q_s.at[slot], s.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(s.statistics_g.at[batch, head.q, queries], s.statistics_s.at[slot], s.q_ready.at[slot])
        if kernel.policy.changes_scores:
            plgpu.copy_gmem_to_smem(s.lse_g.at[batch, head.q, queries], s.lse_s.at[slot], s.q_ready.at[slot])
        load_values(kernel.policy, walk.refs, queries, slot, s.values_s, s.q_ready)
        s.column_s[slot] = column  # consumers read it from here, so that they hold no state of the walk
        plgpu.barrier_arrive(s.q_ready.at[slot])
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.do_free.at[slot]))
        plgpu.copy_gmem_to_smem(s.do_g.at[batch, queries, head.q], s.do_s.at[slot], s.do_ready.at[slot])

    total, _ = walk.each(load, None)
    drain(total, kernel.tiles.stages, s.q_free, s.do_free)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: dk and dv of 64 keys, and its half of every dq tile."""

    kernel: _KeyMajor
    s: _Scratch
    walk: _Walk
    warpgroup: jax.Array

    def run(self):
        """Runs all steps and writes dk and dv."""
        s, kernel, dim = self.s, self.kernel, self.kernel.dim
        plgpu.barrier_wait(s.kv_ready)
        accumulator = plgpu.ACC((ROWS, dim), jnp.float32)
        dk, dv = pl.run_scoped(self._all_steps, accumulator, accumulator)
        keys = pl.ds(self.walk.tile * kernel.tiles.row_tokens + self.warpgroup * ROWS, ROWS)
        if kernel.with_dq and kernel.split == 1:  # the other warpgroup's last dq reads these keys too
            plgpu.barrier_arrive(s.ds_ready)
            plgpu.barrier_wait(s.ds_ready)
        grads = ((dk * kernel.scale, s.k_s, s.dk_g), (dv, s.v_s, s.dv_g))
        for grad, staging, gmem in grads:
            target = gmem.at[self.walk.first.batch, keys, self.walk.first.kv]
            if kernel.split > 1:
                self._add_features(grad, target)
            elif kernel.grad_dtype.itemsize == 2:
                staging[self._rows] = grad.astype(kernel.grad_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging.at[self._rows], target)
            else:
                target[...] = grad
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def _rows(self):
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def _all_steps(self, dk_ref, dv_ref):
        if not self.kernel.with_dq:
            self.walk.each(functools.partial(self._step, dk_ref, dv_ref), None)
            return dk_ref[...], dv_ref[...]
        # dq of a step is computed in the next one, so that no warpgroup waits for the other's dS of the same step.
        # Step -1 has dS = 0 and adds nothing, to the first query tile of the first head.
        s, columns = self.s, self.kernel.tiles.columns
        s.ds_s[1, self._rows] = plgpu.layout_cast(jnp.zeros((ROWS, columns), self.kernel.dtype), TILE)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.ds_ready)
        before = (jnp.int32(0), self.walk.first.q)
        steps, before = self.walk.each(functools.partial(self._step, dk_ref, dv_ref), before)
        plgpu.barrier_wait(s.ds_ready)

        def last(dq_ref):
            self._issue_dq(dq_ref, lax.rem(steps + 1, jnp.int32(2)))
            self._add_dq(dq_ref[...], before)

        pl.run_scoped(last, plgpu.ACC(self.kernel.part, jnp.float32))
        return dk_ref[...], dv_ref[...]

    def _step(self, dk_ref, dv_ref, step, _, head, masked: bool, before):
        s, kernel = self.s, self.kernel
        slot = lax.rem(step, jnp.int32(kernel.tiles.stages))
        p, ds = self._gradient(masked, slot, head)
        if kernel.with_dq:
            here = (s.column_s[slot], head.q)
            half = lax.rem(step, jnp.int32(2))
        plgpu.wgmma(dv_ref, p, s.do_s.at[slot])
        if kernel.with_dq:
            plgpu.barrier_wait(s.ds_ready)  # the step before: the other's dS is there, what it replaces is read

        def products(*dq_ref):
            if kernel.with_dq:
                self._issue_dq(*dq_ref, 1 - half)
            plgpu.wgmma(dk_ref, ds, s.q_s.at[slot])
            if kernel.with_dq:  # while the products run
                s.ds_s[half, self._rows] = ds
                plgpu.commit_smem()
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(s.do_free.at[slot])
            if kernel.with_dq:
                plgpu.barrier_arrive(s.ds_ready)
                self._add_dq(plgpu.wgmma_accumulator_load(*dq_ref, wait_n=1), before)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.q_free.at[slot])

        if not kernel.with_dq:
            products()
            return before
        pl.run_scoped(products, plgpu.ACC(kernel.part, jnp.float32))
        return here

    def _gradient(self, masked: bool, slot, head):
        """Probabilities and gradients of the logits, [keys, queries], in the operands' dtype."""
        s, kernel, policy = self.s, self.kernel, self.kernel.policy
        vectors = s.statistics_s.at[slot].transpose((1, 0))
        tile = plgpu.ACC((ROWS, kernel.tiles.columns), jnp.float32)
        # A barrier's wait is a loop: accumulators that begin behind it begin as zeros of their first product.
        plgpu.barrier_wait(s.q_ready.at[slot])

        def logits_of(s_ref):
            plgpu.wgmma(s_ref, s.k_s.at[self._rows], s.q_s.at[slot].transpose((1, 0)))
            if not policy.changes_scores:
                plgpu.wgmma(s_ref, ones(0), vectors)
            plgpu.barrier_wait(s.do_ready.at[slot])
            return pl.run_scoped(functools.partial(gradients_of, s_ref), tile)

        def gradients_of(s_ref, dp_ref):
            plgpu.wgmma(dp_ref, s.v_s.at[self._rows], s.do_s.at[slot].transpose((1, 0)))
            plgpu.wgmma(dp_ref, ones(1), vectors)
            key0 = self.walk.tile * kernel.tiles.row_tokens + self.warpgroup * ROWS
            place = Place(key0, jnp.int32(0), ROWS, kernel.tiles.columns)
            if masked or policy.changes_scores:
                values = tuple(x.at[slot] for x in s.values_s)
                place = dataclasses.replace(place, column0=s.column_s[slot] * kernel.tiles.columns, values=values)
            rows = policy.load_rows(self.walk.refs, head, key0, ROWS) if masked else ()
            logits = plgpu.wgmma_accumulator_load(s_ref, wait_n=2)
            if policy.changes_scores:
                scaled = logits * kernel.scale
                lse = plgpu.load(s.lse_s.at[slot], layout=COLUMN)
                p = jnp.exp2(policy.scores(scaled, head, place) * LOG2E - place.by_column(lse))
            else:
                p = jnp.exp2(logits * (kernel.scale * LOG2E))
            if masked:
                p = jnp.where(policy.seen(rows, head, place), p, 0.0)
            ds = p * dp_ref[...]
            if policy.changes_scores:
                ds = policy.score_gradient(scaled, ds, head, place)
            return p.astype(kernel.dtype), ds.astype(kernel.dtype)

        return pl.run_scoped(logits_of, tile)

    def _issue_dq(self, dq_ref, half):
        """Issues this warpgroup's half of a tile's dq."""
        s, (_, columns) = self.s, self.kernel.part
        ds_s = s.ds_s.at[half]
        if columns == self.kernel.dim:
            plgpu.wgmma(dq_ref, ds_s.at[:, pl.ds(self.warpgroup * ROWS, ROWS)].transpose((1, 0)), s.k_s)
        else:
            features = pl.ds(self.warpgroup * columns, columns)
            plgpu.wgmma(dq_ref, ds_s.transpose((1, 0)), s.k_s.at[:, features])

    def _add_dq(self, dq, where):
        """Adds it to device memory; where: (query tile, query head)."""
        (rows, columns), (tile, q_head) = self.kernel.part, where
        queries, features = tile * self.kernel.tiles.columns, pl.ds(0, columns)
        if columns == self.kernel.dim:
            queries = queries + self.warpgroup * ROWS
        else:
            features = pl.ds(self.warpgroup * columns, columns)
        self._add(dq, self.s.dq_g.at[self.walk.first.batch, pl.ds(queries, rows), q_head, features])

    def _add_features(self, x, target):
        """Adds a [keys, head_dim] tile to device memory, as many features at a time as are staged."""
        columns = self.kernel.part[1]
        for first in range(0, self.kernel.dim, columns):
            self._add(x[:, first : first + columns], target.at[:, pl.ds(first, columns)])

    def _add(self, x, target):
        staging = self.s.sum_s.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the addition before has read its tile
        staging[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")
