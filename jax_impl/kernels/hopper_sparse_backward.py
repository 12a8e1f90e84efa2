"""Block-sparse backward pass on Hopper for tiles of 64 keys: each warpgroup follows a list of its own.

As in hopper_backward.py, dk and dv stay in registers and dq is added to float32 memory by TMA, five products a tile.
Here the two consumer warpgroups of a thread block own a tile of 64 keys each, walk their own lists of query pieces over
all heads of the group, and never meet: each adds whole dq tiles. Douts and queries alternate in one ring, douts first,
so that a ring of three tiles prefetches both.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import LOG2E, heads_side_by_side, round_up, shared_tile
from jax_impl.kernels.hopper_lists import Lists
from jax_impl.kernels.hopper_masks import COLUMN, ROW, TILE
from jax_impl.kernels.hopper_sparse_forward import CONSUMERS, ROWS, ListRefs, Walk, row_tile, walk_of

PART = 64  # features of dq that are staged at a time


@dataclasses.dataclass(frozen=True)
class SparseBackwardTiles:
    """The schedule: tiles of one ring, registers of a consumer and of the producer, cache budget of what is in use."""

    slots: int = 3
    registers: tuple[int, int] = (240, 24)
    l2_bytes: int = 32 << 20


def kv_heads_in_cache(q_len: int, kv_heads: int, head_dim: int, budget: int) -> int:
    """kv heads to run side by side, a divisor of them all: of each, one query head's q, dout and float32 dq is in use.

    Lists are met in no common order, so what is not in the cache comes from memory anew for every tile.
    """
    return heads_side_by_side(kv_heads, kv_heads, 8 * q_len * head_dim, budget)


def sparse_backward(q, k, v, dout, lse, delta, lists: Lists, scale: float, tiles: SparseBackwardTiles, *, grad_dtype):
    """dq (not yet scaled), dk and dv over the listed pieces.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype, in the
        layout of the lists.
      lse, delta: float32 [batch, q_heads, whole pieces]; lse in base 2, +inf where empty or padded.
      lists: rows are keys; both in 64s, an even number of tiles, one list a kv head or one for all.
      scale: > 0.
      grad_dtype: of dk and dv.

    Returns: dq float32 [batch, whole pieces, q_heads, head_dim]; dk, dv [batch, tiles * 64, kv_heads, head_dim].
    """
    batch, q_len, q_heads, dim = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    side = kv_heads_in_cache(q_len, kv_heads, dim, tiles.l2_bytes)
    grad_dtype = jnp.dtype(grad_dtype)
    kernel = _Backward(tiles, scale, q_heads // kv_heads, kv_heads, dim, side, lists.heads, dtype, grad_dtype)
    grad = jax.ShapeDtypeStruct((batch, lists.tiles * ROWS, kv_heads, dim), grad_dtype)
    buffer = jax.new_ref(jnp.zeros((batch, round_up(q_len, ROWS), q_heads, dim), jnp.float32))
    slots, bar = CONSUMERS * tiles.slots, plgpu.Barrier
    dk, dv = plgpu.kernel(
        kernel.body,
        out_type=[grad, grad],
        scratch_types={
            "k_s": shared_tile((CONSUMERS, ROWS, dim), dtype),
            "v_s": shared_tile((CONSUMERS, ROWS, dim), dtype),
            "ring_s": shared_tile((slots, ROWS, dim), dtype),
            "stat_s": plgpu.SMEM((slots, ROWS), jnp.float32),
            "piece_s": plgpu.SMEM((slots,), jnp.int32),
            "ds_s": shared_tile((CONSUMERS, ROWS, ROWS), dtype),
            "dq_s": shared_tile((CONSUMERS, ROWS, PART), jnp.float32),
            "kv_ready": bar(num_arrivals=2, num_barriers=CONSUMERS),
            "ready": bar(num_arrivals=2, num_barriers=slots),
            "free": bar(num_barriers=slots),
        },
        grid=(batch, kv_heads // side, lists.tiles // CONSUMERS, side),
        grid_names=("batch", "section", "place", "side"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="hopper_sparse_backward",
    )(q, k, v, dout, lse, delta, buffer, *lists.operands())
    return buffer[...], dk, dv


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
    piece_s: jax.Ref
    ds_s: jax.Ref
    dq_s: jax.Ref
    kv_ready: jax.Ref
    ready: jax.Ref
    free: jax.Ref


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The kernel's body and what it closes over."""

    tiles: SparseBackwardTiles
    scale: float
    group: int
    kv_heads: int
    dim: int
    side: int
    mask_heads: int
    dtype: jnp.dtype
    grad_dtype: jnp.dtype

    def body(self, q_g, k_g, v_g, do_g, lse_g, delta_g, dq_g, *refs, **scratch):
        """One thread block: two tiles of keys of one kv head, over all query heads of its group."""
        *lists, dk_g, dv_g = refs
        s, refs = _Scratch(q_g, k_g, v_g, do_g, lse_g, delta_g, dq_g, dk_g, dv_g, **scratch), ListRefs(*lists)
        batch, warpgroup = lax.axis_index("batch"), lax.axis_index("warpgroup")
        kv_head = lax.axis_index("section") * self.side + lax.axis_index("side")
        mask_head = lax.div(kv_head * self.mask_heads, jnp.int32(self.kv_heads))
        place = lax.axis_index("place") * CONSUMERS
        walks = [walk_of(refs, mask_head, row_tile(refs, mask_head, place + c), 1) for c in range(CONSUMERS)]
        pl.when(warpgroup == CONSUMERS)(lambda: _produce(self, s, walks, batch, kv_head))

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            choose = functools.partial(jnp.where, warpgroup == 0)
            mine = Walk(refs, mask_head, *(choose(getattr(walks[0], x), getattr(walks[1], x))
                                           for x in ("tile", "full", "total")), 1)
            _Consumer(self, s, mine, batch, kv_head, warpgroup).run()


