"""Merging partial attention results over disjoint keys; its twin is torch_impl/context_parallel/merge.py.

With parts (o_i, l_i): l = log sum exp(l_i), o = sum exp(l_i - l) o_i. Associative and commutative, with (0, -inf) as
identity. The maximum is taken out first and guarded, since -inf - (-inf) is NaN (two empty parts) and exp of a large
difference overflows.
"""

import jax
import jax.numpy as jnp

Part = tuple[jax.Array, jax.Array]


def empty(q) -> Part:
    """The identity of `merge` for queries [batch, rows, heads, head_dim]: out 0, lse -inf."""
    batch, rows, heads, _ = q.shape
    return jnp.zeros(q.shape, jnp.float32), jnp.full((batch, heads, rows), -jnp.inf, jnp.float32)


def merge(a: Part, b: Part) -> Part:
    """The result over the keys of both parts.

    Args:
      a, b: (out [batch, rows, heads, head_dim], lse [batch, heads, rows]), both float32; an empty row is (0, -inf).

    >>> import jax.numpy as jnp
    >>> empty = (jnp.zeros((1, 1, 1, 1)), jnp.full((1, 1, 1), -jnp.inf))
    >>> seen = (jnp.full((1, 1, 1, 1), 7.0), jnp.zeros((1, 1, 1)))
    >>> out, lse = merge(empty, seen)
    >>> out.item(), lse.item()
    (7.0, 0.0)
    """
    out_a, lse_a = a
    out_b, lse_b = b
    top = jnp.maximum(lse_a, lse_b)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out = out_a * _by_row(weight_a / safe) + out_b * _by_row(weight_b / safe)
    return out, jnp.where(some, top + jnp.log(safe), -jnp.inf)


def _by_row(weight: jax.Array) -> jax.Array:
    """[batch, heads, rows] to [batch, rows, heads, 1]."""
    return weight.transpose(0, 2, 1)[..., None]
