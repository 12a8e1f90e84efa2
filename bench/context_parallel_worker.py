"""What the ranks of the context-parallel bench do, whatever the stack: check, count and time the cases of a request.

    python -m torch_impl.launch --ranks 2 -- python -m bench.context_parallel_torch_worker REQUEST.json ROWS.jsonl
    python -m jax_impl.launch --ranks 2 -- python -m bench.context_parallel_jax_worker REQUEST.json ROWS.jsonl

Every rank (process) runs every case: the bytes handed to collectives against the schedule's, a check against the
reference, each pass timed on all ranks at once. An iteration's slowest rank counts. Rank 0 appends the rows. How a
stack does these things is its `Job`, in the module of its name. A row that takes longer than the deadline ends the
process, with what every thread was doing on stderr: a collective that hangs never returns by itself.
"""

import dataclasses
import faulthandler
import functools
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import environment, records, trace
from bench.cases import ProblemSpec
from bench.context_parallel_cases import (
    Case,
    from_record,
    is_among,
    operand_bytes,
    plan_of_schedule,
    trace_key,
    work_of,
)
from bench.context_parallel_job import RESULTS, TRACED_CALLS, Agreed, Job, Ready, at_length, problem_of
from bench.link_model import links_of, predict
from bench.timing import Protocol
from parity.compare import errors, over_budget
from parity.inputs import InputSpec, make_inputs
from parity.reference import Reference, reference_of, sample_of
from workload.problem import PASSES, AttentionProblem
from workload.schedule import Schedule

TRACE_SECONDS = 4.0  # kept for each traced case where the time is limited
LINK_KINDS = {  # what leaves a rank of `world`, for an operand of one byte
    "permute": lambda world: 1.0,
    "all_to_all": lambda world: (world - 1) / world,
    "all_gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
}


# ---- a row ---------------------------------------------------------------------------------------


def measure_case(job: Job, case: Case, checked: dict[str, dict[str, Any]], measured: dict[Hashable, dict[str, Any]]
                 ) -> dict[str, Any]:
    """The row of a case, equal on all ranks.

    Args:
      checked: of `checks_of`.
      measured: this job's good rows by `work_of`, which stand for other cases of the same work.
    """
    row, whole = _new_row(job, case), time.perf_counter()
    try:
        if case.world > job.world:
            raise Agreed("unsupported", f"world {case.world}: the job has {job.world} ranks")
        problem = problem_of(case.spec)
        began = time.perf_counter()
        schedule = job.agreed(lambda: case.schedule(problem))
        row["schedule_seconds"] = time.perf_counter() - began
        work = work_of(case, schedule)
        if work in measured:
            same = measured[work]
            return same | {"key": row["key"], "case": row["case"], "measured_as": same["key"]}
        row |= {"flops": {which: problem.flops(which) for which in PASSES}, "area": problem.mask.area,
                "schedule": plan_of_schedule(schedule)}
        if case.any_length in checked:
            row |= checked[case.any_length]
        else:
            row |= check(job, case)
        wrong = row.pop("wrong", [])
        if wrong:
            return row | {"status": "mismatch", "reason": "; ".join(wrong)}
        if job.request.timed:
            row |= clock(job, case, schedule)
        if not all(row["bytes_match"].values()):
            reason = f"bytes handed to collectives are not the schedule's: {row['moved']}"
            return row | {"status": "mismatch", "reason": reason}
        measured[work] = row | {"row_seconds": time.perf_counter() - whole}
        return measured[work]
    except Agreed as failure:
        return row | {"status": failure.status, "reason": failure.reason}


def _new_row(job: Job, case: Case) -> dict[str, Any]:
    return {
        "key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
        "environment": environment.machine() | job.stack.environment() | {"processes": len(job.gather(0))},
    }


