"""Block-sparse backward pass on Hopper, host side: what pairs of key tiles see together, then what each sees alone.

Both kernels hold dk and dv in registers and add dq to float32 memory by TMA, five products a tile. At tiles of 64 keys
those additions are what the cache can just bear; what two tiles see together (hopper_sparse_pairs.py) takes half as
many, what a tile sees alone (hopper_sparse_roles.py) all of them. Blocks of 128 are seen together throughout.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

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
      l2_bytes: cache that the queries, douts and float32 dq of the heads side by side, or of a range, may take.
      whole_bytes: a head whose queries, douts and dq take more is walked in ranges.
    """

    pairs: PairTiles = PairTiles()
    roles: RoleTiles = RoleTiles()
    l2_bytes: int = 32 << 20
    whole_bytes: int = 64 << 20


def _head_bytes(q_len: int, head_dim: int) -> int:
    """Of a query head's queries, douts and float32 dq."""
    return 8 * q_len * head_dim


def kv_heads_in_cache(q_len: int, kv_heads: int, head_dim: int, budget: int) -> int:
    """kv heads to run side by side, a divisor of them all: of each, one query head's q, dout and float32 dq is in use.

    Lists are met in no common order, so what is not in the cache comes from memory anew for every tile.
    """
    return heads_side_by_side(kv_heads, kv_heads, _head_bytes(q_len, head_dim), budget)


def ranges_in_cache(q_len: int, head_dim: int, tiles: SparseBackwardTiles) -> int:
    """Ranges of a long head's queries, none of which has more than fits where tokens stay where they are.

    Thread blocks begin together and drift apart, in some heads' time as far as a head is long. Ranks that share a
    program have equally many queries, whatever their blocks are, and so equally many ranges.
    """
    held = _head_bytes(q_len, head_dim)
    return 1 if held <= tiles.whole_bytes else -(-held // tiles.l2_bytes)


def sparse_backward(
    q, k, v, dout, lse, delta, shared: tuple[Lists, ...], apart: tuple[Lists, ...] | None, scale: float,
    tiles: SparseBackwardTiles, *, grad_dtype, dq_scale: float, dq_dtype,
    policy_of: Callable[[Lists], Policy] | None = None
):
    """dq, dk and dv over the listed pieces.

    Args:
      q, dout: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; one 16-bit dtype, in the
        layout of the lists.
      lse, delta: float32 [batch, q_heads, whole pieces]; lse in base 2, +inf where empty or padded.
      shared, apart: of each range of queries; rows are keys, in tiles of 128 and 64; pieces are of 64; one list a kv
        head or one for all.
      scale: not 0.
      grad_dtype: of dk and dv.
      dq_scale, dq_dtype: what the sum that is dq is multiplied by, and its dtype.
      policy_of: what is asked of given lists' pieces, and logits changed.

    Returns: dq [batch, whole pieces, q_heads, head_dim]; dk, dv [batch, whole tiles, kv_heads, head_dim].
    """
    batch, q_len, q_heads, dim = q.shape
    kv_heads, pieces, grad_dtype = k.shape[2], round_up(q_len, ROWS) // ROWS, jnp.dtype(grad_dtype)
    group = q_heads // kv_heads
    side = kv_heads_in_cache(q_len, kv_heads, dim, tiles.l2_bytes)

    def grid(lists: Lists) -> KeyGrid:
        return KeyGrid(batch, kv_heads, lists.tiles, group, side, lists.heads)

    dq = jax.new_ref(jnp.zeros((batch, q_heads * pieces, *register_shape(dim)), jnp.float32))
    asked = policy_of or (lambda lists: None)
    changed = policy_of is not None and policy_of(shared[0]).changes_scores
    lse, delta = -lse if changed else -lse / (scale * LOG2E), -delta
    added = group > 1 or len(shared) > 1  # parts: one pass over them costs less than sums in memory by thread blocks
    part = grad_dtype if added or apart is None else jnp.dtype(jnp.float32)
    # Jitted, they are traced and lowered once for all ranges.
    together = jax.jit(functools.partial(
        pairs_backward, scale=scale, tiles=tiles.pairs, grid=grid(shared[0]), grad_dtype=part))
    alone = apart and jax.jit(functools.partial(
        roles_backward, scale=scale, tiles=tiles.roles, grid=grid(apart[0]), grad_dtype=grad_dtype))
    vectors = statistics(None if changed else lse, delta) if alone else None
    total: list[jax.Array] = []
    for n, lists in enumerate(shared):
        if total:  # so that parts have been added, and their memory is free, before those of the next range are made
            lists, total = lax.optimization_barrier((lists, total))
        grads = together(q, k, v, dout, lse, delta, dq, lists, policy=asked(lists))
        if alone:
            rest = alone(q, k, v, dout, vectors, dq, apart[n], before=() if added else grads, policy=asked(apart[n]),
                         lse=lse)
            grads = [x.astype(jnp.float32) + y for x, y in zip(grads, rest, strict=True)] if added else rest
        if added:
            grads = [x.reshape(*x.shape[:2], kv_heads, group, dim).sum(axis=3, dtype=jnp.float32) for x in grads]
            grads = total = [x + y for x, y in zip(total, grads, strict=True)] if total else grads
    return by_token(dq[...], q_heads, dq_scale, dq_dtype), *(x.astype(grad_dtype) for x in grads)
