"""fa2_sparse: FlashAttention-2's schedule over lists of 128 blocks, in Pallas for GPUs in general.

As `triton_vsa`, with tiles of 128 in the forward pass; forward and backward, grouped heads, any blocks.
"""

import functools

from jax_impl.kernels import pallas_triton as body
from jax_impl.kernels import triton_vsa
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.fa2 import HEAD_DIMS
from jax_impl.kernels.pallas_triton import Schedule, Tile, Walks
from jax_impl.kernels.triton_vsa import prepare_blocks
from workload.capability import DYNAMIC_MASKS, Capability
from workload.problem import AttentionProblem


def default_schedule(problem: AttentionProblem) -> Schedule:
    """Tiles of 128 forward and 64 backward, the best measured on an H200, where they fit head_dim and dtype."""
    if problem.dtype == "float32" or problem.head_dim > 128:
        return triton_vsa.default_schedule(problem)
    return Schedule(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))


def prepare(problem: AttentionProblem, device=None, *, schedule: Schedule | None = None) -> Walks:
    """Tile lists of the three passes, O(listed tiles); `schedule` is cut to the mask's block."""
    return prepare_blocks(problem, schedule or default_schedule(problem), device)


KERNEL = Kernel(
    "fa2_sparse",
    Capability(DYNAMIC_MASKS, head_dims=HEAD_DIMS, source="own, Pallas (Triton backend), tiles of 128"),
    prepare,
    functools.partial(body.attend, name="fa2_sparse"),
    functools.partial(body.gradients, name="fa2_sparse"),
)
