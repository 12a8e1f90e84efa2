"""Block-sparse backward pass on Hopper: a role for each warpgroup, five products a tile.

A thread block owns 64 keys and walks their list of query pieces in one query head. One warpgroup
computes probabilities and dv, one the gradients of the logits and dk, one dq, which it adds to float32 memory by TMA;
probabilities and gradients are handed on through shared memory. None waits for another's arithmetic, so the products
of one run under the exponentials, sums and additions of the others. Keys and values stay in registers.
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
from jax_impl.kernels.hopper_lists import Lists
from jax_impl.kernels.hopper_masks import TILE, Policy
from jax_impl.kernels.hopper_sparse_forward import ROWS, ListRefs, Walk
from jax_impl.kernels.hopper_sparse_keys import KeyGrid, KeyTile, of_columns
from jax_impl.kernels.hopper_statistics import TERMS, ones

ROLES = 3


@dataclasses.dataclass(frozen=True)
class RoleTiles:
    """The schedule.

    Attributes:
      stages: depth of the query and dout rings.
      handed: steps whose probabilities, and whose gradients, wait for the next warpgroup.
      registers: of a thread of each role (probabilities, gradients, dq) and of the producer.
    """

    stages: int = 3
    handed: int = 2
    registers: tuple[int, int, int, int] = (208, 176, 96, 32)


def roles_backward(
    q, k, v, dout, statistics, dq, lists: Lists, scale: float, tiles: RoleTiles, grid: KeyGrid, *, grad_dtype,
    before=(), policy: Policy | None = None, lse=None
):
    """dk and dv of the lists, whose rows are 64 keys, added to those of `before`, if any; else as `pairs_backward`.

    statistics: of lse, zeros where a policy changes logits, and of delta; lse: for such a policy.
    """
    batch, _, q_heads, dim = q.shape
    dtype = q.dtype
    kernel = _Backward(tiles, scale, grid, dim, dq.shape[1] // q_heads, dtype, grad_dtype, policy)
    values, changed = (policy.values, policy.changes_scores) if policy else (0, False)
    grad = jax.ShapeDtypeStruct((batch, lists.tiles * ROWS, q_heads, dim), grad_dtype)
    stages, handed, bar = tiles.stages, tiles.handed, plgpu.Barrier
    vector = functools.partial(plgpu.SMEM, (stages, ROWS))
    return plgpu.kernel(
        kernel.body,
        out_type=[grad, grad],
        scratch_types={
            "k_s": shared_tile((ROWS, dim), dtype),
            "v_s": shared_tile((ROWS, dim), dtype),
            "q_s": shared_tile((stages, ROWS, dim), dtype),
            "do_s": shared_tile((stages, ROWS, dim), dtype),
            "statistics_s": shared_tile((stages, ROWS, TERMS), jnp.bfloat16),
            "piece_s": plgpu.SMEM((stages,), jnp.int32),
            "p_s": shared_tile((handed, ROWS, ROWS), dtype),
            "ds_s": shared_tile((handed, ROWS, ROWS), dtype),
            "dq_s": plgpu.SMEM((2, *register_shape(PART)), jnp.float32),
            "kv_ready": bar(num_arrivals=2),
            "q_ready": bar(num_arrivals=2 + values + changed, num_barriers=stages),
            "do_ready": bar(num_barriers=stages),
            "q_free": bar(num_arrivals=2, num_barriers=stages),
            "do_free": bar(num_arrivals=2, num_barriers=stages),
            "p_ready": bar(num_barriers=handed),
            "p_free": bar(num_barriers=handed),
            "ds_ready": bar(num_barriers=handed),
            "ds_free": bar(num_barriers=handed),
            "ended": bar(num_arrivals=ROLES),
            **({"values_s": [vector(jnp.int32) for _ in range(values)]} if values else {}),
            **({"lse_s": vector(jnp.float32)} if changed else {}),
        },
        grid=grid.shape,
        grid_names=grid.names,
        num_threads=ROLES + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_sparse_roles",
    )(q, k, v, dout, statistics, dq, *((lse,) if changed else ()), *before, *(policy or lists).operands())


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Device-memory and shared-memory references of a thread block (_g and _s) and its barriers."""

    q_g: jax.Ref
    k_g: jax.Ref
    v_g: jax.Ref
    do_g: jax.Ref
    statistics_g: jax.Ref
    dq_g: jax.Ref
    dk_g: jax.Ref
    dv_g: jax.Ref
    k_s: jax.Ref
    v_s: jax.Ref
    q_s: jax.Ref
    do_s: jax.Ref
    statistics_s: jax.Ref
    piece_s: jax.Ref
    p_s: jax.Ref
    ds_s: jax.Ref
    dq_s: jax.Ref
    kv_ready: jax.Ref
    q_ready: jax.Ref
    do_ready: jax.Ref
    q_free: jax.Ref
    do_free: jax.Ref
    p_ready: jax.Ref
    p_free: jax.Ref
    ds_ready: jax.Ref
    ds_free: jax.Ref
    ended: jax.Ref
    lse_g: jax.Ref | None = None
    lse_s: jax.Ref | None = None
    values_s: list[jax.Ref] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The kernel's body and what it closes over."""

    tiles: RoleTiles
    scale: float
    grid: KeyGrid
    dim: int
    pieces: int
    dtype: jnp.dtype
    grad_dtype: jnp.dtype
    policy: Policy | None

    def body(self, q_g, k_g, v_g, do_g, statistics_g, dq_g, *refs, **scratch):
        """One thread block: a tile of keys of a kv head, in one of its query heads."""
        *refs, dk_g, dv_g = refs
        lse_g = refs.pop(0) if self.policy is not None and self.policy.changes_scores else None
        count = len(dataclasses.fields(ListRefs)) if self.policy is None else len(self.policy.operands())
        before, refs = refs[:-count] or (None, None), refs[-count:]
        s = _Scratch(q_g, k_g, v_g, do_g, statistics_g, dq_g, dk_g, dv_g, lse_g=lse_g, **scratch)
        block, warpgroup = _Block(self, s, self.grid.here(refs, self.policy), *before), lax.axis_index("warpgroup")
        for role, run in enumerate((block.probabilities, block.gradients, block.query_gradients, block.produce)):

            @pl.when(warpgroup == role)
            def _(role=role, run=run):
                registers = self.tiles.registers[role]
                plgpu.set_max_registers(registers, action="increase" if registers >= 128 else "decrease")
                run()


