"""One rank of the context-parallel bench in PyTorch; its twin is bench/context_parallel_jax_worker.py.

    python -m torch_impl.launch --ranks 2 -- python -m bench.context_parallel_torch_worker CASES.json ROWS.jsonl

CASES.json: {"cases": [Case.record(), ...], "protocol": {...}, "check_len": tokens, "links": [bytes, ...],
"deadline": seconds, "inside": bool, "budget": seconds}. Every rank runs every case: its plan, a check against the
reference at `check_len` tokens, the bytes handed to collectives against the schedule's, each pass timed on all ranks
at once. Rank 0 appends the rows; past the budget no further case is begun. An iteration's slowest rank counts. "inside"
adds what a pass is made of: each step's local work timed alone, the job that a replay predicts from it and the measured
links, and how much of the communication a trace shows beside other kernels.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from bench import environment, records
from bench.context_parallel_cases import Case, from_record, operand_bytes, plan_of_schedule
from bench.link_model import Links, predict
from bench.timing import Protocol, measure
from bench.torch_stack import Stack
from bench.worker_main import failure_of
from parity.compare import errors, over_budget
from parity.inputs import InputSpec, make_inputs
from parity.reference import Reference, reference_of, sample_of
from torch_impl import context_parallel, kernels, launch
from torch_impl.context_parallel.attention import backward, forward
from torch_impl.context_parallel.local import row_sums
from torch_impl.context_parallel.merge import merge
from torch_impl.context_parallel.plan import default_kernel
from workload.problem import PASSES, AttentionProblem

SHORT = Protocol(samples=5, least=3, seconds=0.05)
SIDES = {"q": "q", "k": "kv", "v": "kv", "dout": "q"}


@dataclasses.dataclass
class Bench:
    """What the cases of a run share.

    Attributes:
      job: the ranks; control: a gloo group for what is agreed on the host.
      protocol: how long to time; check_len: tokens of the check, 0 for the case's own length.
      inside: whether to look inside a pass; links: what the links of this job cost, once measured.
      singles: seconds of the kernel alone on one device, by problem, kernel and pass.
    """

    job: context_parallel.Job
    control: Any
    stack: Stack
    protocol: Protocol
    check_len: int
    inside: bool = False
    links: Links | None = None
    singles: dict[tuple, float] = dataclasses.field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        got: list[Any] = [None] * self.job.world
        dist.all_gather_object(got, value, group=self.control)
        return got

    def agreed(self, work):
        """work() on every rank; where one fails all raise, naming it, so that none enters what others will not."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            failure = failure_of(error)
        for rank, found in enumerate(self.gather(failure)):
            if found is not None:
                raise Agreed(found["status"], f"rank {rank}: {found['reason']}")
        return result


class Agreed(RuntimeError):
    """A failure that all ranks know of: a status and its reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


def measure_case(bench: Bench, case: Case) -> dict[str, Any]:
    """The row of a case, equal on all ranks."""
    row: dict[str, Any] = {
        "key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
        "environment": environment.machine() | bench.stack.environment(),
    }
    try:
        if case.world > bench.job.world:
            raise Agreed("unsupported", f"world {case.world}: the job has {bench.job.world} ranks")
        topology = bench.agreed(lambda: case.topology)
        mesh = context_parallel.make_mesh(topology, bench.job, bench.job.rank)
        problem = _problem(case.spec)
        began = time.perf_counter()
        schedule = bench.agreed(lambda: case.schedule(problem))
        row["schedule_seconds"] = time.perf_counter() - began
        row |= {"flops": {which: problem.flops(which) for which in PASSES}, "area": problem.mask.area,
                "schedule": plan_of_schedule(schedule)}
        row |= check(bench, case, mesh)
        wrong = row.pop("wrong")
        if wrong:
            return row | {"status": "mismatch", "reason": "; ".join(wrong)}
        return row | clock(bench, case, mesh, schedule)
    except Agreed as failure:
        return row | {"status": failure.status, "reason": failure.reason}


@functools.lru_cache(maxsize=4)
def _problem(spec) -> AttentionProblem:
    return spec.problem()


def _plan(case: Case, mesh, schedule):
    kernel = case.kernel or default_kernel(schedule.problem.mask, mesh.device.type)
    return context_parallel.plan_of(schedule, mesh, kernel, case.head_groups)


# ---- the check -----------------------------------------------------------------------------------


def check(bench: Bench, case: Case, mesh) -> dict[str, Any]:
    """Errors of the ranks' joined results against the reference, judged by rank 0; "wrong" is empty if all is well."""
    spec = case.spec if not bench.check_len else dataclasses.replace(case.spec, seq_len=bench.check_len)
    problem = _problem(spec)

    def work():
        if mesh is None:
            return {}
        plan = _plan(case, mesh, case.schedule(problem))
        q, k, v, dout = (context_parallel.shard(x, plan, SIDES[name]) for name, x in _inputs(spec, bench.stack).items())
        for x in (q, k, v):
            x.requires_grad_()
        out = context_parallel.attend(q, k, v, plan)
        out.backward(dout)
        results = {"out": (out.detach(), "q"), "dq": (q.grad, "q"), "dk": (k.grad, "kv"), "dv": (v.grad, "kv")}
        return {name: context_parallel.unshard(x, plan, side) for name, (x, side) in results.items()}

    whole, again = bench.agreed(work), bench.agreed(work)
    same = all(torch.equal(whole[name], again[name]) for name in whole)
    found: dict[str, Any] = {}
    if bench.job.rank == 0:
        reference, sample = _reference(spec), sample_of(problem)
        got = {name: bench.stack.take(sample.take(name, x, problem.group)) for name, x in whole.items()}
        measured = errors(got, reference.results)
        budget = {name: reference.budget[name] for name in measured}
        found = {"errors": measured, "budget": budget, "bit_identical": same, "oracle": reference.oracle,
                 "check_len": problem.kv_len, "wrong": over_budget(measured, budget)}
    return bench.gather(found)[0]


