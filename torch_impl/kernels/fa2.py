"""fa2: flash-attention 2, six regular masks: the flash-attn package where it is installed, else torch's own copy.

A mask without documents runs in the batch form, one with documents in the varlen form, the batch folded into
the documents. The kernel marks a row without keys by lse +inf; here and at every border of ours it is -inf.
Dao, FlashAttention-2, 2023.
"""

import dataclasses
import functools
import importlib.util

import numpy as np
import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.naive import unseen, whole_rows
from workload.capability import HALF, REGULAR, Capability
from workload.errors import Unsupported
from workload.problem import AttentionProblem

NAME = "fa2"
aten = torch.ops.aten
UNBOUNDED = -1  # the kernel's word for a side of the window without a bound


@dataclasses.dataclass(frozen=True)
class RegularOperands:
    """A regular mask as flash kernels take it.

    Attributes:
      causal, window: as in `workload.masks.Regular`, the window's open sides being None.
      cu_q, cu_kv: int32 [batch * documents + 1] offsets into tokens of all batch entries, or None.
      max_q, max_kv: the longest document's queries and keys.
    """

    causal: bool
    window: tuple[int | None, int | None]
    cu_q: torch.Tensor | None
    cu_kv: torch.Tensor | None
    max_q: int
    max_kv: int


def regular_operands(problem: AttentionProblem, device=None) -> RegularOperands:
    """The mask's regular form on the device. Documents of all batch entries follow one another."""
    regular = problem.mask.regular
    window = regular.window or (None, None)
    if regular.cu_seqlens_q is None:
        return RegularOperands(regular.causal, window, None, None, problem.q_len, problem.kv_len)
    offsets, longest = [], []
    for cu, length in ((regular.cu_seqlens_q, problem.q_len), (regular.cu_seqlens_kv, problem.kv_len)):
        cu = np.asarray(cu)
        begins = cu[:-1][None] + length * np.arange(problem.batch)[:, None]
        all_batches = np.append(begins.ravel(), length * problem.batch).astype(np.int32)
        offsets.append(torch.as_tensor(all_batches, device=device))
        longest.append(int(np.diff(cu).max(initial=0)))
    return RegularOperands(regular.causal, window, *offsets, *longest)


def fold(x: torch.Tensor, operands: RegularOperands) -> torch.Tensor:
    """[B, S, H, D] as the kernel takes it: [B * S, H, D] where there are documents."""
    return whole_rows(x if operands.cu_q is None else x.flatten(0, 1))


def fold_lse(lse: torch.Tensor, operands: RegularOperands) -> torch.Tensor:
    """[B, H, S] with -inf in empty rows to the kernel's form, [H, B * S] where there are documents, +inf there."""
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return lse.contiguous() if operands.cu_q is None else lse.transpose(0, 1).flatten(1).contiguous()


def unfold_lse(lse: torch.Tensor, batch: int, operands: RegularOperands) -> torch.Tensor:
    """The inverse of `fold_lse`."""
    if operands.cu_q is not None:
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return lse.masked_fill(lse == torch.inf, -torch.inf).contiguous()


def require_own_dtypes(kernel: str, argument: str, wanted, given) -> None:
    """Raises `Unsupported` where a third-party kernel is asked for another dtype than that of its inputs."""
    if wanted not in (None, given):
        raise Unsupported(f"torch kernel {kernel}", f"{argument} {wanted}: results are {given}")


def prepare(problem: AttentionProblem, device=None) -> RegularOperands:
    """The mask's causal flag, window and document offsets. Raises `Unsupported` on a heterogeneous mask."""
    if problem.mask.regular is None:
        raise Unsupported(f"torch kernel {NAME}", f"mask {problem.mask.name} is not regular")
    return regular_operands(problem, device)


@functools.cache
def _package():
    """flash_attn's operators where the package proper is installed (flash-attn-4 shares its name), else None."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return importlib.import_module("flash_attn.flash_attn_interface")
    except ImportError:
        return None


def _window(operands: RegularOperands) -> tuple[int, int]:
    left, right = (UNBOUNDED if side is None else side for side in operands.window)
    return left, 0 if operands.causal else right


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    batch = q.shape[0]
    if not q.shape[1] or not k.shape[1]:
        return unseen(q)
    shape = q.shape
    q, k, v = (fold(x, operands) for x in (q, k, v))
    run = _torch_forward if _package() is None else _package_forward
    out, lse = run(q, k, v, operands, scale)
    return out.reshape(shape), unfold_lse(lse, batch, operands)


def _torch_forward(q, k, v, operands, scale):
    left, right = _window(operands)
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, operands.cu_q, operands.cu_kv, operands.max_q, operands.max_kv, 0.0, operands.causal, False,
        scale=scale, window_size_left=left, window_size_right=right)
    return out, lse


def _package_forward(q, k, v, operands, scale):
    left, right = _window(operands)
    common = {"dropout_p": 0.0, "softmax_scale": scale, "causal": operands.causal, "window_size_left": left,
              "window_size_right": right, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
    if operands.cu_q is None:
        out, lse, *_ = _package()._flash_attn_forward(q, k, v, **common)
    else:
        out, lse, *_ = _package()._flash_attn_varlen_forward(
            q, k, v, operands.cu_q, operands.cu_kv, operands.max_q, operands.max_kv, **common)
    return out, lse


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's.
    """
    del delta  # rowsum(out * dout) by contract: the kernel makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    shapes = q.shape, k.shape, v.shape
    if not q.shape[1] or not k.shape[1]:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    lse = fold_lse(lse, operands)
    q, k, v, out, dout = (fold(x, operands).contiguous() for x in (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
    run = _torch_backward if _package() is None else _package_backward
    grads = run(q, k, v, out, lse, dout, operands, scale)
    return tuple(x.reshape(shape) for x, shape in zip(grads, shapes, strict=True))


def _torch_backward(q, k, v, out, lse, dout, operands, scale):
    left, right = _window(operands)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout is off: its state is not read
    return aten._flash_attention_backward(
        dout, q, k, v, out, lse, operands.cu_q, operands.cu_kv, operands.max_q, operands.max_kv, 0.0, operands.causal,
        seed, seed, scale=scale, window_size_left=left, window_size_right=right)


def _package_backward(q, k, v, out, lse, dout, operands, scale):
    left, right = _window(operands)
    common = {"dropout_p": 0.0, "softmax_scale": scale, "causal": operands.causal, "window_size_left": left,
              "window_size_right": right, "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    grads = [torch.empty_like(x) for x in (q, k, v)]
    if operands.cu_q is None:
        _package()._flash_attn_backward(dout, q, k, v, out, lse, *grads, **common)
    else:
        _package()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, *grads, operands.cu_q, operands.cu_kv, operands.max_q, operands.max_kv, **common)
    return grads


def available() -> str | None:
    """Why it cannot run here."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    if torch.cuda.get_device_capability()[0] < 8:
        return "needs compute capability 8.0"
    return None


KERNEL = Kernel(
    NAME,
    Capability(REGULAR, dtypes=HALF, head_dims=tuple(range(8, 257, 8)), positive_scale=True,
               source="flash-attn 2 where installed, else the same kernel in torch"),
    prepare,
    forward,
    backward,
    available,
)
