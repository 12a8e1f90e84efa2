"""The public attention call of the PyTorch stack; its twin is jax_impl/attention.py."""

from typing import Any

import torch

from torch_impl import kernels
from torch_impl.autocast import without_autocast
from torch_impl.once import once_differentiable
from workload.errors import Unsupported
from workload.problem import AttentionProblem, check_operands


@torch.compiler.disable
def attention(q, k, v, mask, *, kernel: str = "naive", scale: float | None = None, **options):
    """Attention under a mask, differentiable in q, k and v.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim], one dtype and device.
      mask: an `IntervalMask` or `BlockMask` of (q_len, kv_len). Windows are inclusive, causal is
        bottom-right aligned.
      kernel: a name of `torch_impl.kernels.NAMES`.
      scale: logit scale, head_dim ** -0.5 by default.
      options: those of the kernel's `prepare`.

    Returns: out as q, and lse float32 [batch, q_heads, q_len], natural log. An empty row gives out 0
    and lse -inf. Gradients flow through out; lse is a constant to differentiation. `torch.autocast` changes nothing,
    `torch.compile` leaves the call as it is.

    Raises: `Unsupported` where the kernel cannot take the problem, ValueError on shapes that disagree, TypeError on
      operands that are no tensors of this stack and on options that the kernel does not have.
    """
    problem = problem_of(q, k, v, mask, scale)
    chosen = kernels.get(kernel)
    chosen.require(problem, ("forward",))
    chosen.require_options(options)
    return attend(kernel, problem.scale, q, k, v, chosen.prepare(problem, q.device, **options))


def problem_of(q, k, v, mask, scale: float | None = None) -> AttentionProblem:
    """The `AttentionProblem` of these operands; ValueError naming the operand whose shape or dtype disagrees."""
    check_operands((torch.Tensor,), q=q, k=k, v=v)
    dtype = str(q.dtype).removeprefix("torch.")
    problem = AttentionProblem(mask, q.shape[0], q.shape[2], k.shape[2], q.shape[3], dtype, scale)
    for name, x, want in (("q", q, problem.q_shape), ("k", k, problem.kv_shape), ("v", v, problem.kv_shape)):
        if tuple(x.shape) != want:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, the problem's is {want}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: {x.dtype} on {x.device}, q has {q.dtype} on {q.device}")
    return problem


@torch.compiler.disable
def attend(kernel: str, scale: float, q, k, v, operands: Any):
    """out, lse of a kernel on operands it prepared; differentiable in q, k, v through out."""
    return _Attend.apply(kernel, scale, q, k, v, operands)


class _Attend(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, kernel, scale, q, k, v, operands):
        out, lse = kernels.get(kernel).forward(q, k, v, operands, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, scale, operands
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, dout, _):
        kernel, scale, operands = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        backward = kernels.get(kernel).backward
        if backward is None:
            raise Unsupported(f"torch kernel {kernel}", "has no backward pass")
        dq, dk, dv = backward(q, k, v, out, lse, dout, operands, scale)
        return None, None, dq, dk, dv, None
