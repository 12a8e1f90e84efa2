"""Which blocks a dynamic mask keeps, chosen on the device; its twin is torch_impl/selection.py.

Both stacks keep the same blocks on equal scores, ties to the lower index: top-k sorts, and top-p sums softmax weights
in fixed point, where no rounding depends on a library's exp or on the order of a sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from workload.selection import check_mass, check_pooled, check_slots, fixed_point_weights


def pooled_scores(q, k, q_bounds: np.ndarray, kv_bounds: np.ndarray) -> jax.Array:
    """Mean-pooled q . mean-pooled k, scaled as logits, averaged over the batch and the query heads of a mask.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k: [batch, kv_len, kv_heads, head_dim].
      q_bounds, kv_bounds: int32 [heads, blocks + 1]; heads is 1, kv_heads or q_heads.

    Returns: float32 [heads, q_blocks, kv_blocks].
    """
    check_pooled(q, k, q_bounds, kv_bounds)
    heads, (batch, _, q_heads, dim), kv_heads = len(q_bounds), q.shape, k.shape[2]
    if heads > kv_heads:
        k = jnp.repeat(k, heads // kv_heads, axis=2)
    q, k = _pooled(q, q_bounds), _pooled(k, kv_bounds)
    k = jnp.repeat(k, q_heads // k.shape[2], axis=2)
    scores = jnp.einsum("bqhd,bkhd->hqk", q, k, precision=lax.Precision.HIGHEST)
    return scores.reshape(heads, q_heads // heads, *scores.shape[1:]).mean(axis=1) * (dim**-0.5 / batch)


def _pooled(x, bounds: np.ndarray) -> jax.Array:
    """Mean over the tokens of each block: [batch, seq, n, d] to float32 [batch, blocks, n, d]; 0 for an empty block."""
    sizes = np.diff(bounds)
    token = bounds[:, :-1, None] + np.arange(max(1, sizes.max()))
    inside = np.arange(token.shape[2]) < sizes[:, :, None]

    def one_head(head):
        mine, at, held, size = head
        return (mine[:, at].astype(jnp.float32) * held[None, :, :, None, None]).sum(axis=2) / size[None, :, None, None]

    mine = jnp.moveaxis(x.reshape(*x.shape[:2], len(bounds), -1, x.shape[3]), 2, 0)
    arrays = (np.where(inside, token, 0).astype(np.int32), inside, np.maximum(sizes, 1).astype(np.float32))
    out = lax.map(one_head, (mine, *(jnp.asarray(a) for a in arrays)))
    return jnp.moveaxis(out, 0, 2).reshape(x.shape[0], sizes.shape[1], x.shape[2], x.shape[3])


def top_k(scores, k: int, allowed=None) -> tuple[jax.Array, jax.Array]:
    """The k best allowed key blocks of each query block, ties to the lower index.

    Args:
      scores: float32 [heads, q_blocks, kv_blocks].
      allowed: bool, broadcast to scores; all by default.

    Returns: counts int32 [heads, q_blocks] and ascending indices int32 [heads, q_blocks, k], zero after counts.
    ValueError where k is not within 1..kv_blocks.
    """
    scores, allowed = _open(scores, allowed)
    k, order = check_slots(k, scores.shape[2]), _order(scores, allowed)
    chosen = jnp.put_along_axis(jnp.zeros_like(allowed), order[:, :, :k], True, axis=2, inplace=False)
    return lists(chosen & allowed, k)


def top_p(scores, p: float, allowed=None) -> tuple[jax.Array, jax.Array]:
    """The smallest set of allowed key blocks of each query block whose softmax mass reaches p, ties to the lower index.

    Masses are in units of 2 ** -17 of the row's largest. Arguments and results as of `top_k`, with kv_blocks slots.
    """
    check_mass("p", p)
    scores, allowed = _open(scores, allowed)
    steps, table, limit = fixed_point_weights()
    top = jnp.where(allowed, scores, -jnp.inf).max(axis=2, keepdims=True)
    below = jnp.clip(jnp.round((top - scores) * steps), 0, limit).astype(jnp.int32)
    weight = jnp.asarray(table)[below % len(table)] >> (below // len(table))
    weight = jnp.where(allowed, weight, 0)
    order = _order(scores, allowed)
    sorted_weight = jnp.take_along_axis(weight, order, axis=2)
    before = jnp.cumsum(sorted_weight, axis=2) - sorted_weight
    total = weight.sum(axis=2, keepdims=True)
    kept = before.astype(jnp.float32) < total.astype(jnp.float32) * jnp.float32(p)
    chosen = jnp.put_along_axis(jnp.zeros_like(allowed), order, kept, axis=2, inplace=False)
    return lists(chosen & allowed, scores.shape[2])


def lists(chosen, slots: int) -> tuple[jax.Array, jax.Array]:
    """counts and ascending, zero-padded indices of a bool [heads, q_blocks, kv_blocks] picture."""
    counts = chosen.sum(axis=2, dtype=jnp.int32)
    order = jnp.argsort(~chosen, axis=2, stable=True)[:, :, :slots].astype(jnp.int32)
    return counts, jnp.where(jnp.arange(slots) < counts[:, :, None], order, 0)


def _open(scores, allowed):
    scores = jnp.asarray(scores, jnp.float32)
    return scores, jnp.broadcast_to(True if allowed is None else jnp.asarray(allowed), scores.shape)


def _order(scores, allowed):
    return jnp.argsort(jnp.where(allowed, -scores, jnp.inf), axis=2, stable=True)
