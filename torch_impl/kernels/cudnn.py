"""cudnn: scaled_dot_product_attention pinned to cuDNN, on the masks that it takes without a dense bias.

Calls the operator that SDPBackend.CUDNN_ATTENTION dispatches to, since the public function hides its lse. cuDNN
through torch aligns a causal mask with the first key, so causal is taken where q_len equals kv_len.
"""

import dataclasses
from collections.abc import Iterable

import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.fa2 import require_own_dtypes
from torch_impl.kernels.naive import whole_rows
from workload.capability import HALF, Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

NAME = "cudnn"
aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class CudnnCapability(Capability):
    """What cuDNN takes through torch, beside what the table's fields can say.

    Under causal and a negative scale out was NaN on an H200 (cuDNN 9.19).
    """

    def refuse(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> str | None:
        """As `Capability.refuse`; also causal off the square, and a single query on a single key."""
        mask = problem.mask
        if mask.name == "causal" and mask.q_len != mask.kv_len:
            return f"does not take causal with q_len {mask.q_len} and kv_len {mask.kv_len}"
        if mask.q_len == mask.kv_len == 1:
            return "does not take q_len 1 with kv_len 1"
        return super().refuse(problem, passes)


@dataclasses.dataclass(frozen=True)
class CudnnOperands:
    """All that cuDNN is told of a mask."""

    causal: bool


def prepare(problem: AttentionProblem, device=None) -> CudnnOperands:
    """The causal flag. Raises `Unsupported` on what the capability refuses."""
    del device
    reason = KERNEL.capability.refuse(problem)
    if reason:
        raise Unsupported(f"torch kernel {NAME}", reason)
    return CudnnOperands(problem.mask.name == "causal")


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    q, k, v = (whole_rows(x).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, operands.causal, False, scale=scale)
    return out.transpose(1, 2), lse.reshape(q.shape[:3]).float()


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's.
    """
    del delta  # rowsum(out * dout) by contract: cuDNN makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    q, k, v, out, dout = (whole_rows(x.to(q.dtype)).transpose(1, 2) for x in (q, k, v, out, dout))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is off: its state is not read
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None].contiguous(), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0,
        operands.causal, scale=scale)
    return tuple(x.transpose(1, 2) for x in grads)


def available() -> str | None:
    """Why it cannot run here."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if not torch.backends.cudnn.is_available():
        return "torch has no cuDNN"
    return None


KERNEL = Kernel(
    NAME,
    CudnnCapability(("full", "causal"), dtypes=HALF, head_dims=(64, 128), positive_scale=True,
                    source=f"torch {torch.__version__}: SDPA with the cuDNN backend"),
    prepare,
    forward,
    backward,
    available,
)
