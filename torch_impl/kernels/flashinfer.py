"""flashinfer: FlashInfer's wrapper for variable block sizes as its package ships it, Hopper backend, forward only.

Any blocks, boundaries per kv head; no causal diagonal. It gathers keys token by token, so its lists hold one int32
for each key of each listed block.
"""

import dataclasses
from typing import Any

import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.naive import whole_rows
from torch_impl.kernels.packages import installed, package
from workload.capability import DYNAMIC_MASKS, HALF, Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

NAME = "flashinfer"
WORKSPACE = 256 << 20  # bytes
LN2 = 0.6931471805599453


def available() -> str | None:
    """Why it cannot run here."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return "the flashinfer-python package is not installed" if installed(NAME) else None


class WrapperCapability(Capability):
    """The base's checks, and what else the wrapper is without."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason:
            return reason
        mask = problem.mask
        checks = (
            (not mask.causal, "a causal diagonal"),
            ((mask.counts > 0).all(), "query blocks that see no key block"),
            (mask.heads in (1, problem.kv_heads), f"mask of {mask.heads} heads with kv_heads {problem.kv_heads}"),
            (_listed_keys(mask) * problem.kv_heads // mask.heads < 2**31, "lists of 2**31 keys"),
        )
        return next((f"does not take {what}" for good, what in checks if not good), None)


def _listed_keys(mask) -> int:
    """Keys of all listed blocks of all query blocks and heads: the length of the wrapper's list."""
    sizes = mask.kv_bounds[:, 1:].astype("int64") - mask.kv_bounds[:, :-1]
    return sum(int(sizes[h][mask.indices[h][mask.listed[h]]].sum()) for h in range(mask.heads))


@dataclasses.dataclass(frozen=True)
class WrapperOperands:
    """A planned wrapper, and the logit scale that it was planned for."""

    wrapper: Any
    scale: float


def compile_ahead(problem: AttentionProblem, device: torch.device, passes=PASSES) -> None:
    """Compiles what the wrapper will ask for, about a minute for a head_dim and dtype: no other row waits for it so."""
    del device, passes
    dtype, dim = getattr(torch, problem.dtype), problem.head_dim
    no_positions, plain = 0, (False, False, False)  # no window, no cap of logits, no half-precision sums
    prefill = package(NAME, f"{NAME}.prefill")
    prefill.get_batch_prefill_module("fa3", dtype, dtype, dtype, torch.int32, dim, dim, no_positions, *plain)


def prepare(problem: AttentionProblem, device=None) -> WrapperOperands:
    """Plans the wrapper; the first plan of a head_dim and dtype compiles for about a minute."""
    mask, repeats = problem.mask, problem.kv_heads // problem.mask.heads
    bitmap, rows, columns = (
        torch.as_tensor(x, device=device).repeat_interleave(repeats, 0)
        for x in (mask.block_bitmap(), mask.q_bounds[:, 1:] - mask.q_bounds[:, :-1],
                  mask.kv_bounds[:, 1:] - mask.kv_bounds[:, :-1])
    )
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = package(NAME, NAME).VariableBlockSparseAttentionWrapper(workspace, backend="fa3")
    wrapper.plan(bitmap, rows, columns, problem.q_heads, problem.kv_heads, problem.head_dim, sm_scale=problem.scale,
                 q_data_type=getattr(torch, problem.dtype))
    return WrapperOperands(wrapper, problem.scale)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on other than the planned scale."""
    if out_dtype not in (None, q.dtype):
        raise Unsupported(f"torch kernel {NAME}", f"out_dtype {out_dtype}: results are {q.dtype}")
    if scale != operands.scale:
        raise Unsupported(f"torch kernel {NAME}", f"scale {scale}: planned for {operands.scale}")
    entries = zip(*(whole_rows(x).transpose(1, 2) for x in (q, k, v)), strict=True)
    results = [operands.wrapper.run(*entry, return_lse=True) for entry in entries]
    out, lse = (torch.stack(x) for x in zip(*results, strict=True))
    return out.transpose(1, 2), lse * LN2


KERNEL = Kernel(
    NAME,
    WrapperCapability(
        DYNAMIC_MASKS, dtypes=HALF, head_dims=(64, 128, 256), passes=("forward",),
        positive_scale=True, source="flashinfer-python, VariableBlockSparseAttentionWrapper, fa3 backend",
    ),
    prepare,
    forward,
    None,
    available,
    compile_ahead=compile_ahead,
)
