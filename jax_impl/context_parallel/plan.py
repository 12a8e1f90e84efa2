"""A schedule made ready for a mesh: the static program and, as arrays, its data; twin in torch_impl."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl import kernels
from jax_impl.context_parallel.local import Data, Local
from jax_impl.kernels import stack
from workload.block_masks import BlockMask
from workload.errors import Unsupported, integer
from workload.problem import AttentionProblem, check_kind
from workload.schedule import Schedule, schedule_under
from workload.sharding import Sharding
from workload.signature import Signature
from workload.topology import Topology, make_topology


@dataclasses.dataclass(frozen=True)
class Program:
    """All that is static: plans with equal programs (and equal shapes) share one compilation.

    Attributes:
      signature: steps, hops, heads.
      kernel: name of the local kernel.
      mesh: holds the axes "ring" and "ulysses".
      head_groups: groups of heads that travel and compute in turn.
      batch_axes: mesh axes that split the batch, or None.
    """

    signature: Signature
    kernel: str
    mesh: Mesh
    head_groups: int = 1
    batch_axes: Any = None

    @property
    def local(self) -> Local:
        """What each rank computes with."""
        return Local(self.kernel, self.signature, self.head_groups)

    def spec(self, tokens_at: int = 1) -> PartitionSpec:
        """How an array with batch first and tokens at this axis is split."""
        between = [None] * (tokens_at - 1)
        return PartitionSpec(self.batch_axes, *between, self.token_axes)

    @property
    def token_axes(self) -> tuple[str, str]:
        """The mesh axes that split tokens, in rank order."""
        slow, fast = self.signature.topology.axes
        return slow[0], fast[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A program and its data: a pytree, so it can be an argument of a jitted training step.

    A plan of other documents with an equal program and equal shapes compiles nothing anew.
    """

    program: Program = dataclasses.field(metadata={"static": True})
    data: Data


def make_mesh(topology: Topology, devices=None) -> Mesh:
    """The mesh of a topology over its first `world` devices, in rank order."""
    check_kind("topology", topology, Topology)
    devices = jax.devices() if devices is None else devices
    if len(devices) < topology.world:
        raise ValueError(f"devices: {len(devices)} for world {topology.world}")
    names, sizes = zip(*topology.axes, strict=True)
    return Mesh(np.array(devices[: topology.world]).reshape(sizes), names)


def make_plan(
    problem: AttentionProblem, *, scheme: str, mesh: Mesh, sharding: str | tuple[Sharding, Sharding] = "contiguous",
    window: int | None = None, ranks_per_node: int = 8, granule: int = 1, kernel: str | None = None, batch_axes=None,
    skip: bool = True, travel: str = "float32", with_lse: bool = False, head_groups: int = 1, on_host: bool = False,
) -> Plan:
    """The plan of a scheme on a mesh.

    Args:
      problem: the global problem; its batch is that of one context-parallel group.
      scheme: one of `workload.topology.SCHEMES`.
      mesh: with axes "ring" and "ulysses", whose sizes are the degrees; the one named first is the slower in rank
        order. Other axes may split the batch.
      sharding: one of `workload.schedule.SHARDINGS`, or (query, key) shardings; see `schedule_under`.
      window: loongtrain's inner ring.
      granule: see `make_sharding`.
      kernel: of `jax_impl.kernels.NAMES`; by default naive on CPU; on GPU flashmask (static), flashinfer (dynamic).
      batch_axes: mesh axes that split the batch.
      skip, travel, with_lse: see `make_schedule`.
      head_groups: of ulysses and all_gather: some heads travel while others compute.
      on_host: leave the data in NumPy arrays, which a program may close over on any number of processes; else they
        are placed on the mesh, and the plan is an argument of the program.

    Raises: `Unsupported` where the scheme or the kernel cannot take the problem, before anything runs.
    """
    batch_groups(mesh, batch_axes)
    check_kind("problem", problem, AttentionProblem)
    topology = _topology(scheme, mesh, window, ranks_per_node)
    schedule = schedule_under(scheme, problem, topology, sharding, granule=granule, skip=skip, travel=travel,
                              with_lse=with_lse)
    kernel = kernel or default_kernel(problem.mask, mesh.devices.flat[0].platform)
    return plan_of(schedule, mesh, kernel, head_groups, batch_axes=batch_axes, skip=skip, on_host=on_host)


def plan_of(schedule: Schedule, mesh: Mesh, kernel: str, head_groups: int = 1, *, batch_axes=None, skip: bool = True,
            on_host: bool = False) -> Plan:
    """The plan that executes a schedule with a local kernel; arguments as in `make_plan`."""
    check_kind("schedule", schedule, Schedule)
    head_groups = integer("head_groups", head_groups, 1)
    schedule.check_head_groups(head_groups)
    signature = schedule.signature
    if signature.scheme == "usp" and signature.topology.ulysses == 1:  # without an exchange it is the ring, one program
        signature = dataclasses.replace(signature, scheme="ring")
    program = Program(signature, kernel, mesh, head_groups, batch_axes)
    plan = Plan(program, _host_data(schedule, kernel, head_groups, skip))
    return plan if on_host else place(plan)


