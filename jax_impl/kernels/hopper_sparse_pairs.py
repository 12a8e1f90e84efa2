"""Block-sparse backward pass on Hopper for what a pair of key tiles sees together: 128 keys on one list.

As in hopper_backward.py, each of two consumer warpgroups holds dk and dv of 64 keys, and dS goes through shared memory
once, for dq of the step before, so that none waits for the other's dS of the same step: each computes half of its
features over the keys of both and adds them to float32 memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_add import PART, add, register_shape, wait
from jax_impl.kernels.hopper_forward import COMPILER, drain, load_values, shared_tile
from jax_impl.kernels.hopper_inline import fence, opaque_zero, rounded, widened
from jax_impl.kernels.hopper_lists import Lists
from jax_impl.kernels.hopper_masks import TILE, Policy
from jax_impl.kernels.hopper_sparse_forward import CONSUMERS, ROWS, Walk
from jax_impl.kernels.hopper_sparse_keys import KeyGrid, KeyTile, of_columns


@dataclasses.dataclass(frozen=True)
class PairTiles:
    """The schedule.

    Attributes:
      slots: tiles of the ring of queries and douts.
      registers: of a consumer and of the producer thread.
    """

    slots: int = 4
    registers: tuple[int, int] = (240, 24)


def pairs_backward(
    q, k, v, dout, lse, delta, dq, lists: Lists, scale: float, tiles: PairTiles, grid: KeyGrid, *, grad_dtype,
    policy: Policy | None = None
):
    """Every query head's dk and dv of the lists, whose rows are 128 keys; see `hopper_sparse_backward.sparse_backward`.

    Args:
      lse, delta: float32 [batch, q_heads, whole pieces], both negative, lse in units of the logits, or in base 2 where
        a policy changes them.
      dq: a reference to float32 [batch, q_heads * pieces, *register_shape(head_dim)], to which dq is added.
      grid: of the thread blocks.
      policy: the element test, and logits changed; its operands begin with those of the lists.

    Returns: dk, dv [batch, tiles * 128, q_heads, head_dim].
    """
    batch, _, q_heads, dim = q.shape
    dtype, slots, bar, values = q.dtype, tiles.slots, plgpu.Barrier, policy.values if policy else 0
    kernel = _Pairs(tiles, scale, grid, dim, dq.shape[1] // q_heads, dtype, grad_dtype, policy)
    grad = jax.ShapeDtypeStruct((batch, lists.tiles * lists.rows, q_heads, dim), grad_dtype)
    scratch = {
        "k_s": shared_tile((CONSUMERS * ROWS, dim), dtype),
        "v_s": shared_tile((CONSUMERS * ROWS, dim), dtype),
        "ring_s": shared_tile((slots, ROWS, dim), dtype),
        "stat_s": plgpu.SMEM((slots, ROWS), jnp.float32),
        "where_s": plgpu.SMEM((slots,), jnp.int32),
        "ds_s": shared_tile((2 if kernel.halves else 1, CONSUMERS * ROWS, ROWS), dtype),
        "dq_s": plgpu.SMEM((CONSUMERS, *register_shape(PART)), jnp.float32),
        "kv_ready": bar(num_arrivals=2),
        "ready": bar(num_arrivals=2 + values, num_barriers=slots),
        "free": bar(num_arrivals=CONSUMERS, num_barriers=slots),
    }
    if kernel.halves:
        scratch["ds_ready"] = bar(num_arrivals=CONSUMERS)
    if values:
        scratch["values_s"] = [plgpu.SMEM((slots, ROWS), jnp.int32) for _ in range(values)]
    return plgpu.kernel(
        kernel.body,
        out_type=[grad, grad],
        scratch_types=scratch,
        grid=grid.shape,
        grid_names=grid.names,
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_sparse_pairs",
    )(q, k, v, dout, lse, delta, dq, *(policy or lists).operands())


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Device-memory and shared-memory references of a thread block (_g and _s) and its barriers."""

    q_g: jax.Ref
    k_g: jax.Ref
    v_g: jax.Ref
    do_g: jax.Ref
    lse_g: jax.Ref
    delta_g: jax.Ref
    dq_g: jax.Ref
    dk_g: jax.Ref
    dv_g: jax.Ref
    k_s: jax.Ref
    v_s: jax.Ref
    ring_s: jax.Ref
    stat_s: jax.Ref
    where_s: jax.Ref
    ds_s: jax.Ref
    dq_s: jax.Ref
    kv_ready: jax.Ref
    ready: jax.Ref
    free: jax.Ref
    ds_ready: jax.Ref | None = None
    values_s: list[jax.Ref] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Pairs:
    """The kernel's body and what it closes over."""

    tiles: PairTiles
    scale: float
    grid: KeyGrid
    dim: int
    pieces: int
    dtype: jnp.dtype
    grad_dtype: jnp.dtype
    policy: Policy | None

    @property
    def halves(self) -> bool:
        """Whether each warpgroup computes half of the features of dq; at head_dim 64 each adds its own keys' share."""
        return self.dim == CONSUMERS * PART

    def body(self, q_g, k_g, v_g, do_g, lse_g, delta_g, dq_g, *refs, **scratch):
        """One thread block: two tiles of keys of a kv head, in one of its query heads."""
        *refs, dk_g, dv_g = refs
        s = _Scratch(q_g, k_g, v_g, do_g, lse_g, delta_g, dq_g, dk_g, dv_g, **scratch)
        here, warpgroup = self.grid.here(refs, self.policy), lax.axis_index("warpgroup")
        pl.when(warpgroup == CONSUMERS)(lambda: _produce(self, s, here))

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            _Consumer(self, s, here, warpgroup).run()


