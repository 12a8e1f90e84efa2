"""vsa: FastVideo's block-sparse kernel for Hopper as its package ships it (Zhang et al., VSA, 2025).

Blocks of 64, one list a query head, no grouped heads, no causal diagonal, logits scaled by head_dim ** -0.5. The
package falls back to Triton where its compiled part does not load; that counts as unavailable here.
"""

import dataclasses
import functools
import importlib

import torch

from torch_impl.kernels.base import Kernel
from workload.capability import Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

NAME = "vsa"
BLOCK = 64


@functools.cache
def _module():
    """fastvideo_kernel.block_sparse_attn, the module: the package exports a function of that name. None if absent."""
    try:
        return importlib.import_module("fastvideo_kernel.block_sparse_attn")
    except ImportError:
        return None


def available() -> str | None:
    """Why it cannot run here."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if _module() is None:
        return "the fastvideo-kernel package is not installed"
    return None if all(_module()._get_sm90_ops()) else "the Hopper part of fastvideo-kernel does not load"


class Capability64(Capability):
    """The base's checks, and what else the kernel is without."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason:
            return reason
        mask, scale = problem.mask, problem.head_dim**-0.5
        checks = (
            (not mask.causal, "a causal diagonal"),
            ((mask.counts > 0).all(), "query blocks that see no key block"),
            (abs(problem.scale - scale) <= 1e-6 * scale, f"scale {problem.scale}"),
        )
        return next((f"does not take {what}" for good, what in checks if not good), None)


@dataclasses.dataclass(frozen=True)
class VsaOperands:
    """What the kernel reads of a mask.

    indices: int32 [1, q_heads, q_blocks, kv_blocks]; counts: int32 [1, q_heads, q_blocks]; sizes: int32 [kv_blocks].
    """

    indices: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor


def prepare(problem: AttentionProblem, device=None) -> VsaOperands:
    """The lists on the device."""
    mask, repeats = problem.mask, problem.q_heads // problem.mask.heads
    counts, indices = (torch.as_tensor(x, device=device).repeat_interleave(repeats, 0)[None]
                       for x in (mask.counts, mask.indices))
    indices = torch.nn.functional.pad(indices, (0, mask.kv_blocks - indices.shape[3]))
    sizes = torch.as_tensor(mask.kv_bounds[0, 1:] - mask.kv_bounds[0, :-1], device=device)
    return VsaOperands(indices.contiguous(), counts.contiguous(), sizes.contiguous())


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[B, S, H, D] to [B, H, whole blocks, D], zeros at the end."""
    return torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, -x.shape[1] % BLOCK)).contiguous()


def _honoured(scale: float, head_dim: int, **dtypes) -> None:
    for name, (got, want) in dtypes.items():
        if got not in (None, want):
            raise Unsupported(f"torch kernel {NAME}", f"{name} {got}: results are {want}")
    if abs(scale - head_dim**-0.5) > 1e-6 * head_dim**-0.5:
        raise Unsupported(f"torch kernel {NAME}", f"scale {scale}: it is fixed at head_dim ** -0.5")


def _by_entry(run, operands: VsaOperands, *tensors) -> list[torch.Tensor]:
    """Results of run(tensors of one batch entry, lists), put together: the kernels take no more than one."""
    parts = [run(*entry, operands.indices, operands.counts, operands.sizes)
             for entry in zip(*(x.split(1) for x in tensors), strict=True)]
    return [x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True)]


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on another scale or out_dtype."""
    q_len, d = q.shape[1], q.shape[3]
    _honoured(scale, d, out_dtype=(out_dtype, q.dtype))
    out, stored = _by_entry(_module().block_sparse_attn_sm90, operands, *(_blocks(x) for x in (q, k, v)))
    # The kernel stores -sqrt(head_dim) * lse.
    return out[:, :, :q_len].transpose(1, 2), stored[:, :, :q_len, 0].float() * -(d**-0.5)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout."""
    del delta  # rowsum(out * dout) by contract: the kernel makes it from the two
    q_len, kv_len, d = q.shape[1], k.shape[1], q.shape[3]
    _honoured(scale, d, grad_dtype=(grad_dtype, q.dtype))
    stored = torch.nn.functional.pad(lse * -(d**0.5), (0, -q_len % BLOCK))[..., None].contiguous()
    blocks = [_blocks(x.to(q.dtype)) for x in (dout, q, k, v, out)]
    grads = _by_entry(_module().block_sparse_attn_backward_sm90, operands, *blocks, stored)
    return tuple(x[:, :, :n].transpose(1, 2) for x, n in zip(grads, (q_len, kv_len, kv_len), strict=True))


KERNEL = Kernel(
    NAME,
    Capability64(
        ("uniform_block",), dtypes=("bfloat16",), head_dims=(64, 128), grouped_heads=False,
        block_sizes=(BLOCK,), source="fastvideo-kernel, wgmma",
    ),
    prepare,
    forward,
    backward,
    available,
)
