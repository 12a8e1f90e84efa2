"""Do the two stacks agree? Both against the float64 reference, and against each other, cell by cell.

    python -m bench.parity                      # the whole matrix that this machine can run
    python -m bench.parity --resume             # what is left of it
    python -m bench.parity --kernels=naive --masks=causal --shapes=tiny --passes=backward --schemes=none

A cell is a kernel, a mask, a shape and a pass that both stacks offer. Its inputs are made once and stored as an Orbax
checkpoint: JAX restores it, PyTorch is handed the raw buffers. Exits with 1 if a cell fails, and prints the command
that repeats just that cell. Several jobs, each with workers of its own, check side by side; on a GPU the cells of
shapes that are to be timed are timed afterwards, nothing beside them, the stacks in turns.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags
from rich.console import Console

from bench import engine, options, records
from bench.cases import STACKS, Case, ProblemSpec, differing
from bench.report import tables
from bench.timing import Protocol
from bench.workers import Failure
from parity.budgets import cross_budget
from parity.compare import errors, over_budget
from parity.matrix import CPU_SHAPES, GPU_SHAPES, SHAPES
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

SHARED_KERNELS = tuple(name for name in options.KERNELS["jax"] if name in options.KERNELS["torch"])
ROUNDS = 3
BRIEF = Protocol(samples=5, seconds=0.1, warmups=5)
MOST_JOBS = 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    kernel: str
    which: str
    shape: str
    spec: ProblemSpec

    @property
    def key(self) -> str:
        """Unique name of its row."""
        return f"parity/{self.kernel}/{self.which}/{self.spec.label}"

    @property
    def command(self) -> str:
        """Repeats just this cell."""
        return (
            f"python -m bench.parity --kernels={self.kernel} --masks={self.spec.mask} --shapes={self.shape} "
            f"--passes={self.which} --seed={self.spec.seed} --schemes=none --out=out/again.jsonl"
        )

    def of(self, stack: str) -> dict[str, Any]:
        """The case that a stack's worker runs."""
        return Case(stack, self.kernel, self.which, self.spec).record()


def spec_of(mask: str, shape_name: str, seed: int) -> ProblemSpec:
    """A mask on a shape of the matrix."""
    shape = SHAPES[shape_name]
    settings = differing(window=shape.window, block=shape.block, sparse_block=shape.sparse_block, density=0.5)
    q_len = 0 if shape.q_len == shape.seq_len else shape.q_len
    return ProblemSpec(mask, shape.seq_len, q_len, shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim,
                       shape.dtype, seed, settings)


def cells(kernels: Iterable[str], masks: Iterable[str], shapes: Iterable[str], which: Iterable[str],
          seed: int) -> list[Cell]:
    """The matrix, a kernel's cells on a shape together."""
    masks, which = tuple(masks), tuple(which)
    return [
        Cell(kernel, w, shape, spec_of(mask, shape, seed))
        for shape in shapes for kernel in kernels for mask in masks for w in which
    ]


class Problems:
    """The reference and the inputs of each problem as files, made once each by the judge of the job that asks first."""

    def __init__(self, folder: Path, deadline: float):
        self._folder, self._deadline = folder, deadline
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[str, dict[str, str] | Failure] = {}

    def of(self, cell: Cell, workers: engine.Workers) -> dict[str, str] | Failure:
        """{"reference": path, stack: path of the inputs it reads}, or why there are none."""
        label = cell.spec.label
        with self._locks.setdefault(label, threading.Lock()):
            if label not in self._made:
                self._made[label] = self._make(cell, workers["judge"])
            return self._made[label]

    def _make(self, cell: Cell, judge) -> dict[str, str] | Failure:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        paths = {"reference": str(folder / "reference.npz"), "jax": str(folder / "inputs"),
                 "torch": str(folder / "inputs.npz")}
        found = judge.ask(f"{engine.TASKS}:reference", self._deadline, spec=cell.of("jax"), path=paths["reference"])
        if isinstance(found, Failure):
            return Failure(found.status, f"the reference: {found.reason}")
        found = judge.ask(f"{engine.TASKS}:exchange", self._deadline, spec=cell.of("jax"), checkpoint=paths["jax"],
                          buffers=paths["torch"])
        return Failure(found.status, f"the inputs: {found.reason}") if isinstance(found, Failure) else paths


