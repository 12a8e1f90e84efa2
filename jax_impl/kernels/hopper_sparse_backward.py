"""Block-sparse backward pass on Hopper, host side: what pairs of key tiles see together, then what each sees alone.

Both kernels hold dk and dv in registers and add dq to float32 memory by TMA, five products a tile. At tiles of 64 keys
those additions are what the cache can just bear; what two tiles see together (hopper_sparse_pairs.py) takes half as
many, what a tile sees alone (hopper_sparse_roles.py) all of them. Blocks of 128 are seen together throughout.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jax_impl.kernels.hopper_add import natural, register_shape
from jax_impl.kernels.hopper_forward import heads_side_by_side, round_up
from jax_impl.kernels.hopper_lists import Lists
from jax_impl.kernels.hopper_sparse_forward import ROWS
from jax_impl.kernels.hopper_sparse_pairs import PairTiles, pairs_backward
from jax_impl.kernels.hopper_sparse_roles import RoleTiles, roles_backward


@dataclasses.dataclass(frozen=True)
class SparseBackwardTiles:
    """The schedules, and how much cache the queries, douts and float32 dq of the heads side by side may take."""

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
    grad_dtype
):
    """dq (not yet scaled), dk and dv over the listed pieces.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype, in the
        layout of the lists.
      lse, delta: float32 [batch, q_heads, whole pieces]; lse in base 2, +inf where empty or padded.
      shared, apart: rows are keys, in tiles of 128 and 64; pieces are of 64; one list a kv head or one for all.
      scale: not 0.
      grad_dtype: of dk and dv.

    Returns: dq float32 [batch, whole pieces, q_heads, head_dim]; dk, dv [batch, whole tiles, kv_heads, head_dim].
    """
    batch, q_len, q_heads, dim = q.shape
    pieces, grad_dtype = round_up(q_len, ROWS) // ROWS, jnp.dtype(grad_dtype)
    side = kv_heads_in_cache(q_len, k.shape[2], dim, tiles.l2_bytes)
    dq = jax.new_ref(jnp.zeros((batch, q_heads * pieces, *register_shape(dim)), jnp.float32))
    arrays = (q, k, v, dout, lse, delta, dq)
    part = grad_dtype if apart is None else jnp.dtype(jnp.float32)
    grads = pairs_backward(*arrays, shared, scale, tiles.pairs, side, grad_dtype=part)
    if apart is not None:
        grads = roles_backward(*arrays, apart, grads, scale, tiles.roles, side, grad_dtype=grad_dtype)
    dq = natural(dq[...]).reshape(batch, q_heads, pieces * ROWS, dim)
    return dq.swapaxes(1, 2), *grads
