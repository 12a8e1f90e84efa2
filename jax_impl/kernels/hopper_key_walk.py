"""Which queries a thread block of the key-major pass visits, those that see a tile of keys, in some query heads, and
the warp that loads them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import drain, load_values
from jax_impl.kernels.hopper_inline import opaque_zero
from jax_impl.kernels.hopper_masks import Head, Policy, Walk

APART = 16  # query tiles among which thread blocks that run side by side begin a walk of the same ones


@dataclasses.dataclass(frozen=True)
class KeyWalk:
    """The (query head, query tile) pairs that a block visits, head by head.

    Attributes:
      refs: what the policy reads of the mask.
      first, heads: the first query head, and how many there are.
      tile: of keys.
    """

    policy: Policy
    refs: list
    first: Head
    heads: int
    tile: jax.Array

    def head(self, g):
        """The g-th query head."""
        return Head(self.first.batch, self.first.q + g, self.first.kv)

    def each(self, visit, carry, half=None, pass_by=None, begin=None):
        """Folds visit(step, index of the query tile as a function, head, masked, carry) -> carry over all pairs.

        step counts over all heads. Returns (the number of steps, carry).

        half: of the keys, if asked for: at masked steps outside its span pass_by(step, head, carry) -> carry stands for
          visit, and begin(step, carry) -> carry comes before a visit that none precedes.
        """
        walk_of = functools.partial(self.policy.walk, self.refs)
        shared, apart = walk_of(self.first, self.tile), self.policy.heads_differ and self.heads > 1

        def one_head(g, state):
            walk, (base, carry) = walk_of(self.head(g), self.tile) if apart else shared, state

            def step(masked, n, carry):
                column = lambda: walk.column(n if masked else self._apart(walk, n))  # noqa: E731
                return visit(base + n, column, self.head(g), masked, carry)

            def passed(n, carry):
                return pass_by(base + n, self.head(g), carry)

            first, last = (0, walk.partial) if half is None else walk.span(half)
            if half is not None:
                carry = begin(base + first, lax.fori_loop(0, first, passed, carry))
            carry = lax.fori_loop(first, last, functools.partial(step, True), carry)
            if half is not None:
                carry = lax.fori_loop(last, walk.partial, passed, carry)
                resumes = (last < walk.partial) & (walk.partial < walk.total)
                carry = lax.cond(resumes, functools.partial(begin, base + walk.partial), lambda carry: carry, carry)
            carry = lax.fori_loop(walk.partial, walk.total, functools.partial(step, False), carry)
            return base + walk.total, carry

        # Of a loop of one turn ptxas keeps less in uniform registers, a tenth more instructions a step: so none is seen
        # to be one.
        return lax.fori_loop(0, self.heads + opaque_zero(shared.total), one_head, (jnp.int32(0), carry))

    def _apart(self, walk: Walk, n):
        """Full step n of a walk that begins a few tiles later than that of the tile of keys before: what blocks add
        side by side should not all go to the same rows of dq."""
        full = walk.total - walk.partial
        turned = n + jnp.minimum(lax.rem(self.tile, jnp.int32(APART)), full)
        return jnp.where(turned >= walk.total, turned - full, turned)


@dataclasses.dataclass(frozen=True)
class Scratch:
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


def produce(s: Scratch, walk: KeyWalk, tiles, ahead: bool):
    """Loads the keys and values once, then keeps the rings of queries and douts full.

    tiles: `BackwardTiles`; ahead: whether the last step computes logits of one more.
    """
    plgpu.set_max_registers(tiles.registers[1], action="decrease")
    stages, batch, policy = jnp.int32(tiles.stages), walk.first.batch, walk.policy
    keys = pl.ds(walk.tile * tiles.row_tokens, tiles.row_tokens)
    plgpu.copy_gmem_to_smem(s.k_g.at[batch, keys, walk.first.kv], s.k_s, s.kv_ready)
    plgpu.copy_gmem_to_smem(s.v_g.at[batch, keys, walk.first.kv], s.v_s, s.kv_ready)

    def load(step, column, head, *_):
        slot, column = lax.rem(step, stages), column()
        queries = pl.ds(column * tiles.columns, tiles.columns)
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.q_free.at[slot]))
        plgpu.copy_gmem_to_smem(s.q_g.at[batch, queries, head.q], s.q_s.at[slot], s.q_ready.at[slot])
        plgpu.copy_gmem_to_smem(s.statistics_g.at[batch, head.q, queries], s.statistics_s.at[slot], s.q_ready.at[slot])
        if policy.changes_scores:
            plgpu.copy_gmem_to_smem(s.lse_g.at[batch, head.q, queries], s.lse_s.at[slot], s.q_ready.at[slot])
        load_values(policy, walk.refs, queries, slot, s.values_s, s.q_ready)
        s.column_s[slot] = column  # consumers read it from here, so that they hold no state of the walk
        plgpu.barrier_arrive(s.q_ready.at[slot])
        pl.when(step >= stages)(lambda: plgpu.barrier_wait(s.do_free.at[slot]))
        plgpu.copy_gmem_to_smem(s.do_g.at[batch, queries, head.q], s.do_s.at[slot], s.do_ready.at[slot])

    total, _ = walk.each(load, None)
    if ahead:
        load(total, lambda: jnp.int32(0), walk.first)
        total += 1
    drain(total, tiles.stages, s.q_free, s.do_free)
