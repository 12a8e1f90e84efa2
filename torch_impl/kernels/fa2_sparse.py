"""fa2_sparse: FlashAttention-2's schedule over lists of 128 blocks in Triton.

As `triton_vsa`, with tiles of 128 queries; forward and backward, grouped heads, any block that 16 divides.
"""

import torch

from torch_impl.kernels import block_sparse, triton_vsa
from torch_impl.kernels import triton_support as support
from torch_impl.kernels.base import Kernel
from torch_impl.kernels.block_sparse import BlockSparseOperands, Launches, UniformBlocks, prepare_blocks
from torch_impl.kernels.walks import Launch
from workload.problem import AttentionProblem

NAME = "fa2_sparse"


def launches_for(head_dim: int, dtype: torch.dtype) -> Launches:
    """Tiles of 128 where they fit an H200 at the problem's head_dim and dtype."""
    if dtype == torch.float32 or support.padded_dim(head_dim) > 128:
        return triton_vsa.launches_for(head_dim, dtype)
    return Launches(Launch(128, 128, 8, 2), Launch(128, 64, 8, 2), Launch(128, 64, 8, 2))


def prepare(problem: AttentionProblem, device=None, *, launches: Launches | None = None) -> BlockSparseOperands:
    """Tile lists of the three passes, O(listed tiles); `launches` are cut to the mask's block."""
    chosen = launches or launches_for(problem.head_dim, getattr(torch, problem.dtype))
    return prepare_blocks(NAME, problem, device, chosen)


KERNEL = Kernel(
    NAME,
    UniformBlocks(("uniform_block",), source="own, Triton, tiles of 128"),
    prepare,
    block_sparse.forward,
    block_sparse.backward,
    support.available,
)
