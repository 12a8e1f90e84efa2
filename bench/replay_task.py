"""What a worker does for a replay: each rank's local work of a schedule, rank after rank, on one device.

All functions here run inside a worker of one stack and return plain JSON values; `bench/replay.py` asks for them.
Equal local problems are run once; of a step's ranks, those with the most work and some others.
"""

import dataclasses
import functools
import hashlib
import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.attention_task import stack_of
from bench.context_parallel_cases import from_record
from bench.spot_check import spot_errors
from bench.timing import Protocol, measure
from parity.inputs import make_inputs, widened
from workload.problem import AttentionProblem
from workload.schedule import Schedule

BATCH_SECONDS = 0.005  # calls are timed in batches at least this long, so that what it costs to launch them is small
BATCHES = 64
SPOTS = 2  # distinct local problems of a group of which some rows and keys are checked


def stack_part(stack: str, name: str):
    """A module of a stack's context_parallel package."""
    return importlib.import_module(f"{stack}_impl.context_parallel.{name}")


# ---- what a replay computes ----------------------------------------------------------------------


def outputs(stack_name: str, schedule: Schedule, kernel: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """out, dq, dk, dv of the whole problem, float64 in token order, made by every rank's local work in turn.

    Collectives are copies on the host and sums are float64: judged are the schedule, its local masks and the kernel.

    Args:
      arrays: q, k, v, dout of the whole problem, as `Stack.put` takes them.
    """
    stack, problem = stack_of(stack_name), schedule.problem
    found = {name: np.zeros(shape) for name, shape in (
        ("out", problem.q_shape), ("dq", problem.q_shape), ("dk", problem.kv_shape), ("dv", problem.kv_shape))}
    for rank in range(schedule.topology.world):
        _replay_rank(stack, schedule, kernel, rank, arrays, found)
    return found


def _replay_rank(stack, schedule: Schedule, kernel: str, rank: int, arrays, found) -> None:
    """Adds one rank's results: a forward walk that merges, a backward walk that accumulates."""
    signature, (ring_index, u) = schedule.signature, schedule.topology.place(rank)
    merge = stack_part(stack.name, "merge").merge
    chosen, rows = stack.kernel(kernel), schedule.q_groups[ring_index]
    q_heads, kv_heads = (
        np.array(slots)[u * local : (u + 1) * local]
        for slots, local in ((signature.heads.q_slots, signature.heads.q_local),
                             (signature.heads.kv_slots, signature.heads.kv_local))
    )
    scale, single = signature.scale, stack.float32
    q, dout = (stack.put(_cut(arrays[x], rows, q_heads, signature.q_rows)) for x in ("q", "dout"))
    steps, total = [], None
    for t in range(len(signature.steps)):
        keys = schedule.keys(t, ring_index)
        k, v = (stack.put(_cut(arrays[x], keys, kv_heads, signature.kv_rows)) for x in ("k", "v"))
        operands = stack.prepare(chosen, schedule.local_problem(t, rank))
        part = chosen.forward(q, k, v, operands, scale, out_dtype=single)
        total = part if total is None else merge(total, part)
        steps.append((keys, k, v, operands))
    out, lse = total
    _add(found["out"], stack.take(out), rows, q_heads)
    out = stack.like(out, q)
    for keys, k, v, operands in steps:
        dq, dk, dv = chosen.backward(q, k, v, out, lse, dout, operands, scale, grad_dtype=single)
        _add(found["dq"], stack.take(dq), rows, q_heads)
        _add(found["dk"], stack.take(dk), keys, kv_heads)
        _add(found["dv"], stack.take(dv), keys, kv_heads)


def _cut(x: np.ndarray, tokens: np.ndarray, heads: np.ndarray, length: int) -> np.ndarray:
    """[batch, seq, heads, d] to a rank's tokens and heads, zeros where there is padding."""
    out = np.zeros((x.shape[0], length, len(heads), x.shape[3]), x.dtype)
    out[:, : len(tokens)] = np.where((heads >= 0)[:, None], x[:, tokens][:, :, np.maximum(heads, 0)], x.dtype.type(0))
    return out


def _add(into: np.ndarray, part: np.ndarray, tokens: np.ndarray, heads: np.ndarray) -> None:
    for n, head in enumerate(heads):
        if head >= 0:
            into[:, tokens, head] += part[:, : len(tokens), n]


def check(case: dict[str, Any], tokens: int, kernel: str) -> dict[str, Any]:
    """Errors of a small replay of a case (`tokens` a rank, 8 ranks and a few heads at most) against the oracle."""
    from parity.compare import relative_error
    from workload.oracle import attention_oracle

    chosen = from_record(case)
    small = dataclasses.replace(
        chosen, world=min(chosen.world, 8), ulysses=0, window=0,
        spec=dataclasses.replace(
            chosen.spec, seq_len=tokens * min(chosen.world, 8), q_heads=min(8, chosen.spec.q_heads),
            kv_heads=min(2, chosen.spec.kv_heads), batch=1,
        ),
    )
    schedule = small.schedule()
    problem = schedule.problem
    arrays = make_inputs(problem, small.spec.inputs())
    got = outputs(small.stack, schedule, kernel, arrays)
    exact = {name: widened(x) for name, x in arrays.items()}
    want = attention_oracle(exact["q"], exact["k"], exact["v"], problem.mask, problem.scale, exact["dout"])
    return {name: relative_error(x, getattr(want, name)) for name, x in got.items()}


# ---- what a replay measures ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One local problem that is run: which step and rank of which case, and a key that equal problems share."""

    case: int
    step: int
    rank: int
    problem: AttentionProblem
    key: str


def chosen_ranks(cells: np.ndarray, count: int) -> list[int]:
    """Ranks to run at a step: the one with the most cells, then ranks spread over the order of work; 0 is all.

    >>> chosen_ranks(np.array([5, 1, 9, 3]), 2)
    [2, 1]
    """
    order = np.argsort(-cells, kind="stable")
    if not count or count >= len(order):
        return order.tolist()
    return order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))].tolist()


