"""Do the two stacks agree? Both against the float64 reference, and against each other, cell by cell.

    python -m bench.parity                      # the whole matrix that this machine can run
    python -m bench.parity --resume             # what is left of it
    python -m bench.parity --kernels=naive --masks=causal --shapes=tiny --passes=backward

A cell is a kernel, a mask, a shape and a pass that both stacks offer. Its inputs are made once and stored as an Orbax
checkpoint: JAX restores it, PyTorch is handed the raw buffers. Exits with 1 if a cell fails, and prints the command
that repeats just that cell. On a GPU both stacks are also timed, in turns, and the throughput ratio is told.
"""

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterable
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
            f"--passes={self.which} --seed={self.spec.seed} --out=out/again.jsonl"
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
    """The matrix, a problem's cells together."""
    return [
        Cell(kernel, w, shape, spec)
        for shape in shapes for mask in masks for spec in [spec_of(mask, shape, seed)] for kernel in kernels
        for w in which
    ]


class Exchange:
    """Inputs of each problem as a checkpoint and as raw buffers, made by the judge once, while the run lasts."""

    def __init__(self, workers: engine.Workers, folder: Path, deadline: float):
        self._workers, self._folder, self._deadline = workers, folder, deadline
        self._found: dict[str, dict[str, str] | Failure] = {}

    def of(self, cell: Cell) -> dict[str, str] | Failure:
        """{stack: path of the inputs it reads}, or why there are none."""
        label = cell.spec.label
        if label not in self._found:
            paths = {"jax": str(self._folder / f"in{len(self._found)}"),
                     "torch": str(self._folder / f"in{len(self._found)}.npz")}
            made = self._workers["judge"].ask(
                f"{engine.TASKS}:exchange", self._deadline, spec=cell.of("jax"), checkpoint=paths["jax"],
                buffers=paths["torch"])
            self._found[label] = made if isinstance(made, Failure) else paths
        return self._found[label]


def judge(cell: Cell, workers: engine.Workers, references: engine.References, exchange: Exchange, folder: Path,
          deadline: float, timed: bool) -> dict[str, Any]:
    """The row of a cell."""
    environment = {stack: workers.environment(stack, deadline) for stack in STACKS}
    case = cell.of("jax") | {"stack": "both", "shape": cell.shape}
    row = engine.new_row(cell.key, "parity", case, environment["torch"] | environment["jax"])
    row["repeat"] = cell.command
    refused = {}
    for stack in STACKS:
        reason = workers[stack].ask(f"{engine.TASKS}:refuse", deadline, case=cell.of(stack))
        if isinstance(reason, Failure):
            return row | {"status": reason.status, "reason": f"{stack}: {reason.reason}"}
        refused |= {stack: reason} if reason else {}
    if refused:
        return row | {"status": "unsupported", "reason": "; ".join(f"{s}: {r}" for s, r in refused.items())}
    reference = references.of(Case("jax", cell.kernel, cell.which, cell.spec))
    inputs = exchange.of(cell)
    for label, made in (("the reference", reference), ("the inputs", inputs)):
        if isinstance(made, Failure):
            return row | {"status": made.status, "reason": f"{label}: {made.reason}"}
    assert isinstance(inputs, dict)
    row |= {"errors": {}, "sources": {}, "prepare_seconds": {}, "compile_seconds": {}}
    wrong, results = [], {}
    for stack in STACKS:
        keep = folder / f"{stack}.npz"
        found = workers[stack].ask(f"{engine.TASKS}:check", deadline, case=cell.of(stack), reference=reference,
                                   keep=str(keep), inputs=inputs[stack])
        if isinstance(found, Failure):
            return row | {"status": found.status, "reason": f"{stack}: {found.reason}"}
        row["budget"], row["oracle"] = found["budget"], found["oracle"]
        row["errors"][stack] = found["errors"]
        row["sources"][stack] = found["source"]
        for name in ("prepare_seconds", "compile_seconds"):
            row[name][stack] = found[name]
        wrong += [f"{stack} {line}" for line in found["wrong"]]
        with np.load(keep) as held:
            results[stack] = {name: held[name] for name in held.files}
    row["budget_cross"] = cross_budget(row["budget"])
    row["errors"]["cross"] = errors(results["jax"], results["torch"])
    wrong += [f"jax to torch {line}" for line in over_budget(row["errors"]["cross"], row["budget_cross"])]
    if wrong:
        return row | {"status": "mismatch", "reason": "; ".join(wrong)}
    return row | throughput(cell, workers, deadline) if timed else row


