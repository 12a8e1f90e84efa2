"""Runs cases through worker processes into a record file: refuse, check against the reference, time, write.

The reference of a problem is computed once, by the judge's worker, and both stacks and all kernels are held to it.
One worker a stack takes the rows one after another; several of them build and check side by side, and what is timed is
timed alone (`bench/turns.py`). Nothing here imports JAX or PyTorch.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import environment, records
from bench.cases import STACKS, Case
from bench.rates import GPU_BACKENDS, flag, with_rates
from bench.shares import Shares, ordered
from bench.shorter import Shorter
from bench.timing import Protocol
from bench.turns import Turns
from bench.workers import Failure, Worker
from workload.scratch import scratch

TASKS = "bench.attention_task"
WHOLE_CELLS = 1 << 24  # logits of a head, 4K tokens, above which some rows and keys are judged: a bench has many rows
KEEPS_MEMORY = ("jax",)  # its allocator takes memory of the device for good
RENEWED_BYTES = 6 << 30
AGAIN_SECONDS = 1.0  # for a ceiling that a row is about to be rejected by
TRIES = 3  # times that a row is timed before it is rejected


@dataclasses.dataclass(frozen=True)
class Options:
    """How a run goes.

    Attributes:
      out: record file; resume: whether rows that it has are kept and skipped.
      again: tells of a row that it has, with its key, whether it is asked again all the same.
      deadline: seconds a row may take, building and compiling included.
      memory: bytes a worker may hold privately, None for no limit.
      protocol: how long to time; timed: False checks only.
      workers: processes of each stack.
      patience: seconds a run of a pass may take, by the estimate from the same rows at a shorter length; a row above
        is skipped. None for no limit.
      longest: (kernel, tokens) pairs; rows of the kernel at more tokens are skipped.
      seconds: after which no further row is begun.
      ahead: whether several workers compile what they can of a length before any of it is timed, which spares turns;
        a brief run shows its first rows earlier without.
    """

    out: Path
    resume: bool = False
    again: Callable[[dict[str, Any]], bool] | None = None
    deadline: float = 180.0
    memory: int | None = None
    protocol: Protocol = Protocol()
    timed: bool = True
    workers: int = 1
    patience: float | None = None
    longest: tuple[tuple[str, int], ...] = ()
    seconds: float = math.inf
    ahead: bool = True


def open_records(options: Options) -> records.Writer:
    """The record file; ValueError where it holds rows and the run is no resumption."""
    writer = records.Writer(options.out, alone=True, again=options.again)
    if writer.keys and not options.resume:
        writer.close()
        raise ValueError(f"--out: {options.out} holds {len(writer.keys)} rows; give --resume to go on, or another file")
    return writer


class Workers(contextlib.ExitStack):
    """The workers of a run, each started when first asked; arguments as of `Worker`."""

    def __init__(self, memory: int | None = None, environ: Mapping[str, str] | None = None):
        super().__init__()
        self._memory, self._environ = memory, environ
        self._held: dict[tuple[str, int], Worker] = {}
        self._environment: dict[str, dict] = {}
        self._lock = threading.Lock()

    def __getitem__(self, stack: str) -> Worker:
        return self.of(stack, 0)

    def of(self, stack: str, number: int) -> Worker:
        """A stack's worker by number; they are alike."""
        with self._lock:
            if (stack, number) not in self._held:
                self._held[stack, number] = self.enter_context(Worker(stack, self._memory, self._environ))
            return self._held[stack, number]

    def start(self, stacks: Sequence[str], deadline: float, number: int = 1) -> None:
        """Starts workers at the same time, `number` of each stack, of the judge one: importing takes seconds."""
        workers = [self.of(stack, n) for stack in stacks for n in range(1 if stack == "judge" else number)]
        with concurrent.futures.ThreadPoolExecutor(len(workers) or 1) as pool:
            list(pool.map(lambda x: x.ask(f"{TASKS}:ready", deadline, stack=x.stack), workers))

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


