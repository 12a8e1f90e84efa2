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
from bench.context_parallel_cases import Case, from_record
from bench.spot_check import spot_errors
from bench.timing import Protocol, measure, wall
from parity.inputs import make_inputs, widened
from workload.block_masks import BlockMask
from workload.capability import DYNAMIC_MASKS
from workload.masks import IntervalMask
from workload.problem import PASSES, AttentionProblem
from workload.schedule import Schedule

LONG_SECONDS = 0.02
WARM_TOKENS = 512  # of the problem that a stack's compilers are called with before anything is timed
NEARLY = 0.9  # ranks with this share of the busiest rank's cells may be the slowest
FIRST, LATER, LAST = "first", "later", "last"
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


def kernel_of(case: Case) -> str:
    """The local kernel of a case; by default naive on a CPU, flashmask or flashinfer on a GPU."""
    if case.kernel:
        return case.kernel
    if not stack_of(case.stack).on_gpu:
        return "naive"
    return "flashinfer" if case.spec.mask in DYNAMIC_MASKS else "flashmask"


def check(case: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Errors of a small replay of a case (`tokens` a rank, 8 ranks and a few heads at most) against the oracle."""
    from parity.compare import relative_error
    from workload.oracle import attention_oracle

    chosen = from_record(case)
    world, spec = min(chosen.world, 8), chosen.spec
    kv_heads, group = min(2, spec.kv_heads), min(4, spec.q_heads // spec.kv_heads)
    spec = dataclasses.replace(
        spec.at_length(tokens * world), q_heads=kv_heads * group, kv_heads=kv_heads, batch=1)
    small = dataclasses.replace(chosen, world=world, ulysses=0, window=0, spec=spec)
    schedule = small.schedule()
    problem = schedule.problem
    arrays = make_inputs(problem, small.spec.inputs())
    got = outputs(small.stack, schedule, kernel_of(small), arrays)
    exact = {name: widened(x) for name, x in arrays.items()}
    q, k, v, dout = (exact[name] for name in ("q", "k", "v", "dout"))
    want = attention_oracle(q, k, v, problem.mask, problem.scale, dout)
    # dq and dk are differences, of which the second part is delta * (P k) and P^T (delta * q): out and dv of this.
    delta = (want.out * dout).sum(axis=3, keepdims=True)
    second = attention_oracle(q, k, k, problem.mask, problem.scale, delta * q)
    least = {"dq": problem.scale * np.linalg.norm(delta * second.out), "dk": problem.scale * np.linalg.norm(second.dv)}
    return {name: relative_error(x, getattr(want, name), least.get(name, 0.0)) for name, x in got.items()}


# ---- what a replay measures ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One local problem that is run: which step and rank of which case, and a name that equal problems share.

    place: FIRST, LATER (it adds to what an earlier step made) or LAST (and makes the result).
    """

    case: int
    step: int
    rank: int
    problem: AttentionProblem
    name: str
    place: str


def chosen_ranks(cells: np.ndarray, count: int) -> list[int]:
    """Ranks to run at a step: the busiest and others spread over those nearly as busy; 0 is all ranks.

    >>> chosen_ranks(np.array([5, 19, 20, 3, 18]), 2)
    [2, 4]
    """
    order = np.argsort(-cells, kind="stable")
    if not count:
        return order.tolist()
    order = order[cells[order] >= NEARLY * cells.max()]
    return order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))].tolist()


def works_of(number: int, schedule: Schedule, count: int) -> list[Work]:
    """The local problems of a schedule to run; steps and ranks without a visible cell are not among them."""
    found = []
    for t in range(len(schedule.signature.steps)):
        for rank in chosen_ranks(schedule.cells[t], count):
            if schedule.cells[t, rank]:
                problem = schedule.local_problem(t, rank)
                place = FIRST if t == 0 else LAST if t == len(schedule.signature.steps) - 1 else LATER
                found.append(Work(number, t, rank, problem, mask_key(problem.mask), place))
    return found


def mask_key(mask) -> str:
    """Equal for masks whose arrays are equal."""
    names = ("starts", "ends", "q_bounds", "kv_bounds", "counts", "indices", "q_positions", "kv_positions")
    digest = hashlib.sha256()
    for name in names:
        if hasattr(mask, name):
            digest.update(np.ascontiguousarray(getattr(mask, name)))
    return digest.hexdigest()[:16]


