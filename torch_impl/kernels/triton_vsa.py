"""triton_vsa: block-sparse attention of 64 blocks in Triton, forward and backward.

The published kernel (Zhang et al., VSA, 2025) is MHA at 64 blocks; this one takes grouped heads, lists per kv head
or per q head, a causal diagonal, rows with no or unequal numbers of blocks, and any block that 16 divides.
"""

import torch

from torch_impl.kernels import block_sparse
from torch_impl.kernels import triton_support as support
from torch_impl.kernels.base import Kernel
from torch_impl.kernels.block_sparse import BlockSparseOperands, Launches, UniformBlocks, prepare_blocks
from torch_impl.kernels.walks import Launch
from workload.problem import AttentionProblem

NAME = "triton_vsa"


def launches_for(head_dim: int, dtype: torch.dtype) -> Launches:
    """Tiles of 64 where they fit an H200 at the problem's head_dim and dtype."""
    if dtype == torch.float32 or support.padded_dim(head_dim) > 128:
        return Launches(Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1), 64)
    return Launches(Launch(64, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 2))


def prepare(problem: AttentionProblem, device=None, *, launches: Launches | None = None) -> BlockSparseOperands:
    """Tile lists of the three passes, O(listed tiles); `launches` are cut to the mask's block."""
    chosen = launches or launches_for(problem.head_dim, getattr(torch, problem.dtype))
    return prepare_blocks(NAME, problem, device, chosen)


KERNEL = Kernel(
    NAME,
    UniformBlocks(("uniform_block",), source="own, Triton, tiles of 64"),
    prepare,
    block_sparse.forward,
    block_sparse.backward,
    support.available,
)
