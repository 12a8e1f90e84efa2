"""fa3_mask: flash_attn.cute's Hopper kernel with a mask_mod on row intervals and block lists, all static masks.

Block lists come from the tile runs, as for `flex`: blocks of 128 x 128, full ones without the mask_mod.
"""

import dataclasses
import functools
import hashlib
import inspect

import numpy as np
import torch

from torch_impl.kernels import flex
from torch_impl.kernels.base import Kernel
from torch_impl.kernels.fa2 import require_own_dtypes
from torch_impl.kernels.fa3 import CUTE
from torch_impl.kernels.fakes import compile_on_fakes
from torch_impl.kernels.packages import installed, on_hopper, package
from workload.capability import ALL_STATIC, HALF, Capability
from workload.errors import Unsupported
from workload.problem import AttentionProblem

NAME = "fa3_mask"
BLOCK = flex.BLOCK


@dataclasses.dataclass(frozen=True)
class MaskOperands:
    """bounds: int32 [q_len] tensors starts[0], ends[0], ...; key_blocks, query_blocks: four block lists each."""

    bounds: tuple[torch.Tensor, ...]
    key_blocks: tuple[torch.Tensor, ...]
    query_blocks: tuple[torch.Tensor, ...]


@functools.cache
def _mask_mod(intervals: int):
    """The package's form of the predicate for one or two intervals a row; a function of the CuTe language."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute.utils import scalar_to_ssa, ssa_to_scalar

    @cute.jit
    def one(batch, head, row, key, seqlen_info, aux):
        i = ssa_to_scalar(row)
        low = scalar_to_ssa(aux[0][i], cutlass.Int32)
        high = scalar_to_ssa(aux[1][i], cutlass.Int32)
        return (low <= key) & (key < high)

    @cute.jit
    def two(batch, head, row, key, seqlen_info, aux):
        i = ssa_to_scalar(row)
        low = scalar_to_ssa(aux[0][i], cutlass.Int32)
        high = scalar_to_ssa(aux[1][i], cutlass.Int32)
        low2 = scalar_to_ssa(aux[2][i], cutlass.Int32)
        high2 = scalar_to_ssa(aux[3][i], cutlass.Int32)
        return ((low <= key) & (key < high)) | ((low2 <= key) & (key < high2))

    chosen = {1: one, 2: two}[intervals]
    # The package names what it compiled after the repr of a closure, addresses in it: its disk cache would never hit.
    chosen.__cute_hash__ = hashlib.sha256(inspect.getsource(chosen).encode()).hexdigest()
    return chosen


def prepare(problem: AttentionProblem, device=None) -> MaskOperands:
    """Row bounds and block lists on the device. Raises `Unsupported` on more than two intervals a row."""
    mask = problem.mask
    if mask.intervals > 2:
        raise Unsupported(f"torch kernel {NAME}", f"mask {mask.name} has {mask.intervals} intervals a row")
    rows = [x[r] for r in range(mask.intervals) for x in (mask.starts, mask.ends)]
    bounds = tuple(torch.as_tensor(np.ascontiguousarray(x), device=device) for x in rows)
    lists = flex.lists_of(mask, device), flex.lists_of(mask.transpose(), device)
    return MaskOperands(bounds, *(tuple(x) for x in lists))


def _options(operands: MaskOperands, lists, scale: float) -> dict:
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    blocks = BlockSparseTensorsTorch(*lists, block_size=(BLOCK, BLOCK))
    return {"softmax_scale": scale, "mask_mod": _mask_mod(len(operands.bounds) // 2),
            "aux_tensors": list(operands.bounds), "block_sparse_tensors": blocks}


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    require_own_dtypes(NAME, "out_dtype", out_dtype, q.dtype)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out, lse, *_ = package(NAME, f"{CUTE}.interface")._flash_attn_fwd(
        q, k, v, return_lse=True, **_options(operands, operands.key_blocks, scale))
    return out, lse.masked_fill(lse == torch.inf, -torch.inf)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's.
    """
    del delta  # rowsum(out * dout) by contract: the kernel makes it from the two
    require_own_dtypes(NAME, "grad_dtype", grad_dtype, q.dtype)
    q, k, v, out, dout = (x.contiguous() for x in (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return package(NAME, f"{CUTE}.interface")._flash_attn_bwd(
        q, k, v, out, dout, lse, **_options(operands, operands.query_blocks, scale))[:3]


def available() -> str | None:
    """Why it cannot run here."""
    return on_hopper() or installed(CUTE)


KERNEL = Kernel(
    NAME,
    Capability(ALL_STATIC, dtypes=HALF, head_dims=(64, 128), positive_scale=True,
               source="flash_attn.cute (flash-attn-4, Hopper path): mask_mod and block lists"),
    prepare,
    forward,
    backward,
    available,
    compile_ahead=compile_on_fakes(prepare, forward, backward),
)
