"""Replays a context-parallel job on one device: every rank's local work, really run, rank after rank; predicts the job.

    python -m bench.replay --schemes=ring,ulysses --worlds=8,64 --tokens_per_rank=8K --out=out/replay.jsonl
    python -m bench.replay --stack=torch --masks=causal_document --sharding=zigzag,striped

A row is a scheme under a mask on a world: per step the seconds of the local work (equal local problems are run once,
ranks are sampled with --ranks_per_step), the balance of the schedule, T1 on one device, and the efficiency
E = T1 / (world * slowest). `compute` ends each step in a barrier, as a ring does, and counts the merges; `predicted`
adds the links that the flags describe. T1 is timed before all else and, where it fits beside the others' memory, again
behind a case whose turn comes a while later, since clocks drift: a row takes the better of its last two timings. A
small replay of each scheme, mask and sharding is held to the float64 oracle first (--check), and of what is timed, some
rows and keys.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import itertools
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from bench import context_parallel_cases as cp
from bench import engine, environment, options, program, records
from bench.cases import STACKS, ProblemSpec, differing
from bench.link_model import Links, predict
from bench.replay_task import FIRST, works_of
from bench.timing import Protocol
from bench.turns import Turns
from bench.workers import Failure, Worker
from workload.capability import DYNAMIC_MASKS
from workload.errors import Unsupported
from workload.problem import PASSES
from workload.schedule import Schedule
from workload.suite import ALL_BUILDERS

TASKS = "bench.replay_task"
LOCK = Path(tempfile.gettempdir()) / f"attention-replay-{os.getuid()}.lock"
CHECK_TOKENS = 64  # tokens a rank of the small replay that is held to the oracle
TILE = 128  # of the estimate
FRESH_SECONDS = 15.0  # after which T1 is timed again
HELD_BYTES = 8 << 30  # that a backward pass of T1 moves, at most, where it is: its worker keeps about twice as much
CHECK_LIMIT = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a replay goes.

    Attributes:
      out, resume, again, deadline: as in `engine.Options`.
      ranks: ranks run a step, the busiest first; 0 for all.
      protocol: how long a local problem is timed.
      flop_limit: FLOPs of the longest pass that T1 may run.
      links: what links cost.
      check: whether a small replay is held to the oracle first.
      rate: FLOP/s of a full tile for an estimate without a device, 0 to measure.
      workers: processes at work at the same time; what is timed is timed alone.
    """

    out: Path
    resume: bool
    deadline: float
    ranks: int
    protocol: Protocol
    flop_limit: float
    links: Links
    check: bool = True
    workers: int = 1
    rate: float = 0.0
    again: Callable[[dict[str, Any]], bool] | None = None


def define() -> None:
    """Defines the flags."""
    options.define_measuring("out/replay.jsonl", deadline=300.0)
    options.define_problems(("full", "causal", "full_document", "causal_document"), seqlens=None)
    cp.define(worlds=("8", "64"))
    flags.FLAGS.set_default("seconds", 0.1)
    flags.DEFINE_string("tokens_per_rank", "8K", "Tokens a rank.")
    options.on_cpu(tokens_per_rank="256")
    flags.DEFINE_integer("ranks_per_step", 2, "Ranks run a step, the busiest and others nearly as busy; 0 for all.",
                         lower_bound=0)
    options.define_float("flop_limit", 4e14, "FLOPs of the longest pass that T1 may run.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Processes that build and compile at the same time; what they built is timed "
                         "one by one.", lower_bound=1)
    options.define_float("estimate_rate", 0.0, "Measure nothing: count visited tiles, at this rate in FLOP/s (6e14).",
                         lower_bound=0)
    flags.DEFINE_bool("check", True, "Hold a small replay to the oracle before a row is measured.")
    for name, value in dataclasses.asdict(Links()).items():
        unit = "seconds" if name.endswith("latency") else "bytes/s"
        options.define_float(f"link_{name}", value, f"{name.replace('_', ' ')}, {unit} a rank.")


