"""What the block-sparse backward kernels on Hopper share: the keys of a thread block, and what is seen of them."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_forward import LOG2E
from jax_impl.kernels.hopper_masks import COLUMN, ROW, TILE, Head, Place, Policy
from jax_impl.kernels.hopper_sparse_forward import ROWS, Walk, list_refs, row_tile, walk_of


@dataclasses.dataclass(frozen=True)
class KeyGrid:
    """Which keys and which query head each thread block of a backward kernel takes.

    Blocks of a head follow each other, so that its queries, douts and dq stay in the cache.

    Attributes:
      batch, kv_heads, tiles: how many there are, tiles of keys.
      group: query heads of a kv head.
      side: kv heads that run side by side.
      mask_heads: masks held.
    """

    batch: int
    kv_heads: int
    tiles: int
    group: int
    side: int
    mask_heads: int

    names = ("batch", "section", "member", "place", "side")

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's grid."""
        return self.batch, self.kv_heads // self.side, self.group, self.tiles, self.side

    def here(self, refs, policy: Policy | None) -> "KeyTile":
        """What this thread block works on; refs: the lists, or the policy's operands, in device memory."""
        lists = list_refs(refs)
        kv_head = lax.axis_index("section") * self.side + lax.axis_index("side")
        mask_head = lax.div(kv_head * self.mask_heads, jnp.int32(self.kv_heads))
        walk = walk_of(lists, mask_head, row_tile(lists, mask_head, lax.axis_index("place")), 1)
        head = Head(lax.axis_index("batch"), kv_head * self.group + lax.axis_index("member"), kv_head)
        return KeyTile(head, walk, refs, policy)


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """A tile of keys in one query head.

    Attributes:
      walk: the pieces of queries that see it.
      refs: the lists, or the policy's operands, in device memory.
      policy: the element test, and logits changed; None where the lists alone say what is seen.
    """

    head: Head
    walk: Walk
    refs: list
    policy: Policy | None

    @property
    def changes_scores(self) -> bool:
        """Whether logits are changed."""
        return self.policy is not None and self.policy.changes_scores

    def weights(self, logits, scale: float, key0, piece, masked: bool, lse, values):
        """Probabilities [keys, queries], and what their gradients are to be multiplied by: the same, and where a policy
        changes logits the derivative times them.

        Args:
          logits: yet to be scaled, less lse where no policy changes them.
          key0, piece, lse, values: functions, called where needed: the first of the ROWS keys, the piece of queries,
            their negative lse in base 2, the policy's `column_values` in shared memory.
        """
        policy, shape, place = self.policy, logits.shape, None
        if policy is not None and (masked or policy.changes_scores):
            place = Place(key0(), piece() * ROWS, *shape, values())
        if self.changes_scores:
            scaled = logits * scale
            p = jnp.exp2(policy.scores(scaled, self.head, place) * LOG2E + place.by_column(lse()))
        else:
            p = jnp.exp2(logits * (scale * LOG2E))
        if masked:
            p = jnp.where(self._seen(key0, piece, place, shape), p, 0.0)
        return p, policy.score_gradient(scaled, p, self.head, place) if self.changes_scores else p

    def _seen(self, key0, piece, place, shape):
        """Which queries of a piece see which keys; padded queries have an infinite lse."""
        if self.policy is not None:
            return self.policy.seen(self.policy.load_rows(self.refs, self.head, key0(), ROWS), self.head, place)
        first = self.walk.refs.starts[self.walk.head, piece()]
        low = plgpu.load(self.walk.refs.bound.at[self.walk.head, pl.ds(key0(), ROWS)], layout=ROW, optimized=False)
        query = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        return query >= lax.broadcast_in_dim(low - first, shape, [0])


def of_columns(ref):
    """Numbers of the columns of a tile, from shared memory."""
    return plgpu.load(ref, layout=COLUMN)