def check(job: Job, case: Case) -> dict[str, Any]:
    """Bytes, and errors of the ranks' joined results against the reference, judged by rank 0; "wrong" is empty if all
    is well.
    """
    spec = at_length(case, job.request.check_len).spec
    problem = problem_of(spec)
    schedule = case.schedule(problem)
    ready = job.agreed(lambda: job.ready(case, schedule, _inputs(dataclasses.replace(spec, mask="full", settings=()))))

    def work():
        if ready is None:
            return {}
        ready.begin()
        return ready.results()

    results, again = job.agreed(work), job.agreed(work)
    same = job.agreed(lambda: ready is None or ready.same(results, again))
    whole = job.agreed(lambda: {} if ready is None else ready.whole(results))

    def judge():
        if job.rank:
            return {}
        reference, sample = _reference(spec, job.request.references), sample_of(problem)
        got = {name: job.stack.take(sample.take(name, x, problem.group)) for name, x in whole.items()}
        measured = errors(got, reference.results)
        budget = {name: reference.budget[name] for name in measured}
        return {"errors": measured, "budget": budget, "oracle": reference.oracle, "check_len": problem.kv_len,
                "wrong": over_budget(measured, budget)}

    found = job.gather(job.agreed(judge))[0]
    return found | {"bit_identical": all(job.gather(same))} | count(job, ready, schedule)


@functools.lru_cache(maxsize=2)
def _inputs(spec: ProblemSpec) -> dict[str, np.ndarray]:
    """q, k, v, dout, which no mask changes."""
    return make_inputs(problem_of(spec), InputSpec(spec.seed))


@functools.lru_cache(maxsize=16)
def _reference(spec: ProblemSpec, folder: str) -> Reference:
    path = Path(folder, f"{hashlib.sha256(spec.label.encode()).hexdigest()}.npz") if folder else None
    if path is not None and path.exists():
        return Reference.load(str(path), RESULTS)
    found = reference_of(problem_of(spec), InputSpec(spec.seed))
    if path is not None:
        made = path.with_suffix(f".{os.getpid()}.npz")
        found.save(str(made))
        made.rename(path)  # whole, whoever looks
    return found


def count(job: Job, ready: Ready | None, schedule: Schedule) -> dict[str, Any]:
    """Whether each pass hands the schedule's bytes to collectives, and what it hands over."""
    found: dict[str, Any] = {"bytes_match": {}, "moved": {}}
    for which in PASSES:
        moved = job.agreed(lambda which=which: None if ready is None else ready.moved(which))
        expected = operand_bytes(schedule.signature, which)
        by_rank = job.gather(moved)
        found["bytes_match"][which] = all(m in (None, expected) for m in by_rank)
        found["moved"][which] = by_rank[0]
    return found


def clock(job: Job, case: Case, schedule: Schedule) -> dict[str, Any]:
    """Seconds of each pass by the slowest rank of each iteration, efficiency, bytes, peak memory."""
    problem, protocol = schedule.problem, Protocol(**job.request.protocol)
    ready = job.agreed(lambda: job.ready(case, schedule))
    job.agreed(lambda: None if ready is None else ready.begin())
    found: dict[str, Any] = {"timer": job.timer, "cache": "as it is", "seconds": {}, "skew": {}, "rate": {},
                             "efficiency": {}, "single_seconds": {}} | count(job, ready, schedule)
    for which in PASSES:
        by_rank = job.samples(None if ready is None else functools.partial(ready.run, which), protocol)
        slowest = [max(x) for x in zip(*by_rank, strict=True)]
        middle = statistics.median(slowest)
        found["seconds"][which] = {"samples": slowest, "median": middle, "min": min(slowest), "max": max(slowest)}
        found["skew"][which] = None if len(by_rank) == 1 < case.world else \
            statistics.median([(max(x) - min(x)) / max(x) for x in zip(*by_rank, strict=True)])
        found["rate"][which] = problem.flops(which) / case.world / middle
        single = _single(job, case, problem, which)
        found["single_seconds"][which] = single
        found["efficiency"][which] = single / (case.world * middle) if single else None
        if job.request.inside:
            found.setdefault("inside", {})[which] = look_inside(job, ready, schedule, which)
    found["kernel"] = None if ready is None else ready.kernel
    found["peak_bytes"] = max(job.gather(job.agreed(lambda: 0 if ready is None else ready.peak())))
    found["rate_of"] = "per rank, exact area over the slowest rank's seconds"
    return found


