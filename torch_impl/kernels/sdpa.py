"""sdpa: torch's scaled_dot_product_attention under a dense mask. O(q_len * kv_len) memory.

The public function hides its lse, so this calls the operators it dispatches to for a dense mask: memory-efficient
attention on a GPU, the CPU flash kernel on a CPU. Both recompute rowsum(out * dout) in their backward from the out
they are handed, so the out and lse of a larger problem serve as well as their own. On a CPU half inputs are widened
to float32 first: the CPU kernel's own half form takes a coarse exponential (lse off by 4e-6, relatively).
"""

import dataclasses

import torch

from torch_impl.kernels import naive
from torch_impl.kernels.base import Kernel
from workload.capability import ALL_MASKS, Capability
from workload.problem import AttentionProblem

aten = torch.ops.aten
KEY_UNIT = 16  # the GPU operator wants the bias' strides in units of 16 elements
ROW_UNIT = 64  # its backward computes with whatever lies between q_len and the next 64 rows: we put zeros there


@dataclasses.dataclass(frozen=True)
class SdpaOperands:
    """A mask as the operators take it.

    Attributes:
      bias: [1, heads, rows, keys], 0 or -inf; q_len and kv_len are rounded up to ROW_UNIT and KEY_UNIT, and an
        empty row is all 0.
      some: bool [1, heads, q_len], rows with keys.
    """

    bias: torch.Tensor
    some: torch.Tensor


def prepare(problem: AttentionProblem, device=None) -> SdpaOperands:
    """The mask as an additive bias in the problem's dtype, on the device."""
    seen = naive.dense_mask(naive.prepare(problem, device), problem.kv_len)
    some = seen.any(dim=-1)
    seen |= ~some[..., None]  # an empty row looks at everything, so that no softmax meets only -inf
    dtype = getattr(torch, problem.dtype)
    rows, keys = (n + -n % unit for n, unit in ((problem.q_len, ROW_UNIT), (problem.kv_len, KEY_UNIT)))
    bias = torch.zeros(seen.shape[0], rows, keys, dtype=dtype, device=device)
    bias[:, : problem.q_len, : problem.kv_len].masked_fill_(~seen, -torch.inf)
    return SdpaOperands(bias[None], some[None])


def _per_head(x: torch.Tensor, q_heads: int) -> torch.Tensor:
    """x [1, heads, ...] with one entry a query head, or with its one head left to broadcast."""
    return x if x.shape[1] == 1 else x.repeat_interleave(q_heads // x.shape[1], dim=1)


def _working(q: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype to compute in, for results in `wanted` or q's own."""
    return wanted or q.dtype if q.is_cuda else torch.promote_types(q.dtype, torch.float32)


def _arguments(q, k, v, operands, dtype):
    """q, k, v as [B, q_heads, S, D] in dtype, the bias for each of them, and the rows with keys."""
    b, q_len, heads, _ = q.shape
    group = heads // k.shape[2]
    q, k, v = (naive.whole_rows(x.to(dtype)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    bias = _per_head(operands.bias, heads).to(dtype)[:, :, :q_len, : k.shape[2]].expand(b, heads, -1, -1)
    return q, k, v, bias, _per_head(operands.some, heads)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; a float32 out of half inputs is computed on inputs widened to float32."""
    if not q.shape[1] or not k.shape[1]:
        return naive.unseen(q, out_dtype)
    dtype = _working(q, out_dtype)
    qt, kt, vt, bias, some = _arguments(q, k, v, operands, dtype)
    if q.is_cuda:
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(qt, kt, vt, bias, True, scale=scale)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(qt, kt, vt, attn_mask=bias, scale=scale)
    out = out.masked_fill(~some[..., None], 0.0).transpose(1, 2)
    return out.to(out_dtype or q.dtype), lse[..., : q.shape[1]].float().masked_fill(~some, -torch.inf)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is what the operator makes of them."""
    del delta  # rowsum(out * dout) by contract: recomputed from the two
    wants = [grad_dtype or x.dtype for x in (q, k, v)]
    if not q.shape[1] or not k.shape[1]:
        return tuple(torch.zeros_like(x, dtype=t) for x, t in zip((q, k, v), wants, strict=True))
    dtype = _working(q, grad_dtype)
    rows = (0, -q.shape[1] % ROW_UNIT) if q.is_cuda else (0, 0)
    # The GPU operator reads out as [B, S, H, D] rows whatever its strides say: hand it nothing else.
    padded = lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, *rows)).contiguous()  # noqa: E731
    qt, kt, vt, bias, some = _arguments(padded(q), k, v, operands, dtype)
    out, dout = (padded(x.to(dtype)).transpose(1, 2) for x in (out, dout))
    lse = lse.masked_fill(~some, torch.inf)  # exp(s - inf) is 0: an empty row adds nothing
    if q.is_cuda:
        lse = torch.nn.functional.pad(lse, rows, value=torch.inf)
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dout, qt, kt, vt, bias, out, lse, seed, seed, 0.0, [True, True, True, False], scale=scale)
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, qt, kt, vt, out, lse, 0.0, False, attn_mask=bias, scale=scale)
    group = q.shape[2] // k.shape[2]
    if group > 1:
        dk, dv = (x.unflatten(1, (-1, group)).sum(dim=2, dtype=torch.float32) for x in (dk, dv))
    dq = dq[:, :, : q.shape[1]]
    return tuple(x.transpose(1, 2).to(t) for x, t in zip((dq, dk, dv), wants, strict=True))


KERNEL = Kernel(
    "sdpa",
    Capability(ALL_MASKS, source=f"torch {torch.__version__}: memory-efficient attention (GPU), CPU flash attention"),
    prepare,
    forward,
    backward,
)
