"""What the cells of kernels and of schemes in `bench.parity` have in common: problems made ready, rows written."""

import math
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from bench import engine, records
from bench.cases import STACKS, Case, ProblemSpec, differing
from bench.report import tables
from bench.workers import Failure, Worker
from parity.matrix import SHAPES

ROUNDS = 3
SAMPLES = 3  # of a cell of a scheme in each round
GRACE = 20.0  # seconds for what is at work when the time is up
KEPT = 16  # cells of schemes that a job keeps on its devices, to be timed


class Cell(Protocol):
    """A cell of either kind: unique name of its row, and the command that repeats it."""

    @property
    def key(self) -> str: ...

    @property
    def command(self) -> str: ...


def spec_of(mask: str, shape_name: str, seed: int) -> ProblemSpec:
    """A mask on a shape of the matrix."""
    shape = SHAPES[shape_name]
    settings = differing(window=shape.window, block=shape.block, sparse_block=shape.sparse_block, density=0.5)
    q_len = 0 if shape.q_len == shape.seq_len else shape.q_len
    return ProblemSpec(mask, shape.seq_len, q_len, shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim,
                       shape.dtype, seed, settings)


class Problems:
    """The reference and the inputs of each problem as files, made once each, by a judge that is free."""

    def __init__(self, folder: Path, deadline: float, judges: Sequence[Worker]):
        self._folder, self._deadline = folder, deadline
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[str, dict[str, str] | Failure] = {}
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()  # no more start than are asked at a time
        for judge in reversed(judges):
            self._free.put(judge)

    def of(self, spec: ProblemSpec) -> dict[str, str] | Failure:
        """{"reference": path, stack: path of the inputs it reads}, or why there are none."""
        label = spec.label
        with self._locks.setdefault(label, threading.Lock()):
            if label not in self._made:
                judge = self._free.get()
                try:
                    self._made[label] = self._make(spec, judge)
                finally:
                    self._free.put(judge)
            return self._made[label]

    def _make(self, spec: ProblemSpec, judge: Worker) -> dict[str, str] | Failure:
        case = Case("jax", "naive", "forward", spec).record()  # the judge reads its problem alone
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        paths = {"reference": str(folder / "reference.npz"), "jax": str(folder / "inputs"),
                 "torch": str(folder / "inputs.npz")}
        found = judge.ask(f"{engine.TASKS}:reference", self._deadline, spec=case, path=paths["reference"])
        if isinstance(found, Failure):
            return Failure(found.status, f"the reference: {found.reason}")
        found = judge.ask(f"{engine.TASKS}:exchange", self._deadline, spec=case, checkpoint=paths["jax"],
                          buffers=paths["torch"])
        return Failure(found.status, f"the inputs: {found.reason}") if isinstance(found, Failure) else paths


def in_turns(clock: Callable[[str], float | Failure]) -> dict[str, Any]:
    """What a row tells of both stacks' seconds, told by clock(stack) in turns.

    The ratio is JAX's throughput over PyTorch's: above 1, JAX is faster.
    """
    rounds: dict[str, list[float]] = {stack: [] for stack in STACKS}
    for _ in range(ROUNDS):
        for stack in STACKS:
            found = clock(stack)
            if isinstance(found, Failure):
                return {"status": found.status, "reason": f"{stack}, timed: {found.reason}"}
            rounds[stack].append(found)
    seconds = {stack: statistics.median(values) for stack, values in rounds.items()}
    return {"seconds": seconds, "rounds": rounds, "throughput_ratio": seconds["torch"] / seconds["jax"]}


class Rows:
    """Where the rows of a run go, from several threads, and how much time is left for more.

    Args:
      seconds: after which no further cell is begun.
    """

    def __init__(self, writer: records.Writer, total: int, console: Console, seconds: float = math.inf):
        self._writer, self._total, self._console = writer, total, console
        self._until = time.monotonic() + seconds
        self._done, self._lock = 0, threading.Lock()

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._until

    @property
    def closed(self) -> bool:
        """Whether what was at work when the time was up has had its seconds, and its timing behind it as many."""
        return time.monotonic() > self._until + 2 * GRACE

    def patience(self, deadline: float) -> float:
        """Seconds that a step which begins now may take."""
        return max(1.0, min(deadline, self._until + GRACE - time.monotonic()))

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
