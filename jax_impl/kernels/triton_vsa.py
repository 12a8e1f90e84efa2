"""triton_vsa: block-sparse attention of 64 blocks in Pallas for GPUs in general, forward and backward.

The published kernel (Zhang et al., VSA, 2025) is MHA at 64 blocks; this one takes grouped heads, lists per kv head
or per q head, a causal diagonal, rows with no or unequal numbers of blocks, and any blocks, variable ones included:
those that no tile of 16 divides cost a look at the blocks of every element.
"""

import dataclasses
import functools
import math

from jax_impl.kernels import pallas_triton as body
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.block_lists import divides, key_walk, query_walk
from jax_impl.kernels.fa2 import HEAD_DIMS
from jax_impl.kernels.pallas_triton import Schedule, Tile, Walks
from workload.capability import DYNAMIC_MASKS, Capability
from workload.problem import AttentionProblem


def default_schedule(problem: AttentionProblem) -> Schedule:
    """Tiles of 64 where they fit an H200 at the problem's head_dim and dtype."""
    if problem.dtype == "float32" or problem.head_dim > 128:
        return Schedule(Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))
    return Schedule(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2))


def within(schedule: Schedule, block: int) -> Schedule:
    """The schedule with every tile cut to the largest power of two that divides a uniform block of k * 16."""
    cut = lambda t: dataclasses.replace(  # noqa: E731
        t, rows=math.gcd(t.rows, block), columns=math.gcd(t.columns, block)
    )
    return Schedule(cut(schedule.forward), cut(schedule.dq), cut(schedule.dkv))


def prepare_blocks(problem: AttentionProblem, schedule: Schedule, device=None) -> Walks:
    """Tile lists of the three passes of a block-sparse kernel; those by key are transposed on the device."""
    mask, q_heads = problem.mask, problem.q_heads
    schedule = within(schedule, mask.block) if divides(mask, 16) else schedule
    forward, dq = (query_walk(mask, q_heads, t.rows, t.columns, device) for t in (schedule.forward, schedule.dq))
    dkv = key_walk(mask, q_heads, schedule.dkv.rows, schedule.dkv.columns, device)
    return Walks(forward, dq, dkv, schedule)


def prepare(problem: AttentionProblem, device=None, *, schedule: Schedule | None = None) -> Walks:
    """Tile lists of the three passes, O(listed tiles); `schedule` is cut to the mask's block."""
    return prepare_blocks(problem, schedule or default_schedule(problem), device)


KERNEL = Kernel(
    "triton_vsa",
    Capability(DYNAMIC_MASKS, head_dims=HEAD_DIMS, source="own, Pallas (Triton backend), tiles of 64"),
    prepare,
    functools.partial(body.attend, name="triton_vsa"),
    functools.partial(body.gradients, name="triton_vsa"),
)
