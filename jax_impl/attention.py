"""The public attention call of the JAX stack; its twin is torch_impl/attention.py."""

import functools
from typing import Any

import jax
import numpy as np

from jax_impl import kernels
from jax_impl.once import once_differentiable
from workload.errors import Unsupported
from workload.problem import AttentionProblem, check_operands


def attention(q, k, v, mask, *, kernel: str = "naive", scale: float | None = None, **options):
    """Attention under a mask, differentiable in q, k and v.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim], one dtype.
      mask: an `IntervalMask` or `BlockMask` of (q_len, kv_len). Windows are inclusive, causal is
        bottom-right aligned.
      kernel: a name of `jax_impl.kernels.NAMES`.
      scale: logit scale, head_dim ** -0.5 by default.
      options: those of the kernel's `prepare`.

    Returns: out as q, and lse float32 [batch, q_heads, q_len], natural log. An empty row gives out 0
    and lse -inf. Gradients flow through out; lse is a constant to differentiation. Inside jit, the mask's data are
    constants of the program. Batch and heads that are split over devices are a `jax.shard_map` of the caller's around
    the call, with check_vma=False for kernels of Pallas.

    Raises: `Unsupported` where the kernel cannot take the problem, ValueError on shapes that disagree, TypeError on
      operands that are no tensors of this stack and on options that the kernel does not have.
    """
    problem = problem_of(q, k, v, mask, scale)
    chosen = kernels.get(kernel)
    chosen.require(problem, ("forward",))
    chosen.require_options(options)
    with jax.ensure_compile_time_eval():  # of the mask alone, also where a training step is traced
        operands = chosen.prepare(problem, **options)
    out, lse = attend(kernel, problem.scale, q, k, v, operands)
    return out, jax.lax.stop_gradient(lse)


def problem_of(q, k, v, mask, scale: float | None = None) -> AttentionProblem:
    """The `AttentionProblem` of these operands; ValueError naming the operand whose shape or dtype disagrees."""
    check_operands((jax.Array, np.ndarray), q=q, k=k, v=v)
    problem = AttentionProblem(mask, q.shape[0], q.shape[2], k.shape[2], q.shape[3], str(q.dtype), scale)
    for name, x, want in (("q", q, problem.q_shape), ("k", k, problem.kv_shape), ("v", v, problem.kv_shape)):
        if tuple(x.shape) != want:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, the problem's is {want}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {x.dtype}, q has {q.dtype}")
    return problem


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(kernel: str, scale: float, q, k, v, operands: Any):
    """out, lse of a kernel on operands it prepared; differentiable in q, k, v through out."""
    return kernels.get(kernel).forward(q, k, v, operands, scale)


def _attend_forward(kernel, scale, q, k, v, operands):
    out, lse = attend(kernel, scale, q, k, v, operands)
    return (out, lse), (q, k, v, out, lse, operands)


def _attend_backward(kernel, scale, saved, cotangents):
    *tensors, operands = saved
    q, k, v, out, lse, dout = once_differentiable((*tensors, cotangents[0]))
    backward = kernels.get(kernel).backward
    if backward is None:
        raise Unsupported(f"jax kernel {kernel}", "has no backward pass")
    dq, dk, dv = backward(q, k, v, out, lse, dout, operands, scale)
    return dq, dk, dv, None


attend.defvjp(_attend_forward, _attend_backward)
