"""sdpa: jax.nn.dot_product_attention, its XLA implementation, under a dense mask. O(q_len * kv_len) memory.

jax.nn rounds the lse it returns to the input dtype, fills rows without keys with the mean of all values and takes
no lse from outside, so this file adds three things: its own float32 lse, zeros for empty rows, and gradients by
`jax.vjp` that honour the out and lse of a larger problem (`backward`).
"""

import contextlib

import jax
import jax.numpy as jnp

from jax_impl.kernels.base import Kernel
from jax_impl.kernels.naive import dense_mask, prepare
from workload.capability import ALL_MASKS, Capability
from workload.problem import PASSES


def _per_head(operands, q, k):
    """The dense mask as jax.nn takes it, bool [1, 1 or q_heads, q_len, kv_len]."""
    seen = dense_mask(operands, k.shape[1])
    if seen.shape[0] > 1:
        seen = jnp.repeat(seen, q.shape[2] // seen.shape[0], axis=0)
    return seen[None]


def _exact(dtype):
    """float32 products in float32: the default on a GPU would be TF32."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def _lse(q, k, seen, scale):
    """Natural-log lse, float32 [B, q_heads, q_len], of the same logits as jax.nn computes."""
    batch, q_len, heads, d = q.shape
    grouped = q.reshape(batch, q_len, k.shape[2], heads // k.shape[2], d)
    s = jnp.einsum("bthgd,bshd->bhgts", grouped, k, preferred_element_type=jnp.float32) * scale
    s = jnp.where(seen, s.reshape(batch, heads, q_len, -1), -jnp.inf)
    return jax.nn.logsumexp(s, axis=-1)


def _attend(q, k, v, seen, scale):
    """out with zeros in empty rows, and lse with -inf there."""
    if not seen.size:
        return jnp.zeros_like(q), jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
    some = seen.any(axis=-1)  # [1, 1 or q_heads, q_len]
    safe = seen | ~some[..., None]  # an empty row looks at everything, so that no gradient meets -inf
    with _exact(q.dtype):
        out = jax.nn.dot_product_attention(q, k, v, mask=safe, scale=scale, implementation="xla")
        lse = _lse(q, k, safe, scale)
    out = jnp.where(some.swapaxes(1, 2)[..., None], out, jnp.zeros_like(out))
    return out, jnp.where(some, lse, -jnp.inf)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; float32 out of half inputs is computed on inputs widened to float32."""
    dtype = out_dtype or q.dtype
    q, k, v = (x.astype(jnp.promote_types(x.dtype, dtype)) for x in (q, k, v))
    return _attend(q, k, v, _per_head(operands, q, k), scale)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv by jax.vjp; lse, out and delta may belong to a larger problem.

    With w = exp(own lse - lse), P of the larger problem is w P. As d(own lse)/dS = P, the cotangents w dout of
    out and w (rowsum(dout own_out) - delta) of the own lse make dS = w P (dout v^T - delta), as is wanted.
    """
    if delta is None:
        delta = jnp.einsum("bshd,bshd->bhs", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest")
    dtypes = [grad_dtype or x.dtype for x in (q, k, v)]
    q, k, v = (x.astype(jnp.promote_types(x.dtype, t)) for x, t in zip((q, k, v), dtypes, strict=True))
    seen = _per_head(operands, q, k)
    (own_out, own_lse), pull = jax.vjp(lambda q, k, v: _attend(q, k, v, seen, scale), q, k, v)
    weight = jnp.where(own_lse == -jnp.inf, 0.0, jnp.exp(own_lse - jnp.where(own_lse == -jnp.inf, 0.0, lse)))
    dout = dout.astype(jnp.float32)
    own_delta = jnp.einsum("bshd,bshd->bhs", own_out.astype(jnp.float32), dout, precision="highest")
    d_out = weight.swapaxes(1, 2)[..., None] * dout
    grads = pull((d_out.astype(own_out.dtype), weight * (own_delta - delta)))
    return tuple(g.astype(t) for g, t in zip(grads, dtypes, strict=True))


class SdpaCapability(Capability):
    """The base's checks, and XLA's own: no float16 product with float32 sums on a CPU."""

    def refuse(self, problem, passes=PASSES):
        """Why XLA cannot take this problem here, naming the argument; None where it can."""
        if problem.dtype == "float16" and jax.default_backend() == "cpu":
            return "does not take dtype float16 on a CPU"
        return super().refuse(problem, passes)


KERNEL = Kernel(
    "sdpa",
    SdpaCapability(ALL_MASKS, source=f"jax.nn.dot_product_attention (xla), jax {jax.__version__}; lse of our own"),
    prepare,
    forward,
    backward,
)
