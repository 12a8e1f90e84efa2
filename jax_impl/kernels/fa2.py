"""fa2: FlashAttention-2's schedule in Pallas for GPUs in general, under any interval mask.

Dao, FlashAttention-2, 2023. Empty tiles are not visited, only partial ones are masked.
"""

import functools

from jax_impl.kernels import pallas_triton as body
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.pallas_triton import Schedule, Tile, Walks
from jax_impl.kernels.walks import run_walk
from workload.capability import ALL_STATIC, Capability
from workload.problem import AttentionProblem

HEAD_DIMS = tuple(range(8, 257, 8))


def default_schedule(problem: AttentionProblem) -> Schedule:
    """Tiles for the problem's head_dim and dtype; those of half precision to 128 are the best measured on an H200."""
    if problem.dtype == "float32":
        small = Tile(32, 32, 4, 2) if problem.head_dim > 64 else Tile(64, 32, 4, 2)
        return Schedule(small, small, small)
    if problem.head_dim > 128:
        return Schedule(Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2))
    if problem.head_dim > 64:
        return Schedule(Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2))
    return Schedule(Tile(64, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 32, 4, 3))


def prepare(problem: AttentionProblem, device=None, *, schedule: Schedule | None = None) -> Walks:
    """Tile runs and row intervals of the three passes; O(q_len + kv_len)."""
    schedule = schedule or default_schedule(problem)
    mask, by_key = problem.mask, problem.mask.transpose()
    forward, dq, dkv = (
        run_walk(m, tile.rows, tile.columns, device)
        for m, tile in ((mask, schedule.forward), (mask, schedule.dq), (by_key, schedule.dkv))
    )
    return Walks(forward, dq, dkv, schedule)


KERNEL = Kernel(
    "fa2",
    Capability(ALL_STATIC, head_dims=HEAD_DIMS, source="own, Pallas (Triton backend), FlashAttention-2 schedule"),
    prepare,
    functools.partial(body.attend, name="fa2"),
    functools.partial(body.gradients, name="fa2"),
)