def _single(job: Job, case: Case, problem: AttentionProblem, which: str) -> float | None:
    """Seconds of the same kernel on the whole problem on one device; None where it does not fit there."""
    kernel = case.kernel or job.default_kernel(problem)
    key = case.spec.label, kernel, which
    if key not in job.singles:
        mine = job.agreed(lambda: None if job.rank else job.single(case.spec, kernel, which))
        job.singles[key] = job.gather(mine)[0]
    return job.singles[key]


def look_inside(job: Job, ready: Ready | None, schedule: Schedule, which: str) -> dict[str, Any]:
    """Each step's local work alone, and the job that these and the measured links predict; equal on all ranks."""
    short = Protocol(samples=5, least=3, seconds=0.05)
    steps = job.agreed(lambda: None if ready is None else ready.steps(which, short))
    by_rank = [s for s in job.gather(steps) if s is not None]
    slowest = [max(s) for s in zip(*by_rank, strict=True)]
    found: dict[str, Any] = {"step_seconds": by_rank}
    if job.links is not None:
        guess = predict(schedule.signature, which, slowest, job.links, 1 if ready is None else ready.groups)
        found |= {"links": dataclasses.asdict(job.links), "predicted": guess.total, "compute": guess.compute}
    return found


def trace_row(job: Job, case: Case) -> dict[str, Any]:
    """What a trace of a call shows of each rank's links and work; the traces themselves lie beside the rows."""
    row = _new_row(job, case) | {"key": trace_key(case), "kind": "trace", "trace": {}}
    try:
        schedule = job.agreed(case.schedule)
        ready = job.agreed(lambda: job.ready(case, schedule))
        job.agreed(lambda: None if ready is None else ready.begin())
        for which in PASSES:
            seen = job.agreed(lambda which=which: None if ready is None else
                              trace.last_call(ready.traced(which), TRACED_CALLS))
            if seen is not None:
                trace.write(seen, trace.path_of(out_folder(), f"{case.key}/{which}/rank{job.rank}"))
            told = None if seen is None else trace.overlap(seen)
            row["trace"][which] = [x for x in job.gather(told) if x is not None]
        return row
    except Agreed as failure:
        return row | {"status": failure.status, "reason": failure.reason}


def out_folder() -> Path:
    """Where traces go: beside the record file that the command line names."""
    return Path(sys.argv[2]).parent / "traces"


# ---- links ---------------------------------------------------------------------------------------


def measure_links(job: Job, sizes: Sequence[int]) -> dict[str, Any]:
    """Wire bytes a second that leave a rank, of each collective at each operand size, by the slowest rank."""
    protocol = dataclasses.replace(Protocol(**job.request.protocol), seconds=0.05)
    found: dict[str, list[dict]] = {}
    for size in sizes:
        calls, operand = job.agreed(lambda size=size: job.link_calls(size))
        for kind, share in LINK_KINDS.items():
            slowest = [max(s) for s in zip(*job.samples(calls[kind], protocol), strict=True)]
            seconds, wire = statistics.median(slowest), operand * share(job.world)
            found.setdefault(kind, []).append({"operand_bytes": operand, "wire_bytes": int(wire), "seconds": seconds,
                                               "bandwidth": wire / seconds if seconds else None})
    return found


def links_row(job: Job) -> dict[str, Any]:
    """The row of the job's links."""
    row = {"key": f"links/{job.stack.name}/w{job.world}", "kind": "links", "status": "ok", "reason": "",
           "case": {"stack": job.stack.name, "world": job.world},
           "environment": environment.machine() | job.stack.environment()}
    try:
        return row | {"links": measure_links(job, job.request.links)}
    except Agreed as failure:
        return row | {"status": failure.status, "reason": failure.reason}


# ---- a job ---------------------------------------------------------------------------------------


