"""Which queries a thread block of the key-major pass visits: those that see a tile of keys, in some query heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

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

    def each(self, visit, carry):
        """Folds visit(step, index of the query tile as a function, head, masked, carry) -> carry over all pairs.

        step counts over all heads. Returns (the number of steps, carry).
        """
        walk_of = functools.partial(self.policy.walk, self.refs)
        shared, apart = walk_of(self.first, self.tile), self.policy.heads_differ and self.heads > 1

        def one_head(g, state):
            walk, (base, carry) = walk_of(self.head(g), self.tile) if apart else shared, state

            def step(masked, n, carry):
                column = lambda: walk.column(n if masked else self._apart(walk, n))  # noqa: E731
                return visit(base + n, column, self.head(g), masked, carry)

            carry = lax.fori_loop(0, walk.partial, functools.partial(step, True), carry)
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
