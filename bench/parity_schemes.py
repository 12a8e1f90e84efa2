"""The cells of schemes in `bench.parity`: a scheme, a mask and a world on real ranks of both stacks.

JAX splits the inputs over its ranks and saves the shards as an Orbax checkpoint; each rank of PyTorch is handed what it
restores of it and runs on that. The results of PyTorch's ranks become a sharded checkpoint that JAX restores under its
own mesh, where both are joined and judged. Ranks of JAX are the devices of one process, ranks of PyTorch are processes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import context_parallel_cases as cp
from bench import engine
from bench.parity_cells import KEPT, ROUNDS, SAMPLES, Problems, Rows, in_turns, spec_of
from bench.rates import GPU_BACKENDS
from bench.workers import Failure, Worker
from parity.budgets import cross_budget
from parity.compare import over_budget
from workload.capability import DYNAMIC_MASKS
from workload.errors import Unsupported
from workload.scratch import scratch

JAX, TORCH = "bench.parity_jax_ranks", "bench.parity_torch_ranks"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell: the case as JAX runs it, and the name of its shape."""

    case: cp.Case
    shape: str

    @property
    def key(self) -> str:
        """Unique name of its row."""
        return f"parity/{self.case.key.removeprefix('jax/')}"

    @property
    def command(self) -> str:
        """Repeats just this cell."""
        case = self.case
        return (
            f"python -m bench.parity --schemes={case.scheme} --masks={case.spec.mask} "
            f"--worlds={case.world} --sharding={case.sharding} --shapes={self.shape} --seed={case.spec.seed} "
            "--out=out/again.jsonl"
        )

    def of(self, stack: str) -> dict[str, Any]:
        """The case that a stack's ranks run."""
        return dataclasses.replace(self.case, stack=stack).record()


def cells(schemes: Iterable[str], masks: Iterable[str], worlds: Iterable[int], shardings: Iterable[str], shape: str,
          seed: int) -> list[Cell]:
    """The matrix, a world's cells together, of those a scheme's: some compile to the same programs."""
    schemes, masks, shardings = tuple(schemes), tuple(masks), tuple(shardings)
    return [
        Cell(cp.Case("jax", scheme, spec_of(mask, shape, seed), world, sharding), shape)
        for world in worlds for scheme in schemes for sharding in shardings for mask in masks
    ]


class Gang(contextlib.ExitStack):
    """The ranks of PyTorch as workers; started when first asked, all anew after one failed."""

    def __init__(self, world: int):
        super().__init__()
        self._threads = self.enter_context(concurrent.futures.ThreadPoolExecutor(world))
        self._workers = [self.enter_context(Worker("torch")) for _ in range(world)]
        self._joined = False

    def ask(self, task: str, deadline: float, **arguments: Any) -> list[Any] | Failure:
        """Every rank's answer, or the failure of the first rank that has one."""
        failed = self.join(deadline)
        return failed or self._each(f"{TORCH}:{task}", deadline, [{} for _ in self._workers], **arguments)

    def join(self, deadline: float) -> Failure | None:
        """Starts the ranks and lets them meet, if that is still to be done."""
        if self._joined:
            return None
        port = self._workers[0].ask(f"{TORCH}:open_store", deadline, wait=deadline)
        if isinstance(port, Failure):
            return port
        each = [{"rank": rank, "world": len(self._workers)} for rank in range(len(self._workers))]
        joined = self._each(f"{TORCH}:join", deadline, each, port=port, wait=deadline)
        if isinstance(joined, Failure):
            return joined
        self._joined = True
        return None

    def environment(self, deadline: float) -> dict[str, Any]:
        """Of the first rank; empty where it does not start."""
        found = self._workers[0].ask(f"{engine.TASKS}:environment", deadline, stack="torch")
        return {} if isinstance(found, Failure) else found

    def _each(self, task, deadline, each, **arguments):
        asked = [self._threads.submit(w.ask, task, deadline, **mine, **arguments)
                 for w, mine in zip(self._workers, each, strict=True)]
        answers = [a.result() for a in asked]
        failed = {rank: a for rank, a in enumerate(answers) if isinstance(a, Failure)}
        if not failed:
            return answers
        if {f.status for f in failed.values()} != {"unsupported"} or len(failed) < len(answers):
            self._joined = False  # ranks that do not fail alike may wait for one another
            for worker in self._workers:
                worker.kill()
        first = min(failed.values(), key=lambda f: f.status == "timeout")  # a rank that waited for another tells less
        return Failure(first.status, "; ".join(f"rank {rank}: {f.reason}" for rank, f in failed.items()))