def _produce(kernel: _Pairs, s: _Scratch, here: KeyTile):
    """Loads the keys and values once, then keeps the ring of queries and douts full."""
    plgpu.set_max_registers(kernel.tiles.registers[1], action="decrease")
    head, walk, slots = here.head, here.walk, jnp.int32(kernel.tiles.slots)
    keys = pl.ds(walk.tile * CONSUMERS * ROWS, CONSUMERS * ROWS)
    plgpu.copy_gmem_to_smem(s.k_g.at[head.batch, keys, head.kv], s.k_s, s.kv_ready)
    plgpu.copy_gmem_to_smem(s.v_g.at[head.batch, keys, head.kv], s.v_s, s.kv_ready)

    def load(turn, gmem, stats, piece):
        slot, rows = lax.rem(turn, slots), pl.ds(piece * ROWS, ROWS)
        pl.when(turn >= slots)(lambda: plgpu.barrier_wait(s.free.at[slot]))
        s.where_s[slot] = head.q * kernel.pieces + piece  # consumers read it, so that they hold no state of the walk
        plgpu.copy_gmem_to_smem(gmem.at[head.batch, rows, head.q], s.ring_s.at[slot], s.ready.at[slot])
        plgpu.copy_gmem_to_smem(stats.at[head.batch, head.q, rows], s.stat_s.at[slot], s.ready.at[slot])
        if kernel.policy is not None:  # read with the queries; the douts' barrier counts as many
            load_values(kernel.policy, here.refs, rows, slot, s.values_s, s.ready)

    def visit(n, _):
        piece = walk.index(n, 0)
        load(2 * n, s.q_g, s.lse_g, piece)
        load(2 * n + 1, s.do_g, s.delta_g, piece)

    lax.fori_loop(0, walk.total, visit, None)
    drain(2 * walk.total, kernel.tiles.slots, s.free)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: dk and dv of 64 keys, and its share of every dq tile."""

    kernel: _Pairs
    s: _Scratch
    here: KeyTile
    warpgroup: jax.Array

    @property
    def walk(self) -> Walk:
        """The pieces of queries."""
        return self.here.walk

    @property
    def _mine(self):
        """Its rows of what both warpgroups hold in shared memory."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def _operand(self, n):
        """The same rows, as an operand of the products of step n.

        They seem to vary with n: else the compiler makes the descriptors of all products before the loop, more than it
        has uniform registers for.
        """
        return pl.ds((self.warpgroup + opaque_zero(n)) * ROWS, ROWS)

    @property
    def _key0(self):
        """Its first key."""
        return (self.walk.tile * CONSUMERS + self.warpgroup) * ROWS

    def run(self):
        """Runs all steps and writes dk and dv."""
        s, kernel, mine = self.s, self.kernel, self._mine
        plgpu.barrier_wait(s.kv_ready)
        accumulator = plgpu.ACC((ROWS, kernel.dim), jnp.float32)
        dk, dv = pl.run_scoped(self._all_steps, accumulator, accumulator)
        here = self.here.head.batch, pl.ds(self._key0, ROWS), self.here.head.q
        if kernel.halves:  # the other warpgroup's last dq reads these keys too
            plgpu.barrier_arrive(s.ds_ready)
            plgpu.barrier_wait(s.ds_ready)
        for grad, staging, gmem in ((dk * kernel.scale, s.k_s, s.dk_g), (dv, s.v_s, s.dv_g)):
            if kernel.grad_dtype.itemsize == 2:
                staging[mine] = grad.astype(kernel.grad_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging.at[mine], gmem.at[here])
            else:
                gmem[here] = grad
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        wait()

    def _all_steps(self, dk_ref, dv_ref):
        s = self.s
        if self.kernel.halves:  # step -1 has dS = 0 and adds nothing, to the first piece
            s.ds_s[1, self._mine] = plgpu.layout_cast(jnp.zeros((ROWS, ROWS), self.kernel.dtype), TILE)
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.ds_ready)
        start = self.here.head.q * self.kernel.pieces
        last = self.walk.each_piece(functools.partial(self._step, dk_ref, dv_ref), start)
        if self.kernel.halves:
            plgpu.barrier_wait(s.ds_ready)

            def rest(dq_ref):
                self._issue_dq(dq_ref, lax.rem(self.walk.total + 1, jnp.int32(2)))
                self._add_dq(dq_ref[...], last)

            pl.run_scoped(rest, plgpu.ACC((ROWS, PART), jnp.float32))
        return dk_ref[...], dv_ref[...]

    def _slot(self, turn):
        return lax.rem(turn, jnp.int32(self.kernel.tiles.slots))

    def _step(self, dk_ref, dv_ref, masked: bool, n, last):
        s, kernel, q_slot = self.s, self.kernel, self._slot(2 * n)
        tile = plgpu.ACC((ROWS, ROWS), jnp.float32)
        ds = pl.run_scoped(functools.partial(self._gradient, masked, dv_ref, n), tile, tile)
        here, half = s.where_s[q_slot], 0
        if kernel.halves:
            half = lax.rem(n, jnp.int32(2))
            plgpu.barrier_wait(s.ds_ready)  # the other's dS of the step before is there, the one before that is read
        else:
            s.ds_s[half, self._mine] = ds
            plgpu.commit_smem()
        products = functools.partial(self._products, dk_ref, ds, n, half, last if kernel.halves else here)
        pl.run_scoped(products, plgpu.ACC((ROWS, PART), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.free.at[q_slot])
        return here

    def _start(self, ref, slot):
        """Starts an accumulator from its queries' lse or delta, so that no registers hold those later."""
        ref[...] = lax.broadcast_in_dim(of_columns(self.s.stat_s.at[slot]), (ROWS, ROWS), [1])

    def _gradient(self, masked: bool, dv_ref, n, s_ref, dp_ref):
        """Gradients of the logits [keys, queries], in 16 bits; issues dv."""
        s, kernel, here = self.s, self.kernel, self.here
        q_slot, do_slot = self._slot(2 * n), self._slot(2 * n + 1)
        plgpu.barrier_wait(s.ready.at[q_slot])
        if not here.changes_scores:
            self._start(s_ref, q_slot)
        plgpu.wgmma(s_ref, s.k_s.at[self._operand(n)], s.ring_s.at[q_slot].transpose((1, 0)))
        plgpu.barrier_wait(s.ready.at[do_slot])
        self._start(dp_ref, do_slot)  # a store into an accumulator waits for the products issued before it
        plgpu.wgmma(dp_ref, s.v_s.at[self._operand(n)], s.ring_s.at[do_slot].transpose((1, 0)))
        p, weight = here.weights(
            plgpu.wgmma_accumulator_load(s_ref, wait_n=1), kernel.scale, lambda: self._key0,
            lambda: lax.rem(s.where_s[q_slot], jnp.int32(kernel.pieces)), masked,
            lambda: of_columns(s.stat_s.at[q_slot]), lambda: tuple(x.at[q_slot] for x in s.values_s))
        p = rounded(p, kernel.dtype)
        plgpu.wgmma(dv_ref, p, s.ring_s.at[do_slot])
        weight = rounded(weight, kernel.dtype) if here.changes_scores else p  # rounded for dv too: frees registers
        return (widened(weight) * plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)).astype(kernel.dtype)

    def _products(self, dk_ref, ds, n, half, where, dq_ref):
        """dk, and a share of dq: of the step before where the warpgroups halve it."""
        s = self.s
        self._issue_dq(dq_ref, 1 - half if self.kernel.halves else 0)
        plgpu.wgmma(dk_ref, ds, s.ring_s.at[self._slot(2 * n)])
        if self.kernel.halves:  # while the products run
            s.ds_s[half, self._mine] = ds
            fence()  # who reads it waits for every thread of both
        plgpu.wgmma_wait(2)
        plgpu.barrier_arrive(s.free.at[self._slot(2 * n + 1)])  # dv has read its douts
        dq = plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)
        if self.kernel.halves:
            plgpu.barrier_arrive(s.ds_ready)
        self._add_dq(dq, where)

    def _issue_dq(self, dq_ref, half):
        s, both = self.s, self.kernel.halves
        rows = pl.ds(0, CONSUMERS * ROWS) if both else self._mine
        keys = s.k_s.at[rows, pl.ds(self.warpgroup * PART, PART)] if both else s.k_s.at[rows]
        plgpu.wgmma(dq_ref, s.ds_s.at[half, rows].transpose((1, 0)), keys)

    def _add_dq(self, dq, where):
        """Adds a share of dq to device memory; where: the query head and piece."""
        rows = register_shape(PART)[0]
        features = pl.ds((self.warpgroup if self.kernel.halves else 0) * rows, rows)
        add(dq, self.s.dq_s.at[self.warpgroup], self.s.dq_g.at[self.here.head.batch, where, features])