def cases_of(values: flags.FlagValues) -> list[cp.Case]:
    """The rows that the flags ask for. ValueError names the flag."""
    [per_rank] = options.numbers("tokens_per_rank", [values.tokens_per_rank])
    worlds = options.numbers("worlds", values.worlds)
    documents = options.documents(values.documents, [per_rank * world for world in worlds])
    settings = differing(documents=documents, long_share=values.long_share)
    masks = options.choose("masks", values.masks, ALL_BUILDERS)
    out = []
    for stack in options.choose("stack", values.stack, STACKS):
        if values.kernel:
            options.choose_one("kernel", values.kernel, options.KERNELS[stack])
        for mask, world in itertools.product(masks, worlds):
            spec = ProblemSpec(mask, per_rank * world, 0, values.batch, values.q_heads, values.kv_heads,
                               values.head_dim, values.dtype, values.seed, settings)
            out += cp.cases_of(values, stack, spec, world)
    return out


def settings_of(values: flags.FlagValues) -> Settings:
    """How the run goes, from the flags."""
    try:
        links = Links(*(getattr(values, f"link_{f.name}") for f in dataclasses.fields(Links)))
    except ValueError as problem:
        raise ValueError(f"--link_{problem}") from problem
    protocol = Protocol(samples=5, least=2, seconds=values.seconds)
    resume, again = options.resumption(values)
    return Settings(Path(values.out), resume, values.deadline, values.ranks_per_step, protocol,
                    values.flop_limit, links, values.check, values.workers, values.estimate_rate,
                    again)


def shape_key(case: cp.Case, schedule: Schedule) -> tuple:
    """Cases of one key run the same compiled local program."""
    s = schedule.signature
    return (case.stack, case.kernel, case.spec.mask in DYNAMIC_MASKS, s.batch, s.q_rows, s.kv_rows, s.heads.q_local,
            s.heads.kv_local, s.head_dim, s.dtype, len(s.steps) > 1, case.world > 1)


def summary(schedule: Schedule, measured: dict[str, Any], links: Links) -> dict[str, Any]:
    """What a row tells of measured local work: per pass the slowest rank's seconds and the predicted job's.

    measured: of `replay_task.times`; what is done once comes to the first step.
    """
    steps = range(len(schedule.signature.steps))
    out: dict[str, Any] = {}
    for which, once in zip(PASSES, measured["once"], strict=True):
        slowest = np.zeros(len(steps))
        for run in measured["runs"]:
            slowest[run["step"]] = max(slowest[run["step"]], run[which])
        slowest[0] += once
        found = predict(schedule.signature, which, slowest.tolist(), links)
        out[which] = {"slowest": slowest.tolist(), "compute": found.compute, "predicted": found.total,
                      "exposed_links": found.exposed}
    return out


def efficiencies(row: dict[str, Any], one: dict[str, Any], world: int) -> dict[str, Any]:
    """E = T1 / (world * time), of the local work alone and of the predicted job, by pass and for both."""
    out = {}
    for label in ("compute", "predicted"):
        times = {which: row[which][label] for which in PASSES}
        single = {which: one[which]["seconds"] for which in PASSES}
        out[label] = {which: single[which] / (world * times[which]) if times[which] else 0.0 for which in PASSES}
        total = sum(times.values())
        out[label]["both"] = sum(single.values()) / (world * total) if total else 0.0
    return out


def over_limit(errors: dict[str, float], dtype: str) -> str:
    """Which results are wrong, in words; "" where none is."""
    limit = CHECK_LIMIT[dtype]
    return "; ".join(f"{name}: error {e:.3g} > {limit}" for name, e in errors.items() if not e <= limit)


def one_device(case: cp.Case, limit: float) -> cp.Case:
    """The case whose one rank computes the whole problem: T1.

    Where its backward pass has more than `limit` FLOPs, the longest length (halved as often as needed) within it.
    """
    return cp.Case(case.stack, "ulysses", _within(case.spec, limit), 1, "contiguous", kernel=case.kernel)


