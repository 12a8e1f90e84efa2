"""The cells of kernels in `bench.parity`: a kernel, a mask, a shape and a pass, on one device, in both stacks."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bench import engine, options
from bench.cases import STACKS, Case, ProblemSpec
from bench.parity_cells import Problems, Rows, in_turns, spec_of
from bench.timing import Protocol
from bench.turns import Turns
from bench.workers import Failure
from parity.budgets import cross_budget
from parity.compare import errors, over_budget
from parity.matrix import SHAPES

TIMED_TOGETHER = 6  # cells of a job that are timed at a turn at most: all others wait
HOLDS_LOGITS = ("naive", "sdpa")
SHARED = tuple(name for name in options.KERNELS["jax"] if name in options.KERNELS["torch"])
BRIEF = Protocol(samples=3, seconds=0.05, warmups=3)
GLANCE = Protocol(samples=1, least=1, seconds=0.1, warmups=0)
GROUP = 12  # cells that a job takes at once at most: those of one program, so that it is compiled once


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
    def place(self) -> tuple[str, str, str]:
        """What the passes of a problem have in common: kernel, shape, mask."""
        return self.kernel, self.shape, self.spec.mask

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


def judge(cell: Cell, workers: engine.Workers, problems: Problems, turns: Turns, patience: Callable[[], float]
          ) -> dict[str, Any]:
    """The row of a cell, untimed.

    Args:
      turns: compiling takes none; the rest is done among others, a check again alone where their memory was in the way.
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
        with turns.together():
            made = problems.of(cell.spec)
        if isinstance(made, Failure):
            return row | {"status": made.status, "reason": made.reason}
        for done in built:
            done.result()
        with turns.together():
            checked = dict(zip(STACKS, threads.map(check, STACKS, itertools.repeat(made)), strict=True))
    lacking = [stack for stack, (found, _) in checked.items()
               if isinstance(found, Failure) and found.status == "out_of_memory"]
    if lacking:
        with turns.alone():
            checked |= {stack: check(stack, made) for stack in lacking}
    for stack, (found, _) in checked.items():
        if isinstance(found, Failure):
            return row | {"status": found.status, "reason": f"{stack}: {found.reason}"}
    told = {stack: found for stack, (found, _) in checked.items()}
    row |= {"budget": told["torch"]["budget"], "oracle": told["torch"]["oracle"]}
    for there, name in (("errors", "errors"), ("sources", "source"), ("prepare_seconds", "prepare_seconds"),
                        ("compile_seconds", "compile_seconds")):
        row[there] = {stack: found[name] for stack, found in told.items()}
    row["flags"] = [f"{stack}: {flag}" for stack, found in told.items() for flag in found["flags"]]
    row["budget_cross"] = cross_budget(row["budget"])
    row["errors"]["cross"] = errors(*(results for _, results in checked.values()))
    wrong = [f"{stack} {line}" for stack, found in told.items() for line in found["wrong"]]
    wrong += [f"jax to torch {line}" for line in over_budget(row["errors"]["cross"], row["budget_cross"])]
    return row | {"status": "mismatch", "reason": "; ".join(wrong)} if wrong else row


def clock(cell: Cell, workers: engine.Workers, protocol: Protocol, patience: Callable[[], float], stack: str
          ) -> float | Failure:
    """Seconds of a stack on the device."""
    found = workers[stack].ask(f"{engine.TASKS}:clock", patience(), case=cell.of(stack),
                               protocol=dataclasses.asdict(protocol), brief=True)
    return found if isinstance(found, Failure) else found["seconds"]["median"]


def grouped(left: Iterable[Cell], programs: Mapping[tuple[str, str, str], Any]) -> list[tuple[Cell, ...]]:
    """The cells that a job takes at once: of a kernel, a shape and a program of JAX's, those to be timed in front.

    Long ones of kernels that hold all logits stay with one job, which keeps the memory that it once took.

    Args:
      programs: by kernel, shape and mask.
    """
    groups: dict[tuple, list[Cell]] = {}
    for cell in sorted(left, key=lambda c: not SHAPES[c.shape].timed):
        large = SHAPES[cell.shape].timed and cell.kernel in HOLDS_LOGITS
        groups.setdefault(HOLDS_LOGITS if large else (*cell.place[:2], programs[cell.place]), []).append(cell)
    return [part for key, group in groups.items()
            for part in itertools.batched(group, len(group) if key == HOLDS_LOGITS else GROUP)]


