"""dq on its own, query-major: the deterministic companion of hopper_backward.py; two of its products are done again."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import (
    COMPILER,
    LOG2E,
    drain,
    heads_side_by_side,
    load_values,
    round_up,
    shared_tile,
    value_tiles,
)
from jax_impl.kernels.hopper_masks import ROW, Head, Place, Policy, Walk

CONSUMERS = 2
ROWS = 64


@dataclasses.dataclass(frozen=True)
class QueryTiles:
    """Tile sizes of the query-major kernel: keys of a tile, ring depth, registers, cache budget (see ForwardTiles)."""

    columns: int = 64
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    l2_bytes: int = 24 << 20

    @property
    def row_tokens(self) -> int:
        """Queries of a thread block."""
        return CONSUMERS * ROWS


def query_major(q, k, v, dout, lse, delta, policy: Policy, scale: float, tiles: QueryTiles, *, grad_dtype):
    """dq [batch, q_len, q_heads, head_dim]; arguments as `hopper_backward.key_major`'s; the policy's rows: queries."""
    batch, q_len, q_heads, dim = q.shape
    kv_heads, padded = k.shape[2], round_up(q_len, tiles.row_tokens)
    side = heads_side_by_side(q_heads, kv_heads, 4 * k.shape[1] * dim, tiles.l2_bytes)
    kernel = _QueryMajor(policy, tiles, scale, q_heads // kv_heads, dim, side, q.dtype, jnp.dtype(grad_dtype))
    stages, bar = tiles.stages, plgpu.Barrier
    dq = plgpu.kernel(
        kernel.body,
        out_type=jax.ShapeDtypeStruct((batch, padded, q_heads, dim), grad_dtype),
        scratch_types={
            "q_s": shared_tile((CONSUMERS, ROWS, dim), q.dtype),
            "do_s": shared_tile((CONSUMERS, ROWS, dim), q.dtype),
            "k_s": shared_tile((stages, tiles.columns, dim), q.dtype),
            "v_s": shared_tile((stages, tiles.columns, dim), q.dtype),
            "values_s": value_tiles(policy, tiles),
            "rows_ready": bar(num_arrivals=2, num_barriers=CONSUMERS),
            "k_ready": bar(num_arrivals=1 + policy.values, num_barriers=stages),
            "v_ready": bar(num_barriers=stages),
            "k_free": bar(num_arrivals=CONSUMERS, num_barriers=stages),
            "v_free": bar(num_arrivals=CONSUMERS, num_barriers=stages),
        },
        grid=(batch, q_heads // side, padded // tiles.row_tokens, side),
        grid_names=("batch", "section", "place", "side"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_query_major",
    )(q, k, v, dout, lse, delta, *policy.operands())
    return dq[:, :q_len]


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
    q_s: jax.Ref
    do_s: jax.Ref
    k_s: jax.Ref
    v_s: jax.Ref
    values_s: list[jax.Ref]
    rows_ready: jax.Ref
    k_ready: jax.Ref
    v_ready: jax.Ref
    k_free: jax.Ref
    v_free: jax.Ref


@dataclasses.dataclass(frozen=True)
class _QueryMajor:
    """The kernel's body and what it closes over."""

    policy: Policy
    tiles: QueryTiles
    scale: float
    group: int
    dim: int
    side: int
    dtype: jnp.dtype
    grad_dtype: jnp.dtype

    def body(self, q_g, k_g, v_g, do_g, lse_g, delta_g, *refs, **scratch):
        """One thread block: a row tile of one query head."""
        *mask_refs, dq_g = refs
        s = _Scratch(q_g, k_g, v_g, do_g, lse_g, delta_g, dq_g, **scratch)
        q_head = lax.axis_index("section") * self.side + lax.axis_index("side")
        head = Head(lax.axis_index("batch"), q_head, lax.div(q_head, jnp.int32(self.group)))
        tile = self.policy.row_tile(mask_refs, head, lax.axis_index("place"))
        walk = self.policy.walk(mask_refs, head, tile)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == CONSUMERS)(lambda: self._produce(s, mask_refs, head, walk))

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            row0 = tile * self.tiles.row_tokens + warpgroup * ROWS
            rows = self.policy.load_rows(mask_refs, head, row0, ROWS)
            _Consumer(self, s, head, warpgroup, row0, rows, walk).run()

    def _produce(self, s, mask_refs, head, walk):
        plgpu.set_max_registers(self.tiles.registers[1], action="decrease")
        stages = jnp.int32(self.tiles.stages)

        def load(n, _):
            slot, keys = lax.rem(n, stages), pl.ds(walk.column(n) * self.tiles.columns, self.tiles.columns)
            for gmem, smem, ready, free in (
                (s.v_g, s.v_s, s.v_ready, s.v_free),
                (s.k_g, s.k_s, s.k_ready, s.k_free),
            ):
                pl.when(n >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                plgpu.copy_gmem_to_smem(gmem.at[head.batch, keys, head.kv], smem.at[slot], ready.at[slot])
            load_values(self.policy, mask_refs, keys, slot, s.values_s, s.k_ready)

        lax.fori_loop(0, walk.total, load, None)
        drain(walk.total, self.tiles.stages, s.v_free, s.k_free)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: dq of 64 queries."""

    kernel: _QueryMajor
    s: _Scratch
    head: Head
    warpgroup: jax.Array
    row0: jax.Array
    rows: tuple
    walk: Walk

    def run(self):
        """Loads q, dout, lse and delta of its rows, runs the column tiles, writes dq."""
        s, kernel, mine = self.s, self.kernel, self.warpgroup
        queries = pl.ds(self.row0, ROWS)
        for gmem, smem in ((s.q_g, s.q_s), (s.do_g, s.do_s)):
            source = gmem.at[self.head.batch, queries, self.head.q]
            plgpu.copy_gmem_to_smem(source, smem.at[mine], s.rows_ready.at[mine])
        lse, delta = (
            plgpu.load(x.at[self.head.batch, self.head.q, queries], layout=ROW, optimized=False)
            for x in (s.lse_g, s.delta_g)
        )
        plgpu.barrier_wait(s.rows_ready.at[mine])

        def all_steps(dq_ref):
            step = functools.partial(self._step, dq_ref, lse, delta)
            lax.fori_loop(0, self.walk.partial, functools.partial(step, True), None)
            lax.fori_loop(self.walk.partial, self.walk.total, functools.partial(step, False), None)
            return dq_ref[...]

        dq = pl.run_scoped(all_steps, plgpu.ACC((ROWS, kernel.dim), jnp.float32)) * kernel.scale
        target = s.dq_g.at[self.head.batch, queries, self.head.q]
        if kernel.grad_dtype.itemsize == 2:
            s.q_s[mine] = dq.astype(kernel.grad_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s.q_s.at[mine], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        else:
            target[...] = dq

    def _step(self, dq_ref, lse, delta, masked: bool, n, _):
        s, kernel = self.s, self.kernel
        slot = lax.rem(n, jnp.int32(kernel.tiles.stages))
        place = Place(self.row0, jnp.int32(0), ROWS, kernel.tiles.columns)
        if masked or kernel.policy.changes_scores:
            values = tuple(x.at[slot] for x in s.values_s)
            place = dataclasses.replace(place, column0=self.walk.column(n) * kernel.tiles.columns, values=values)

        def gradient(dp_ref, s_ref):
            plgpu.barrier_wait(s.v_ready.at[slot])
            plgpu.wgmma(dp_ref, s.do_s.at[self.warpgroup], s.v_s.at[slot].transpose((1, 0)))
            plgpu.barrier_wait(s.k_ready.at[slot])
            plgpu.wgmma(s_ref, s.q_s.at[self.warpgroup], s.k_s.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(s.v_free.at[slot])
            return dp_ref[...], s_ref[...]

        tile = plgpu.ACC((ROWS, kernel.tiles.columns), jnp.float32)
        dp, logits = pl.run_scoped(gradient, tile, tile)
        policy = kernel.policy
        if policy.changes_scores:
            scaled = logits * kernel.scale
            p = jnp.exp2(policy.scores(scaled, self.head, place) * LOG2E - place.by_row(lse))
        else:
            p = jnp.exp2(logits * (kernel.scale * LOG2E) - place.by_row(lse))
        if masked:
            p = jnp.where(policy.seen(self.rows, self.head, place), p, 0.0)
        ds = p * (dp - place.by_row(delta))
        if policy.changes_scores:
            ds = policy.score_gradient(scaled, ds, self.head, place)
        plgpu.wgmma(dq_ref, ds.astype(kernel.dtype), s.k_s.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.k_free.at[slot])