def place(plan: Plan) -> Plan:
    """A plan whose data are NumPy arrays (`on_host`), placed on its mesh."""
    program = plan.program
    tokens = NamedSharding(program.mesh, PartitionSpec(program.token_axes))
    return Plan(program, jax.tree.map(lambda x: put(x, tokens), plan.data))


def alike(plans: Sequence[Plan], *, fixed: bool = True) -> list[Plan]:
    """The same plans, those of equal programs made equal in shape where `stack.alike` can: they share one compilation.

    A set of documents or masks that is known beforehand compiles once. Their data are NumPy arrays (`on_host`).
    """
    masks = stack.alike([plan.data.masks for plan in plans], [plan.program for plan in plans], fixed=fixed)
    return [Plan(plan.program, dataclasses.replace(plan.data, masks=m)) for plan, m in zip(plans, masks, strict=True)]


def _host_data(schedule: Schedule, kernel: str, head_groups: int, skip: bool) -> Data:
    """A schedule's data in NumPy arrays."""
    signature = schedule.signature

    def by_rank(order):
        places = [schedule.topology.place(rank)[0] for rank in range(schedule.topology.world)]
        return np.concatenate([order(r) for r in places]).astype(np.int32)

    return Data(
        masks=tuple(step_operands(schedule, kernel, head_groups)),
        seen=tuple(_seen(schedule, t, skip) for t in range(len(signature.steps))),
        q_positions=schedule.q_sharding.table.reshape(-1).astype(np.int32),
        kv_positions=schedule.kv_sharding.table.reshape(-1).astype(np.int32),
        q_order=by_rank(schedule.q_order) if signature.sorts_q else None,
        kv_order=by_rank(schedule.kv_order) if signature.sorts_kv else None,
        gathered_order=by_rank(schedule.gathered_order) if signature.sorts_gathered else None,
    )


def _seen(schedule: Schedule, step: int, skip: bool) -> np.ndarray | None:
    """Which ranks see a key of the step, bool [world]; None where all compute, as in the first step of a walk.

    Without `skip`, where one program serves every mask, each remote step asks, whatever this mask shows.
    """
    seen, gathers = schedule.cells[step] > 0, schedule.signature.gathers
    asks = gathers or not schedule.signature.steps[step].at_home
    return seen if asks and not (seen.all() and skip) and (skip or not gathers) else None


def step_operands(schedule: Schedule, kernel: str, head_groups: int = 1) -> list[Any]:
    """Per step, the kernel's operands of all ranks, leaves [world, ...]; equal local masks are prepared once."""
    chosen, host = kernels.get(kernel), jax.local_devices(backend="cpu")[0]
    out = []
    for t in range(len(schedule.signature.steps)):
        made: dict[tuple[int, ...], Any] = {}
        for rank in range(schedule.topology.world):
            key = schedule.local_key(t, rank)
            if key not in made:
                problem = schedule.local_problem(t, rank, head_groups)
                chosen.require(problem)
                with jax.ensure_compile_time_eval():  # a plan made while a training step is traced
                    made[key] = jax.tree.map(np.asarray, chosen.prepare(problem, host))
        out.append(stack.stack_operands([made[schedule.local_key(t, rank)] for rank in range(schedule.topology.world)]))
    return out


def default_kernel(mask, platform: str) -> str:
    """The local kernel of a platform: naive on CPU, flashmask or flashinfer on GPU."""
    if platform == "cpu":
        return "naive"
    return "flashinfer" if isinstance(mask, BlockMask) else "flashmask"


def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array, the same on every process, placed; each process hands over the parts of its own devices."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def batch_groups(mesh: Mesh, batch_axes: Any) -> int:
    """Among how many groups of ranks these axes of a mesh split the batch; ValueError where it lacks one."""
    check_kind("mesh", mesh, Mesh)
    axes = jax.tree.leaves(batch_axes)
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(f"batch_axes: {axis!r} is none of the mesh's {', '.join(mesh.shape)}")
    return math.prod(mesh.shape[axis] for axis in axes)


def _topology(scheme: str, mesh: Mesh, window: int | None, ranks_per_node: int) -> Topology:
    for axis in ("ring", "ulysses"):
        if axis not in mesh.shape:
            raise ValueError(f"mesh: has axes {', '.join(mesh.shape)}, {axis} is missing")
    ring, ulysses = mesh.shape["ring"], mesh.shape["ulysses"]
    head_first = mesh.axis_names.index("ring") < mesh.axis_names.index("ulysses")
    if scheme == "ulysses" and ring > 1:
        raise Unsupported(scheme, f"mesh with ring {ring}: the scheme exchanges heads among all ranks")
    return make_topology(
        scheme, ring * ulysses, ulysses=ulysses, window=window, ranks_per_node=ranks_per_node, head_first=head_first
    )