class Run:
    """A run of jobs: the cells that are left, and where their rows go."""

    def __init__(self, left: Sequence[Cell], rows: Rows, problems: Problems, deadline: float):
        self._left, self._rows, self._problems, self._deadline = left, rows, problems, deadline
        self._turns = Turns()
        self._groups: dict[bool, collections.deque[tuple[Cell, ...]]] = {
            timed: collections.deque() for timed in (True, False)}

    def deal(self, workers: Sequence[engine.Workers], threads: concurrent.futures.Executor) -> None:
        """Starts the workers and has them tell which cells share a program."""
        several = [list(some) for _, some in itertools.groupby(
            sorted({c.place: c for c in self._left}.values(), key=lambda c: c.place), lambda c: c.place[:2])]

        def tell(n: int) -> dict[tuple[str, str, str], Any]:
            workers[n].start(STACKS, self._deadline)
            told: dict[tuple[str, str, str], Any] = {}
            for some in several[n :: len(workers)]:
                found = workers[n]["jax"].ask(
                    f"{engine.TASKS}:programs", self._deadline, of=[cell.of("jax") for cell in some])
                same = [cell.spec.mask for cell in some] if isinstance(found, Failure) else found
                told |= {cell.place: program for cell, program in zip(some, same, strict=True)}
            return told

        programs = {k: v for part in threads.map(tell, range(len(workers))) for k, v in part.items()}
        for n, part in enumerate(grouped(self._left, programs)):
            self._groups[SHAPES[part[0].shape].timed].append(_rotated(part, n))

    def job(self, workers: engine.Workers) -> None:
        """Takes groups until none is left or the time is up. A cell that the end of the time cuts off is left."""
        on_gpu, to_time = engine.on_gpu(workers, self._deadline), []
        while not self._rows.over:
            group = self._take(timed=True)
            if not group:
                self._time(to_time, workers)
            group = group or self._take(timed=False)
            if not group:
                return
            for cell in group:
                if self._rows.over:
                    return
                began = time.perf_counter()
                row = judge(cell, workers, self._problems, self._turns, self._patience)
                row["check_seconds"] = time.perf_counter() - began
                if self._rows.over and row["status"] == "timeout":
                    return
                if on_gpu and SHAPES[cell.shape].timed and row["status"] == "ok":
                    with self._turns.together():
                        for stack in STACKS:  # the first timing compiles
                            clock(cell, workers, GLANCE, self._patience, stack)
                    to_time.append((cell, row))
                    if len(to_time) == TIMED_TOGETHER:
                        self._time(to_time, workers)
                else:
                    self._rows.write(cell, row)

    def _time(self, cells: list[tuple[Cell, dict[str, Any]]], workers: engine.Workers) -> None:
        """Times cells and writes their rows, as far as the time suffices; leaves none of them."""
        if cells:
            with self._turns.alone():  # others go on building
                for cell, row in cells:
                    if not self._rows.over:
                        ask = functools.partial(clock, cell, workers, BRIEF, self._patience)
                        self._rows.write(cell, row | in_turns(ask))
        cells.clear()

    def _take(self, timed: bool) -> tuple[Cell, ...]:
        """The next group, of those to be timed or of the others; none where there is none."""
        try:
            return self._groups[timed].popleft()
        except IndexError:
            return ()

    def _patience(self) -> float:
        return self._rows.patience(self._deadline)


def _rotated(group: tuple[Cell, ...], n: int) -> tuple[Cell, ...]:
    """Jobs begin at different masks, so that they do not wait for one another's reference."""
    at = 2 * n % len(group)
    return group[at:] + group[:at]


def run(left: Sequence[Cell], rows: Rows, problems: Problems, deadline: float,
        workers: Sequence[engine.Workers]) -> None:
    """Judges cells, a job for each of `workers`; those to be timed come first, and are timed alone."""
    going = Run(left, rows, problems, deadline)
    with concurrent.futures.ThreadPoolExecutor(len(workers)) as threads:
        try:
            going.deal(workers, threads)
            list(threads.map(going.job, workers))
        except BaseException:  # an interrupt: what the others are at is not waited for
            for mine in workers:
                mine.close()
            raise
