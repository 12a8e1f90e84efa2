"""Context-parallel schemes on the devices of this host (or of several), in both stacks: checked, then timed.

    python -m bench.context_parallel --worlds=2 --schemes=ring,ulysses --masks=causal --seqlens=16K
    python -m bench.context_parallel --worlds=8 --hosts=2 --host=0 --coordinator=10.0.0.1:29500 ...   # on each host

A row is a scheme x mask x sharding x world x stack: errors against the reference, bytes handed to collectives against
the schedule's, seconds of the slowest rank of each iteration, skew, rate, efficiency, peak memory. Ranks are processes,
one a device; a rank that is lost, fails or lags ends its job within --deadline, and the row it was at says so, naming
rank, step and peer; what was left goes on in a new job. Without a GPU, ranks are processes on the CPU over gloo.
"""

import collections
import contextlib
import dataclasses
import datetime
import importlib
import itertools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import flags

from bench import context_parallel_cases as cp
from bench import engine, environment, options, program, records
from bench.cases import STACKS, ProblemSpec, differing
from bench.workers import ENVIRONMENT, MEMORY_WORDS
from workload import ranks
from workload.capability import DYNAMIC_MASKS
from workload.ranks import RankFailure, end_all
from workload.schedule import SHARDINGS
from workload.scratch import scratch
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES

LOST_JOBS = 2  # at a scheme, after which its other cases are not tried


def define() -> None:
    """Defines the flags."""
    options.define_measuring("out/context_parallel.jsonl", deadline=120.0)
    options.define_problems(("full", "causal", "full_document", "causal_document"), seqlens=("16K",))
    cp.define(worlds=("2",))
    flags.DEFINE_integer("samples", 15, "Iterations a pass.", lower_bound=1)
    options.define_list("head_groups", ["1"], "Groups of heads that travel while others compute; numbers above 1 for "
                        f"the schemes that have them ({', '.join(cp.GROUPED)}).")
    flags.DEFINE_enum("travel", "float32", ["float32", "own"], "dtype of gradient sums in flight; own: the problem's.")
    flags.DEFINE_string("check_len", "2K", "Tokens of the problem that is held to the reference; 0 for the row's own.")
    options.on_cpu(check_len="256")
    flags.DEFINE_bool("time", True, "Time the cases; else they are only checked.")
    flags.DEFINE_string("checked", "", "A record file: its good rows stand for the check of cases of another length.")
    flags.DEFINE_list("links", [], "Also measure links, at these operand bytes: 64K, 64M.")
    flags.DEFINE_bool("inside", False, "PyTorch: also time each step's local work alone and predict the job from it "
                      "and the links.")
    flags.DEFINE_list("trace", [], "Cases of which a call is traced, as ring:causal or ring:causal:zigzag, in rows of "
                      "their own after all others; the traces go beside --out.")
    flags.DEFINE_bool("ahead", False, "Let a stack compile while another is timed: on a GPU host with idle cores.")
    options.define_float("budget", 0.0, "No row is begun this many seconds after the start, which the stacks share; "
                         "0: no limit.",
                         lower_bound=0)
    flags.DEFINE_integer("hosts", 1, "Hosts of the job; each runs this command.", lower_bound=1)
    flags.DEFINE_integer("host", 0, "Which host this is.", lower_bound=0)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of host 0, where --hosts > 1.")


def cases_of(values: flags.FlagValues) -> list[cp.Case]:
    """The rows that the flags ask for. ValueError names the flag."""
    travel = "float32" if values.travel == "float32" else values.dtype
    lengths, worlds, groups = (
        options.numbers(name, getattr(values, name)) for name in ("seqlens", "worlds", "head_groups"))
    settings = differing(documents=options.documents(values.documents, lengths), long_share=values.long_share)
    masks = options.choose("masks", values.masks, ALL_BUILDERS)
    out = []
    for stack in options.choose("stack", values.stack, STACKS):
        if values.inside and stack == "jax":
            raise ValueError("--inside: jax times no step alone; give --stack=torch")
        if values.kernel:
            options.choose_one("kernel", values.kernel, options.KERNELS[stack])
        for length, mask, world in itertools.product(lengths, masks, worlds):
            spec = ProblemSpec(mask, length, 0, values.batch, values.q_heads, values.kv_heads, values.head_dim,
                               values.dtype, values.seed, settings)
            for case in cp.cases_of(values, stack, spec, world):
                out += [dataclasses.replace(case, travel=travel, head_groups=n)
                        for n in groups if n == 1 or case.scheme in cp.GROUPED]
    if not out:
        raise ValueError(f"--head_groups: only {' and '.join(cp.GROUPED)} take more than 1")
    for case in {(c.scheme, c.world, c.head_groups, c.spec.mask in DYNAMIC_MASKS): c for c in out}.values():
        if case.head_groups > 1:
            cp.check_head_groups(case)
    return out  # mask by mask, as they are given: if time runs out, the first ones are whole