def works_of(number: int, schedule: Schedule, count: int) -> list[Work]:
    """The local problems of a schedule to run; steps and ranks without a visible cell are not among them."""
    found = []
    for t in range(len(schedule.signature.steps)):
        for rank in chosen_ranks(schedule.cells[t], count):
            if schedule.cells[t, rank]:
                problem = schedule.local_problem(t, rank)
                found.append(Work(number, t, rank, problem, mask_key(problem.mask)))
    return found


def mask_key(mask) -> str:
    """Equal for masks whose arrays are equal."""
    names = ("starts", "ends", "q_bounds", "kv_bounds", "counts", "indices", "q_positions", "kv_positions")
    digest = hashlib.sha256()
    for name in names:
        if hasattr(mask, name):
            digest.update(np.ascontiguousarray(getattr(mask, name)))
    return digest.hexdigest()[:16]


@dataclasses.dataclass
class _Group:
    """Cases of equal local shapes, built in a worker: what there is to run, and both passes compiled."""

    works: list[Work]
    cells: list[np.ndarray]
    problems: dict[str, AttentionProblem]
    operands: dict[str, Any]
    passes: "_Passes"
    walked: bool


_ready: list[_Group] = []  # the group this worker has built


def build(case_list: Sequence[dict[str, Any]], kernel: str, count: int) -> dict[str, Any]:
    """Makes the local problems of cases of equal `bench.replay.shape_key` and compiles both passes for them.

    Args:
      count: ranks a step, see `chosen_ranks`.
    """
    _ready.clear()
    cases = [from_record(c) for c in case_list]
    schedules = [c.schedule() for c in cases]
    signature, stack = schedules[0].signature, stack_of(cases[0].stack)
    stack.release()
    works = [w for n, s in enumerate(schedules) for w in works_of(n, s, count)]
    problems = {w.key: w.problem for w in works}
    chosen = stack.kernel(kernel)
    for problem in problems.values():
        chosen.require(problem)
    began = time.perf_counter()
    operands = dict(zip(problems, stack.prepare_alike(chosen, list(problems.values())), strict=True))
    prepare_seconds = time.perf_counter() - began
    some, walked = next(iter(problems)), len(signature.steps) > 1
    passes = _Passes(stack, chosen, problems[some], operands[some], partial_out=walked,
                     partial_grads=signature.topology.world > 1)
    _ready.append(_Group(works, [s.cells for s in schedules], problems, operands, passes, walked))
    return {"distinct": len(problems), "prepare_seconds": prepare_seconds,
            "compile_seconds": time.perf_counter() - began - prepare_seconds}