def judge(cell: Cell, workers: engine.Workers, problems: Problems, deadline: float) -> dict[str, Any]:
    """The row of a cell, untimed."""
    machine = {stack: workers.environment(stack, deadline) for stack in STACKS}
    case = cell.of("jax") | {"stack": "both", "shape": cell.shape}
    row = engine.new_row(cell.key, "parity", case, machine["torch"] | machine["jax"])
    row["repeat"] = cell.command
    refused = {}
    for stack in STACKS:
        reason = workers[stack].ask(f"{engine.TASKS}:refuse", deadline, case=cell.of(stack))
        if isinstance(reason, Failure):
            return row | {"status": reason.status, "reason": f"{stack}: {reason.reason}"}
        refused |= {stack: reason} if reason else {}
    if refused:
        return row | {"status": "unsupported", "reason": "; ".join(f"{s}: {r}" for s, r in refused.items())}
    made = problems.of(cell, workers)
    if isinstance(made, Failure):
        return row | {"status": made.status, "reason": made.reason}
    row |= {"errors": {}, "sources": {}, "prepare_seconds": {}, "compile_seconds": {}}
    wrong, results = [], {}
    for stack in STACKS:
        with tempfile.NamedTemporaryFile(suffix=".npz") as keep:
            found = workers[stack].ask(f"{engine.TASKS}:check", deadline, case=cell.of(stack),
                                       reference=made["reference"], keep=keep.name, inputs=made[stack])
            if isinstance(found, Failure):
                return row | {"status": found.status, "reason": f"{stack}: {found.reason}"}
            with np.load(keep.name) as held:
                results[stack] = {name: held[name] for name in held.files}
        row["budget"], row["oracle"] = found["budget"], found["oracle"]
        row["errors"][stack] = found["errors"]
        row["sources"][stack] = found["source"]
        for name in ("prepare_seconds", "compile_seconds"):
            row[name][stack] = found[name]
        wrong += [f"{stack} {line}" for line in found["wrong"]]
    row["budget_cross"] = cross_budget(row["budget"])
    row["errors"]["cross"] = errors(results["jax"], results["torch"])
    wrong += [f"jax to torch {line}" for line in over_budget(row["errors"]["cross"], row["budget_cross"])]
    return row | {"status": "mismatch", "reason": "; ".join(wrong)} if wrong else row


def throughput(cell: Cell, workers: engine.Workers, deadline: float) -> dict[str, Any]:
    """Both stacks timed in turns; ratio = JAX over PyTorch (above 1: JAX is faster)."""
    medians: dict[str, list[float]] = {stack: [] for stack in STACKS}
    for _ in range(ROUNDS):
        for stack in STACKS:
            found = workers[stack].ask(f"{engine.TASKS}:clock", deadline, case=cell.of(stack),
                                       protocol=dataclasses.asdict(BRIEF), brief=True)
            if isinstance(found, Failure):
                return {"status": found.status, "reason": f"{stack}, timed: {found.reason}"}
            medians[stack].append(found["seconds"]["median"])
    seconds = {stack: statistics.median(values) for stack, values in medians.items()}
    return {"seconds": seconds, "rounds": medians, "throughput_ratio": seconds["torch"] / seconds["jax"]}


class Run:
    """A run that is open: the cells that are left, by kernel and shape, and where their rows go."""

    def __init__(self, left: Sequence[Cell], writer: records.Writer, folder: Path, deadline: float, console: Console,
                 until: float):
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in left:
            groups.setdefault((cell.shape, cell.kernel), []).append(cell)
        self._groups = collections.deque(_rotated(group, n) for n, group in enumerate(groups.values()))
        self._writer, self._deadline, self._console, self._until = writer, deadline, console, until
        self._problems = Problems(folder, deadline)
        self._total, self._done, self._lock = len(left), 0, threading.Lock()

    def job(self, workers: engine.Workers) -> list[tuple[Cell, dict[str, Any]]]:
        """Checks groups until none is left or the time is up; returns the rows that are good and still to be timed."""
        workers.start([*STACKS, "judge"], self._deadline)
        on_gpu, to_time = engine.on_gpu(workers, self._deadline), []
        while True:
            try:
                group = self._groups.popleft()
            except IndexError:
                return to_time
            for cell in group:
                if time.monotonic() > self._until:
                    return to_time
                began = time.perf_counter()
                row = judge(cell, workers, self._problems, self._deadline)
                row["check_seconds"] = time.perf_counter() - began
                if on_gpu and SHAPES[cell.shape].timed and row["status"] == "ok":
                    to_time.append((cell, row))
                else:
                    self.write(cell, row)

    def time(self, cell: Cell, row: dict[str, Any], workers: engine.Workers) -> None:
        """Times a cell whose check was good, and writes it."""
        self.write(cell, row | throughput(cell, workers, self._deadline))

    def write(self, cell: Cell, row: dict[str, Any]) -> None:
        """Writes and tells a row."""
        with self._lock:
            self._writer.write(row)
            self._done += 1
            told = "; ".join(f"{side} {tables.share(row, side)}" for side in row.get("errors", {}))
            if "throughput_ratio" in row:
                told += f"; JAX / PyTorch {row['throughput_ratio']:.2f}"
            if row["status"] != "unsupported":
                text = f"[{self._done}/{self._total}] {cell.key}: {row['status']} {row['reason'] or told}"
                self._console.print(f"{text} ({row['check_seconds']:.1f} s)", markup=False)
            if row["status"] not in ("ok", "unsupported"):
                self._console.print(f"    again: {cell.command}", markup=False)


