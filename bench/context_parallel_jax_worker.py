"""The ranks of the context-parallel bench in JAX; its twin is bench/context_parallel_torch_worker.py.

    python -m bench.context_parallel_jax_worker CASES.json ROWS.jsonl
    python -m jax_impl.launch --ranks 2 -- python -m bench.context_parallel_jax_worker CASES.json ROWS.jsonl

CASES.json: {"cases": [Case.record(), ...], "protocol": {...}, "check_len": tokens, "links": [bytes, ...],
"deadline": seconds, "budget": seconds}. One process with all devices, or one process a device. Every process runs every
case: its plan, a check against the reference at `check_len` tokens, the bytes that the compiled passes hand to
collectives against the schedule's, each pass timed. Process 0 appends the rows; past the budget no further case begins.
What a program needs is known once it is compiled: a case that does not fit some device is out_of_memory on all, unrun.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench import environment, records
from bench.context_parallel_cases import Case, from_record, operand_bytes, plan_of_schedule
from bench.jax_stack import Stack
from bench.timing import Protocol
from bench.worker_main import failure_of
from jax_impl import context_parallel as cp
from jax_impl import kernels, launch
from jax_impl.context_parallel.attention import backward, forward
from jax_impl.context_parallel.plan import default_kernel
from jax_impl.hlo import collective_bytes
from parity.compare import errors, over_budget
from parity.inputs import InputSpec, make_inputs
from parity.reference import Reference, reference_of, sample_of
from workload.problem import PASSES, AttentionProblem

SIDES = {"q": "q", "k": "kv", "v": "kv", "dout": "q"}
BATCH_SECONDS = 0.02  # what it costs to launch a program on all devices is small in a batch of calls this long


class Agreed(RuntimeError):
    """A failure that all processes know of: a status and its reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclasses.dataclass