def run(job: Job, out: str) -> None:
    """All cases of the job's request whose rows rank 0's file lacks, once it is this job's turn."""
    request = job.request
    before, checked = job.gather(None if job.rank else (_rows_before(out), checks_of(request.checked)))[0]
    asked = [from_record(fields) for fields in request.cases]
    cases = [c for c in asked if c.key not in before]
    traced = [c for c in asked if is_among(c, request.trace) and trace_key(c) not in before]
    lengths = [(c, request.check_len) for c in cases if c.any_length not in checked]
    job.progress.at("building")
    job.build([*lengths, *((c, 0) for c in asked if c in traced or request.timed and c in cases)])
    job.progress.at("waiting for its turn")
    _wait_for(request.after)
    job.gather("ready")  # some build more than others, and no row has begun
    links_key = f"links/{job.stack.name}/w{job.world}"
    if request.links:
        _begin(job, links_key)
        row = before.get(links_key)
        if row is None:
            row = links_row(job)
            _write(job, out, row)
        job.links = links_of(row["links"], job.world) if row["status"] == "ok" else None
    measured: dict[Hashable, dict[str, Any]] = {}
    rows = [(case.key, functools.partial(measure_case, job, case, checked, measured),
             request.until - TRACE_SECONDS * len(traced)) for case in cases]
    rows += [(trace_key(case), functools.partial(trace_row, job, case), request.until)
             for case in traced]  # last: profilers can fail
    for key, made, until in rows:
        if any(job.gather(time.time() > until)):
            continue
        _begin(job, f"row {key}")
        _write(job, out, made())
    faulthandler.cancel_dump_traceback_later()


def _rows_before(out: str) -> dict[str, dict[str, Any] | None]:
    """Keys of the rows that the file has, with those of links as they are."""
    stand = records.keys(out)
    return {row["key"]: row if row["kind"] == "links" else None for row in records.read(out) if row["key"] in stand}


def checks_of(path: str) -> dict[str, dict[str, Any]]:
    """What the good rows of a file say of their check, by `Case.any_length`."""
    names = ("errors", "budget", "bit_identical", "oracle", "check_len", "bytes_match", "moved")
    rows = [] if not path else records.read(path)
    return {from_record(row["case"]).any_length: {name: row[name] for name in names}
            for row in rows if row["kind"] == "context_parallel" and row["status"] == "ok"}


def _wait_for(path: str) -> None:
    while path and not os.path.exists(path):
        time.sleep(0.02)


def _begin(job: Job, step: str) -> None:
    job.progress.at(step)
    faulthandler.dump_traceback_later(job.request.deadline, exit=True)


def _write(job: Job, out: str, row: dict[str, Any]) -> None:
    if job.rank == 0:
        with records.Writer(out) as writer:
            writer.write(row)
        print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    if row["status"] != "ok":
        return f"{row['key']}: {row['status']}: {row['reason'][:300]}"
    if row["kind"] == "links":
        best = {kind: max(x["bandwidth"] or 0 for x in sizes) for kind, sizes in row["links"].items()}
        return f"{row['key']}: " + ", ".join(f"{kind} {b / 1e9:.1f} GB/s" for kind, b in best.items())
    if row["kind"] == "trace":
        seen = [x for ranks in row["trace"].values() for x in ranks]
        links, hidden = (sum(x[name] for x in seen) for name in ("link_seconds", "hidden_seconds"))
        return f"{row['key']}: {links * 1e3:.3f} ms of links, {hidden * 1e3:.3f} ms of it hidden"
    parts = [f"error {max(e / row['budget'][n] for n, e in row['errors'].items()):.2f} of budget"]
    for which in PASSES if "seconds" in row else ():
        e = row["efficiency"][which]
        parts.append(f"{which} {row['seconds'][which]['median'] * 1e3:.3f} ms {row['rate'][which] / 1e12:.4g} TFLOP/s"
                     + (f" E {e:.3f}" if e else ""))
    return f"{row['key']}: " + ", ".join(parts)
