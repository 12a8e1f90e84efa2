"""naive: dense attention with a float32 softmax, the specification in jnp. O(q_len * kv_len) memory."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_impl.kernels.base import Kernel
from workload.capability import ALL_MASKS, Capability
from workload.masks import visible
from workload.problem import AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntervalOperands:
    """starts, ends: int32 [R, q_len]."""

    starts: jax.Array
    ends: jax.Array


def prepare(problem: AttentionProblem, device=None) -> IntervalOperands:
    """The mask's row intervals on the device."""
    return IntervalOperands(*(jax.device_put(x, device) for x in (problem.mask.starts, problem.mask.ends)))


def _seen(operands: IntervalOperands, kv_len: int) -> jax.Array:
    """Dense mask, bool [1, q_len, kv_len]."""
    q_len = operands.starts.shape[1]
    return visible(operands.starts, operands.ends, jnp.arange(q_len)[:, None], jnp.arange(kv_len)[None, :])[None]


def _split(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, S, H, D] to float32 [B, kv_heads, group, S, D]."""
    b, s, h, d = q.shape
    return q.astype(jnp.float32).reshape(b, s, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)


def _join(x: jax.Array) -> jax.Array:
    """[B, kv_heads, group, S, D] to [B, S, H, D]."""
    b, hk, g, s, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, s, hk * g, d)


def _logits(q, k, operands, scale):
    seen = _seen(operands, k.shape[1])
    hk = k.shape[2]
    group = q.shape[2] // hk if seen.shape[0] == q.shape[2] else 1
    seen = seen.reshape(-1, group, *seen.shape[1:])[None]
    s = scale * jnp.einsum("bhgid,bjhd->bhgij", _split(q, hk), k.astype(jnp.float32), precision="highest")
    return jnp.where(seen, s, -jnp.inf)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    s = _logits(q, k, operands, scale)
    top = s.max(axis=-1, initial=-jnp.inf)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(s - top[..., None])
    total = weight.sum(axis=-1)
    some = total > 0
    p = weight / jnp.where(some, total, 1.0)[..., None]
    out = _join(jnp.einsum("bhgij,bjhd->bhgid", p, v.astype(jnp.float32), precision="highest"))
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    return out.astype(out_dtype or q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    s = _logits(q, k, operands, scale)
    lse = lse.reshape(s.shape[:4])
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])
    do = _split(dout, k.shape[2])
    if delta is None:
        delta = (do * _split(out, k.shape[2])).sum(axis=-1)
    dp = jnp.einsum("bhgid,bjhd->bhgij", do, v.astype(jnp.float32), precision="highest")
    ds = p * (dp - delta.reshape(lse.shape)[..., None])
    dq = _join(jnp.einsum("bhgij,bjhd->bhgid", ds, k.astype(jnp.float32), precision="highest")) * scale
    dk = jnp.einsum("bhgij,bhgid->bjhd", ds, _split(q, k.shape[2]), precision="highest") * scale
    dv = jnp.einsum("bhgij,bhgid->bjhd", p, do, precision="highest")
    return tuple(g.astype(grad_dtype or x.dtype) for g, x in ((dq, q), (dk, k), (dv, v)))


KERNEL = Kernel(
    "naive", Capability(ALL_MASKS, source="own, dense jnp"), prepare, forward, backward
)
