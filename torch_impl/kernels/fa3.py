"""fa3: flash-attention 3 on Hopper, six regular masks: flash_attn.cute, else the older flash_attn_interface.

The CuTe package's Hopper path is FlashAttention-3's algorithm. Both packages are called below their autograd layer,
where lse is an argument, so the out and lse of a larger problem serve as well. Shah et al., FlashAttention-3, 2024.
"""

import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.fa2 import (
    RegularOperands,
    fold,
    fold_lse,
    regular_operands,
    require_own_dtypes,
    unfold_lse,
)
from torch_impl.kernels.fakes import compile_on_fakes
from torch_impl.kernels.naive import unseen
from torch_impl.kernels.packages import installed, on_hopper, package
from workload.capability import HALF, REGULAR, Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

NAME = "fa3"
CUTE, INTERFACE = "flash_attn.cute", "flash_attn_interface"


def available() -> str | None:
    """Why it cannot run here."""
    return on_hopper() or (installed(CUTE) and installed(INTERFACE) and f"neither {CUTE} nor {INTERFACE} is installed")


def prepare(problem: AttentionProblem, device=None) -> RegularOperands:
    """The mask's causal flag, window and document offsets. Raises `Unsupported` on a heterogeneous mask."""
    if problem.mask.regular is None:
        raise Unsupported(f"torch kernel {NAME}", f"mask {problem.mask.name} is not regular")
    return regular_operands(problem, device)


def _cute_options(operands: RegularOperands, scale: float) -> dict:
    """Keywords of flash_attn.cute; an open side of a window is None."""
    left, right = operands.window
    windowed = left is not None or right is not None
    return {
        "softmax_scale": scale,
        "causal": operands.causal and not windowed,
        "window_size_left": left,
        "window_size_right": 0 if operands.causal and windowed else right,
        "cu_seqlens_q": operands.cu_q,
        "cu_seqlens_k": operands.cu_kv,
        "max_seqlen_q": None if operands.cu_q is None else operands.max_q,
        "max_seqlen_k": None if operands.cu_q is None else operands.max_kv,
    }


def _interface_window(operands: RegularOperands) -> dict:
    """The window as flash_attn_interface takes it; an open side is -1."""
    left, right = ((-1 if side is None else side) for side in operands.window)
    return {"window_size_left": left, "window_size_right": 0 if operands.causal else right}


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    shape, batch = q.shape, q.shape[0]
    if not q.shape[1] or not k.shape[1]:
        return unseen(q)
    q, k, v = (fold(x, operands).contiguous() for x in (q, k, v))
    if installed(CUTE) is None:
        options = _cute_options(operands, scale)
        out, lse, *_ = package(NAME, f"{CUTE}.interface")._flash_attn_fwd(q, k, v, return_lse=True, **options)
    else:
        out, lse, *_ = package(NAME, INTERFACE)._flash_attn_forward(
            q, k, v, cu_seqlens_q=operands.cu_q, cu_seqlens_k=operands.cu_kv, max_seqlen_q=operands.max_q,
            max_seqlen_k=operands.max_kv, softmax_scale=scale, causal=operands.causal, **_interface_window(operands))
    return out.reshape(shape), unfold_lse(lse, batch, operands)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's.
    """
    del delta  # rowsum(out * dout) by contract: the kernel makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    shapes = q.shape, k.shape, v.shape
    if not q.shape[1] or not k.shape[1]:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    q, k, v, out, dout = (fold(x, operands).contiguous() for x in (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
    lse = fold_lse(lse, operands)
    if installed(CUTE) is None:
        options = _cute_options(operands, scale)
        grads = package(NAME, f"{CUTE}.interface")._flash_attn_bwd(q, k, v, out, dout, lse, **options)[:3]
    else:
        grads = [torch.empty_like(x) for x in (q, k, v)]
        package(NAME, INTERFACE)._flash_attn_backward(
            dout, q, k, v, out, lse, operands.cu_q, operands.cu_kv, None, None, operands.max_q, operands.max_kv, *grads,
            scale, operands.causal, **_interface_window(operands))
    return tuple(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True))


def _compile_ahead(problem: AttentionProblem, device: torch.device, passes=PASSES) -> None:
    """The CuTe package compiles when its tensors are fake; the older one has nothing to compile."""
    if installed(CUTE) is None:
        compile_on_fakes(prepare, forward, backward)(problem, device, passes)


KERNEL = Kernel(
    NAME,
    Capability(REGULAR, dtypes=HALF, head_dims=(64, 128, 256), positive_scale=True,
               source="flash_attn.cute (flash-attn-4, Hopper path), else flash_attn_interface"),
    prepare,
    forward,
    backward,
    available,
    compile_ahead=_compile_ahead,
)