def throughput(cell: Cell, workers: engine.Workers, deadline: float) -> dict[str, Any]:
    """Both stacks timed in turns; throughput_ratio is JAX over PyTorch (above 1: JAX is faster)."""
    protocol = dataclasses.asdict(Protocol(samples=5, seconds=0.2, warmups=5))
    medians: dict[str, list[float]] = {stack: [] for stack in STACKS}
    for _ in range(ROUNDS):
        for stack in STACKS:
            found = workers[stack].ask(
                f"{engine.TASKS}:clock", deadline, case=cell.of(stack), protocol=protocol, brief=True)
            if isinstance(found, Failure):
                return {"status": found.status, "reason": f"{stack}, timed: {found.reason}"}
            medians[stack].append(found["seconds"]["median"])
    seconds = {stack: statistics.median(values) for stack, values in medians.items()}
    return {"seconds": seconds, "rounds": medians, "throughput_ratio": seconds["torch"] / seconds["jax"]}


def run(todo: list[Cell], out: Path, resume: bool, deadline: float, console: Console) -> list[dict[str, Any]]:
    """Judges the cells that the file does not have yet; returns all its rows."""
    with (
        engine.open_records(engine.Options(out, resume)) as writer,
        engine.Workers() as workers,
        tempfile.TemporaryDirectory(prefix="parity-") as name,
    ):
        left = [cell for cell in todo if cell.key not in writer.keys]
        console.print(f"{len(todo)} cells, {len(todo) - len(left)} of them done; records: {out}")
        folder = Path(name)
        references, exchange = engine.References(workers, folder, deadline), Exchange(workers, folder, deadline)
        workers.start([*STACKS, "judge"] if left else [], deadline)
        timed = bool(left) and engine.on_gpu(workers, deadline)
        for number, cell in enumerate(left, 1):
            row = judge(cell, workers, references, exchange, folder, deadline, timed)
            writer.write(row)
            told = "; ".join(f"{side} {tables.share(row, side)}" for side in row.get("errors", {}))
            if row["status"] != "unsupported":
                text = f"[{number}/{len(left)}] {cell.key}: {row['status']} {row['reason'] or told}"
                console.print(text, markup=False)
            if row["status"] not in ("ok", "unsupported"):
                console.print(f"    again: {cell.command}", markup=False)
    return records.read(out)


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_list("kernels", ["all"], f"Kernels: all, or some of {', '.join(SHARED_KERNELS)}.")
    flags.DEFINE_list("masks", ["all"], f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    flags.DEFINE_list(
        "shapes", ["machine"], f"Shapes: machine (those that suit it), all, or some of {', '.join(SHAPES)}.")
    flags.DEFINE_list("passes", ["all"], "Passes: all, or some of forward, backward.")
    flags.DEFINE_integer("seed", 0, "Of documents, mask parameters and inputs.", lower_bound=0)
    flags.DEFINE_string("out", "out/parity.jsonl", "Record file.")
    flags.DEFINE_bool("resume", False, "Keep the rows that --out has and go on.")
    flags.DEFINE_float("deadline", 180.0, "Seconds a step of a cell may take.", lower_bound=1)


def main(argv):
    values = flags.FLAGS
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    console = Console(highlight=False, soft_wrap=True)
    try:
        kernels = options.choose("kernels", values.kernels, SHARED_KERNELS)
        masks = options.choose("masks", values.masks, ALL_BUILDERS)
        which = options.choose("passes", values.passes, PASSES)
        shapes = values.shapes
        if shapes == ["machine"]:
            with engine.Workers() as workers:
                shapes = GPU_SHAPES if engine.on_gpu(workers, values.deadline) else CPU_SHAPES
        shapes = options.choose("shapes", list(shapes), tuple(SHAPES))
        rows = run(cells(kernels, masks, shapes, which, values.seed), Path(values.out), values.resume, values.deadline,
                   console)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    tables.parity_table([row for row in rows if row["status"] != "unsupported"], console)
    count = {s: sum(row["status"] == s for row in rows) for s in records.STATUSES}
    print(", ".join(f"{n} {status}" for status, n in count.items() if n))
    return 1 if len(rows) > count["ok"] + count["unsupported"] else 0


if __name__ == "__main__":
    define()
    app.run(main)