def check_hosts(values: flags.FlagValues) -> None:
    """ValueError naming the flag of a job on several hosts that is wrong."""
    try:
        ranks.check_hosts(values.hosts, values.host, values.coordinator)
    except ValueError as problem:
        raise ValueError(f"--{problem}") from problem
    options.worlds(values.worlds, values.hosts)


def request_of(values: flags.FlagValues, cases: Sequence[cp.Case]) -> dict[str, Any]:
    """What every job of the run is told besides its cases; see `context_parallel_job.Request`. ValueError names the
    flag.
    """
    check_hosts(values)
    check_len = 0 if values.check_len == "0" else options.numbers("check_len", [values.check_len])[0]
    traced = [text.split(":") for text in values.trace]
    for parts in traced:
        if len(parts) not in (2, 3) or any(x not in y for x, y in zip(parts, (SCHEMES, ALL_BUILDERS, SHARDINGS))):
            raise ValueError(f"--trace: {':'.join(parts)!r} is no scheme:mask or scheme:mask:sharding")
        if not any(cp.is_among(case, [parts]) for case in cases):
            raise ValueError(f"--trace: {':'.join(parts)!r} is no case of this run")
    if values.checked:
        try:
            records.read(*records.there([values.checked]))  # what is wrong with it is said before ranks start
        except ValueError as problem:
            raise ValueError(f"--checked: {problem}") from problem
    return {
        "protocol": {"samples": values.samples, "least": min(3, values.samples), "seconds": values.seconds},
        "check_len": check_len, "timed": values.time, "checked": values.checked, "deadline": values.deadline,
        "links": options.numbers("links", values.links), "inside": values.inside, "trace": traced,
    }


