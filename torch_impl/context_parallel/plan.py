"""A schedule made ready for a mesh: a rank's static part and, as tensors, its data; twin in jax_impl."""

import dataclasses

import numpy as np
import torch

from torch_impl import kernels
from torch_impl.context_parallel.local import Data, Local
from torch_impl.context_parallel.mesh import Mesh
from workload.block_masks import BlockMask
from workload.errors import Unsupported, integer
from workload.problem import AttentionProblem, check_kind
from workload.schedule import EMPTY, Schedule, schedule_under
from workload.sharding import Sharding
from workload.topology import Topology, make_topology


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one rank executes: made once per mask, used by every layer and training step under it."""

    local: Local
    data: Data


def make_plan(
    problem: AttentionProblem, *, scheme: str, mesh: Mesh, sharding: str | tuple[Sharding, Sharding] = "contiguous",
    window: int | None = None, granule: int = 1, kernel: str | None = None, skip: bool = True,
    travel: str = "float32", with_lse: bool = False, head_groups: int = 1,
) -> Plan:
    """The plan of a scheme on a mesh; every rank makes its own, from equal arguments.

    Args:
      problem: the global problem; its batch is that of one context-parallel group.
      scheme: one of `workload.topology.SCHEMES`.
      mesh: of `make_mesh`.
      sharding: one of `workload.schedule.SHARDINGS`, or (query, key) shardings; see `schedule_under`.
      window: loongtrain's inner ring; the mesh's by default.
      granule: see `make_sharding`.
      kernel: of `torch_impl.kernels.NAMES`; by default naive on CPU; on GPU flashmask (static), triton_vsa (uniform
        blocks), sdpa (variable blocks).
      skip, travel, with_lse: see `make_schedule`.
      head_groups: of ulysses and all_gather: some heads travel while others compute.

    Raises: `Unsupported` where the scheme or the kernel cannot take the problem, before anything runs.
    """
    check_kind("mesh", mesh, Mesh)
    check_kind("problem", problem, AttentionProblem)
    topology = _topology(scheme, mesh, window)
    if topology.window != mesh.topology.window:
        mesh = mesh.windowed(topology.window)
    schedule = schedule_under(scheme, problem, topology, sharding, granule=granule, skip=skip, travel=travel,
                              with_lse=with_lse)
    return plan_of(schedule, mesh, kernel or default_kernel(problem.mask, mesh.device.type), head_groups)


def plan_of(schedule: Schedule, mesh: Mesh, kernel: str, head_groups: int = 1) -> Plan:
    """The plan of the mesh's rank that executes a schedule with a local kernel."""
    check_kind("schedule", schedule, Schedule)
    signature, rank = schedule.signature, mesh.rank
    head_groups = integer("head_groups", head_groups, 1)
    schedule.check_head_groups(head_groups)
    ring_index = schedule.topology.place(rank)[0]

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(x.astype(np.int64), device=mesh.device)

    data = Data(
        masks=tuple(
            step_operands(schedule, t, rank, kernel, mesh.device, head_groups) for t in range(len(signature.steps))
        ),
        q_positions=tensor(schedule.q_sharding.table[rank]),
        kv_positions=tensor(schedule.kv_sharding.table[rank]),
        q_order=tensor(schedule.q_order(ring_index)) if signature.sorts_q else None,
        kv_order=tensor(schedule.kv_order(ring_index)) if signature.sorts_kv else None,
        gathered_order=tensor(schedule.gathered_order(ring_index)) if signature.sorts_gathered else None,
    )
    return Plan(Local(kernel, signature, mesh, head_groups), data)


def step_operands(schedule: Schedule, step: int, rank: int, kernel: str, device, head_groups: int = 1):
    """The kernel's operands of a rank at a step, or None where none of its rows sees a key of the step."""
    if schedule.mask_class(step, schedule.topology.place(rank)[0]) == EMPTY:
        return None
    problem, chosen = schedule.local_problem(step, rank, head_groups), kernels.get(kernel)
    chosen.require(problem)
    return chosen.prepare(problem, device)


def default_kernel(mask, platform: str) -> str:
    """The local kernel of a platform: naive on CPU; on GPU flashmask, or for blocks triton_vsa (uniform) or sdpa."""
    if platform == "cpu":
        return "naive"
    if not isinstance(mask, BlockMask):
        return "flashmask"
    return "triton_vsa" if mask.name == "uniform_block" else "sdpa"


def _topology(scheme: str, mesh: Mesh, window: int | None) -> Topology:
    have = mesh.topology
    if scheme == "ulysses" and have.ring > 1:
        raise Unsupported(scheme, f"mesh with ring {have.ring}: the scheme exchanges heads among all ranks")
    if scheme == "loongtrain" and window is None:
        window = have.window
    return make_topology(scheme, have.world, ulysses=have.ulysses, window=window, ranks_per_node=have.ranks_per_node,
                         head_first=have.head_first)