def times(protocol: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the local work that `build` made, of all its cases.

    Returns: per case its runs, [{step, rank, cells, forward, backward}]; the largest spot errors; and the seconds of
    merging two partial results (forward) and of adding two gradients (backward), which every step of a walk but the
    first costs besides.
    """
    group, limits = _ready[0], Protocol(**protocol)
    stack, seconds = group.passes.stack, {}
    spots: dict[str, float] = {}
    for name, operands in group.operands.items():
        if len(seconds) < SPOTS:
            results = (*group.passes.forward(operands), *group.passes.backward(operands))
            for label, e in spot_errors(stack, group.problems[name], group.passes.inputs, results).items():
                spots[label] = max(spots.get(label, 0.0), e)
        seconds[name] = group.passes.seconds(operands, limits)
    runs: list[list[dict[str, Any]]] = [[] for _ in group.cells]
    for w in group.works:
        forward, backward = seconds[w.key]
        cells = int(group.cells[w.case][w.step, w.rank])
        runs[w.case].append({"step": w.step, "rank": w.rank, "cells": cells, "forward": forward, "backward": backward})
    some = next(iter(group.problems.values()))
    combine = _time_combining(stack, some, limits) if group.walked else [0.0, 0.0]
    return {"runs": runs, "combine": combine, "spot_errors": spots}


class _Passes:
    """Both passes of a kernel compiled for the shapes of a problem, and random inputs for them.

    partial: whether results are parts of a larger problem: out and gradients in float32.
    """

    def __init__(self, stack, kernel, problem: AttentionProblem, operands, *, partial_out: bool, partial_grads: bool):
        self.stack, scale = stack, problem.scale
        kinds = [stack.float32 if partial else None for partial in (partial_out, partial_grads)]
        self.inputs = stack.random(problem)

        def forward(q, k, v, operands):
            return kernel.forward(q, k, v, operands, scale, out_dtype=kinds[0])

        def backward(q, k, v, out, lse, dout, operands):
            return kernel.backward(q, k, v, out, lse, dout, operands, scale, grad_dtype=kinds[1])

        q, k, v, dout = self.inputs
        self._forward, _, self.results = stack.compile(
            ("forward", kernel.name, scale, partial_out), forward, q, k, v, operands)
        out, lse = self.results
        self._out = stack.like(out, q)
        self._backward, _, _ = stack.compile(
            ("backward", kernel.name, scale, partial_grads), backward, q, k, v, self._out, lse, dout, operands)

    def forward(self, operands):
        """out, lse; the backward pass runs from the last ones."""
        self.results = self._forward(*self.inputs[:3], operands)
        self._out = self.stack.like(self.results[0], self.inputs[0])
        return self.results

    def backward(self, operands):
        """dq, dk, dv."""
        q, k, v, dout = self.inputs
        return self._backward(q, k, v, self._out, self.results[1], dout, operands)

    def seconds(self, operands, protocol: Protocol) -> tuple[float, float]:
        """Of both passes."""
        forward = functools.partial(self._forward, *self.inputs[:3], operands)
        return _seconds(self.stack, forward, protocol), _seconds(self.stack, lambda: self.backward(operands), protocol)


def _time_combining(stack, problem, protocol: Protocol) -> list[float]:
    """Seconds of one merge, and of adding dq, dk, dv to what there is."""
    merge = stack_part(stack.name, "merge").merge
    q, k, v, _ = stack.random(problem)
    part = stack_part(stack.name, "merge").empty(q)
    join, _, _ = stack.compile("merge", merge, part, part)
    grads = [stack.like(x, part[0]) for x in (q, k, v)]
    add, _, _ = stack.compile("add", lambda a, b: [x + y for x, y in zip(a, b, strict=True)], grads, grads)
    return [_seconds(stack, lambda: join(part, part), protocol), _seconds(stack, lambda: add(grads, grads), protocol)]


def _seconds(stack, call, protocol: Protocol) -> float:
    """Median seconds of a call, timed in batches from one wait to the next; of a long call, the better of two."""
    def once():
        began = time.perf_counter()
        stack.finish(call())
        return time.perf_counter() - began

    first = once()
    if first > 10 * BATCH_SECONDS:
        return min(first, once())
    batch = max(1, min(BATCHES, round(BATCH_SECONDS / max(1e-6, once()))))

    def sample(_):
        began = time.perf_counter()
        for _ in range(batch):
            result = call()
        stack.finish(result)
        return (time.perf_counter() - began) / batch
    return measure(sample, protocol).median
