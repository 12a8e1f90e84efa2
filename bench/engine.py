"""Runs cases through worker processes into a record file: refuse, check against the reference, time, write.

Rows are grouped by problem, so the reference of a problem is computed once, by the judge's worker, and both stacks
and all kernels are held to it. Nothing here imports JAX or PyTorch.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import environment, records
from bench.cases import STACKS, Case
from bench.timing import Protocol, above_ceiling, above_dense, unusual_ratio
from bench.workers import Failure, Worker

TASKS = "bench.attention_task"
GPU_BACKENDS = ("gpu", "cuda")
AGAIN_SECONDS = 1.0  # for a ceiling that a row is about to be rejected by


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run goes.

    Attributes:
      out: record file; resume: whether rows that it has are kept and skipped.
      deadline: seconds a row may take, building and compiling included.
      memory: bytes a worker may hold privately, None for no limit.
      protocol: how long to time; timed: False checks only.
      seconds: after which no further row is begun.
    """

    out: Path
    resume: bool = False
    deadline: float = 180.0
    memory: int | None = None
    protocol: Protocol = Protocol()
    timed: bool = True
    seconds: float = math.inf


def open_records(options: Options) -> records.Writer:
    """The record file; ValueError where it holds rows and the run is no resumption."""
    writer = records.Writer(options.out)
    if writer.keys and not options.resume:
        writer.close()
        raise ValueError(f"out: {options.out} holds {len(writer.keys)} rows; give --resume to go on, or another file")
    return writer


class Workers(contextlib.ExitStack):
    """The workers of a run, each started when first asked; arguments as of `Worker`."""

    def __init__(self, memory: int | None = None, environ: Mapping[str, str] | None = None):
        super().__init__()
        self._memory, self._environ = memory, environ
        self._held: dict[str, Worker] = {}
        self._environment: dict[str, dict] = {}

    def __getitem__(self, stack: str) -> Worker:
        if stack not in self._held:
            self._held[stack] = self.enter_context(Worker(stack, self._memory, self._environ))
        return self._held[stack]

    def start(self, stacks: Sequence[str], deadline: float) -> None:
        """Starts workers at the same time: importing a stack takes seconds."""
        workers = [(self[stack], stack) for stack in stacks]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda x: x[0].ask(f"{TASKS}:ready", deadline, stack=x[1]), workers))

    def environment(self, stack: str, deadline: float) -> dict[str, Any]:
        """Machine and stack versions of a row."""
        if stack not in self._environment:
            found = self[stack].ask(f"{TASKS}:environment", deadline, stack=stack)
            if isinstance(found, Failure):
                return environment.machine() | {"stack": f"did not start: {found.reason}"}
            self._environment[stack] = found
        return environment.machine() | self._environment[stack]


def on_gpu(workers: Workers, deadline: float) -> bool:
    """Whether both stacks find a GPU."""
    return all(workers.environment(s, deadline).get("backend") in GPU_BACKENDS for s in STACKS)


def gpus(workers: Workers, deadline: float) -> int:
    """How many GPUs both stacks find."""
    return workers["jax"].ask(f"{TASKS}:devices", deadline) if on_gpu(workers, deadline) else 0


class References:
    """References of problems, computed by the judge once each and kept as files while the run lasts."""

    def __init__(self, workers: Workers, folder: Path, deadline: float):
        self._workers, self._folder, self._deadline = workers, folder, deadline
        self._found: dict[str, str | Failure] = {}

    def of(self, case: Case) -> str | Failure:
        """The path of a problem's reference, or why there is none."""
        label = case.spec.label
        if label not in self._found:
            path = str(self._folder / f"{len(self._found)}.npz")
            found = self._workers["judge"].ask(f"{TASKS}:reference", self._deadline, spec=case.record(), path=path)
            self._found[label] = found if isinstance(found, Failure) else path
        return self._found[label]