def unseeing(problem: AttentionProblem) -> AttentionProblem:
    """The problem under a mask of the same shapes that shows nothing to anybody."""
    mask = problem.mask
    if isinstance(mask, BlockMask):
        nothing = dataclasses.replace(mask, counts=np.zeros_like(mask.counts))
    else:
        nothing = IntervalMask(np.zeros_like(mask.starts), np.zeros_like(mask.ends), mask.kv_len, "custom")
    return dataclasses.replace(problem, mask=nothing)


@dataclasses.dataclass
class _Group:
    """Cases of equal local shapes, built in a worker: what there is to run, and the programs that run it.

    operands: of each distinct problem; the last, where the cases walk, sees nothing (NOTHING).
    seconds: of both passes, by problem and place, once timed; once: see `times`.
    spots: problems and results of which some rows and keys are checked.
    """

    works: list[Work]
    cells: list[np.ndarray]
    problems: dict[str, AttentionProblem]
    operands: dict[str, Any]
    programs: "_Programs | _Walked"
    seconds: dict[tuple[str, str], tuple[float, float]] = dataclasses.field(default_factory=dict)
    once: list[float] = dataclasses.field(default_factory=list)
    spots: list[tuple[AttentionProblem, Any]] = dataclasses.field(default_factory=list)


NOTHING = "nothing"
_ready: list[_Group] = []  # the group this worker has built


def build(case_list: Sequence[dict[str, Any]], count: int) -> dict[str, Any]:
    """Makes the local problems of cases of equal `bench.replay.shape_key` and compiles what runs them.

    Next to nothing runs on the device, so that other workers can build while one measures.

    Args:
      count: ranks a step, see `chosen_ranks`.
    """
    _ready.clear()
    cases = [from_record(c) for c in case_list]
    schedules = [c.schedule() for c in cases]
    signature, stack = schedules[0].signature, stack_of(cases[0].stack)
    stack.release()
    works = [w for n, s in enumerate(schedules) for w in works_of(n, s, count)]
    problems = {w.name: w.problem for w in works}
    distinct, walked = len(problems), len(signature.steps) > 1
    chosen, some = stack.kernel(kernel_of(cases[0])), works[0]
    for problem in problems.values():
        chosen.require(problem)
    if walked:
        problems[NOTHING] = unseeing(some.problem)
    began = time.perf_counter()
    operands = dict(zip(problems, stack.prepare_alike(chosen, list(problems.values())), strict=True))
    prepare_seconds = time.perf_counter() - began
    make: Any = _Walked if walked else functools.partial(_Programs, partial_grads=signature.topology.world > 1)
    programs = make(stack, chosen, some.problem, operands[some.name])
    if not stack.compiles_ahead and not isinstance(some.problem.mask, BlockMask):
        _call_compilers(make, stack, chosen, some.problem)
    _ready.append(_Group(works, [s.cells for s in schedules], problems, operands, programs))
    return {"kernel": chosen.name, "timer": f"{stack.timer}, warm cache", "distinct": distinct,
            "prepare_seconds": prepare_seconds, "compile_seconds": time.perf_counter() - began - prepare_seconds}


def _call_compilers(make, stack, kernel, problem: AttentionProblem) -> None:
    """Runs all programs on the first tokens of a problem: those compile at a first call, by heads and dtypes."""
    rows, keys = (np.arange(min(n, WARM_TOKENS)) for n in (problem.q_len, problem.kv_len))
    small = dataclasses.replace(problem, mask=problem.mask.restrict(rows, keys))
    operands = stack.prepare(kernel, small)
    programs = make(stack, kernel, small, operands)
    programs.draw()
    stack.finish(programs.results(operands, operands))


def times(number: int, protocol: dict[str, Any], checked: bool) -> dict[str, Any]:
    """Seconds of the local work of one of the cases that `build` was given; what an earlier one ran is not run again.

    Nothing of it runs on the device any more when it returns; checked: `spots` will be asked for.

    Returns: its runs, [{step, rank, cells, forward, backward}], where a step of a walk but the first adds to what the
    steps before made, and the last makes out in its dtype; by pass what a rank of a walk does `once`: the row sums of
    out * dout, and dq from the sum that its kernel keeps; and whether any of it was run for this case: `news`.
    """
    group, limits = _ready[0], Protocol(**protocol)
    programs, works, seconds = group.programs, [w for w in group.works if w.case == number], group.seconds
    if not programs.inputs:
        programs.draw()
    new = [some for some in dict.fromkeys((w.name, w.place) for w in works) if some not in seconds]
    for name, place in new:
        seconds[name, place] = programs.seconds(group.operands[name], place, limits)
    if not group.once:
        group.once = programs.seconds_once(group.operands[group.works[0].name], limits)
    for name in () if group.spots or not checked else list(dict.fromkeys(w.name for w in works))[:SPOTS]:
        results = programs.results(group.operands[name], group.operands.get(NOTHING))
        programs.stack.finish(results)
        group.spots.append((group.problems[name], results))
    runs = []
    for w in works:
        forward, backward = seconds[w.name, w.place]
        cells = int(group.cells[number][w.step, w.rank])
        runs.append({"step": w.step, "rank": w.rank, "cells": cells, "forward": forward, "backward": backward})
    return {"runs": runs, "once": group.once, "news": bool(new)}