@functools.lru_cache(maxsize=4)
def _inputs(spec, stack) -> dict[str, torch.Tensor]:
    return {name: stack.put(x) for name, x in make_inputs(_problem(spec), InputSpec(spec.seed)).items()}


@functools.lru_cache(maxsize=16)
def _reference(spec) -> Reference:
    return reference_of(_problem(spec), InputSpec(spec.seed))


# ---- the clock -----------------------------------------------------------------------------------


def clock(bench: Bench, case: Case, mesh, schedule) -> dict[str, Any]:
    """Bytes, seconds of each pass by the slowest rank of each iteration, efficiency, peak memory."""
    plan = bench.agreed(lambda: None if mesh is None else _plan(case, mesh, schedule))
    problem = schedule.problem
    tensors = bench.agreed(lambda: _local(plan, problem, bench.job))
    saved = bench.agreed(lambda: None if plan is None else forward(plan, *tensors[:3])[1])
    calls = {"forward": lambda: forward(plan, *tensors[:3]), "backward": lambda: backward(plan, saved, tensors[3])}
    found: dict[str, Any] = {"timer": bench.stack.timer, "cache": "as it is", "seconds": {}, "skew": {}, "rate": {},
                             "efficiency": {}, "bytes_match": {}, "single_seconds": {}, "kernel": None}
    for which in PASSES:
        moved = bench.agreed(lambda which=which: _moved(plan, calls[which]))
        expected = operand_bytes(schedule.signature, which)
        found["bytes_match"][which] = all(m in (None, expected) for m in bench.gather(moved))
        samples = _samples(bench, calls[which] if plan is not None else None)
        slowest = [max(x) for x in zip(*samples)]
        middle = statistics.median(slowest)
        found["seconds"][which] = {"samples": slowest, "median": middle, "min": min(slowest), "max": max(slowest)}
        found["skew"][which] = statistics.median([(max(x) - min(x)) / max(x) for x in zip(*samples)])
        found["rate"][which] = problem.flops(which) / case.world / middle
        single = _single(bench, case, problem, which)
        found["single_seconds"][which] = single
        found["efficiency"][which] = single / (case.world * middle) if single else None
        if bench.inside:
            found.setdefault("inside", {})[which] = look_inside(bench, plan, schedule, which, calls[which])
    found["kernel"] = None if plan is None else plan.local.kernel
    found["peak_bytes"] = max(bench.gather(0 if plan is None else _peak(bench.stack, calls)))
    found["rate_of"] = "per rank, exact area over the slowest rank's seconds"
    if not all(found["bytes_match"].values()):
        found |= {"status": "mismatch", "reason": "bytes handed to collectives are not the schedule's"}
    return bench.gather(found)[0]


def _local(plan, problem, job) -> list[torch.Tensor] | None:
    """This rank's q, k, v, dout."""
    if plan is None:
        return None
    signature = plan.local.signature
    return _draw(problem, signature.q_length, signature.kv_length, plan.local.mesh.device, job.rank)


def _moved(plan, call) -> dict[str, int] | None:
    if plan is None:
        return None
    plan.local.mesh.forget()
    call()
    return plan.local.mesh.bytes