def _rotated(group: list[Cell], n: int) -> list[Cell]:
    """Jobs begin at different masks, so that they do not wait for one another's reference."""
    at = 2 * n % len(group)
    return group[at:] + group[:at]


def run(todo: Sequence[Cell], out: Path, resume: bool, deadline: float, console: Console,
        workers: Sequence[engine.Workers], seconds: float = math.inf) -> list[dict[str, Any]]:
    """Judges the cells that the file does not have yet, a job for each of `workers`; returns all its rows.

    After `seconds` no further cell is begun.
    """
    until = time.monotonic() + seconds
    with (
        engine.open_records(engine.Options(out, resume)) as writer,
        tempfile.TemporaryDirectory(prefix="parity-") as name,
    ):
        left = [cell for cell in todo if cell.key not in writer.keys]
        console.print(f"{len(todo)} cells, {len(todo) - len(left)} of them done; records: {out}")
        if left:
            going = Run(left, writer, Path(name), deadline, console, until)
            with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
                to_time = list(threads.map(going.job, workers))
            for mine, cells_of_job in zip(workers, to_time, strict=True):
                for cell, row in cells_of_job:
                    going.time(cell, row, mine)
    return records.read(out)


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_list("kernels", ["all"], f"Kernels: all, none, or some of {', '.join(SHARED_KERNELS)}.")
    flags.DEFINE_list("masks", ["all"], f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    flags.DEFINE_list(
        "shapes", ["machine"], f"Shapes: machine (those that suit it), all, or some of {', '.join(SHAPES)}.")
    flags.DEFINE_list("passes", ["all"], "Passes of kernels: all, or some of forward, backward.")
    flags.DEFINE_integer("seed", 0, "Of documents, mask parameters and inputs.", lower_bound=0)
    flags.DEFINE_integer("jobs", 0, "Cells that are checked side by side; 0: as many as suit the machine.",
                         lower_bound=0)
    options.define_float("seconds", 0.0, "No further cell is begun after this; 0: no limit.", lower_bound=0)
    flags.DEFINE_string("out", "out/parity.jsonl", "Record file.")
    flags.DEFINE_bool("resume", False, "Keep the rows that --out has and go on.")
    options.define_float("deadline", 180.0, "Seconds a step of a cell may take.", lower_bound=1)


def main(argv):
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    console = Console(highlight=False, soft_wrap=True)
    with contextlib.ExitStack() as held:
        first = held.enter_context(engine.Workers())
        try:
            kernels = () if values.kernels == ["none"] else options.choose("kernels", values.kernels, SHARED_KERNELS)
            masks = options.choose("masks", values.masks, ALL_BUILDERS)
            which = options.choose("passes", values.passes, PASSES)
            shapes = None if values.shapes == ["machine"] else options.choose("shapes", values.shapes, tuple(SHAPES))
            first.start(STACKS, values.deadline)
            gpu = engine.on_gpu(first, values.deadline)
            todo = cells(kernels, masks, shapes or (GPU_SHAPES if gpu else CPU_SHAPES), which, values.seed)
            jobs = values.jobs or (min(MOST_JOBS, len(os.sched_getaffinity(0)) // 2) if gpu else 1)
            workers = [first, *(held.enter_context(engine.Workers()) for _ in range(jobs - 1))]
            rows = run(todo, Path(values.out), values.resume, values.deadline, console, workers,
                       values.seconds or math.inf)
        except ValueError as problem:
            print(problem, file=sys.stderr)
            return 2
    left = {cell.key for cell in todo} - {row["key"] for row in rows}
    tables.parity_table([row for row in rows if row["status"] != "unsupported"], console)
    count = {s: sum(row["status"] == s for row in rows) for s in records.STATUSES}
    print(", ".join(f"{n} {status}" for status, n in count.items() if n)
          + (f"; {len(left)} cells are left: --resume" if left else ""))
    return 1 if len(rows) > count["ok"] + count["unsupported"] else 0


if __name__ == "__main__":
    define()
    app.run(main)