class Ceilings:
    """The matrix peak by dtype: the best that any stack reached on this machine; measured rows go into the file."""

    def __init__(self, workers: Workers, writer: records.Writer, stacks: Sequence[str], options: Options):
        self._workers, self._writer, self._stacks, self._options = workers, writer, stacks, options
        self._peaks: dict[str, float] = {}

    def peak(self, dtype: str) -> float:
        """FLOP/s; infinite where no stack could measure it."""
        if dtype not in self._peaks:
            for stack in self._stacks:
                key = f"ceiling/{stack}/{dtype}"
                if key not in self._writer.keys:
                    environment = self._workers.environment(stack, self._options.deadline)
                    row = new_row(key, "ceiling", {"stack": stack, "dtype": dtype}, environment)
                    found = self._measure(stack, dtype)
                    self._writer.write(row | (_failed(found) if isinstance(found, Failure) else found))
            self._peaks[dtype] = max(
                (r["peak_flops"] for r in records.read(self._writer.path)
                 if r["kind"] == "ceiling" and r["status"] == "ok" and r["case"]["dtype"] == dtype),
                default=float("inf"))
        return self._peaks[dtype]

    def again(self, dtype: str) -> float:
        """The peak, measured once more: before a row is rejected, lest a busy machine spoilt the first measurement."""
        patient = Protocol(samples=40, seconds=AGAIN_SECONDS)
        for stack in self._stacks:
            found = self._measure(stack, dtype, patient)
            if not isinstance(found, Failure):
                self._peaks[dtype] = max(self._peaks[dtype], found["peak_flops"])
        return self._peaks[dtype]

    def _measure(self, stack, dtype, protocol=None):
        return self._workers[stack].ask(
            f"{TASKS}:ceiling", self._options.deadline, stack=stack, dtype=dtype,
            protocol=dataclasses.asdict(protocol or self._options.protocol))


def new_row(key: str, kind: str, case: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """A row of status ok without figures yet."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "key": key, "kind": kind, "case": case, "status": "ok", "reason": "", "flags": [],
        "environment": environment, "time": now,
    }


def _failed(failure: Failure) -> dict[str, str]:
    return {"status": failure.status, "reason": failure.reason}


def measure_case(
    case: Case, workers: Workers, references: References, ceilings: Ceilings, options: Options
) -> dict[str, Any]:
    """One row: what became of a case."""
    worker, fields = workers[case.stack], {"case": case.record()}
    row = new_row(case.key, "attention", fields["case"], workers.environment(case.stack, options.deadline))
    reason = worker.ask(f"{TASKS}:refuse", options.deadline, **fields)
    if isinstance(reason, Failure):
        return row | _failed(reason)
    if reason:
        return row | {"status": "unsupported", "reason": reason}
    described = worker.ask(f"{TASKS}:describe", options.deadline, **fields)
    if isinstance(described, Failure):
        return row | _failed(described)
    row |= described
    reference = references.of(case)
    if isinstance(reference, Failure):
        return row | {"status": reference.status, "reason": f"the reference: {reference.reason}"}
    checked = worker.ask(f"{TASKS}:check", options.deadline, reference=reference, **fields)
    if isinstance(checked, Failure):
        return row | _failed(checked)
    wrong = checked.pop("wrong")
    row |= checked
    if wrong:
        return row | {"status": "mismatch", "reason": "; ".join(wrong)}
    if not options.timed:
        return row
    timed = worker.ask(
        f"{TASKS}:clock", options.deadline, protocol=dataclasses.asdict(options.protocol), **fields
    )
    if isinstance(timed, Failure):
        return row | _failed(timed)
    row, dtype = row | timed, case.spec.dtype
    rated = with_rates(row, ceilings.peak(dtype))
    return rated if rated["status"] == "ok" else with_rates(row, ceilings.again(dtype))


def with_rates(row: dict[str, Any], peak: float) -> dict[str, Any]:
    """The row with rate and bandwidth; a rate above the ceiling makes it an error."""
    median = row["seconds"]["median"]
    if median <= 0:
        return row | {"status": "error", "reason": f"measured {median:g} s: shorter than the timer can tell"}
    rate = row["flops"] / median
    row = row | {"rate": rate, "bandwidth": row["bytes"] / median, "peak_flops": peak}
    impossible = above_ceiling(rate, peak)
    return row | {"status": "error", "reason": impossible} if impossible else row


def dense_key(case: dict[str, Any]) -> tuple:
    """What a masked row and the full-mask row it is held against have in common."""
    return tuple(case[name] for name in (
        "stack", "kernel", "pass", "seq_len", "q_len", "batch", "q_heads", "kv_heads", "head_dim", "dtype"))


def flag(row: dict[str, Any], seen: dict[tuple, float]) -> dict[str, Any]:
    """The row, flagged where its figures do not fit those of rows before it, which it adds itself to (`seen`).

    A rate above 1.1 x that of the same kernel under the full mask (its fastest sample against the median here: noise
    flags nothing); on a GPU, a backward pass that takes less than 1.5 or more than 5 times its forward.
    """
    if row["status"] != "ok" or "rate" not in row:
        return row
    case, key, complaints = row["case"], dense_key(row["case"]), []
    problem = tuple(json.dumps(v) for k, v in sorted(case.items()) if k != "pass")
    if case["mask"] == "full":
        seen[key] = row["flops"] / row["seconds"]["min"]
    elif key in seen:
        complaints.append(above_dense(row["rate"], seen[key]))
    if case["pass"] == "forward":
        seen[problem] = row["seconds"]["median"]
    elif problem in seen and row["environment"].get("backend") in GPU_BACKENDS:
        complaints.append(unusual_ratio(row["seconds"]["median"], seen[problem]))
    return row | {"flags": [*row["flags"], *filter(None, complaints)]}


def ordered(cases: Iterable[Case]) -> list[Case]:
    """Full masks first (others are held against them), then by problem, so that a reference serves all its rows.

    Problems of a length stay in the order in which they come.
    """
    unique = {case.key: case for case in cases}
    came = {label: n for n, label in enumerate(dict.fromkeys(case.spec.label for case in unique.values()))}
    return sorted(unique.values(), key=lambda c: (
        c.spec.seq_len, c.spec.mask != "full", came[c.spec.label], c.kernel, c.which != "forward", c.stack))


class Session(contextlib.ExitStack):
    """A run that is open: its record file, workers, references and ceilings.

    Raises ValueError where the file holds rows and `options.resume` is false.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.writer = self.enter_context(open_records(options))
        self.workers = self.enter_context(Workers(options.memory))
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="reference-"))
        self.references = References(self.workers, Path(folder), options.deadline)
        self._seen: dict[tuple, float] = {}
        self._ceilings: Ceilings | None = None

    def start(self, cases: Sequence[Case]) -> None:
        """Starts the workers that the cases need, measures the ceilings, reads the rates that the file has."""
        stacks = sorted({case.stack for case in cases})
        self.workers.start([*stacks, "judge"] if cases else [], self.options.deadline)
        self._ceilings = Ceilings(self.workers, self.writer, stacks, self.options)
        for dtype in sorted({case.spec.dtype for case in cases}) if self.options.timed else ():
            self._ceilings.peak(dtype)
        for row in records.read(self.options.out):
            if row["kind"] == "attention":
                flag(row, self._seen)

    def measure(self, case: Case) -> dict[str, Any]:
        """Measures a case and writes its row."""
        ceilings = self._ceilings or Ceilings(self.workers, self.writer, [case.stack], self.options)
        row = flag(measure_case(case, self.workers, self.references, ceilings, self.options), self._seen)
        self.writer.write(row)
        return row