class Jobs:
    """Runs cases as jobs of one stack and world; a job that fails costs the row it was at.

    Attributes:
      out: the record file; request: what every job is told; deadline: seconds a row may take.
      hosts, host, coordinator: see `launch.spawn`.
      ahead: whether a stack builds while the one before it is measured.
      budget: seconds after which no row is begun; of several stacks each ends at its share of them.
      stopped: whether the run ended before its last job.
    """

    def __init__(self, out: Path, request: dict[str, Any], deadline: float, hosts: int = 1, host: int = 0,
                 coordinator: str | None = None, ahead: bool = False, budget: float = math.inf):
        self.out, self.request, self.deadline = out, dict(request), deadline
        self.hosts, self.host, self.coordinator = hosts, host, coordinator
        self.ahead, self.began, self.budget = ahead, time.time(), budget
        self._lost: collections.Counter = collections.Counter()
        self.stopped = False

    def stop(self) -> None:
        """Ends what runs; rows that are not there yet stay away."""
        self.stopped = True
        end_all()

    def run(self, cases: Sequence[cp.Case]) -> None:
        """Every case whose row the file lacks."""
        by_stack: dict[str, list[cp.Case]] = {}
        for case in cases:
            by_stack.setdefault(case.stack, []).append(case)
        with scratch("jobs") as folder, ThreadPoolExecutor(len(STACKS)) as threads:
            self.request |= {"references": str(folder)}
            turns = [folder / str(n) for n in range(len(by_stack) + 1)]
            running: list[Future] = []
            try:
                for members, mine, following in zip(by_stack.values(), turns, turns[1:], strict=False):
                    until = self.began + self.budget * (len(running) + 1) / len(by_stack)
                    running.append(threads.submit(self._stack, members, until, mine if running else None, following))
                    if not self.ahead:
                        running[-1].result()
                for each in running:
                    each.result()
            except BaseException:  # an interrupt: the ranks are not waited for
                self.stop()
                raise

    def _stack(self, cases: Sequence[cp.Case], until: float, turn: Path | None, following: Path) -> None:
        """All jobs of one stack, which measure nothing before `turn` is there; then it is the `following` one's."""
        by_world: dict[int, list[cp.Case]] = {}
        for case in cases:
            by_world.setdefault(case.world, []).append(case)
        try:
            for world, members in by_world.items():
                if self.hosts > 1 and not self.stopped:  # rank 0 knows what is left, and tells the ranks
                    self._job(world, members, until, turn)
                while self.hosts == 1 and not self.stopped and (left := self._left(members)) and time.time() < until:
                    self._job(world, left, until, turn)
        finally:
            following.touch()

    def _left(self, cases: Sequence[cp.Case]) -> list[cp.Case]:
        """Cases without a row; those of a scheme at which too many jobs were lost get one here."""
        given_up = [c for c in cases if self._lost[c.stack, c.scheme] >= LOST_JOBS]
        for case, key in self._missing(given_up):
            self._write_failure(case, key, "error", f"not run: {LOST_JOBS} jobs were lost at {case.scheme}")
        missing = {case.key for case, _ in self._missing(cases)}
        return [case for case in cases if case.key in missing]

    def _missing(self, cases: Sequence[cp.Case]) -> list[tuple[cp.Case, str]]:
        """(case, key) of the rows that are not there, in the order in which a job writes them."""
        traced = [c for c in cases if cp.is_among(c, self.request.get("trace", ()))]
        wanted = [(c, c.key) for c in cases] + [(c, cp.trace_key(c)) for c in traced]
        done = self._done()
        return [(case, key) for case, key in wanted if key not in done]

    def _done(self) -> set[str]:
        return records.keys(self.out)

    def _job(self, world: int, left: Sequence[cp.Case], until: float, turn: Path | None) -> None:
        stack, before = left[0].stack, self._done()
        launch = _launcher(stack)
        request = self.request | {"cases": [c.record() for c in left], "after": str(turn or "")}
        seconds = self.deadline * (1 + len(left))
        if until < math.inf:
            request["until"] = until
            seconds = min(seconds, max(0.0, until - time.time()) + self.deadline)
        with scratch("cases") as folder:
            path = folder / "cases.json"
            path.write_text(json.dumps(request))
            command = [sys.executable, "-m", f"bench.context_parallel_{stack}_worker", str(path), str(self.out)]
            try:
                launch.spawn(
                    command, world // self.hosts, deadline_s=seconds, hosts=self.hosts, host=self.host,
                    coordinator=self.coordinator, environ=os.environ | ENVIRONMENT[stack], show=True)
            except RankFailure as failure:
                self._blame(left, failure)
                return
        if self.host == 0 and self._missing(left) and self._done() == before and time.time() < until:
            raise RuntimeError(f"a job of {stack} on {world} ranks wrote no row")

    def _blame(self, left: Sequence[cp.Case], failure: RankFailure) -> None:
        """The row that the job was at; on several hosts it was the last job."""
        if self.stopped:  # by whoever ended the run
            return
        case, key = next(iter(self._missing(left)), (None, ""))
        if self.host or case is None:  # where every row is there: what failed was the end of the job
            print(f"{left[0].stack}: {failure}", file=sys.stderr, flush=True)
        else:
            self._lost[case.stack, case.scheme] += 1
            text = str(failure)
            status = "out_of_memory" if any(w in text.lower() for w in MEMORY_WORDS) else \
                "timeout" if any(w in text for w in ("deadline", "furthest behind", "Timeout (")) else "error"
            self._write_failure(case, key, status, " | ".join(text.splitlines())[:1500])
        if self.hosts > 1:
            self.stopped = True
            print("a job on several hosts is not begun again: give --resume on every host", file=sys.stderr)

    def _write_failure(self, case: cp.Case, key: str, status: str, reason: str) -> None:
        row: dict[str, Any] = {
            "key": key, "kind": "context_parallel" if key == case.key else "trace", "case": case.record(),
            "status": status, "reason": reason, "environment": environment.machine(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        with records.Writer(self.out) as writer:
            writer.write(row)
        print(f"{key}: {status}: {reason[:300]}", flush=True)


def _launcher(stack: str):
    """The stack's launcher: PyTorch's holds the store that ranks meet at, JAX's finds a free port."""
    return importlib.import_module(f"{stack}_impl.launch")


def main() -> int:
    """Runs the cases that the flags name; 1 where a row failed or the run was ended, 2 for bad flags."""
    values = flags.FLAGS
    cases = cases_of(values)
    request = request_of(values, cases)
    out, going_on = Path(values.out), options.resumption(values)
    jobs = Jobs(out, request, values.deadline, values.hosts, values.host, values.coordinator, values.ahead,
                values.budget or math.inf)
    signal.signal(signal.SIGTERM, lambda *_: jobs.stop())  # else ranks would live on, and hold their devices
    with contextlib.nullcontext() if values.host else engine.open_records(engine.Options(out, *going_on)):
        jobs.run(cases)
    if values.host:
        print("rows are written on host 0")
        return int(jobs.stopped)
    return program.ended(out) or int(jobs.stopped)


if __name__ == "__main__":
    define()
    program.run(main)
