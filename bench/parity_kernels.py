"""The cells of kernels in `bench.parity`: a kernel, a mask, a shape and a pass, on one device, in both stacks."""

import collections
import concurrent.futures
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from bench import engine
from bench.cases import STACKS, Case, ProblemSpec
from bench.parity_cells import Problems, Rows, in_turns, spec_of
from bench.timing import Protocol
from bench.workers import Failure
from parity.budgets import cross_budget
from parity.compare import errors, over_budget
from parity.matrix import SHAPES

BRIEF = Protocol(samples=3, seconds=0.1, warmups=4)
GROUP = 8  # cells of one kernel and shape that a job takes at once: they share compilations
TIMED_GROUP = 2  # of those to be timed, for which all wait: a mask's passes


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


def cells(kernels: Iterable[str], masks: Iterable[str], shapes: Iterable[str], which: Iterable[str],
          seed: int) -> list[Cell]:
    """The matrix, a kernel's cells on a shape together."""
    masks, which = tuple(masks), tuple(which)
    return [
        Cell(kernel, w, shape, spec_of(mask, shape, seed))
        for shape in shapes for kernel in kernels for mask in SHAPES[shape].masks or masks if mask in masks
        for w in which
    ]


def judge(cell: Cell, workers: engine.Workers, problems: Problems, patience: Callable[[], float]) -> dict[str, Any]:
    """The row of a cell, untimed.

    Args:
      patience: what a step that begins now may take, in seconds.
    """
    machine = {stack: workers.environment(stack, patience()) for stack in STACKS}
    case = cell.of("jax") | {"stack": "both", "shape": cell.shape}
    row = engine.new_row(cell.key, "parity", case, machine["torch"] | machine["jax"])
    row["repeat"] = cell.command
    refused = {}
    for stack in STACKS:
        reason = workers[stack].ask(f"{engine.TASKS}:refuse", patience(), case=cell.of(stack))
        if isinstance(reason, Failure):
            return row | {"status": reason.status, "reason": f"{stack}: {reason.reason}"}
        refused |= {stack: reason} if reason else {}
    if refused:
        told = "; ".join(f"{stack}: {reason}" for stack, reason in refused.items())
        return row | {"status": "unsupported", "reason": told, "refused": refused}

    def build(stack: str) -> None:
        workers[stack].ask(f"{engine.TASKS}:build", patience(), case=cell.of(stack))  # the check tells what fails

    def check(stack: str, paths: dict[str, str]) -> tuple[Any, dict[str, np.ndarray]]:
        with tempfile.NamedTemporaryFile(suffix=".npz") as keep:
            found = workers[stack].ask(f"{engine.TASKS}:check", patience(), case=cell.of(stack),
                                       reference=paths["reference"], keep=keep.name, inputs=paths[stack])
            if isinstance(found, Failure):
                return found, {}
            with np.load(keep.name) as held:
                return found, {name: held[name] for name in held.files}

    with concurrent.futures.ThreadPoolExecutor(len(STACKS)) as threads:  # compilers take most of the time
        built = [threads.submit(build, stack) for stack in STACKS]
        made = problems.of(cell.spec, workers)
        if isinstance(made, Failure):
            return row | {"status": made.status, "reason": made.reason}
        for done in built:
            done.result()
        checked = dict(zip(STACKS, threads.map(check, STACKS, itertools.repeat(made)), strict=True))
    for stack, (found, _) in checked.items():
        if isinstance(found, Failure):
            return row | {"status": found.status, "reason": f"{stack}: {found.reason}"}
    told = {stack: found for stack, (found, _) in checked.items()}
    row |= {"budget": told["torch"]["budget"], "oracle": told["torch"]["oracle"]}
    for there, name in (("errors", "errors"), ("sources", "source"), ("prepare_seconds", "prepare_seconds"),
                        ("compile_seconds", "compile_seconds")):
        row[there] = {stack: found[name] for stack, found in told.items()}
    row["budget_cross"] = cross_budget(row["budget"])
    row["errors"]["cross"] = errors(*(results for _, results in checked.values()))
    wrong = [f"{stack} {line}" for stack, found in told.items() for line in found["wrong"]]
    wrong += [f"jax to torch {line}" for line in over_budget(row["errors"]["cross"], row["budget_cross"])]
    return row | {"status": "mismatch", "reason": "; ".join(wrong)} if wrong else row


def throughput(cell: Cell, workers: engine.Workers, deadline: float) -> dict[str, Any]:
    """Both stacks' device time in turns."""
    def clock(stack: str) -> float | Failure:
        found = workers[stack].ask(f"{engine.TASKS}:clock", deadline, case=cell.of(stack),
                                   protocol=dataclasses.asdict(BRIEF), brief=True)
        return found if isinstance(found, Failure) else found["seconds"]["median"]
    return in_turns(clock)


class Run:
    """A run of jobs: the cells that are left, in groups of a kernel and a shape, and where their rows go."""

    def __init__(self, left: Sequence[Cell], rows: Rows, problems: Problems, deadline: float, size: int):
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in left:
            groups.setdefault((cell.shape, cell.kernel), []).append(cell)
        parts = [part for group in groups.values() for part in itertools.batched(group, size)]
        self._groups = collections.deque(_rotated(part, n) for n, part in enumerate(parts))
        self._rows, self._problems, self._deadline = rows, problems, deadline

    def job(self, workers: engine.Workers) -> list[tuple[Cell, dict[str, Any]]]:
        """Checks groups until none is left or the time is up; returns the rows that are good and still to be timed.

        A cell that the end of the time cuts off is left for another run.
        """
        workers.start([*STACKS, "judge"], self._deadline)
        on_gpu, to_time = engine.on_gpu(workers, self._deadline), []
        while True:
            try:
                group = self._groups.popleft()
            except IndexError:
                return to_time
            for cell in group:
                if self._rows.over:
                    return to_time
                began = time.perf_counter()
                row = judge(cell, workers, self._problems, lambda: self._rows.patience(self._deadline))
                row["check_seconds"] = time.perf_counter() - began
                if self._rows.over and row["status"] == "timeout":
                    return to_time
                if on_gpu and SHAPES[cell.shape].timed and row["status"] == "ok":
                    to_time.append((cell, row))
                else:
                    self._rows.write(cell, row)


def _rotated(group: tuple[Cell, ...], n: int) -> tuple[Cell, ...]:
    """Jobs begin at different masks, so that they do not wait for one another's reference."""
    at = 2 * n % len(group)
    return group[at:] + group[:at]


def run(left: Sequence[Cell], rows: Rows, problems: Problems, deadline: float,
        workers: Sequence[engine.Workers]) -> None:
    """Judges cells, a job for each of `workers`: first those to be timed, which then are, one after the other."""
    timed = [cell for cell in left if SHAPES[cell.shape].timed]
    rest = [cell for cell in left if not SHAPES[cell.shape].timed]
    for part, size in ((timed, TIMED_GROUP), (rest, GROUP)):
        if not part:
            continue
        going = Run(part, rows, problems, deadline, size)
        with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
            found = zip(workers, threads.map(going.job, workers), strict=True)
            try:
                to_time = [(cell, row, mine) for mine, several in found for cell, row in several]
            except BaseException:  # an interrupt: what the others are at is not waited for
                for mine in workers:
                    mine.close()
                raise
        order = list(dict.fromkeys(cell.spec.mask for cell in part))
        to_time.sort(key=lambda x: order.index(x[0].spec.mask))  # masks in turn, should the run be cut short
        for cell, row, mine in to_time:
            rows.write(cell, row | throughput(cell, mine, deadline))