class Run(contextlib.ExitStack):
    """A job of scheme cells: the workers that it keeps, and the rows of cells that agree and are still to be timed."""

    def __init__(self, rows: Rows, problems: Problems, deadline: float, world: int):
        super().__init__()
        self._rows, self._problems, self._deadline = rows, problems, deadline
        self._workers = self.enter_context(engine.Workers(environ={"JAX_NUM_CPU_DEVICES": str(world)}))
        self._gang = self.enter_context(Gang(world))
        self._good: dict[Cell, dict[str, Any]] = {}

    def start(self) -> None:
        """Starts the workers side by side: importing takes seconds."""
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            threads.submit(self._workers["jax"].ask, f"{JAX}:ready", self._deadline)
            threads.submit(self._workers["judge"].ask, f"{JAX}:ready", self._deadline)
            threads.submit(self._gang.join, self._deadline)

    def on_gpu(self) -> bool:
        """Whether both stacks find a GPU."""
        found = self._workers.environment("jax", self._deadline), self._gang.environment(self._deadline)
        return all(machine.get("backend") in GPU_BACKENDS for machine in found)

    def grouped(self, cells: Sequence[Cell], size: int) -> list[tuple[Cell, ...]]:
        """Cells that a job takes at once: about `size` of one program of JAX's; what takes longest in front."""
        found = self._workers["jax"].ask(f"{JAX}:programs", self._deadline, of=[cell.of("jax") for cell in cells])
        of_program: dict[int, list[Cell]] = collections.defaultdict(list)
        for number, cell in enumerate(cells):
            of_program[number if isinstance(found, Failure) else found[number]].append(cell)
        groups = [part for some in of_program.values() for part in
                  itertools.batched(some, math.ceil(len(some) / max(1, round(len(some) / size))))]
        return sorted(groups, key=lambda some: (some[0].case.spec.mask not in DYNAMIC_MASKS, -len(some)))

    def check(self, left: "collections.deque[tuple[Cell, ...]]", timed: bool) -> None:
        """Judges groups of cells until none is left, no more can be kept to be timed, or the time is up.

        timed: whether the rows of cells that agree are kept for `clock`, unless a worker that held one of them is lost.
        """
        while not self._rows.over:
            try:
                some = left.popleft()
            except IndexError:
                return
            if len(self._good) + len(some) > KEPT:
                left.appendleft(some)
                return
            with scratch("schemes") as folder:
                for number, cell in enumerate(some):
                    if self._rows.over:
                        return
                    began = time.perf_counter()
                    row = self.judge(cell, some, folder / str(number)) | {"check_seconds": time.perf_counter() - began}
                    if self._rows.over and row["status"] == "timeout":
                        return
                    if timed and row["status"] == "ok":
                        self._good[cell] = row
                        continue
                    if row["status"] not in ("ok", "unsupported", "mismatch"):
                        self.write()
                    self._rows.write(cell, row)

    def clock(self) -> None:
        """Times the cells that agree and writes their rows, as far as the time suffices. No job may check meanwhile."""
        for cell in list(self._good):
            if self._rows.closed:
                break
            timed = self._throughput(cell)
            self._rows.write(cell, self._good.pop(cell) | timed)
        self.write()

    def write(self) -> None:
        """Writes the rows that are kept as they are."""
        while self._good:
            self._rows.write(*self._good.popitem())

    def judge(self, cell: Cell, beside: Sequence[Cell], folder: Path) -> dict[str, Any]:
        """The row of a cell, untimed.

        Args:
          beside: the cells that this job takes at once, it among them; folder: for its shards, to be made.
        """
        machine = self._workers.environment("jax", self._patience())
        row = engine.new_row(cell.key, "parity", cell.of("jax") | {"stack": "both", "shape": cell.shape}, machine)
        row["repeat"] = cell.command
        try:
            cell.case.schedule()
        except Unsupported as reason:
            return row | {"status": "unsupported", "reason": str(reason)}
        with concurrent.futures.ThreadPoolExecutor(2) as threads:  # compilers take most of the time
            built = {
                "jax": threads.submit(self._workers["jax"].ask, f"{JAX}:build", self._patience(), case=cell.of("jax"),
                                      beside=[other.of("jax") for other in beside]),
                "torch": threads.submit(self._gang.ask, "build", self._patience(), case=cell.of("torch")),
            }
            made = self._problems.of(cell.case.spec)
        if isinstance(made, Failure):
            return row | {"status": made.status, "reason": made.reason}
        for stack, done in built.items():
            if isinstance(done.result(), Failure):
                return row | {"status": done.result().status, "reason": f"{stack}: {done.result().reason}"}
        folder.mkdir()
        found = self._exchange(cell, made, str(folder))
        if isinstance(found, Failure):
            return row | {"status": found.status, "reason": found.reason}
        wrong = found.pop("wrong")
        row |= found | {"budget_cross": cross_budget(found["budget"])}
        wrong += [f"jax to torch {line}" for line in over_budget(row["errors"]["cross"], row["budget_cross"])]
        return row | {"status": "mismatch", "reason": "; ".join(wrong)} if wrong else row

    def _patience(self) -> float:
        return self._rows.patience(self._deadline)

    def _exchange(self, cell: Cell, made: dict[str, str], folder: str) -> dict[str, Any] | Failure:
        """Runs both stacks, each on the shards of the other's checkpoint; what JAX says of the results."""
        jax, judge = self._workers["jax"], self._workers["judge"]
        ours = {"case": cell.of("jax"), "folder": folder}
        steps = (
            ("jax", lambda: jax.ask(f"{JAX}:run", self._patience(), inputs=made["jax"], **ours)),
            ("the shards of jax", lambda: judge.ask(f"{JAX}:shard_out", self._patience(), folder=folder,
                                                    world=cell.case.world)),
            ("torch", lambda: self._gang.ask("run", self._patience(), case=cell.of("torch"), folder=folder)),
            ("the shards of torch", lambda: judge.ask(f"{JAX}:gather_in", self._patience(), folder=folder,
                                                      world=cell.case.world)),
            ("the results", lambda: jax.ask(f"{JAX}:judge", self._patience(), reference=made["reference"], **ours)),
        )
        answers: dict[str, Any] = {}
        for label, step in steps:
            answers[label] = found = step()
            if isinstance(found, Failure):
                return Failure(found.status, f"{label}: {found.reason}")
        return answers["the results"] | {"kernels": {"jax": answers["jax"], "torch": answers["torch"][0]}}

    def _throughput(self, cell: Cell) -> dict[str, Any]:
        """Seconds of both passes by the slowest rank, the stacks in turns; flags where a device may have waited."""
        waited: collections.Counter[str] = collections.Counter()

        def ranks_of(stack: str) -> list[dict[str, Any]] | Failure:
            if stack == "torch":
                return self._gang.ask("clock", self._patience(), case=cell.of(stack))
            found = self._workers["jax"].ask(f"{JAX}:clock", self._patience(), case=cell.of(stack))
            return found if isinstance(found, Failure) else [found]

        def clock(stack: str) -> float | Failure:
            ranks = ranks_of(stack)
            if isinstance(ranks, Failure):
                return ranks
            waited[stack] += max(rank["waited"] for rank in ranks)
            return statistics.median(map(max, zip(*(rank["samples"] for rank in ranks), strict=True)))

        told = in_turns(clock)
        return told | {"flags": [f"{stack}: a device may have waited for the host in {n} of {ROUNDS * SAMPLES} samples"
                                 for stack, n in waited.items() if n]}


def run(left: Sequence[Cell], rows: Rows, problems: Problems, deadline: float, jobs: int) -> None:
    """Judges cells, a world after the other, by some jobs side by side. On GPUs those that agree are timed last."""
    for world in dict.fromkeys(cell.case.world for cell in left):
        here = [cell for cell in left if cell.case.world == world]
        with contextlib.ExitStack() as held:
            going = [held.enter_context(Run(rows, problems, deadline, world))
                     for _ in range(min(jobs, len(here)))]
            with concurrent.futures.ThreadPoolExecutor(len(going)) as threads:
                try:
                    list(threads.map(Run.start, going))
                    size = min(KEPT // 2, math.ceil(len(here) / len(going)))
                    groups = collections.deque(going[0].grouped(here, size))
                    timed = going[0].on_gpu()
                    while groups and not rows.over:
                        list(threads.map(Run.check, going, itertools.repeat(groups), itertools.repeat(timed)))
                        for one in going:
                            one.clock()
                except BaseException:  # an interrupt: what the others are at is not waited for
                    held.close()
                    for one in going:
                        one.write()
                    raise
