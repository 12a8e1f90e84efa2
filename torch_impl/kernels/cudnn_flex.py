"""cudnn_flex: the flex_attention of nvidia-cudnn-frontend, whose masks are row intervals: all static masks."""

import dataclasses
from typing import Any

import numpy as np
import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.fa2 import require_own_dtypes
from torch_impl.kernels.fakes import compile_on_fakes
from torch_impl.kernels.packages import installed, on_hopper, package
from workload.capability import ALL_STATIC, HALF, Capability
from workload.masks import IntervalMask
from workload.problem import AttentionProblem

NAME = "cudnn_flex"
PACKAGE = "cudnn.flex_attention"


@dataclasses.dataclass(frozen=True)
class PlanOperands:
    """The package's reusable plan of a mask, made for one set of shapes."""

    plan: Any


def endpoints(mask: IntervalMask) -> np.ndarray:
    """A mask's rows as ascending endpoints F, int32 [n, q_len], n odd: keys [0, F0), [F1, F2), ... are visible.

    The leading interval takes the first of ours where it begins at key 0 in every row that has one.

    >>> from workload.masks import causal, causal_sliding_window
    >>> endpoints(causal(2, 3)).tolist(), endpoints(causal_sliding_window(2, 3, 0)).tolist()
    ([[2, 3]], [[0, 0], [1, 2], [2, 3]])
    """
    pairs = [x[r] for r in range(mask.intervals) for x in (mask.starts, mask.ends)]
    some = mask.ends[0] > mask.starts[0]
    if (mask.starts[0][some] == 0).all():
        return np.stack([np.where(some, mask.ends[0], 0), *pairs[2:]]).astype(np.int32)
    return np.stack([np.zeros_like(pairs[0]), *pairs]).astype(np.int32)


def prepare(problem: AttentionProblem, device=None) -> PlanOperands:
    """The plan on the device, backward included; the package reads shapes and strides off contiguous samples."""
    dtype = getattr(torch, problem.dtype)
    q, k, v = (torch.empty(s, dtype=dtype, device=device) for s in (problem.q_shape, *[problem.kv_shape] * 2))
    rows = np.tile(endpoints(problem.mask), problem.batch)
    rows = torch.as_tensor(rows, device=device)[None]
    return PlanOperands(package(NAME, PACKAGE).create_mask_plan(rows, q, k, v, build_backward=True))


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    execution = package(NAME, f"{PACKAGE}.execution")
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse, _ = execution._flex_attention_forward(
        q, k, v, mask_plan=operands.plan, softmax_scale=scale, return_lse=True)
    return out, lse


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's.
    """
    del delta  # rowsum(out * dout) by contract: the package makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    execution = package(NAME, f"{PACKAGE}.execution")
    q, k, v, out, dout = (x.contiguous() for x in (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
    grads = execution._flex_attention_backward(
        q, k, v, out, dout, lse.contiguous(), mask_plan=operands.plan, softmax_scale=scale)
    return tuple(grads)


def available() -> str | None:
    """Why it cannot run here."""
    return on_hopper() or installed(PACKAGE)


KERNEL = Kernel(
    NAME,
    Capability(ALL_STATIC, dtypes=HALF, head_dims=tuple(range(8, 129, 8)), positive_scale=True,
               source="nvidia-cudnn-frontend: cudnn.flex_attention, row-interval masks"),
    prepare,
    forward,
    backward,
    available,
    compile_ahead=compile_on_fakes(prepare, forward, backward),
)