def _samples(bench: Bench, call) -> list[list[float]]:
    """Seconds of each iteration by rank; all ranks begin an iteration together, and take equally many."""
    on_gpu, ready = bench.stack.on_gpu, torch.zeros(1, device=bench.job.device)

    def sample(_):
        dist.all_reduce(ready)  # on a GPU it orders the streams of all ranks, and does not hold up the host
        if call is None:
            return 0.0
        if not on_gpu:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    warm = max(bench.gather(sum(sample(n) for n in range(3)) / 3))
    count = max(bench.protocol.least, min(bench.protocol.samples, int(bench.protocol.seconds / max(warm, 1e-9))))
    mine = [sample(n) for n in range(count)]
    return [samples for samples in bench.gather(mine if call is not None else None) if samples is not None]


def _single(bench: Bench, case: Case, problem: AttentionProblem, which: str) -> float | None:
    """Seconds of the same kernel on the whole problem on one device; None where it does not fit there."""
    name = case.kernel or default_kernel(problem.mask, bench.job.device.type)
    key = case.spec.label, name, which
    if key not in bench.singles:
        seconds = None
        if bench.job.rank == 0:
            try:
                seconds = _time_single(bench, kernels.get(name), problem, which)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        bench.singles[key] = bench.gather(seconds)[0]
    return bench.singles[key]


def _time_single(bench: Bench, kernel, problem: AttentionProblem, which: str) -> float:
    q, k, v, dout = _draw(problem, problem.q_len, problem.kv_len, bench.job.device, 0)
    operands = kernel.prepare(problem, bench.job.device)
    call = lambda n=0: kernel.forward(q, k, v, operands, problem.scale)  # noqa: E731
    if which == "backward":
        out, lse = call()
        call = lambda n=0: kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)  # noqa: E731
    return measure(bench.stack.sampler(call, False, 1e-2), bench.protocol).median


def _draw(problem: AttentionProblem, rows: int, keys: int, device, seed: int) -> list[torch.Tensor]:
    """q, k, v, dout with these many tokens, normal draws made where they are used."""
    draw, dtype = torch.Generator(device=device).manual_seed(seed), getattr(torch, problem.dtype)
    sizes = ((rows, problem.q_heads), (keys, problem.kv_heads), (keys, problem.kv_heads), (rows, problem.q_heads))
    return [torch.randn(problem.batch, *size, problem.head_dim, generator=draw, device=device, dtype=dtype)
            for size in sizes]


def _peak(stack: Stack, calls) -> int:
    def both():
        calls["forward"]()
        calls["backward"]()
    return stack.peak_bytes(both, both)


# ---- inside a pass -------------------------------------------------------------------------------


def look_inside(bench: Bench, plan, schedule, which: str, call) -> dict[str, Any]:
    """What a pass is made of: see the top of this file; equal on all ranks."""
    steps = bench.agreed(lambda: None if plan is None else _step_seconds(bench, plan, schedule, which))
    by_rank = [s for s in bench.gather(steps) if s is not None]
    slowest = [max(s) for s in zip(*by_rank)]
    found: dict[str, Any] = {"step_seconds": by_rank}
    if bench.links is not None:
        groups = 1 if plan is None else plan.local.groups
        guess = predict(schedule.signature, which, slowest, bench.links, groups)
        found |= {"links": dataclasses.asdict(bench.links), "predicted": guess.total, "compute": guess.compute}
    if bench.stack.on_gpu:
        found["trace"] = bench.gather(_overlap(call) if plan is not None else None)
    return found


def _step_seconds(bench: Bench, plan, schedule, which: str) -> list[float]:
    """Seconds of this rank's local work at each step, alone, joining it to the steps before included."""
    local, problem = plan.local, schedule.local_problem(0, plan.local.mesh.rank)
    q, k, v, dout = _draw(problem, problem.q_len, problem.kv_len, bench.job.device, 1)
    kind = torch.float32 if len(plan.data.masks) > 1 else q.dtype
    total, seconds = None, []
    for operands in plan.data.masks:
        if operands is None:
            seconds.append(0.0)
            continue
        out, lse = local.forward(q, k, v, operands, out_dtype=kind)
        joins = total is not None
        if which == "forward":
            total = total or (out, lse)
            def step(n, operands=operands, joins=joins, total=total):
                part = local.forward(q, k, v, operands, out_dtype=kind)
                return merge(total, part, in_place=True) if joins else part
        else:
            total = torch.zeros_like(q, dtype=torch.float32) if total is None else total
            saved, delta = (q, k, v, out.to(q.dtype), lse), row_sums(out, dout)
            def step(n, operands=operands, joins=joins, total=total, saved=saved, delta=delta):
                parts = local.backward(saved, dout, delta, operands)
                return total.add_(parts[0]) if joins else parts
        seconds.append(measure(bench.stack.sampler(step, False, 1e-2), SHORT).median)
    return seconds


