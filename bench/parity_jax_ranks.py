"""What JAX does for a parity cell of a scheme, inside a worker: all ranks are devices of one process.

Its twin is bench/parity_torch_ranks.py. `shard_out` and `gather_in` run in the judge, whose JAX has CPU devices alone.
"""

import contextlib
import functools
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from bench.attention_task import stack_of
from bench.context_parallel_cases import Case, from_record
from bench.jax_stack import meeting
from bench.parity_cells import KEPT, SAMPLES
from jax_impl import context_parallel as cp
from jax_impl.context_parallel.attention import backward, forward
from jax_impl.context_parallel.plan import alike, default_kernel, place
from parity import checkpoints
from parity.compare import RESULTS, errors, over_budget
from parity.inputs import TENSORS
from parity.reference import Reference, sample_of
from workload.capability import DYNAMIC_MASKS
from workload.errors import Unsupported
from workload.problem import AttentionProblem

TOKENS = {"q": 1, "k": 1, "v": 1, "dout": 1, "out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # the axis of tokens
SIDE = {"k": "kv", "v": "kv", "dk": "kv", "dv": "kv"}  # of the others: q
CALLS = 5
HEAD_START = 4  # flushes: launching on several devices of a process takes the host half a millisecond


class _Built:
    """A cell's plan and its compiled passes; once it has run, its sharded inputs."""

    def __init__(self, plan: cp.Plan, problem: AttentionProblem):
        self.plan, self.problem = place(plan), problem
        self.placed: dict[str, jax.Array] = {}
        self.results: dict[str, jax.Array] = {}
        sharded = NamedSharding(plan.program.mesh, plan.program.spec())
        q, k, v, dout = (
            jax.ShapeDtypeStruct((shape[0], positions.size, *shape[2:]), problem.dtype, sharding=sharded)
            for shape, positions in ((problem.q_shape, plan.data.q_positions),
                                     *[(problem.kv_shape, plan.data.kv_positions)] * 2,
                                     (problem.q_shape, plan.data.q_positions)))
        compiled = stack_of("jax").compile_ahead  # once for masks of one signature
        self.forward, _ = compiled("forward", forward, self.plan, q, k, v)
        saved = jax.tree.map(lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
                             jax.eval_shape(forward, self.plan, q, k, v), self.forward.output_shardings)[1]
        self.backward, _ = compiled("backward", backward, self.plan, saved, dout)

    def run(self, inputs: str) -> None:
        """Both passes on the inputs of a checkpoint."""
        whole = checkpoints.restore(inputs)
        self.placed = {name: cp.shard(np.asarray(whole[name]), self.plan, SIDE.get(name, "q")) for name in TENSORS}
        q, k, v, dout = self.placed.values()
        result, saved = self.forward(self.plan, q, k, v)
        self.results = dict(zip(RESULTS, (*result, *self.backward(self.plan, saved, dout)), strict=True))
        jax.block_until_ready(self.results)

    def again(self) -> Any:
        """Both passes once more; the gradients, which may still be under way."""
        q, k, v, dout = self.placed.values()
        _, saved = self.forward(self.plan, q, k, v)
        return self.backward(self.plan, saved, dout)


_held: dict[Case, _Built] = {}


def ready() -> None:
    """Nothing: the worker has imported this module."""


def programs(of: list[dict[str, Any]]) -> list[int]:
    """For each of some cells the number of the first that compiles to the same programs, once their plans are alike.

    Cells under dynamic masks, whose plans take seconds, count as of programs of their own.
    """
    cases, known = [from_record(case) for case in of], {}
    plans = _plans(tuple(case for case in cases if case.spec.mask not in DYNAMIC_MASKS))

    def program(case: Case) -> Hashable:
        leaves, tree = jax.tree.flatten(plans.get(case, case))
        return tree, tuple(x.shape if isinstance(x, np.ndarray) else x for x in leaves)

    return [known.setdefault(program(case), n) for n, case in enumerate(cases)]


@functools.lru_cache(maxsize=1)
def _plans(cases: tuple[Case, ...]) -> dict[Case, cp.Plan]:
    """The plans of some cells of a scheme, made alike where they can be, so that they share a compilation."""
    plans = {}
    for case in cases:
        with contextlib.suppress(Unsupported):  # the cell's own turn tells
            plans[case] = _plan(case)
    return dict(zip(plans, alike(list(plans.values())), strict=True))


def _plan(case: Case) -> cp.Plan:
    problem, mesh = case.spec.problem(), cp.make_mesh(case.topology)
    kernel = case.kernel or default_kernel(problem.mask, mesh.devices.flat[0].platform)
    return cp.plan_of(case.schedule(problem, with_lse=True), mesh, kernel, on_host=True)


def build(case: dict[str, Any], beside: list[dict[str, Any]]) -> None:
    """Makes a cell ready: its plan, alike those of the cells beside it, and both passes, compiled.

    Unsupported where its plan is refused.
    """
    while len(_held) >= KEPT:
        del _held[next(iter(_held))]
    chosen = from_record(case)
    plan = _plans(tuple(from_record(c) for c in beside)).get(chosen) or _plan(chosen)
    _held[chosen] = _Built(plan, chosen.spec.problem())


def _of(case: dict[str, Any]) -> _Built:
    return _held[from_record(case)]


def run(case: dict[str, Any], folder: str, inputs: str) -> str:
    """Of a cell that is built: runs both passes on the inputs and saves their shards as a checkpoint.

    Returns: the local kernel's name.
    """
    built = _of(case)
    built.run(inputs)
    checkpoints.save(Path(folder) / "inputs", built.placed)
    return built.plan.program.kernel


def judge(case: dict[str, Any], folder: str, reference: str) -> dict[str, Any]:
    """Restores PyTorch's shards under this stack's mesh and judges both stacks, joined, and their difference.

    Returns: errors by side, budget, oracle, and what is wrong with each side, a line each.
    """
    built = _of(case)
    plan, spec = built.plan, built.plan.program
    shardings = {name: NamedSharding(spec.mesh, spec.spec(TOKENS[name])) for name in RESULTS}
    theirs = checkpoints.restore(Path(folder) / "torch", shardings)
    judged, sample, group = Reference.load(reference), sample_of(built.problem), built.problem.group
    take = stack_of("jax").take
    got = {
        side: {name: take(sample.take(name, _joined(name, x, plan), group)) for name, x in results.items()}
        for side, results in (("jax", built.results), ("torch", theirs))
    }
    found = {side: errors(results, judged.results) for side, results in got.items()}
    built.results = {}  # memory, for what is built next
    wrong = [f"{side} {line}" for side, measured in found.items() for line in over_budget(measured, judged.budget)]
    return {"errors": found | {"cross": errors(got["jax"], got["torch"])}, "budget": judged.budget,
            "oracle": judged.oracle, "wrong": wrong}


def _joined(name: str, x: jax.Array, plan) -> np.ndarray:
    """A sharded result in token order."""
    if name == "lse":
        return np.moveaxis(np.asarray(cp.unshard(x.transpose(0, 2, 1), plan)), 1, 2)
    return np.asarray(cp.unshard(x, plan, SIDE.get(name, "q")))


def clock(case: dict[str, Any]) -> dict[str, Any]:
    """Of a cell that has run: how long both passes take, calls one behind the other.

    On GPUs between two events on each one's stream, the slowest's, at either of which all have met, the host ahead.

    Returns: samples, seconds of a call as a mean; waited, for how many of them a device may have waited for the host.
    """
    built, stack = _of(case), stack_of("jax")
    devices = tuple(built.plan.program.mesh.devices.flat)
    meet = meeting(devices)

    def calls(_: int) -> Any:
        for _ in range(CALLS):
            last = built.again()
            if not stack.on_gpu:  # queued programs of one process' CPU devices can wait for each other's threads
                jax.block_until_ready(last)
        return meet()

    sample = stack.sampler(calls, cold=False, flushes=HEAD_START, devices=devices)
    return {"samples": [sample(n) / CALLS for n in range(SAMPLES)], "waited": getattr(sample, "waited", 0)}


def shard_out(folder: str, world: int) -> None:
    """In the judge: restores the shards that JAX saved by PyTorch's ranks and hands each its raw buffers, a file."""
    axes = {name: TOKENS[name] for name in TENSORS}
    for rank, shard in enumerate(checkpoints.raw_shards(Path(folder) / "inputs", axes, world)):
        np.savez(f"{folder}/inputs{rank}.npz", **shard)  # type: ignore[arg-type]


def gather_in(folder: str, world: int) -> None:
    """In the judge: the results of PyTorch's ranks, a file each, into one sharded checkpoint."""
    shards = []
    for rank in range(world):
        with np.load(f"{folder}/results{rank}.npz") as held:
            shards.append({name: held[name] for name in RESULTS})
    checkpoints.save_shards(Path(folder) / "torch", shards, {name: TOKENS[name] for name in RESULTS})
