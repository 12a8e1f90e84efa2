"""Block-sparse backward pass on Hopper, host side: what pairs of key tiles see together, then what each sees alone.

Both kernels hold dk and dv in registers and add dq to float32 memory by TMA, five products a tile. At tiles of 64 keys
those additions are what the cache can just bear; what two tiles see together (hopper_sparse_pairs.py) takes half as
many, what a tile sees alone (hopper_sparse_roles.py) all of them. Blocks of 128 are seen together throughout.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_impl.kernels.hopper_add import by_token, register_shape
from jax_impl.kernels.hopper_forward import LOG2E, heads_side_by_side, round_up
from jax_impl.kernels.hopper_lists import Lists
from jax_impl.kernels.hopper_masks import Policy
from jax_impl.kernels.hopper_sparse_forward import ROWS
from jax_impl.kernels.hopper_sparse_keys import KeyGrid
from jax_impl.kernels.hopper_sparse_pairs import PairTiles, pairs_backward
from jax_impl.kernels.hopper_sparse_roles import RoleTiles, roles_backward
from jax_impl.kernels.hopper_statistics import statistics


@dataclasses.dataclass(frozen=True)
class SparseBackwardTiles:
    """The schedules.

    Attributes:
      pairs, roles: of the two kernels.
      l2_bytes: cache that the queries, douts and float32 dq of the heads side by side may take.
    """

    pairs: PairTiles = PairTiles()
    roles: RoleTiles = RoleTiles()
    l2_bytes: int = 32 << 20


def kv_heads_in_cache(q_len: int, kv_heads: int, head_dim: int, budget: int) -> int:
    """kv heads to run side by side, a divisor of them all: of each, one query head's q, dout and float32 dq is in use.

    Lists are met in no common order, so what is not in the cache comes from memory anew for every tile.
    """
    return heads_side_by_side(kv_heads, kv_heads, 8 * q_len * head_dim, budget)


def sparse_backward(
    q, k, v, dout, lse, delta, shared: Lists, apart: Lists | None, scale: float, tiles: SparseBackwardTiles, *,
    grad_dtype, dq_scale: float, dq_dtype, policy: Callable[[Lists], Policy] | None = None
):
    """dq, dk and dv over the listed pieces.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype, in the
        layout of the lists.
      lse, delta: float32 [batch, q_heads, whole pieces]; lse in base 2, +inf where empty or padded.
      shared, apart: rows are keys, in tiles of 128 and 64; pieces are of 64; one list a kv head or one for all.
      scale: not 0.
      grad_dtype: of dk and dv.
      dq_scale, dq_dtype: what the sum that is dq is multiplied by, and its dtype.
      policy: of given lists, what is asked of their pieces, and logits changed.

    Returns: dq [batch, whole pieces, q_heads, head_dim]; dk, dv [batch, whole tiles, kv_heads, head_dim].
    """
    batch, q_len, q_heads, dim = q.shape
    kv_heads, pieces, grad_dtype = k.shape[2], round_up(q_len, ROWS) // ROWS, jnp.dtype(grad_dtype)
    group = q_heads // kv_heads
    side = kv_heads_in_cache(q_len, kv_heads, dim, tiles.l2_bytes)

    def grid(lists: Lists) -> KeyGrid:
        return KeyGrid(batch, kv_heads, lists.tiles, group, side, lists.heads)

    dq = jax.new_ref(jnp.zeros((batch, q_heads * pieces, *register_shape(dim)), jnp.float32))
    asked = policy or (lambda lists: None)
    changed = policy is not None and policy(shared).changes_scores
    lse, delta = -lse if changed else -lse / (scale * LOG2E), -delta
    grouped = group > 1
    part = grad_dtype if grouped or apart is None else jnp.dtype(jnp.float32)
    grads = pairs_backward(q, k, v, dout, lse, delta, dq, shared, scale, tiles.pairs, grid(shared), grad_dtype=part,
                           policy=asked(shared))
    if apart is not None:
        rest = roles_backward(
            q, k, v, dout, statistics(None if changed else lse, delta), dq, apart, scale, tiles.roles, grid(apart),
            grad_dtype=grad_dtype, before=() if grouped else grads, policy=asked(apart), lse=lse)
        grads = [x.astype(jnp.float32) + y for x, y in zip(grads, rest, strict=True)] if grouped else rest
    if grouped:  # one pass over 16-bit parts costs less than sums in memory at the end of every thread block
        grads = [x.reshape(*x.shape[:2], kv_heads, group, dim).sum(axis=3, dtype=jnp.float32).astype(grad_dtype)
                 for x in grads]
    return by_token(dq[...], q_heads, dq_scale, dq_dtype), *grads