def _overlap(call) -> dict[str, float]:
    """Of one traced call: seconds that communication kernels ran, and of those with another kernel beside them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        call()
        torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in traced.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    links, work = _union(spans[True]), _union(spans[False])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in links for b in work)
    total = sum(end - begin for begin, end in links)
    return {"link_seconds": total / 1e6, "hidden_seconds": both / 1e6,
            "work_seconds": sum(end - begin for begin, end in work) / 1e6}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint ascending intervals that cover the same.

    >>> _union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    out: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


# ---- links ---------------------------------------------------------------------------------------


def measure_links(bench: Bench, sizes: list[int]) -> dict[str, Any]:
    """Wire bytes a second that leave a rank, of each collective at each operand size, by the slowest rank."""
    everyone = bench.job.communicator(bench.job.rank, [tuple(range(bench.job.world))], "main")
    assert everyone is not None  # the group of all ranks
    world = bench.job.world
    found: dict[str, list[dict]] = {}
    for size in sizes:
        x = torch.ones(world, max(1, size // 2 // world), dtype=torch.bfloat16, device=bench.job.device)
        operand = x.numel() * 2
        ops = {  # what leaves a rank of an operand of this size
            "permute": (lambda x=x: everyone.rotate([x], 1, "link permute").wait(), operand),
            "all_to_all": (lambda x=x: everyone.all_to_all(x, "link all_to_all").wait(), operand * (world - 1) / world),
            "all_gather": (lambda x=x: everyone.all_gather(x, "link all_gather").wait(), operand * (world - 1)),
            "reduce_scatter": (lambda x=x: everyone.reduce_scatter(x, "link reduce_scatter").wait(),
                               operand * (world - 1) / world),
        }
        for kind, (call, wire) in ops.items():
            slowest = [max(s) for s in zip(*_samples(bench, call))]
            seconds = statistics.median(slowest)
            found.setdefault(kind, []).append({"operand_bytes": operand, "wire_bytes": int(wire), "seconds": seconds,
                                               "bandwidth": wire / seconds if seconds else None})
    return found


def links_of(found: dict[str, Any]) -> Links:
    """Latency and bandwidth of one level from measured hops: the smallest message's time, the largest one's rate."""
    hops = sorted(found["permute"], key=lambda x: x["operand_bytes"])
    latency, bandwidth = hops[0]["seconds"], hops[-1]["bandwidth"]
    return Links(latency, bandwidth, latency, bandwidth)


def run(request: dict[str, Any], out: str) -> None:
    """All cases of a request whose rows the file lacks."""
    place = launch.detect() or launch.Place(0, 1, 0, 1, "127.0.0.1:29500")
    with launch.join(place, timeout_s=request.get("deadline", 60)):
        stack = Stack()
        device = torch.device("cuda", place.local_rank) if stack.on_gpu else torch.device("cpu")
        job = context_parallel.Job(device, deadline_s=request.get("deadline", 60))
        bench = Bench(job, dist.new_group(backend="gloo"), stack, Protocol(**request.get("protocol", {})),
                      request.get("check_len", 0), request.get("inside", False))
        done = bench.gather({row["key"] for row in records.read(out)} if place.rank == 0 else None)[0]
        links_key = f"links/torch/w{place.world}"
        if request.get("links") and links_key not in done:
            row = {"key": links_key, "kind": "links", "case": {"stack": "torch", "world": place.world}, "status": "ok",
                   "reason": "", "environment": environment.machine() | stack.environment()}
            found = measure_links(bench, request["links"])
            bench.links = links_of(found)
            _write(place, out, row | {"links": found})
        began, budget = time.monotonic(), request.get("budget", float("inf"))
        for fields in request["cases"]:
            case = from_record(fields)
            if case.key in done:
                continue
            if bench.gather(time.monotonic() - began)[0] > budget:
                break
            job.watch.progress.at(f"case {case.key}")
            _write(place, out, measure_case(bench, case))
            stack.release()


def _write(place, out: str, row: dict[str, Any]) -> None:
    if place.rank == 0:
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
    parts = []
    for which in PASSES:
        e = row["efficiency"][which]
        parts.append(f"{which} {row['seconds'][which]['median'] * 1e3:.3f} ms {row['rate'][which] / 1e12:.4g} TFLOP/s"
                     + (f" E {e:.3f}" if e else ""))
    return f"{row['key']}: " + ", ".join(parts)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        run(json.load(file), sys.argv[2])
