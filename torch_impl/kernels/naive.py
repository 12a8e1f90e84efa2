"""naive: dense attention with a float32 softmax, the specification in torch. O(q_len * kv_len) memory."""

import dataclasses

import numpy as np
import torch

from torch_impl.kernels.base import Kernel
from workload.block_masks import BlockMask
from workload.capability import ALL_MASKS, Capability
from workload.masks import visible
from workload.problem import AttentionProblem


@dataclasses.dataclass(frozen=True)
class IntervalOperands:
    """starts, ends: int32 [R, q_len]."""

    starts: torch.Tensor
    ends: torch.Tensor


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """A dynamic mask by token; block numbers count from 1, 0 is no block.

    q_block, kv_block: int32 [heads, q_len], [heads, kv_len]; limits: int32 [q_len], leading keys a row may see;
    bitmap: bool [heads, q_blocks + 1, kv_blocks + 1].
    """

    q_block: torch.Tensor
    kv_block: torch.Tensor
    limits: torch.Tensor
    bitmap: torch.Tensor


def prepare(problem: AttentionProblem, device=None) -> IntervalOperands | BlockOperands:
    """The mask's row intervals, or its blocks by token, on the device."""
    mask = problem.mask
    if isinstance(mask, BlockMask):
        bitmap = np.pad(mask.block_bitmap(), ((0, 0), (1, 0), (1, 0)))
        arrays = (mask.q_block_ids() + 1, mask.kv_block_ids() + 1, mask.limits, bitmap)
        return BlockOperands(*(torch.as_tensor(x, device=device) for x in arrays))
    return IntervalOperands(*(torch.as_tensor(x, device=device) for x in (mask.starts, mask.ends)))


def dense_mask(operands: IntervalOperands | BlockOperands, kv_len: int) -> torch.Tensor:
    """The element mask, bool [heads, q_len, kv_len]; heads is 1 for a static mask."""
    if isinstance(operands, BlockOperands):
        j = torch.arange(kv_len, device=operands.limits.device)[None, :]
        head = torch.arange(len(operands.bitmap), device=j.device)[:, None, None]
        listed = operands.bitmap[head, operands.q_block[:, :, None], operands.kv_block[:, None, :]]
        return listed & (j < operands.limits[:, None])
    j = torch.arange(kv_len, device=operands.starts.device)[None, :]
    i = torch.arange(operands.starts.shape[1], device=j.device)[:, None]
    return visible(operands.starts, operands.ends, i, j)[None]


def unseen(q: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries give that see no key: out 0 of `dtype` (q's by default), lse -inf float32 [batch, heads, rows]."""
    batch, rows, heads, _ = q.shape
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
    return torch.zeros_like(q, dtype=dtype), lse


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied where a head's components do not lie side by side: operators behind public functions do not ask."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _split(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, S, H, D] to float32 [B, kv_heads, group, S, D]."""
    b, s, h, d = q.shape
    return q.float().reshape(b, s, kv_heads, h // kv_heads, d).permute(0, 2, 3, 1, 4)


def _join(x: torch.Tensor) -> torch.Tensor:
    """[B, kv_heads, group, S, D] to [B, S, H, D]."""
    b, hk, g, s, d = x.shape
    return x.permute(0, 3, 1, 2, 4).reshape(b, s, hk * g, d)


def _logits(q, k, operands, scale):
    seen = dense_mask(operands, k.shape[1])
    hk = k.shape[2]
    group = q.shape[2] // hk if seen.shape[0] == q.shape[2] else 1
    seen = seen.reshape(len(seen) // group, group, *seen.shape[1:])[None]
    s = scale * torch.einsum("bhgid,bjhd->bhgij", _split(q, hk), k.float())
    return s.masked_fill(~seen, -torch.inf)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    s = _logits(q, k, operands, scale)
    top = s.amax(dim=-1) if k.shape[1] else s.sum(dim=-1) - torch.inf
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(s - top[..., None])
    total = weight.sum(dim=-1)
    some = total > 0
    p = weight / torch.where(some, total, 1.0)[..., None]
    out = _join(torch.einsum("bhgij,bjhd->bhgid", p, v.float()))
    lse = torch.where(some, top + torch.log(torch.where(some, total, 1.0)), -torch.inf)
    return out.to(out_dtype or q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    s = _logits(q, k, operands, scale)
    lse = lse.reshape(s.shape[:4])
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    do = _split(dout, k.shape[2])
    if delta is None:
        delta = (do * _split(out, k.shape[2])).sum(dim=-1)
    dp = torch.einsum("bhgid,bjhd->bhgij", do, v.float())
    ds = p * (dp - delta.reshape(lse.shape)[..., None])
    dq = _join(torch.einsum("bhgij,bjhd->bhgid", ds, k.float())) * scale
    dk = torch.einsum("bhgij,bhgid->bjhd", ds, _split(q, k.shape[2])) * scale
    dv = torch.einsum("bhgij,bhgid->bjhd", p, do)
    return tuple(g.to(grad_dtype or x.dtype) for g, x in ((dq, q), (dk, k), (dv, v)))


KERNEL = Kernel(
    "naive", Capability(ALL_MASKS, source="own, dense torch"), prepare, forward, backward
)
