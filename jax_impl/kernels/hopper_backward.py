"""The key-major backward pass on Hopper: dk and dv in registers, dq added to device memory, five products a tile.

A thread block owns a tile of keys; its two consumer warpgroups hold dk and dv of 64 keys each. Transposed logits and
their gradients (rows are keys, columns are queries) feed the products from registers, and dS goes through shared
memory once, for dq, of which each warpgroup computes a half and adds it to a float32 buffer by TMA
(FlashAttention-3's backward, Shah et al., 2024, appendix B.1). lse and delta are added to the logits and their
gradients by the tensor cores (hopper_statistics.py). Queries that see none of its 64 keys a warpgroup passes by, where
the policy tells. Without dq the same kernel is the deterministic one: nothing is added in an order of chance, and
hopper_dq.py computes dq on its own.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_add import PART, ROWS, add, add_at_once, add_by_parts, by_token, register_shape, wait
from jax_impl.kernels.hopper_forward import COMPILER, LOG2E, round_up, shared_tile, split_number, value_tiles
from jax_impl.kernels.hopper_inline import opaque_zero, store
from jax_impl.kernels.hopper_key_walk import KeyWalk, Scratch, produce
from jax_impl.kernels.hopper_masks import COLUMN, TILE, Head, Place, Policy
from jax_impl.kernels.hopper_statistics import TERMS, base2, begin, ones, statistics

CONSUMERS = 2  # each holds dk and dv of 64 keys: 128 accumulator registers a thread at head_dim 128


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
    total=None, out=None,
):
    """dk, dv and, if asked for, dq in float32, yet to be scaled.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype.
      lse, delta: float32 [batch, q_heads, q_len padded to whole tiles]; lse is -inf where empty or padded; delta may be
        None where with_dq: it is made of `out` then, by a kernel that clears dq too.
      policy: rows are keys in tiles of `tiles.row_tokens`, columns are queries in tiles of `tiles.columns`.
      scale: > 0.
      grad_dtype: of dk and dv.
      total: dq of other keys, as this function returns it, that this one is added to; None where delta is.
      out: [batch, q_len, q_heads, head_dim], or None where delta is given.

    Returns: (dq as `by_token` takes it, float32 [batch, q_heads * tiles of 64 queries, *register_shape(head_dim)], or
    None), dk, dv.
    """
    batch, q_len, q_heads, dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    padded, columns, grad_dtype = round_up(kv_len, tiles.row_tokens), tiles.columns, jnp.dtype(grad_dtype)
    if with_dq and columns * dim != CONSUMERS * ROWS * PART:
        raise ValueError(f"tiles: columns is {columns}; it must be 64 for head_dim 128, 128 for head_dim 64")
    side = math.gcd(tiles.side or kv_heads, kv_heads)
    split = math.gcd(tiles.split, q_heads // kv_heads) if with_dq else 1
    kernel = _KeyMajor(policy, tiles, scale, q_heads // kv_heads, split, dim, side, kv_heads,
                       padded // tiles.row_tokens, q.dtype, grad_dtype, with_dq)
    grad = jax.ShapeDtypeStruct((batch, padded, kv_heads, dim), grad_dtype)
    stages, dtype, bar = tiles.stages, q.dtype, plgpu.Barrier
    if delta is None:
        terms, total = begin(out, dout, lse, None if policy.changes_scores else scale, columns)
    else:
        terms = statistics(None if policy.changes_scores else base2(lse) * (-1.0 / (scale * LOG2E)), -delta)
    if policy.changes_scores:
        lse = base2(lse)
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
            "sum_s": plgpu.SMEM((CONSUMERS, *register_shape(PART)), jnp.float32),
            "ds_ready": bar(num_arrivals=CONSUMERS),
        }

        def cleared(rows: int):
            return jnp.zeros((batch, rows // ROWS, *register_shape(dim)), jnp.float32)

        total = cleared(q_heads * round_up(q_len, columns)) if total is None else total
        sums = [cleared(kv_heads * padded) for _ in range(2 if split > 1 else 0)]
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
    )(q, k, v, dout, lse, terms, *buffers, *policy.operands())
    dq, *sums = (x[...] for x in buffers) if with_dq else (None,)
    if sums:
        grads = [by_token(x, kv_heads, factor, grad_dtype) for x, factor in zip(sums, (scale, 1.0), strict=True)]
    return dq, *(x[:, :kv_len] for x in grads)


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
    def by_warps(self) -> bool:
        """Whether each warp adds its own rows of dq; where several query heads are in work, 4 % slower than at once."""
        return self.split == 1

    @property
    def ahead(self) -> bool:
        """Whether a step computes the next one's logits too, while dk's product runs: with one fence for dS and dq 1 to
        3 % faster, but for short walks. It is slower where parts are added; tiles of 128 columns leave no registers."""
        return self.with_dq and self.by_warps and not self.by_rows and not self.policy.changes_scores

    @property
    def by_rows(self) -> bool:
        """Whether a warpgroup computes half of the rows of a tile's dq, of which there are 128, or of its features."""
        return self.tiles.columns == CONSUMERS * ROWS

    def body(self, q_g, k_g, v_g, do_g, lse_g, statistics_g, *refs, **scratch):
        """One thread block: a tile of keys of one kv head, over all query heads of its group."""
        refs = list(refs)
        dq_g = refs.pop(0) if self.with_dq else None
        if self.split > 1:
            dk_g, dv_g, *mask_refs = refs
        else:
            *mask_refs, dk_g, dv_g = refs
        s = Scratch(q_g, k_g, v_g, do_g, lse_g, statistics_g, dq_g, dk_g, dv_g, **scratch)
        walk, works = self._walk(mask_refs)
        warpgroup = lax.axis_index("warpgroup")
        pl.when((warpgroup == CONSUMERS) & works)(lambda: produce(s, walk, self.tiles, self.ahead))

        @pl.when((warpgroup < CONSUMERS) & works)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            _Consumer(self, s, walk, warpgroup).run()

    def _walk(self, mask_refs):
        """What this thread block visits, and whether it has anything to do."""
        number, works = lax.axis_index("block"), True
        if self.policy.orders_blocks:
            place = self.policy.block(mask_refs, number)
            works = place > 0
            number, kv_head = split_number(place - 1, self.kv_heads)
            place, part = split_number(number, self.split)
        else:
            number, side = split_number(number, self.side)
            number, place = split_number(number, self.places)
            section, part = split_number(number, self.split)
            kv_head = section * self.side + side
        heads = self.group // self.split
        first = Head(lax.axis_index("batch"), kv_head * self.group + part * heads, kv_head)
        tile = place if self.policy.orders_blocks else self.policy.row_tile(mask_refs, first, place)
        return KeyWalk(self.policy, mask_refs, first, heads, tile), works


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: dk and dv of 64 keys, and its half of every dq tile."""

    kernel: _KeyMajor
    s: Scratch
    walk: KeyWalk
    warpgroup: jax.Array

    def run(self):
        """Runs all steps and writes dk and dv."""
        s, kernel, dim = self.s, self.kernel, self.kernel.dim
        plgpu.barrier_wait(s.kv_ready)
        accumulator = plgpu.ACC((ROWS, dim), jnp.float32)
        dk, dv = pl.run_scoped(self._all_steps, accumulator, accumulator)
        if kernel.split > 1:
            tile = (self.walk.first.kv * kernel.places + self.walk.tile) * CONSUMERS + self.warpgroup
            for grad, gmem in ((dk, s.dk_g), (dv, s.dv_g)):
                add_by_parts(grad, self._staging, gmem.at[self.walk.first.batch, tile])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return
        keys = pl.ds(self.walk.tile * kernel.tiles.row_tokens + self.warpgroup * ROWS, ROWS)
        if kernel.with_dq:  # the other warpgroup's last dq reads these keys too
            plgpu.barrier_arrive(s.ds_ready)
            plgpu.barrier_wait(s.ds_ready)
        for grad, staging, gmem in ((dk * kernel.scale, s.k_s, s.dk_g), (dv, s.v_s, s.dv_g)):
            target = gmem.at[self.walk.first.batch, keys, self.walk.first.kv]
            if kernel.grad_dtype.itemsize == 2:
                staging[self._rows] = grad.astype(kernel.grad_dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging.at[self._rows], target)
            else:
                target[...] = grad
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def _staging(self):
        """Where it stages what it adds to device memory."""
        return self.s.sum_s.at[self.warpgroup]

    @property
    def _rows(self):
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def _all_steps(self, dk_ref, dv_ref):
        s, kernel, first = self.s, self.kernel, jnp.int32(0)
        step = functools.partial(self._step, dk_ref, dv_ref)
        if not kernel.with_dq:
            self.walk.each(step, (None, None))
            return dk_ref[...], dv_ref[...]
        # dq of a step is computed in the next one, so that no warpgroup waits for the other's dS of the same step.
        # Step -1 has dS = 0 and adds nothing, to the first query tile of the first head.
        s.ds_s[1, self._rows] = self._zeros(kernel.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(s.ds_ready)
        carry, passing = (None, (first, self.walk.first.q)), ()
        if kernel.ahead:  # every step finds its queries awaited
            plgpu.barrier_wait(s.q_ready.at[first])
            if kernel.policy.spans is None:
                carry = self._begin(first, carry)
            else:
                carry, passing = (self._zeros(jnp.float32), carry[1]), (self.warpgroup, self._pass_by, self._begin)
        steps, (_, before) = self.walk.each(step, carry, *passing)
        if kernel.ahead:
            slot = lax.rem(steps, jnp.int32(kernel.tiles.stages))
            plgpu.barrier_wait(s.do_ready.at[slot])
            plgpu.barrier_arrive(s.q_free.at[slot])
            plgpu.barrier_arrive(s.do_free.at[slot])
        plgpu.barrier_wait(s.ds_ready)

        def last(dq_ref):
            self._issue_dq(dq_ref, lax.rem(steps + 1, jnp.int32(2)), steps)
            self._add_dq(dq_ref[...], before)

        pl.run_scoped(last, plgpu.ACC((ROWS, PART), jnp.float32))
        return dk_ref[...], dv_ref[...]

    def _step(self, dk_ref, dv_ref, step, _, head, masked: bool, carry):
        exponents, before = carry
        slot = lax.rem(step, jnp.int32(self.kernel.tiles.stages))
        ds = self._gradient(dv_ref, exponents, masked, step, slot, head)
        return self._products(dk_ref, ds, step, slot, head, before)

    def _pass_by(self, step, head, carry):
        """A step of whose queries none sees a key of this warpgroup: dq of the step before alone."""
        exponents, before = carry
        slot = lax.rem(step, jnp.int32(self.kernel.tiles.stages))
        plgpu.barrier_wait(self.s.do_ready.at[slot])
        return exponents, self._products(None, None, step, slot, head, before)[1]

    def _begin(self, step, carry):
        """What a step does for the next one, for one that follows none or one that was passed by."""
        return self._exponents(step, lax.rem(step, jnp.int32(self.kernel.tiles.stages))), carry[1]

    def _products(self, dk_ref, ds, step, slot, head, before):
        """dq of the step before, dk of this one and, if ahead, the next one's logits; the step's carry.

        ds: gradients of the logits, or None where none of the queries sees this warpgroup's keys: then dq alone.
        """
        s, kernel = self.s, self.kernel
        if kernel.with_dq:
            here = (s.column_s[slot], head.q)
            half = lax.rem(step, jnp.int32(2))
            plgpu.barrier_wait(s.ds_ready)  # the step before: the other's dS is there, what it replaces is read

        def products(*dq_ref):
            if kernel.with_dq:
                self._issue_dq(*dq_ref, 1 - half, step)
            if ds is not None:
                plgpu.wgmma(dk_ref, ds, s.q_s.at[slot])
            if kernel.with_dq:  # while the products run
                if not kernel.by_warps:  # the addition before has read its tile, as all know behind `commit_smem`
                    wait()
                store(self._zeros(kernel.dtype) if ds is None else ds, s.ds_s.at[half, self._rows])
                if not kernel.by_warps:
                    plgpu.commit_smem()
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(s.do_free.at[slot])
            if kernel.with_dq:
                arrive = functools.partial(plgpu.barrier_arrive, s.ds_ready)
                if not kernel.by_warps:  # else behind the addition's own fence
                    arrive()
                dq = plgpu.wgmma_accumulator_load(*dq_ref, wait_n=0 if ds is None else 1)
                self._add_dq(dq, before, waited=True, stored=arrive)
            after = None
            if kernel.ahead:
                plgpu.barrier_wait(s.q_ready.at[self._after(slot)])
                if ds is not None:
                    after = self._exponents(step, self._after(slot))  # while dk's product runs
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(s.q_free.at[slot])
            return after

        if not kernel.with_dq:
            products()
            return None, None
        return pl.run_scoped(products, plgpu.ACC((ROWS, PART), jnp.float32)), here

    def _zeros(self, dtype):
        return plgpu.layout_cast(jnp.zeros((ROWS, self.kernel.tiles.columns), dtype), TILE)

    def _exponents(self, step, slot):
        """log2 of a tile's probabilities. Not the logits themselves: an accumulator that one step leaves to the next
        takes registers of its own, and the compiler runs all products one after the other."""
        def issued(logits_ref):
            self._issue_logits(logits_ref, self._keys(step), slot)
            return logits_ref[...] * (self.kernel.scale * LOG2E)

        return pl.run_scoped(issued, self._tile)

    def _after(self, slot):
        """The slot of the step after the one that has this slot."""
        stages = self.kernel.tiles.stages
        return 1 - slot if stages == 2 else lax.rem(slot + 1, jnp.int32(stages))

    def _issue_logits(self, logits_ref, keys, slot):
        """Issues the logits' products: of the queries, and of lse where nothing is done to the logits before it."""
        plgpu.wgmma(logits_ref, self.s.k_s.at[keys], self.s.q_s.at[slot].transpose((1, 0)))
        if not self.kernel.policy.changes_scores:
            plgpu.wgmma(logits_ref, ones(0), self.s.statistics_s.at[slot].transpose((1, 0)))

    def _keys(self, step):
        return pl.ds(self._number(step) * ROWS, ROWS)

    @property
    def _tile(self):
        return plgpu.ACC((ROWS, self.kernel.tiles.columns), jnp.float32)

    def _number(self, step):
        """The warpgroup's number, as something that depends on the step as far as the compiler can tell: held over all
        steps, the descriptors of all operands that begin there would take more registers than there are."""
        return self.warpgroup + opaque_zero(step)

    def _gradient(self, dv_ref, exponents, masked: bool, step, slot, head):
        """Gradients of the logits, [keys, queries], in the operands' dtype; issues dv's product on the way.

        exponents: `_exponents` of the tile, or None where they are yet to be computed.
        """
        s, kernel, policy = self.s, self.kernel, self.kernel.policy
        vectors = s.statistics_s.at[slot].transpose((1, 0))
        mine = self._keys(step)

        def logits_of(s_ref):
            self._issue_logits(s_ref, mine, slot)
            plgpu.barrier_wait(s.do_ready.at[slot])
            return pl.run_scoped(functools.partial(gradients_of, s_ref), self._tile)

        def gradients_of(s_ref, dp_ref):
            plgpu.wgmma(dp_ref, s.v_s.at[mine], s.do_s.at[slot].transpose((1, 0)))
            plgpu.wgmma(dp_ref, ones(1), vectors)
            key0 = self.walk.tile * kernel.tiles.row_tokens + self.warpgroup * ROWS
            place = Place(key0, jnp.int32(0), ROWS, kernel.tiles.columns)
            if masked or policy.changes_scores:
                values = tuple(x.at[slot] for x in s.values_s)
                place = dataclasses.replace(place, column0=s.column_s[slot] * kernel.tiles.columns, values=values)
            rows = policy.load_rows(self.walk.refs, head, key0, ROWS) if masked else ()
            logits = plgpu.wgmma_accumulator_load(s_ref, wait_n=2) if exponents is None else None
            if policy.changes_scores:
                scaled = logits * kernel.scale
                lse = plgpu.load(s.lse_s.at[slot], layout=COLUMN)
                p = jnp.exp2(policy.scores(scaled, head, place) * LOG2E - place.by_column(lse))
            else:
                p = jnp.exp2(logits * (kernel.scale * LOG2E) if exponents is None else exponents)
            if masked:
                p = jnp.where(policy.seen(rows, head, place), p, 0.0)
            # Issued before dP is waited for, so that exp2 runs under dP's product and dS is formed under dv's. In tiles
            # of 128 columns there are no registers for it.
            early = not kernel.by_rows

            def issue_dv():
                plgpu.wgmma(dv_ref, p.astype(kernel.dtype), s.do_s.at[slot])

            if early:
                issue_dv()
            ds = p * plgpu.wgmma_accumulator_load(dp_ref, wait_n=int(early))
            if policy.changes_scores:
                ds = policy.score_gradient(scaled, ds, head, place)
            if not early:
                issue_dv()
            return ds.astype(kernel.dtype)

        # A barrier's wait is a loop: accumulators that begin behind it begin as zeros of their first product.
        if exponents is None:
            plgpu.barrier_wait(s.q_ready.at[slot])
            return pl.run_scoped(logits_of, self._tile)
        plgpu.barrier_wait(s.do_ready.at[slot])
        return pl.run_scoped(functools.partial(gradients_of, None), self._tile)

    def _issue_dq(self, dq_ref, half, step):
        """Issues this warpgroup's half of a tile's dq."""
        ds_s, share = self.s.ds_s.at[half], pl.ds(self._number(step) * PART, PART)
        if self.kernel.by_rows:
            plgpu.wgmma(dq_ref, ds_s.at[:, share].transpose((1, 0)), self.s.k_s)
        else:
            plgpu.wgmma(dq_ref, ds_s.transpose((1, 0)), self.s.k_s.at[:, share])

    def _add_dq(self, dq, where, waited: bool = False, stored=None):
        """Adds it to device memory; where: (query tile, query head); waited: see `add_at_once`; stored: see `add`."""
        (tile, q_head), rows = where, register_shape(PART)[0]
        tile, features = (CONSUMERS * tile + self.warpgroup, 0) if self.kernel.by_rows else (tile, self.warpgroup)
        tiles = self.s.dq_g.shape[1] // self.s.q_g.shape[2]
        target = self.s.dq_g.at[self.walk.first.batch, q_head * tiles + tile, pl.ds(features * rows, rows)]
        if self.kernel.by_warps:
            add(dq, self._staging, target, stored=stored)
        else:
            add_at_once(dq, self._staging, target, waited)
