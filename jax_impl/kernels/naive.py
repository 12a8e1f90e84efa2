"""naive: dense attention with a float32 softmax, the specification in jnp. O(q_len * kv_len) memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.base import Kernel
from workload.block_masks import BlockMask
from workload.capability import ALL_MASKS, Capability
from workload.masks import visible
from workload.problem import AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntervalOperands:
    """starts, ends: int32 [R, q_len]."""

    starts: jax.Array
    ends: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """A dynamic mask by token; block numbers count from 1, 0 is no block.

    q_block, kv_block: int32 [heads, q_len], [heads, kv_len]; limits: int32 [q_len], leading keys a row may see;
    bitmap: bool [heads, q_blocks + 1, kv_blocks + 1].
    """

    q_block: jax.Array
    kv_block: jax.Array
    limits: jax.Array
    bitmap: jax.Array


def prepare(problem: AttentionProblem, device=None) -> IntervalOperands | BlockOperands:
    """The mask's row intervals, or its blocks by token, on the device."""
    mask = problem.mask
    if isinstance(mask, BlockMask):
        bitmap = np.pad(mask.block_bitmap(), ((0, 0), (1, 0), (1, 0)))
        arrays = (mask.q_block_ids() + 1, mask.kv_block_ids() + 1, mask.limits, bitmap)
        return BlockOperands(*(jax.device_put(x, device) for x in arrays))
    return IntervalOperands(*(jax.device_put(x, device) for x in (mask.starts, mask.ends)))


def dense_mask(operands: IntervalOperands | BlockOperands, kv_len: int) -> jax.Array:
    """The element mask, bool [heads, q_len, kv_len]; heads is 1 for a static mask."""
    j = jnp.arange(kv_len)[None, :]
    if isinstance(operands, BlockOperands):
        head = jnp.arange(len(operands.bitmap))[:, None, None]
        listed = operands.bitmap[head, operands.q_block[:, :, None], operands.kv_block[:, None, :]]
        return listed & (j < operands.limits[:, None])
    return visible(operands.starts, operands.ends, jnp.arange(operands.starts.shape[1])[:, None], j)[None]


def _split(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, S, H, D] to float32 [B, kv_heads, group, S, D]."""
    b, s, h, d = q.shape
    return q.astype(jnp.float32).reshape(b, s, kv_heads, h // kv_heads, d).transpose(0, 2, 3, 1, 4)


def _join(x: jax.Array) -> jax.Array:
    """[B, kv_heads, group, S, D] to [B, S, H, D]."""
    b, hk, g, s, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, s, hk * g, d)


def _logits(q, k, operands, scale):
    seen = dense_mask(operands, k.shape[1])
    hk = k.shape[2]
    group = q.shape[2] // hk if seen.shape[0] == q.shape[2] else 1
    seen = seen.reshape(len(seen) // group, group, *seen.shape[1:])[None]
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
