"""cudnn_sparse: the block_sparse_attention of nvidia-cudnn-frontend as its package ships it (CuTe DSL, Hopper).

Blocks of 64 or 128, one list a query head, grouped heads in the forward pass only, no causal diagonal. Its backward
transposes the lists at every call.
"""

import dataclasses

import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.fa2 import require_own_dtypes
from torch_impl.kernels.naive import whole_rows
from torch_impl.kernels.packages import installed, on_hopper, package
from workload.capability import Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

NAME = "cudnn_sparse"
PACKAGE = "cudnn.block_sparse_attention"


def available() -> str | None:
    """Why it cannot run here."""
    return on_hopper() or installed(PACKAGE)


class BlockCapability(Capability):
    """The base's checks, and what else the kernel is without."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason:
            return reason
        mask, heads = problem.mask, f"q_heads {problem.q_heads} with kv_heads {problem.kv_heads}"
        checks = (
            (not mask.causal, "a causal diagonal"),
            ((mask.counts > 0).all(), "query blocks that see no key block"),
            ("backward" not in passes or problem.q_heads == problem.kv_heads, f"backward of {heads}"),
        )
        return next((f"does not take {what}" for good, what in checks if not good), None)


@dataclasses.dataclass(frozen=True)
class BlockOperands:
    """What the kernel reads of a mask.

    indices: int32 [1, q_heads, q_blocks, longest]; counts: int32 [1, q_heads, q_blocks]; sizes: int32 [kv_blocks], or
    None where all are whole; block: tokens of a block.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor | None
    block: int


def prepare(problem: AttentionProblem, device=None) -> BlockOperands:
    """The lists on the device, repeated for every query head."""
    mask = problem.mask
    counts, indices = (torch.as_tensor(x, device=device).repeat_interleave(problem.q_heads // mask.heads, 0)[None]
                       for x in (mask.counts, mask.indices))
    ragged = problem.kv_len % mask.block
    sizes = torch.as_tensor(mask.kv_bounds[0, 1:] - mask.kv_bounds[0, :-1], device=device) if ragged else None
    return BlockOperands(indices.contiguous(), counts.contiguous(), sizes, mask.block)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[B, S, H, D] to [B, H, whole blocks, D], zeros at the end; a view where there are none to add."""
    short = -x.shape[1] % block
    return whole_rows(torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) if short else x).transpose(1, 2)


def _arguments(operands: BlockOperands, batch: int, scale: float) -> dict:
    indices, counts = (x.expand(batch, *x.shape[1:]).contiguous() for x in (operands.indices, operands.counts))
    return {"q2k_block_index": indices, "q2k_block_nums": counts, "block_sizes": operands.sizes,
            "sparse_block_size": operands.block, "softmax_scale": scale}


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    found = package(NAME, PACKAGE).block_sparse_attention_forward(
        *(_blocks(x, operands.block) for x in (q, k, v)), **_arguments(operands, q.shape[0], scale))
    q_len = q.shape[1]
    return found["o_tensor"][:, :, :q_len].transpose(1, 2), found["lse_tensor"][:, :, :q_len]


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's, and on grouped heads.
    """
    del delta  # rowsum(out * dout) by contract: the package makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    if q.shape[2] != k.shape[2]:
        reason = f"does not take backward of q_heads {q.shape[2]} with kv_heads {k.shape[2]}"
        raise Unsupported(f"torch kernel {NAME}", reason)
    blocks = [_blocks(x.to(q.dtype), operands.block) for x in (dout, q, k, v, out)]
    lse = torch.nn.functional.pad(lse, (0, -q.shape[1] % operands.block)).contiguous()
    found = package(NAME, PACKAGE).block_sparse_attention_backward(
        *blocks, lse, **_arguments(operands, q.shape[0], scale))
    lengths = zip(("dq_tensor", "dk_tensor", "dv_tensor"), (q.shape[1], k.shape[1], k.shape[1]), strict=True)
    return tuple(found[name][:, :, :n].transpose(1, 2) for name, n in lengths)


KERNEL = Kernel(
    NAME,
    BlockCapability(
        ("uniform_block",), dtypes=("bfloat16",), head_dims=(128,), block_sizes=(64, 128),
        positive_scale=True,
        source="nvidia-cudnn-frontend: cudnn.block_sparse_attention",
    ),
    prepare,
    forward,
    backward,
    available,
)