class Bench:
    """What the cases of a run share: see the twin."""

    stack: Stack
    protocol: Protocol
    check_len: int
    progress: launch.Progress
    singles: dict[tuple, float | None] = dataclasses.field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        """Every process' value, by process."""
        if jax.process_count() == 1:
            return [value]
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.array([len(text)]))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(text)] = text
        rows = multihost_utils.process_allgather(padded)
        return [json.loads(bytes(row[: int(n)])) for row, n in zip(rows, sizes.reshape(-1), strict=True)]

    def agreed(self, work: Callable[[], Any]) -> Any:
        """work() on every process; where one fails all raise, naming it, so that none enters what others will not."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            failure = {"status": error.status, "reason": str(error)} if isinstance(error, Agreed) else failure_of(error)
        for process, found in enumerate(self.gather(failure)):
            if found is not None:
                raise Agreed(found["status"], f"process {process}: {found['reason']}")
        return result


def measure_case(bench: Bench, case: Case) -> dict[str, Any]:
    """The row of a case, equal on all processes."""
    row: dict[str, Any] = {
        "key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
        "environment": environment.machine() | bench.stack.environment() | {"processes": jax.process_count()},
    }
    try:
        if case.world > jax.device_count():
            raise Agreed("unsupported", f"world {case.world}: the job has {jax.device_count()} devices")
        topology = bench.agreed(lambda: case.topology)
        mesh, problem = cp.make_mesh(topology), _problem(case.spec)
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


def _plan(case: Case, mesh: Mesh, schedule):
    kernel = case.kernel or default_kernel(schedule.problem.mask, mesh.devices.flat[0].platform)
    return cp.plan_of(schedule, mesh, kernel)


def _compile(function: Callable, *arguments):
    """A compiled program; Agreed("out_of_memory") where some device of this process cannot hold it."""
    compiled = jax.jit(function).lower(*arguments).compile()
    used = compiled.memory_analysis()
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices()]
    if used is not None and all(limits):
        need = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        if need > min(limits):
            raise Agreed("out_of_memory", f"the program needs {need} bytes a device, which has {min(limits)}")
    return compiled


# ---- the check -----------------------------------------------------------------------------------


def check(bench: Bench, case: Case, mesh: Mesh) -> dict[str, Any]:
    """Errors of the joined results against the reference, judged by process 0; "wrong" is empty if all is well."""
    spec = case.spec if not bench.check_len else dataclasses.replace(case.spec, seq_len=bench.check_len)
    problem = _problem(spec)

    def prepare():
        plan = _plan(case, mesh, case.schedule(problem))
        arrays = make_inputs(problem, InputSpec(spec.seed))
        placed = [cp.shard(_half(x), plan, SIDES[name]) for name, x in arrays.items()]
        return plan, placed, _compile(_both, *placed, plan)

    plan, placed, compiled = bench.agreed(prepare)

    def work():
        results = jax.block_until_ready(compiled(*placed, plan))
        named = zip(("out", "dq", "dk", "dv"), results, ("q", "q", "kv", "kv"), strict=True)
        return {name: np.asarray(cp.unshard(x, plan, side).addressable_data(0)) for name, x, side in named}

    whole, again = bench.agreed(work), bench.agreed(work)
    same = all(np.array_equal(whole[name], again[name]) for name in whole)
    found: dict[str, Any] = {}
    if jax.process_index() == 0:
        reference, sample = _reference(spec), sample_of(problem)
        got = {name: bench.stack.take(sample.take(name, x, problem.group)) for name, x in whole.items()}
        measured = errors(got, reference.results)
        budget = {name: reference.budget[name] for name in measured}
        found = {"errors": measured, "budget": budget, "bit_identical": same, "oracle": reference.oracle,
                 "check_len": problem.kv_len, "wrong": over_budget(measured, budget)}
    return bench.gather(found)[0]


def _both(q, k, v, dout, plan):
    (out, _), saved = forward(plan, q, k, v)
    return out, *backward(plan, saved, dout)


def _half(x: np.ndarray) -> np.ndarray:
    """uint16 as stored is bfloat16."""
    return x.view(jnp.bfloat16) if x.dtype == np.uint16 else x


@functools.lru_cache(maxsize=16)
def _reference(spec) -> Reference:
    return reference_of(_problem(spec), InputSpec(spec.seed))


# ---- the clock -----------------------------------------------------------------------------------


def clock(bench: Bench, case: Case, mesh: Mesh, schedule) -> dict[str, Any]:
    """Bytes, seconds of each pass by the slowest process of each iteration, efficiency, peak memory."""
    problem = schedule.problem

    def prepare():
        plan = _plan(case, mesh, schedule)
        q, k, v, dout = _draw(plan)
        first = _compile(lambda plan, q, k, v: forward(plan, q, k, v), plan, q, k, v)
        return plan, (q, k, v, dout), first

    plan, (q, k, v, dout), first = bench.agreed(prepare)
    _, saved = bench.agreed(lambda: jax.block_until_ready(first(plan, q, k, v)))
    second = bench.agreed(lambda: _compile(backward, plan, saved, dout))
    calls = {"forward": (first, lambda: first(plan, q, k, v)), "backward": (second, lambda: second(plan, saved, dout))}
    found: dict[str, Any] = {"timer": "wall time of batches of calls, all devices", "cache": "as it is", "seconds": {},
                             "skew": {}, "rate": {}, "efficiency": {}, "bytes_match": {}, "single_seconds": {},
                             "kernel": plan.program.kernel}
    for which, (compiled, call) in calls.items():
        expected = operand_bytes(schedule.signature, which)
        found["bytes_match"][which] = all(m == expected for m in bench.gather(collective_bytes(compiled.as_text())))
        samples = bench.gather(_samples(bench, call))
        slowest = [max(x) for x in zip(*samples, strict=True)]
        middle = statistics.median(slowest)
        found["seconds"][which] = {"samples": slowest, "median": middle, "min": min(slowest), "max": max(slowest)}
        found["skew"][which] = None if len(samples) == 1 else \
            statistics.median([(max(x) - min(x)) / max(x) for x in zip(*samples, strict=True)])
        found["rate"][which] = problem.flops(which) / case.world / middle
        single = _single(bench, case, problem, which)
        found["single_seconds"][which] = single
        found["efficiency"][which] = single / (case.world * middle) if single else None
    found["peak_bytes"] = max(bench.gather(max(bench.stack.peak_bytes(call, c) or 0 for c, call in calls.values())))
    found["rate_of"] = "per rank, exact area over the slowest process' seconds"
    if not all(found["bytes_match"].values()):
        found |= {"status": "mismatch", "reason": "bytes that the compiled passes hand over are not the schedule's"}
    return found


def _draw(plan) -> list[jax.Array]:
    """Sharded q, k, v, dout, standard normal, made where they are used."""
    signature, program = plan.program.signature, plan.program
    heads, world = signature.heads, signature.topology.world
    rows, keys = world * signature.q_length, world * signature.kv_length
    sharding = NamedSharding(program.mesh, program.spec())
    sizes = ((rows, heads.q_heads), (keys, heads.kv_heads), (keys, heads.kv_heads), (rows, heads.q_heads))

    def draw(n, size):
        return jax.random.normal(jax.random.key(n), (signature.batch, *size, signature.head_dim), signature.dtype)

    return [jax.jit(draw, static_argnums=(0, 1), out_shardings=sharding)(n, size) for n, size in enumerate(sizes)]


def _samples(bench: Bench, call: Callable[[], Any]) -> list[float]:
    """Seconds of each iteration in this process: batches of calls, as many on every process."""
    def total(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            result = call()
            if not bench.stack.on_gpu:  # queued programs of one process' CPU devices can wait for each other's threads
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return time.perf_counter() - began

    total(1)
    once = max(bench.gather(total(2) / 2))
    batch = max(1, min(64, round(BATCH_SECONDS / max(once, 1e-9))))
    count = int(bench.protocol.seconds / max(batch * once, 1e-9))
    count = max(bench.protocol.least, min(bench.protocol.samples, count))
    return [total(batch) / batch for _ in range(count)]


def _single(bench: Bench, case: Case, problem: AttentionProblem, which: str) -> float | None:
    """Seconds of the same kernel on the whole problem on one device; None where it does not fit there."""
    name = case.kernel or default_kernel(problem.mask, jax.devices()[0].platform)
    key = case.spec.label, name, which
    if key not in bench.singles:
        seconds = None
        if jax.process_index() == 0:
            with contextlib.suppress(Agreed):
                seconds = _time_single(bench, kernels.get(name), problem, which)
        bench.singles[key] = bench.gather(seconds)[0]
    return bench.singles[key]


def _time_single(bench: Bench, kernel, problem: AttentionProblem, which: str) -> float:
    alone = dataclasses.replace(bench, protocol=bench.protocol)
    alone.gather = lambda value: [value]  # type: ignore[method-assign]  # the other processes do not take part
    with jax.default_device(jax.local_devices()[0]):
        q, k, v, dout = bench.stack.random(problem)
        operands = kernel.prepare(problem)
        run = _compile(lambda q, k, v, o: kernel.forward(q, k, v, o, problem.scale), q, k, v, operands)
        if which == "forward":
            return statistics.median(_samples(alone, lambda: run(q, k, v, operands)))
        out, lse = run(q, k, v, operands)
        back = _compile(lambda *x: kernel.backward(*x, problem.scale), q, k, v, out, lse, dout, operands)
        return statistics.median(_samples(alone, lambda: back(q, k, v, out, lse, dout, operands)))


# ---- links ---------------------------------------------------------------------------------------


def measure_links(bench: Bench, sizes: list[int]) -> dict[str, Any]:
    """Wire bytes a second that leave a rank, of each collective at each operand size, by the slowest process."""
    world = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("all",))
    ring = [(r, (r + 1) % world) for r in range(world)]
    kinds = {  # the collective, its result's spec, what leaves a rank of an operand of one byte
        "permute": (lambda x: jax.lax.ppermute(x, "all", ring), 1.0),
        "all_to_all": (lambda x: jax.lax.all_to_all(x, "all", 0, 0, tiled=True), (world - 1) / world),
        "all_gather": (lambda x: jax.lax.all_gather(x, "all", tiled=True), world - 1),
        "reduce_scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), (world - 1) / world),
    }
    found: dict[str, list[dict]] = {}
    for size in sizes:
        length = max(1, size // 2 // world) * world
        x = jax.device_put(jnp.ones(length * world, jnp.bfloat16), NamedSharding(mesh, PartitionSpec("all")))
        for kind, (collective, share) in kinds.items():
            call = jax.jit(jax.shard_map(collective, mesh=mesh, in_specs=PartitionSpec("all"),
                                         out_specs=PartitionSpec("all"), check_vma=False))
            seconds = statistics.median(max(s) for s in zip(*bench.gather(_samples(bench, lambda c=call, x=x: c(x))),
                                                            strict=True))
            wire = 2 * length * share
            found.setdefault(kind, []).append({"operand_bytes": 2 * length, "wire_bytes": int(wire), "seconds": seconds,
                                               "bandwidth": wire / seconds if seconds else None})
    return found


def run(request: dict[str, Any], out: str) -> None:
    """All cases of a request whose rows the file lacks."""
    place = launch.detect()
    joined = contextlib.nullcontext() if place is None else launch.join(place, timeout_s=request.get("deadline", 60))
    with joined:
        stack = Stack()
        bench = Bench(stack, Protocol(**request.get("protocol", {})), request.get("check_len", 0), launch.Progress())
        done = bench.gather(sorted(row["key"] for row in records.read(out)) if jax.process_index() == 0 else None)[0]
        key = f"links/jax/w{jax.device_count()}"
        if request.get("links") and key not in done:
            row = {"key": key, "kind": "links", "case": {"stack": "jax", "world": jax.device_count()}, "status": "ok",
                   "reason": "", "environment": environment.machine() | stack.environment()}
            _write(out, row | {"links": measure_links(bench, request["links"])})
        began, budget = time.monotonic(), request.get("budget", float("inf"))
        for fields in request["cases"]:
            case = from_record(fields)
            if case.key in done:
                continue
            if bench.gather(time.monotonic() - began)[0] > budget:
                break
            bench.progress.at(f"case {case.key}")
            _write(out, measure_case(bench, case))


def _write(out: str, row: dict[str, Any]) -> None:
    if jax.process_index() == 0:
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