@functools.cache
def _within(spec: ProblemSpec, limit: float) -> ProblemSpec:
    while spec.problem().flops("backward") > limit and spec.seq_len > 1024:
        spec = spec.at_length(spec.seq_len // 2)
    return spec


Member = tuple[cp.Case, Schedule]


@dataclasses.dataclass
class One:
    """T1 of a problem: the worker that can time it again, its number there, its last two timings, and when."""

    worker: Worker
    number: int
    timings: list[dict[str, float]]
    when: float

    @property
    def best(self) -> dict[str, float]:
        """Of each pass the better of the last two timings."""
        return {which: min(run[which] for run in self.timings[-2:]) for which in PASSES}


def _joined(found: dict[str, Any], more: Any) -> Any:
    """Both, or the failure that came instead."""
    return more if isinstance(more, Failure) else found | more


class Replay:
    """A run: groups cases by local shape, has workers build and then time them, writes rows."""

    kind = "replay"

    def __init__(self, settings: Settings, workers: engine.Workers, writer: records.Writer):
        self.settings, self.workers, self.writer = settings, workers, writer
        self._found: dict[str, dict[str, Any] | Failure] = {  # T1 of an interrupted run is not measured again
            row["key"]: row for row in records.select(records.read(writer.path), kind=self.kind, status="ok", world=1)
            if row["key"] in writer.keys}
        self._checked: dict[tuple, Any] = {}
        self._turns, self._order = Turns(), dict[str, int]()
        self._ones: dict[str, One] = {}

    def run(self, cases: Sequence[cp.Case]) -> None:
        """Writes a row for each case that the file lacks, and one for T1 of each problem."""
        members: dict[str, Member] = {}
        for case in cases:
            if case.key in self.writer.keys or not self._good(case):
                continue
            for each in (case, self._one(case)):
                if each.key not in members and each.key not in self._found:
                    members[each.key] = each, each.schedule()
        groups: dict[tuple, list[Member]] = {}
        for case, schedule in sorted(  # T1 first: other rows wait for it
                members.values(), key=lambda m: (m[0].stack, m[0].world)):
            groups.setdefault(shape_key(case, schedule), []).append((case, schedule))
            self._order[case.key] = len(self._order)
        waiting: list[Member] = []
        for measured in self._measure(list(groups.values())):
            waiting.append(measured)
            for member in [m for m in waiting if self._one(m[0]).key in self._found]:
                waiting.remove(member)
                self._write(member[0], self._row(*member, self._one(member[0])))

    def _one(self, case: cp.Case) -> cp.Case:
        """The case that measures T1 of a case: itself, where it is one."""
        return one_device(case, self.settings.flop_limit)

    def _good(self, case: cp.Case) -> bool:
        """Whether there is such a schedule and its small replay is right; writes the row where not."""
        try:
            wrong = bool(case.topology) and self._wrong(case)
        except Unsupported as reason:
            wrong = {"status": "unsupported", "reason": str(reason)}
        if wrong:
            self._write(case, wrong)
        return not wrong

    def _wrong(self, case: cp.Case) -> dict[str, str] | None:
        """Status and reason where the small replay fails or is wrong; each (scheme, mask, sharding) is checked once."""
        key = _check_key(case)
        if key not in self._checked:
            self._checked[key] = {} if not self.settings.check else self.workers[case.stack].ask(
                f"{TASKS}:check", self.settings.deadline, case=case.record(), tokens=CHECK_TOKENS)
        errors = self._checked[key]
        if isinstance(errors, Failure):
            return dataclasses.asdict(errors)
        bad = over_limit(errors, case.spec.dtype)
        return {"status": "mismatch", "reason": bad} if bad else None

    def _measure(self, groups: Sequence[Sequence[Member]]) -> Iterator[Member]:
        """Yields each case once it is timed and its group checked; each group has a process of its own.

        `workers` groups are at work at a time. What builds does so together, what is timed is timed alone, in order.
        """
        told: queue.SimpleQueue = queue.SimpleQueue()
        with ThreadPoolExecutor(self.settings.workers) as threads, contextlib.ExitStack() as held:
            for group in groups:
                worker = held.enter_context(Worker(group[0][0].stack))
                threads.submit(self._tell, told, self._group(worker, group))
            for _ in itertools.chain(*groups):
                found = told.get()
                if isinstance(found, BaseException):
                    raise found
                yield found

    @staticmethod
    def _tell(told: queue.SimpleQueue, members: Iterator[Member]) -> None:
        try:
            for member in members:
                told.put(member)
        except BaseException as problem:  # raised where the rows are written
            told.put(problem)

    def _group(self, worker: Worker, group: Sequence[Member]) -> Iterator[Member]:
        """Builds a group, times its cases one by one, checks some of what the first one ran; keeps what was found.

        A worker ends with its group, so that its memory on the device is the next one's (that of a large T1 before the
        next one's turn); T1's, of a size to be kept, is asked again.
        """
        with self._turns.together():
            found = worker.ask(f"{TASKS}:build", self.settings.deadline, case_list=[c.record() for c, _ in group],
                               count=self.settings.ranks)
        with contextlib.nullcontext() if self._kept(group[0][0]) else worker:
            for n, (case, schedule) in enumerate(group):
                each = found
                if not isinstance(found, Failure):
                    each = _joined(found, self._times(worker, n, case, n + 1 == len(group)))
                    if not isinstance(each, Failure) and "spot_errors" not in found:
                        spots = self._spots(worker, case)
                        each, found = _joined(each, spots), _joined(found, spots)
                    if isinstance(each, Failure):
                        found = each  # what follows it in the worker is lost
                self._found[case.key] = each
                yield case, schedule

    @staticmethod
    def _kept(case: cp.Case) -> bool:
        """Whether a case is a T1 whose worker lives on."""
        return case.world == 1 and case.spec.problem().bytes("backward") <= HELD_BYTES

    def _times(self, worker: Worker, number: int, case: cp.Case, last: bool) -> Any:
        with self._turns.alone(self._order[case.key]), open(LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of replays at the same time one is at the device
            found = self._timed(worker, number, case)
            if last and case.world == 1 and not self._kept(case):
                worker.kill()
        return found

    def _timed(self, worker: Worker, number: int, case: cp.Case) -> Any:
        found = worker.ask(f"{TASKS}:times", self.settings.deadline, number=number,
                           protocol=dataclasses.asdict(self.settings.protocol), checked=case.world > 1)
        if isinstance(found, Failure):
            return found
        one = self._ones.get(self._one(case).key)
        if found.pop("news") and one is not None and time.monotonic() - one.when > FRESH_SECONDS:
            again = one.worker.ask(f"{TASKS}:again", self.settings.deadline, number=one.number)
            if not isinstance(again, Failure):
                one.timings, one.when = [*one.timings, again], time.monotonic()
        if self._kept(case):
            one = self._ones[case.key] = One(worker, number, found["runs"], time.monotonic())
        return found | ({"one_device_run": one.best} if one is not None else {})

    def _spots(self, worker: Worker, case: cp.Case) -> Any:
        """What T1 ran is as large as the device allows, and bench.dense checks such problems."""
        errors = {} if case.world == 1 else worker.ask(f"{TASKS}:spots", self.settings.deadline)
        return errors if isinstance(errors, Failure) else {"spot_errors": errors}

    def _row(self, case: cp.Case, schedule: Schedule, one: cp.Case) -> dict[str, Any]:
        found, single = self._found[case.key], self._found[one.key]
        if isinstance(found, Failure):
            return dataclasses.asdict(found)
        found = dict(found)
        run = found.pop("one_device_run", None)
        row = cp.plan_of_schedule(schedule) | {"efficiency_bound": schedule.efficiency_bound} | found
        row |= summary(schedule, found, self.settings.links)
        problem = case.spec.problem()
        for which in PASSES:
            spent = case.world * row[which]["compute"]
            row[which]["rate"] = problem.flops(which) / spent if spent else 0.0
        row |= {"links": dataclasses.asdict(self.settings.links), "errors": self._checked.get(_check_key(case), {}),
                "ranks_per_step": self.settings.ranks}
        wrong = over_limit(found["spot_errors"], case.spec.dtype)
        if wrong:
            return row | {"status": "mismatch", "reason": wrong}
        if isinstance(single, Failure):
            return row | {"one_device": f"{single.status}: {single.reason}"}
        single = one_device_seconds(case, one, run or single["runs"][0])
        return row | {"one_device": single, "efficiency": efficiencies(row, single, case.world)}

    def _environment(self, case: cp.Case) -> dict[str, Any]:
        return self.workers.environment(case.stack, self.settings.deadline)

    def _write(self, case: cp.Case, found: dict[str, Any]) -> None:
        row = {
            "key": case.key, "kind": self.kind, "case": case.record(), "kernel": case.kernel, "status": "ok",
            "reason": "", "environment": self._environment(case),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        } | found
        self.writer.write(row)
        print(line(row), flush=True)


class Estimate(Replay):
    """A replay without a device: the time of a local problem from the tiles that a tiled kernel visits."""

    kind = "replay_estimate"

    def _wrong(self, case: cp.Case) -> None:
        return None

    def _measure(self, groups: Sequence[Sequence[Member]]) -> Iterator[Member]:
        for case, schedule in itertools.chain(*groups):
            self._found[case.key] = estimate(schedule, self.settings.ranks, self.settings.rate,
                                             self.settings.links.memory_bandwidth)
            yield case, schedule

    def _environment(self, case: cp.Case) -> dict[str, Any]:
        return environment.machine() | {"rate": self.settings.rate}


def estimate(schedule: Schedule, ranks: int, rate: float, memory_bandwidth: float) -> dict[str, Any]:
    """What `replay_task` measures, from counts: visited tiles at a rate, a partial one 1.5 times as dear as a full one.

    A later step of a walk reads the float32 out that it adds to, besides writing it; gradients are added where they are
    made. A dynamic mask counts its cells.
    """
    runs: list[dict[str, Any]] = []
    signature = schedule.signature
    rows = signature.batch * signature.q_rows * signature.heads.q_local * signature.head_dim
    add = 4 * rows / memory_bandwidth
    for work in works_of(0, schedule, ranks):
        problem = work.problem
        cells = problem.cells
        if hasattr(problem.mask, "tile_runs"):
            tiles = problem.mask.tile_runs(TILE, TILE)
            cells = int(tiles.full_count.sum() + 1.5 * tiles.partial_count.sum()) * TILE**2
            cells *= problem.batch * problem.q_heads
        runs.append({
            "step": work.step, "rank": work.rank, "cells": int(schedule.cells[work.step, work.rank]),
            "forward": 4 * cells * problem.head_dim / rate + add * (work.place != FIRST),
            "backward": 10 * cells * problem.head_dim / rate,
        })
    once = [x * rows / memory_bandwidth * (len(signature.steps) > 1) for x in (6, 16)]
    timer = "estimated from visited tiles, not measured"
    return {"kernel": "tiles", "timer": timer, "runs": runs, "once": once, "spot_errors": {}}


def _check_key(case: cp.Case) -> tuple:
    return case.stack, case.kernel, case.scheme, case.spec.mask, case.sharding, case.granule


def one_device_seconds(case: cp.Case, one: cp.Case, run: dict[str, Any]) -> dict[str, Any]:
    """T1 by pass: measured, or FLOPs over the rate under that mask at the length that was run."""
    whole, part = case.spec.problem(), one.spec.problem()
    return {"seq_len": one.spec.seq_len} | {
        which: {"seconds": run[which] * whole.flops(which) / part.flops(which), "rate": part.flops(which) / run[which]}
        for which in PASSES
    }


def line(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    if row["status"] != "ok":
        return f"{row['key']}: {row['status']}: {row['reason'][:160]}"
    text = "  ".join(f"{which} {row[which]['compute'] * 1e3:.2f} ms {row[which]['rate'] / 1e12:.3g} TFLOP/s a rank"
                     for which in PASSES)
    if "efficiency" in row:
        alone, linked = (row["efficiency"][label]["both"] for label in ("compute", "predicted"))
        text += f"  E {alone:.3f} (with links {linked:.3f})"
    return f"{row['key']}: {text}  balance {row['total_balance']:.3f}, by step {row['step_balance']:.3f}"


def main() -> int:
    """Runs the cases that the flags name; 1 where a row failed, 2 for bad flags."""
    values = flags.FLAGS
    cases, settings = cases_of(values), settings_of(values)
    with engine.open_records(engine.Options(settings.out, settings.resume, settings.again)) as writer, \
            engine.Workers() as workers:
        (Estimate if settings.rate else Replay)(settings, workers, writer).run(cases)
    return program.ended(settings.out)


if __name__ == "__main__":
    define()
    program.run(main)