def _produce(kernel: _Backward, s: _Scratch, walks: list[Walk], batch, kv_head):
    """Loads each warpgroup's keys and values once, then keeps the rings of douts and queries full."""
    plgpu.set_max_registers(kernel.tiles.registers[1], action="decrease")
    slots, group = jnp.int32(kernel.tiles.slots), kernel.group
    for c, walk in enumerate(walks):
        keys = pl.ds(walk.tile * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(s.k_g.at[batch, keys, kv_head], s.k_s.at[c], s.kv_ready.at[c])
        plgpu.copy_gmem_to_smem(s.v_g.at[batch, keys, kv_head], s.v_s.at[c], s.kv_ready.at[c])

    def load(c: int, turn, gmem, stats, piece, head):
        slot, rows = c * slots + lax.rem(turn, slots), pl.ds(piece * ROWS, ROWS)
        pl.when(turn >= slots)(lambda: plgpu.barrier_wait(s.free.at[slot]))
        s.piece_s[slot] = piece  # consumers read it from here, so that they hold no state of the walk
        plgpu.copy_gmem_to_smem(gmem.at[batch, rows, head], s.ring_s.at[slot], s.ready.at[slot])
        plgpu.copy_gmem_to_smem(stats.at[batch, head, rows], s.stat_s.at[slot], s.ready.at[slot])

    def both(c: int, walk: Walk, n):
        g = lax.div(n, jnp.maximum(walk.total, 1))  # one query head after the other
        piece, head = walk.index(n - g * walk.total, 0), kv_head * group + g
        load(c, 2 * n, s.do_g, s.delta_g, piece, head)
        load(c, 2 * n + 1, s.q_g, s.lse_g, piece, head)

    def step(n, _):
        for c, walk in enumerate(walks):
            pl.when(n < walk.total * group)(functools.partial(both, c, walk, n))

    lax.fori_loop(0, jnp.maximum(walks[0].total, walks[1].total) * group, step, None)
    for c, walk in enumerate(walks):

        def drain(turn, _, c=c):  # nothing may be pending when the block ends
            plgpu.barrier_wait(s.free.at[c * slots + lax.rem(turn, slots)])

        loads = 2 * group * walk.total
        lax.fori_loop(jnp.maximum(loads - slots, 0), loads, drain, None)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: dk and dv of 64 keys, and their share of every dq tile that they meet."""

    kernel: _Backward
    s: _Scratch
    walk: Walk
    batch: jax.Array
    kv_head: jax.Array
    warpgroup: jax.Array

    def run(self):
        """Runs all steps and writes dk and dv."""
        s, kernel, mine = self.s, self.kernel, self.warpgroup
        plgpu.barrier_wait(s.kv_ready.at[mine])
        accumulator = plgpu.ACC((ROWS, kernel.dim), jnp.float32)
        dk, dv = pl.run_scoped(self._all_steps, accumulator, accumulator)
        keys = pl.ds(self.walk.tile * ROWS, ROWS)
        for grad, staging, gmem in ((dk * kernel.scale, s.k_s, s.dk_g), (dv, s.v_s, s.dv_g)):
            target = gmem.at[self.batch, keys, self.kv_head]
            if kernel.grad_dtype.itemsize == 2:
                staging[mine] = grad.astype(kernel.grad_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging.at[mine], target)
            else:
                target[...] = grad
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _all_steps(self, dk_ref, dv_ref):
        full, total = self.walk.full, self.walk.total

        def one_head(g, before):
            step = functools.partial(self._step, dk_ref, dv_ref, self.kv_head * self.kernel.group + g, before)
            lax.fori_loop(0, full, functools.partial(step, False), None)
            lax.fori_loop(full, total, functools.partial(step, True), None)
            return before + total

        lax.fori_loop(0, self.kernel.group, one_head, jnp.int32(0))
        return dk_ref[...], dv_ref[...]

    def _slot(self, turn):
        slots = jnp.int32(self.kernel.tiles.slots)
        return self.warpgroup * slots + lax.rem(turn, slots)

    def _step(self, dk_ref, dv_ref, head, before, masked: bool, n, _):
        s, kernel, mine, n = self.s, self.kernel, self.warpgroup, before + n
        do_slot, q_slot = self._slot(2 * n), self._slot(2 * n + 1)
        tile = plgpu.ACC((ROWS, ROWS), jnp.float32)
        p, ds = pl.run_scoped(functools.partial(self._gradient, masked, do_slot, q_slot), tile, tile)
        p, ds = p.astype(kernel.dtype), ds.astype(kernel.dtype)
        plgpu.wgmma(dv_ref, p, s.ring_s.at[do_slot])
        s.ds_s[mine] = ds
        plgpu.commit_smem()
        target = s.dq_g.at[self.batch, pl.ds(s.piece_s[q_slot] * ROWS, ROWS), head]
        for part in range(kernel.dim // PART):
            share = functools.partial(self._share, dk_ref if part == 0 else None, ds, do_slot, q_slot, part, target)
            pl.run_scoped(share, plgpu.ACC((ROWS, PART), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.free.at[q_slot])

    def _gradient(self, masked: bool, do_slot, q_slot, dp_ref, s_ref):
        """Probabilities and gradients of the logits, float32 [keys, queries]."""
        s, shape = self.s, (ROWS, ROWS)
        plgpu.barrier_wait(s.ready.at[do_slot])
        plgpu.wgmma(dp_ref, s.v_s.at[self.warpgroup], s.ring_s.at[do_slot].transpose((1, 0)))
        plgpu.barrier_wait(s.ready.at[q_slot])
        plgpu.wgmma(s_ref, s.k_s.at[self.warpgroup], s.ring_s.at[q_slot].transpose((1, 0)))
        logits = s_ref[...]
        lse = plgpu.load(s.stat_s.at[q_slot], layout=COLUMN)
        p = jnp.exp2(logits * (self.kernel.scale * LOG2E) - lax.broadcast_in_dim(lse, shape, [1]))
        if masked:
            start = self.walk.refs.starts[self.walk.head, s.piece_s[q_slot]]  # padded queries have an infinite lse
            low = plgpu.load(self.walk.refs.bound.at[self.walk.head, pl.ds(self.walk.tile * ROWS, ROWS)], layout=ROW,
                             optimized=False)
            query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
            p = jnp.where(query >= lax.broadcast_in_dim(low - start, shape, [0]), p, 0.0)
        delta = plgpu.load(s.stat_s.at[do_slot], layout=COLUMN)
        return p, p * (dp_ref[...] - lax.broadcast_in_dim(delta, shape, [1]))

    def _share(self, dk_ref, ds, do_slot, q_slot, part: int, target, dq_ref):
        """This warpgroup's share of some features of dq, added to device memory; dk runs beneath the first."""
        s, mine, features = self.s, self.warpgroup, pl.ds(part * PART, PART)
        keys = s.k_s.at[mine] if self.kernel.dim == PART else s.k_s.at[mine, :, features]
        plgpu.wgmma(dq_ref, s.ds_s.at[mine].transpose((1, 0)), keys)
        if dk_ref is None:
            dq = dq_ref[...]
        else:
            plgpu.wgmma(dk_ref, s.ds_s.at[mine], s.ring_s.at[q_slot])
            dq = plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)
            plgpu.barrier_arrive(s.free.at[do_slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the add before has read its tile
        s.dq_s[mine] = dq
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.dq_s.at[mine], target.at[:, features], reduction_op="add")