class References:
    """References of problems, computed by the judge once each and kept as files while the run lasts."""

    def __init__(self, workers: Workers, folder: Path, deadline: float):
        self._workers, self._folder, self._deadline = workers, folder, deadline
        self._found: dict[str, str | Failure] = {}
        self._locks: dict[str, tuple[int, threading.Lock]] = {}  # of each problem: who wants another does not wait
        self._lock = threading.Lock()

    def of(self, case: Case) -> str | Failure:
        """The path of a problem's reference, or why there is none."""
        label = case.spec.label
        with self._lock:
            number, lock = self._locks.setdefault(label, (len(self._locks), threading.Lock()))
        with lock:
            if label not in self._found:
                path = str(self._folder / f"{number}.npz")
                found = self._workers["judge"].ask(
                    f"{TASKS}:reference", self._deadline, spec=case.record(), path=path, whole_cells=WHOLE_CELLS)
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


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the rows of a run share: the workers, the judge's references, the ceilings, whose turn it is, how to go."""

    workers: Workers
    references: References
    ceilings: Ceilings
    turns: Turns
    options: Options
    not_ahead: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)

    def measure(self, case: Case, number: int, skip: Callable[[dict], dict | None]) -> dict[str, Any]:
        """One row: what became of a case in worker `number` of its stack.

        Args:
          skip: (the row so far, with its FLOPs) -> status and reason where the case is not to be run.
        """
        row = new_row(case.key, "attention", case.record(), self.workers.environment(case.stack, self.options.deadline))
        began, ask = time.perf_counter(), self._ask(case, number)
        try:
            row = self._measured(case, ask, row, skip)
        except _Ended as ended:
            row |= ended.fields
        ask.took["waiting"] = time.perf_counter() - began - sum(ask.took.values())
        return row | {"took": ask.took}

    def build_ahead(self, case: Case, number: int, skip: Callable[[dict], dict | None]) -> None:
        """Compiles a case whose compilation disturbs timings before anything of its length is timed."""
        ask = self._ask(case, number)
        with contextlib.suppress(_Ended):  # its row will tell
            if not ask("refuse") and not skip({"case": case.record()} | ask("describe")) and ask("disturbs"):
                with self.turns.together():
                    self._built(case, ask)

    def judge_ahead(self, case: Case) -> None:
        """Computes a case's reference before its first row asks for it; beside checks, never beside a timing."""
        with self.turns.together():
            self.references.of(case)

    def _ask(self, case: Case, number: int) -> "_Ask":
        return _Ask(self.workers.of(case.stack, number), case, self.options.deadline)

    def _measured(self, case, ask, row, skip) -> dict[str, Any]:
        reason = ask("refuse")
        if reason:
            return row | {"status": "unsupported", "reason": reason}
        row |= ask("describe")
        skipped = skip(row)
        if skipped:
            return row | skipped
        with self.turns.together() if ask("disturbs") else contextlib.nullcontext():
            row |= self._built(case, ask)
        order = (case.spec.seq_len, case.which != "forward")
        try:
            with self.turns.together():
                row |= self._checked(case, ask)
        except _Ended as ended:
            if ended.fields["status"] != "out_of_memory" or self.options.workers == 1:
                raise
            with self.turns.alone(order):  # others' checks may have held what it needs
                row |= self._checked(case, ask)
        if not self.options.timed:
            return row
        with self.turns.alone(order):
            return self._timed(case, ask, row)

    def _timed(self, case, ask, row) -> dict[str, Any]:
        """The row with its times and rates.

        One above the ceiling is timed again beside it before it is rejected: a busy machine may have spoilt either.
        """
        peak = self.ceilings.peak(case.spec.dtype)
        for _ in range(TRIES):
            timed = row | ask("clock", protocol=dataclasses.asdict(self.options.protocol))
            rated = with_rates(timed, peak)
            if rated["status"] != "ok":
                peak = self.ceilings.again(case.spec.dtype)
                rated = with_rates(timed, peak)
            if rated["status"] == "ok":
                break
        return rated

    def _built(self, case, ask) -> dict[str, Any]:
        """What compiling ahead adds to a row: nothing, or why it failed, for a first call compiles too.

        A kernel that failed once is not tried again.
        """
        if (case.stack, case.kernel) not in self.not_ahead:
            try:
                ask("build")
            except _Ended as ended:
                if ended.fields["status"] != "error":
                    raise
                self.not_ahead[case.stack, case.kernel] = ended.fields["reason"]
        reason = self.not_ahead.get((case.stack, case.kernel))
        return {"not_compiled_ahead": reason} if reason else {}

    def _checked(self, case, ask) -> dict[str, Any]:
        """What the check adds to a row; raises `_Ended` where the case is wrong."""
        with ask.taking("reference"):
            reference = self.references.of(case)
        if isinstance(reference, Failure):
            raise _Ended({"status": reference.status, "reason": f"the reference: {reference.reason}"})
        checked = ask("check", reference=reference, whole_cells=WHOLE_CELLS)
        wrong = checked.pop("wrong")
        if wrong:
            raise _Ended(checked | {"status": "mismatch", "reason": "; ".join(wrong)})
        return checked