def again(number: int) -> dict[str, float]:
    """One more sample, seconds of both passes, of a case that `times` has timed and that walks no ring."""
    group = _ready[0]
    assert isinstance(group.programs, _Programs)
    [work] = (w for w in group.works if w.case == number)
    long = {which: s > LONG_SECONDS for which, s in zip(PASSES, group.seconds[work.name, work.place], strict=True)}
    calls = group.programs.calls(group.operands[work.name])
    return {which: group.programs.stack.sampler(lambda _, call=call: call(), long[which])(0)
            for which, call in zip(PASSES, calls, strict=True)}


def spots() -> dict[str, float]:
    """The largest errors at spot-checked rows and keys of some problems of the case that was timed first."""
    group, found = _ready[0], {}
    for problem, results in group.spots:
        for label, e in spot_errors(group.programs.stack, problem, group.programs.inputs, results).items():
            found[label] = max(found.get(label, 0.0), e)
    return found


class _Programs:
    """What a rank runs that has all its keys at hand, compiled for the shapes of a local problem.

    Attributes:
      inputs: q, k, v, dout, random; there once `draw` has been called.
    """

    def __init__(self, stack, kernel, problem: AttentionProblem, operands, partial_grads: bool):
        self.stack, self.inputs = stack, []
        scale, grad_dtype = problem.scale, stack.float32 if partial_grads else None

        def forward(q, k, v, operands):
            return kernel.forward(q, k, v, operands, scale)

        def backward(q, k, v, out, lse, dout, operands):
            return kernel.backward(q, k, v, out, lse, dout, operands, scale, grad_dtype=grad_dtype)

        q, k, lse = _shapes(stack, problem)
        self._random = stack.random_ahead(problem)
        self._forward, _ = stack.compile_ahead("forward", forward, q, k, k, operands)
        self._backward, _ = stack.compile_ahead("backward", backward, q, k, k, q, lse, q, operands)

    def draw(self) -> None:
        """Makes the inputs, on the device."""
        self.inputs = self._random()

    def results(self, operands, nothing):
        """out, lse, dq, dk, dv."""
        del nothing
        q, k, v, dout = self.inputs
        out, lse = self._forward(q, k, v, operands)
        return out, lse, *self._backward(q, k, v, out, lse, dout, operands)

    def seconds(self, operands, place: str, protocol: Protocol) -> tuple[float, float]:
        """Of both passes."""
        assert place == FIRST
        forward, backward = self.calls(operands)
        return seconds_of(self.stack, forward, protocol), seconds_of(self.stack, backward, protocol)

    def calls(self, operands):
        """Both passes, ready to be called."""
        q, k, v, dout = self.inputs
        out, lse = self._forward(q, k, v, operands)
        return (functools.partial(self._forward, q, k, v, operands),
                functools.partial(self._backward, q, k, v, out, lse, dout, operands))

    def seconds_once(self, operands, protocol: Protocol) -> list[float]:
        """Nothing besides."""
        del operands, protocol
        return [0.0, 0.0]