@dataclasses.dataclass(frozen=True)
class _Block:
    """What the four warpgroups of a thread block do."""

    kernel: _Backward
    s: _Scratch
    here: KeyTile
    dk_before: jax.Ref | None
    dv_before: jax.Ref | None

    @property
    def walk(self) -> Walk:
        """The pieces of queries."""
        return self.here.walk

    @property
    def _steps(self):
        return self.walk.total

    @property
    def _keys(self):
        """The tokens of its keys."""
        return pl.ds(self._key0, ROWS)

    @property
    def _key0(self):
        return self.walk.tile * ROWS

    def _slot(self, n):
        return lax.rem(n, jnp.int32(self.kernel.tiles.stages))

    def _hand(self, n):
        return lax.rem(n, jnp.int32(self.kernel.tiles.handed))

    def produce(self):
        """Loads the keys and values once, then keeps the rings of queries and douts full."""
        s, head, stages = self.s, self.here.head, self.kernel.tiles.stages
        plgpu.copy_gmem_to_smem(s.k_g.at[head.batch, self._keys, head.kv], s.k_s, s.kv_ready)
        plgpu.copy_gmem_to_smem(s.v_g.at[head.batch, self._keys, head.kv], s.v_s, s.kv_ready)

        def load(n, _):
            slot, piece = self._slot(n), self.walk.index(n, 0)
            rows = pl.ds(piece * ROWS, ROWS)
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(s.q_free.at[slot]))
            s.piece_s[slot] = piece
            vectors = s.statistics_g.at[head.batch, head.q, rows]
            plgpu.copy_gmem_to_smem(s.q_g.at[head.batch, rows, head.q], s.q_s.at[slot], s.q_ready.at[slot])
            plgpu.copy_gmem_to_smem(vectors, s.statistics_s.at[slot], s.q_ready.at[slot])
            if self.here.changes_scores:
                plgpu.copy_gmem_to_smem(s.lse_g.at[head.batch, head.q, rows], s.lse_s.at[slot], s.q_ready.at[slot])
            if self.kernel.policy is not None:
                load_values(self.kernel.policy, self.here.refs, rows, slot, s.values_s, s.q_ready)
            pl.when(n >= stages)(lambda: plgpu.barrier_wait(s.do_free.at[slot]))
            plgpu.copy_gmem_to_smem(s.do_g.at[head.batch, rows, head.q], s.do_s.at[slot], s.do_ready.at[slot])

        lax.fori_loop(0, self._steps, load, None)
        drain(self._steps, stages, s.q_free, s.do_free)

    def _accumulated(self, step):
        """Runs step(accumulator, ...) over all pieces; the accumulator's value."""
        def run(ref):
            self.walk.each_piece(functools.partial(step, ref))
            return ref[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, self.kernel.dim), jnp.float32))

    def _write(self, grad, before, staging, gmem):
        """A gradient to device memory, once no warpgroup reads shared keys or values any more."""
        here, dtype = (self.here.head.batch, self._keys, self.here.head.q), self.kernel.grad_dtype
        if before is not None:
            grad = grad + plgpu.load(before.at[here], layout=TILE, optimized=False)
        plgpu.barrier_arrive(self.s.ended)
        plgpu.barrier_wait(self.s.ended)
        if dtype.itemsize == 2:
            staging[...] = grad.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, gmem.at[here])
        else:
            gmem[here] = grad
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _product(self, left, right, vector: int, slot):
        """left @ right.T [keys, queries], a vector of the slot's statistics added to every row."""
        def issue(ref):
            plgpu.wgmma(ref, left, right.transpose((1, 0)))
            if vector or not self.here.changes_scores:
                plgpu.wgmma(ref, ones(vector), self.s.statistics_s.at[slot].transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(issue, plgpu.ACC((ROWS, ROWS), jnp.float32))

    def probabilities(self):
        """The first warpgroup: probabilities, and dv."""
        s, kernel = self.s, self.kernel
        plgpu.barrier_wait(s.kv_ready)
        keys = plgpu.load(s.k_s, layout=TILE)

        def step(dv_ref, masked: bool, n, _):
            slot, hand = self._slot(n), self._hand(n)
            plgpu.barrier_wait(s.q_ready.at[slot])
            logits = self._product(keys, s.q_s.at[slot], 0, slot)
            pl.when(n > 0)(lambda: plgpu.barrier_arrive(s.do_free.at[self._slot(n - 1)]))  # dv before has read them
            p, weight = self.here.weights(
                logits, kernel.scale, lambda: self._key0, lambda: s.piece_s[slot], masked,
                lambda: of_columns(s.lse_s.at[slot]), lambda: tuple(x.at[slot] for x in s.values_s))
            p = p.astype(kernel.dtype)
            weight = weight.astype(kernel.dtype) if self.here.changes_scores else p
            plgpu.barrier_arrive(s.q_free.at[slot])
            pl.when(n >= kernel.tiles.handed)(lambda: plgpu.barrier_wait(s.p_free.at[hand]))
            s.p_s[hand] = weight
            plgpu.barrier_arrive(s.p_ready.at[hand])
            plgpu.barrier_wait(s.do_ready.at[slot])
            plgpu.wgmma(dv_ref, p, s.do_s.at[slot])

        dv = self._accumulated(step)
        pl.when(self._steps > 0)(lambda: plgpu.barrier_arrive(s.do_free.at[self._slot(self._steps - 1)]))
        drain(self._steps, kernel.tiles.handed, s.p_free)
        self._write(dv, self.dv_before, s.v_s, s.dv_g)

    def gradients(self):
        """The second warpgroup: gradients of the logits, and dk."""
        s, kernel = self.s, self.kernel
        plgpu.barrier_wait(s.kv_ready)
        values = plgpu.load(s.v_s, layout=TILE)

        def step(dk_ref, masked: bool, n, _):
            del masked
            slot, hand = self._slot(n), self._hand(n)
            plgpu.barrier_wait(s.do_ready.at[slot])
            plgpu.barrier_wait(s.q_ready.at[slot])  # delta comes with the queries
            dp = self._product(values, s.do_s.at[slot], 1, slot)
            plgpu.barrier_wait(s.p_ready.at[hand])
            p = plgpu.load(s.p_s.at[hand], layout=TILE)
            plgpu.barrier_arrive(s.p_free.at[hand])
            ds = (p.astype(jnp.float32) * dp).astype(kernel.dtype)
            plgpu.barrier_arrive(s.do_free.at[slot])
            pl.when(n >= kernel.tiles.handed)(lambda: plgpu.barrier_wait(s.ds_free.at[hand]))
            s.ds_s[hand] = ds
            plgpu.commit_smem()
            plgpu.barrier_arrive(s.ds_ready.at[hand])
            plgpu.wgmma(dk_ref, ds, s.q_s.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.q_free.at[slot])

        dk = self._accumulated(step)
        drain(self._steps, kernel.tiles.handed, s.ds_free)
        self._write(dk * kernel.scale, self.dk_before, s.k_s, s.dk_g)

    def query_gradients(self):
        """The third warpgroup: dq, added to device memory."""
        s, kernel = self.s, self.kernel
        plgpu.barrier_wait(s.kv_ready)
        rows = register_shape(PART)[0]

        def step(n, _):
            here, hand = self.here.head.q * kernel.pieces + self.walk.index(n, 0), self._hand(n)
            target = s.dq_g.at[self.here.head.batch, here]
            plgpu.barrier_wait(s.ds_ready.at[hand])
            for part in range(kernel.dim // PART):

                def product(dq_ref, part=part):
                    features = s.k_s if kernel.dim == PART else s.k_s.at[:, pl.ds(part * PART, PART)]
                    plgpu.wgmma(dq_ref, s.ds_s.at[hand].transpose((1, 0)), features)
                    return dq_ref[...]

                dq = pl.run_scoped(product, plgpu.ACC((ROWS, PART), jnp.float32))
                if part == kernel.dim // PART - 1:
                    plgpu.barrier_arrive(s.ds_free.at[hand])
                add(dq, s.dq_s.at[part], target.at[pl.ds(part * rows, rows)], kernel.dim // PART - 1)

        lax.fori_loop(0, self._steps, step, None)
        wait()
        plgpu.barrier_arrive(s.ended)
        plgpu.barrier_wait(s.ended)