class _Ask:
    """ask(task, ...) of a case's worker; raises `_Ended` where it fails.

    Attributes:
      took: seconds of each task.
    """

    def __init__(self, worker: Worker, case: Case, deadline: float):
        self._worker, self._record, self._deadline = worker, case.record(), deadline
        self.took: dict[str, float] = {}

    def __call__(self, task: str, **arguments) -> Any:
        with self.taking(task):
            found = self._worker.ask(f"{TASKS}:{task}", self._deadline, case=self._record, **arguments)
        if isinstance(found, Failure):
            raise _Ended(_failed(found))
        return found

    @contextlib.contextmanager
    def taking(self, name: str):
        """Adds the seconds of a `with` to what `name` took."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.took[name] = self.took.get(name, 0.0) + time.perf_counter() - began


class _Ended(Exception):
    """A row that goes no further.

    Attributes:
      fields: its status and reason, and what else is known.
    """

    def __init__(self, fields: dict[str, Any]):
        super().__init__(fields["reason"])
        self.fields = fields


class Session(contextlib.ExitStack):
    """A run that is open: its record file, workers, references and ceilings. Several threads may measure.

    Raises ValueError where the file holds rows and `options.resume` is false.
    """

    def __init__(self, options: Options):
        super().__init__()
        self.options = options
        self.writer = self.enter_context(open_records(options))
        self.workers = self.enter_context(Workers(options.memory))
        references = References(self.workers, self.enter_context(scratch("reference")), options.deadline)
        ceilings = Ceilings(self.workers, self.writer, STACKS, options)
        self._bench = Bench(self.workers, references, ceilings, Turns(), options)
        self._seen: dict[tuple, float] = {}
        self._shorter = Shorter(options.patience, options.longest)
        self._lock = threading.Lock()

    def start(self, cases: Sequence[Case]) -> None:
        """Starts the workers that the cases need, measures the ceilings, reads the rates that the file has."""
        stacks = sorted({case.stack for case in cases})
        self.workers.start([*stacks, "judge"] if cases else [], self.options.deadline, self.options.workers)
        ceilings = Ceilings(self.workers, self.writer, stacks, self.options)
        self._bench = dataclasses.replace(self._bench, ceilings=ceilings)
        for dtype in sorted({case.spec.dtype for case in cases}) if self.options.timed else ():
            ceilings.peak(dtype)
        for row in records.read(self.options.out):
            if row["kind"] == "attention" and row["key"] in self.writer.keys:
                flag(row, self._seen)
                self._shorter.add(row)

    def measure(self, case: Case, number: int = 0) -> dict[str, Any]:
        """Measures a case in worker `number` of its stack and writes its row."""
        row = self._bench.measure(case, number, self._shorter.skip)
        with self._lock:
            row = flag(row, self._seen)
            self._shorter.add(row)
            self.writer.write(row)
        return row

    def build_ahead(self, cases: Iterable[Case], number: int) -> None:
        """With several workers: compiles what of some cases would disturb timings if it were compiled later."""
        for case in cases if self.options.workers > 1 and self.options.ahead else ():
            self._bench.build_ahead(case, number, self._shorter.skip)

    def judge_ahead(self, cases: Iterable[Case], over: Callable[[], bool]) -> None:
        """With several workers: computes the references of problems in the order in which they come."""
        firsts: dict[str, Case] = {}
        for case in cases if self.options.workers > 1 else ():
            firsts.setdefault(case.spec.label, case)
        for case in firsts.values():
            if over():
                return
            self._bench.judge_ahead(case)

    def renew(self, case: Case, number: int, last: dict[str, Any] | None) -> None:
        """Ends a worker that may never give back what its last rows took, before it goes on to other shapes."""
        if last is None or (last["case"]["kernel"], last["case"]["seq_len"]) == (case.kernel, case.spec.seq_len):
            return
        if self.options.workers > 1 and case.stack in KEEPS_MEMORY and (last.get("peak_bytes") or 0) > RENEWED_BYTES:
            self.workers.of(case.stack, number).kill()


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
        counter, stopped = itertools.count(1), threading.Event()

        def over():
            return stopped.is_set() or time.monotonic() > until

        def work(share):
            last: dict[str, Any] = {}
            number, length = shares.workers[share][1], 0
            while not over() and (group := shares.take(share)):
                if group[0].spec.seq_len != length:
                    length = group[0].spec.seq_len
                    session.build_ahead([*group, *shares.left(share, length)], number)
                for case in group:
                    if over():
                        return
                    session.renew(case, number, last.get(case.stack))
                    row, at = session.measure(case, number), next(counter)
                    if row.get("peak_bytes"):
                        last[case.stack] = row
                    if row["status"] != "unsupported":
                        console.print(f"[{at}/{len(left)}] {line(row)}", markup=False)

        shares = Shares(left, options.workers)
        with concurrent.futures.ThreadPoolExecutor(len(shares.workers) + 1) as threads:
            try:
                works = [threads.submit(session.judge_ahead, left, over)]
                for done in [threads.submit(work, share) for share in range(len(shares.workers))] + works:
                    done.result()
            except BaseException:  # an interrupt: what the others are at is not waited for
                stopped.set()
                session.workers.close()
                raise
        undone = len(left) - next(counter) + 1
        if undone:
            console.print(f"the time is up: {undone} rows are left")
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