class _Walked:
    """What a rank runs to which keys come step by step: of each pass its first step, a later one, and what ends it."""

    def __init__(self, stack, kernel, problem: AttentionProblem, operands):
        self.stack, self.inputs, scale, ahead = stack, [], problem.scale, stack.compile_ahead
        local = stack_part(stack.name, "local")
        running = local.running(kernel)

        def forward(part, q, k, v, operands):
            return running.forward(part, q, k, v, operands, scale=scale)

        def backward(total, q, k, v, out, lse, dout, delta, operands):
            return running.backward(total, q, k, v, out, lse, dout, operands, scale=scale, delta=delta)

        def last_forward(part, q, k, v, operands):
            return local.last_forward(running, part, q, k, v, operands, scale)

        def start_backward(out, dout):
            return local.row_sums(out, dout)

        def end_backward(total, q):
            return running.gradient(total, q, scale)

        q, k, lse = _shapes(stack, problem)
        self._random = stack.random_ahead(problem)
        self._first, _ = ahead("first", functools.partial(forward, None), q, k, k, operands)
        part = stack.shapes_of(functools.partial(forward, None), q, k, k, operands)
        self._later, _ = ahead("later", forward, part, q, k, k, operands, donate=True)
        self._last, _ = ahead("last", last_forward, part, q, k, k, operands)
        self._row_sums, _ = ahead("row_sums", start_backward, q, q)
        sides = (q, k, k, q, lse, q, lse, operands)
        self._first_back, _ = ahead("first_back", functools.partial(backward, None), *sides)
        total = stack.shapes_of(functools.partial(backward, None), *sides)
        self._later_back, _ = ahead("later_back", lambda made, *rest: backward(made[0], *rest), total, *sides,
                                    donate=True)
        self._end_back, _ = ahead("end_back", end_backward, total and total[0], q)

    def draw(self) -> None:
        """Makes the inputs, on the device."""
        self.inputs = self._random()

    def _saved(self, part, operands):
        """What the steps of a backward pass read besides keys and masks: q, k, v, out, lse, dout, delta."""
        q, k, v, dout = self.inputs
        out, lse = self._last(part, q, k, v, operands)
        return q, k, v, out, lse, dout, self._row_sums(out, dout)

    def results(self, operands, nothing):
        """out, lse, dq, dk, dv, the problem being the second and last step, behind one that shows nothing."""
        q, k, v, _ = self.inputs
        saved = self._saved(self._first(q, k, v, nothing), operands)
        total, dk, dv = self._later_back(self._first_back(*saved, nothing), *saved, operands)
        return saved[3], saved[4], self._end_back(total, q), dk, dv

    def seconds(self, operands, place: str, protocol: Protocol) -> tuple[float, float]:
        """Of both passes, of a step at a place."""
        q, k, v, _ = self.inputs
        part = self._first(q, k, v, operands)
        saved = self._saved(part, operands)
        if place == FIRST:
            return (seconds_of(self.stack, lambda: self._first(q, k, v, operands), protocol),
                    seconds_of(self.stack, lambda: self._first_back(*saved, operands), protocol))
        later = _Chain(lambda part: self._later(part, q, k, v, operands), part)
        forward = later if place == LATER else lambda: self._last(part, q, k, v, operands)
        backward = _Chain(lambda made: self._later_back(made, *saved, operands), self._first_back(*saved, operands))
        return seconds_of(self.stack, forward, protocol), seconds_of(self.stack, backward, protocol)

    def seconds_once(self, operands, protocol: Protocol) -> list[float]:
        """Nothing in the forward pass; of what begins and ends the backward pass."""
        q, k, v, dout = self.inputs
        saved = self._saved(self._first(q, k, v, operands), operands)
        total, *_ = self._first_back(*saved, operands)
        calls = (lambda: self._row_sums(saved[3], dout), lambda: self._end_back(total, q))
        return [0.0, sum(seconds_of(self.stack, call, protocol) for call in calls)]


class _Chain:
    """A call whose result is what the next call begins from."""

    def __init__(self, call, state):
        self.call, self.state = call, state

    def __call__(self):
        self.state = self.call(self.state)
        return self.state


def _shapes(stack, problem: AttentionProblem):
    """What stands for q (and out, dout), k (and v) and lse (and delta)."""
    q, k = (stack.shape(shape, problem.dtype) for shape in (problem.q_shape, problem.kv_shape))
    return q, k, stack.shape((problem.batch, problem.q_heads, problem.q_len), "float32")


def seconds_of(stack, call, protocol: Protocol) -> float:
    """Median seconds of a call by the stack's timer, with a warm cache; a long call, to which it is nothing, has three
    samples: of two the median is no better than the one that a process which was starting disturbed.
    """
    once = wall(call, stack.finish)
    if once > LONG_SECONDS:  # what a first call loads is not the call's
        once = wall(call, stack.finish)
    long = once > LONG_SECONDS
    protocol = dataclasses.replace(protocol, warmups=0, **({"samples": 3, "least": 3} if long else {}))
    return measure(stack.sampler(lambda _: call(), long), protocol).median