def run(cases: Iterable[Case], options: Options, console: Console | None = None) -> list[dict[str, Any]]:
    """Measures the cases that the file does not have yet; returns all its rows.

    Raises ValueError where the file holds rows and `options.resume` is false.
    """
    console = console or Console(highlight=False, soft_wrap=True)
    todo, until = ordered(cases), time.monotonic() + options.seconds
    with Session(options) as session:
        left = [case for case in todo if case.key not in session.writer.keys]
        console.print(f"{len(todo)} rows, {len(todo) - len(left)} of them done; records: {options.out}")
        session.start(left)
        for number, case in enumerate(left, 1):
            if time.monotonic() > until:
                console.print(f"the time is up: {len(left) - number + 1} rows are left")
                break
            row = session.measure(case)
            if row["status"] != "unsupported":
                console.print(f"[{number}/{len(left)}] {line(row)}", markup=False)
    return records.read(options.out)


def line(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    if row["status"] != "ok":
        return f"{row['key']}: {row['status']}: {row['reason'][:160]}"
    if "rate" not in row:
        return f"{row['key']}: ok"
    seconds = row["seconds"]
    flags = f"  ! {'; '.join(row['flags'])}" if row["flags"] else ""
    return (
        f"{row['key']}: {seconds['median'] * 1e3:.3f} ms ±{seconds['spread']:.0%}"
        f"  {row['rate'] / 1e12:.4g} TFLOP/s{flags}"
    )
