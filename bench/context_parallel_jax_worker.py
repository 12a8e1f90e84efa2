"""A rank of the context-parallel bench in JAX; its twin is bench/context_parallel_torch_worker.py.

    python -m jax_impl.launch --ranks 2 -- python -m bench.context_parallel_jax_worker REQUEST.json ROWS.jsonl

What a rank does is told in bench/context_parallel_worker.py, how JAX does it stands here. One process with all devices,
or one process a device. Programs are compiled by threads ahead of the cases, one pair for all plans of equal static
parts and shapes; what a program needs is known once it is compiled: a case that does not fit some device is
out_of_memory on all, unrun.
"""

import concurrent.futures
import contextlib
import functools
import gzip
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench import context_parallel_job as base
from bench import context_parallel_worker as worker
from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.jax_stack import Stack, meeting
from bench.timing import Protocol, measure
from jax_impl import context_parallel as cp
from jax_impl import kernels, launch
from jax_impl.context_parallel.attention import backward, forward
from jax_impl.context_parallel.plan import alike, default_kernel, place
from jax_impl.hlo import collective_bytes
from jax_impl.kernels import stack
from workload.problem import PASSES, AttentionProblem
from workload.schedule import Schedule

BATCH_SECONDS = 0.02  # what it costs to launch a program on all devices is small in a batch of calls this long
TOKENS_AT = {4: 1, 3: 2}  # the token axis of the exchanged q, k, v, out and of lse, by their ranks
LONGEST_WAIT = 600.0  # seconds for another process; a row ends by its own deadline
THREADS = 16  # that compile
_lowering = threading.Lock()  # Python's work: one program after the other is faster than many at a time


class Ready(base.Ready):
    """See the base class."""

    def __init__(self, job: "Job", plan, programs, tensors: Sequence[jax.Array]):
        self.job, self.plan, self.programs = job, plan, programs
        self.kernel = plan.program.kernel
        self.q, self.k, self.v, self.dout = tensors
        self.saved: Any = None

    def run(self, which: str) -> Any:
        program = self.programs[which]
        return program(self.plan, self.q, self.k, self.v) if which == "forward" else \
            program(self.plan, self.saved, self.dout)

    def begin(self) -> None:
        (out, _), kept = jax.block_until_ready(self.run("forward"))
        given = self.q, self.k, self.v, out
        leaves = [given[n] if x is None else x for n, x in enumerate(kept)]
        self.saved = jax.tree.unflatten(self.programs["saved"], leaves)

    def results(self) -> dict[str, jax.Array]:
        (out, _), _ = self.run("forward")
        return jax.block_until_ready(dict(zip(base.RESULTS, (out, *self.run("backward")), strict=True)))

    def same(self, a, b) -> bool:
        return all(np.array_equal(_here(a[name]), _here(b[name])) for name in a)

    def whole(self, results):
        return {name: np.asarray(cp.unshard(x, self.plan, base.SIDES[name]).addressable_data(0))
                for name, x in results.items()}

    def moved(self, which: str) -> dict[str, int]:
        return self.programs["moved"][which]

    def peak(self) -> int:
        return max(self.job.stack.peak_bytes(functools.partial(self.run, which), self.programs[which]) or 0
                   for which in PASSES)

    def traced(self, which: str) -> dict[str, Any]:
        jax.block_until_ready(self.run(which))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                self.job.seconds(functools.partial(self.run, which), base.TRACED_CALLS)
            return json.loads(gzip.open(next(Path(folder).rglob("*.trace.json.gz"))).read())

    def steps(self, which: str, protocol: Protocol) -> list[float]:
        raise NotImplementedError("--inside of JAX: a replay times each step's local work")


def _here(x: jax.Array) -> np.ndarray:
    """This process's part of an array."""
    return np.stack([np.asarray(part.data) for part in x.addressable_shards])


class Job(base.Job):
    """See the base class."""

    def __init__(self, request: base.Request):
        super().__init__(request)
        self.stack = Stack()
        self.timer = "CUDA events around each call, the host ahead" if self.stack.on_gpu else \
            "wall time of batches of calls, all devices"
        self.rank, self.world, self.progress = jax.process_index(), jax.device_count(), launch.Progress()
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
        self._plans: dict[tuple[str, int], Any] = {}
        self._operands_alone: dict[tuple[str, str], Any] = {}
        self._programs: dict[Hashable, Future] = {}
        self._meeting = self._threads.submit(meeting, tuple(jax.devices())) if self.stack.on_gpu else None

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in launch.exchange(json.dumps(value), LONGEST_WAIT)]

    # ---- programs --------------------------------------------------------------------------------

    def build(self, cases: Sequence[tuple[Case, int]]) -> None:
        began = time.perf_counter()
        plans = [(case.key, there, self._threads.submit(self._on_host, there))
                 for case, length in cases for there in [base.at_length(case, length)]]
        concurrent.futures.wait(future for _, _, future in plans)
        made = {(key, there.spec.seq_len): future.result() for key, there, future in plans if not future.exception()}
        own = {(case.key, case.spec.seq_len) for case, length in cases if not length}
        for timed in (False, True):  # others fail again at their turn; what is only checked may cost a kernel more
            some = {key: plan for key, plan in made.items() if (key in own) == timed}
            self._plans.update(zip(some, alike(list(some.values()), fixed=timed), strict=True))
        futures = [future for size in self.request.links for future in self._link_programs(size)[0].values()]
        futures += [self._passes(plan) for plan in self._plans.values()]
        if self.rank == 0 and self.request.timed:
            futures += self._build_alone([case for case, _ in cases])
        concurrent.futures.wait(futures)
        if self.rank == 0:
            print(f"jax: {len(self._programs)} programs for {len(self._plans)} plans in "
                  f"{time.perf_counter() - began:.1f} s", flush=True)

    def _once(self, key: Hashable, work: Callable[[], Any]) -> Future:
        """The future of work() by a thread, begun once a key."""
        if key not in self._programs:
            self._programs[key] = self._threads.submit(work)
        return self._programs[key]

    def _on_host(self, case: Case):
        schedule = case.schedule()
        kernel = case.kernel or self.default_kernel(schedule.problem)
        return cp.plan_of(schedule, cp.make_mesh(case.topology), kernel, case.head_groups, on_host=True)

    def _passes(self, plan) -> Future:
        """Both passes, compiled for all plans of equal static parts and shapes."""
        def work(plan=plan):
            plan = place(plan)
            q, k, dout = (_like(plan, side) for side in ("q", "kv", "q"))
            lowered = {"forward": _lower(_forward, plan, q, k, k)}
            saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(
                plan.program.mesh, plan.program.spec(TOKENS_AT[x.ndim]))), jax.eval_shape(forward, plan, q, k, k)[1])
            lowered["backward"] = _lower(backward, plan, saved, dout)
            made = {which: _compiled(program) for which, program in lowered.items()}
            # XLA widens bfloat16 in a CPU's collectives: there what the program asks for is counted
            moved = {which: collective_bytes(made[which].as_text() if self.stack.on_gpu else program.as_text("hlo"))
                     for which, program in lowered.items()}
            return made | {"saved": jax.tree.structure(saved), "moved": moved}

        leaves, tree = jax.tree.flatten(plan)
        return self._once((tree, tuple((x.shape, str(x.dtype)) for x in leaves)), work)

    def ready(self, case: Case, schedule: Schedule, arrays: dict[str, np.ndarray] | None = None) -> Ready | None:
        length = schedule.problem.kv_len
        held = self._plans.get((case.key, length))
        plan = self._on_host(base.at_length(case, length)) if held is None else held
        programs, plan = self._passes(plan).result(), place(plan)
        if arrays is None:
            tensors = [_draw(like.shape, str(like.dtype), like.sharding)(n)
                       for n, like in enumerate(_like(plan, side) for side in ("q", "kv", "kv", "q"))]
        else:
            tensors = [cp.shard(_stored(x), plan, base.SIDES[name]) for name, x in arrays.items()]
        return Ready(self, plan, programs, tensors)

    def default_kernel(self, problem: AttentionProblem) -> str:
        return default_kernel(problem.mask, jax.devices()[0].platform)

    # ---- times -----------------------------------------------------------------------------------

    def sampler(self, call):
        if self.stack.on_gpu:
            def take(ahead: int) -> tuple[float, bool]:
                return self.stack.between_events(call, ahead, self.together)

            ahead = self.head_start(take)
            return lambda: take(ahead)[0], take(ahead)[0]
        total = functools.partial(self.seconds, call)
        total(1)
        once = max(self.gather(total(2) / 2))
        batch = max(1, min(64, round(BATCH_SECONDS / max(once, 1e-9))))
        return lambda: total(batch) / batch, batch * once

    def together(self) -> jax.Array:
        """All ranks' devices go on from here together; the host does not wait."""
        assert self._meeting is not None  # where there are events
        return self._meeting.result()()

    def seconds(self, call: Callable[[], Any], calls: int) -> float:
        """Wall time of these many calls, queued one behind the other."""
        began = time.perf_counter()
        for _ in range(calls):
            result = call()
            if not self.stack.on_gpu:  # queued programs of one process' CPU devices can wait for each other's threads
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        return time.perf_counter() - began

    def single(self, spec: ProblemSpec, kernel: str, which: str) -> float | None:
        problem = base.problem_of(spec)
        try:
            programs = self._alone(spec, kernel).result()
        except base.Agreed:
            return None
        with jax.default_device(jax.local_devices()[0]):
            operands = jax.tree.map(jnp.asarray, self._operands_alone[spec.label, kernel])
            q, k, v, dout = self.stack.random(problem)
            call = lambda: programs["forward"](q, k, v, operands)  # noqa: E731
            if which == "backward":
                out, lse = call()
                call = lambda: programs["backward"](q, k, v, out, lse, dout, operands)  # noqa: E731
            sampler = self.stack.sampler(lambda _: call(), True)  # behind a flush, as what ranks run
            return measure(sampler, Protocol(**self.request.protocol)).median

    def _build_alone(self, cases: Sequence[Case]) -> list[Future]:
        """The programs of `single` for the cases' problems."""
        wanted = {(case.spec.label, case.kernel or self.default_kernel(base.problem_of(case.spec))): case.spec
                  for case in cases}
        made = [(key, self._threads.submit(self._operands, spec, key[1])) for key, spec in wanted.items()]
        concurrent.futures.wait(future for _, future in made)
        held = {key: future.result() for key, future in made if not future.exception()}
        kinds = [(kernel, wanted[label, kernel].seq_len) for label, kernel in held]
        self._operands_alone.update(zip(held, stack.alike(list(held.values()), kinds), strict=True))
        return [self._alone(wanted[key], key[1]) for key in held]

    def _operands(self, spec: ProblemSpec, kernel: str):
        """A kernel's operands of a whole problem, on the host."""
        made = kernels.get(kernel).prepare(base.problem_of(spec), jax.local_devices(backend="cpu")[0])
        return jax.tree.map(np.asarray, made)

    def _alone(self, spec: ProblemSpec, name: str) -> Future:
        """Both passes of a kernel on a whole problem on this process's first device, for all operands of its shapes."""
        problem, kernel, device = base.problem_of(spec), kernels.get(name), jax.local_devices()[0]
        key = spec.label, name
        if key not in self._operands_alone:
            self._operands_alone[key] = self._operands(spec, name)
        operands = self._operands_alone[key]

        def work():
            with jax.default_device(device):
                q, k = (jax.ShapeDtypeStruct(shape, problem.dtype) for shape in (problem.q_shape, problem.kv_shape))
                def first(q, k, v, o):
                    return kernel.forward(q, k, v, o, problem.scale)
                out, lse = jax.eval_shape(first, q, k, k, operands)
                return {"forward": _compile(first, q, k, k, operands),
                        "backward": _compile(lambda *x: kernel.backward(*x, problem.scale), q, k, k, out, lse, q,
                                             operands)}

        leaves, tree = jax.tree.flatten(operands)
        return self._once((name, problem.q_shape, problem.kv_shape, problem.scale, tree,
                           tuple((x.shape, str(x.dtype)) for x in leaves)), work)

    # ---- links -----------------------------------------------------------------------------------

    def link_calls(self, size: int):
        programs, length = self._link_programs(size)
        x = programs.pop("operand").result()()
        return {kind: functools.partial(made.result(), x) for kind, made in programs.items()}, 2 * length

    def _link_programs(self, size: int) -> tuple[dict[str, Future], int]:
        """Futures of each kind's program and of the one that makes its operand; elements that a rank holds of it."""
        world, spec = self.world, PartitionSpec("all")
        mesh = Mesh(np.array(jax.devices()), ("all",))
        ring = [(r, (r + 1) % world) for r in range(world)]
        kinds = {
            "permute": lambda x: jax.lax.ppermute(x, "all", ring),
            "all_to_all": lambda x: jax.lax.all_to_all(x, "all", 0, 0, tiled=True),
            "all_gather": lambda x: jax.lax.all_gather(x, "all", tiled=True),
            "reduce_scatter": lambda x: jax.lax.psum_scatter(x, "all", tiled=True),
        }
        length, sharding = max(1, size // 2 // world) * world, NamedSharding(mesh, spec)
        like = jax.ShapeDtypeStruct((length * world,), jnp.bfloat16, sharding=sharding)

        def work(collective):
            call = jax.shard_map(collective, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            return _compile(call, like)

        made = {kind: self._once((kind, length), functools.partial(work, f)) for kind, f in kinds.items()}
        made["operand"] = self._once(("operand", length), lambda: jax.jit(
            lambda: jnp.ones(like.shape, like.dtype), out_shardings=sharding).lower().compile())
        return made, length


def _forward(plan, q, k, v):
    """The result, and the leaves of what is saved; None for an operand or the result, which a program would copy."""
    result, saved = forward(plan, q, k, v)
    given = q, k, v, result[0]
    return result, [None if any(x is y for y in given) else x for x in jax.tree.leaves(saved)]


def _compile(function: Callable, *arguments):
    return _compiled(_lower(function, *arguments))


def _lower(function: Callable, *arguments) -> jax.stages.Lowered:
    with _lowering:
        return jax.jit(function).lower(*arguments)


def _compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """A compiled program; Agreed("out_of_memory") where some device of this process cannot hold it."""
    compiled = lowered.compile()
    used = compiled.memory_analysis()
    limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices()]
    if used is not None and all(limits):
        need = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
        if need > min(limits):
            raise base.Agreed("out_of_memory", f"the program needs {need} bytes a device, which has {min(limits)}")
    return compiled


def _like(plan, side: str) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a plan's q ("q") or k ("kv")."""
    signature, program = plan.program.signature, plan.program
    length, heads = (
        (signature.q_length, signature.heads.q_heads) if side == "q" else
        (signature.kv_length, signature.heads.kv_heads)
    )
    shape = signature.batch, signature.topology.world * length, heads, signature.head_dim
    return jax.ShapeDtypeStruct(shape, signature.dtype, sharding=NamedSharding(program.mesh, program.spec()))


@functools.cache
def _draw(shape: tuple[int, ...], dtype: str, sharding) -> Callable[[int], jax.Array]:
    """seed -> standard normal values, made where they are used."""
    return jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, dtype), out_shardings=sharding)


def _stored(x: np.ndarray) -> np.ndarray:
    """uint16 as stored is bfloat16."""
    return x.view(jnp.bfloat16) if x.dtype == np.uint16 else x


def main(request: base.Request, out: str) -> None:
    """Joins the job that a launcher started, if one did, and runs it."""
    place = launch.detect()
    with contextlib.nullcontext() if place is None else launch.join(place, timeout_s=request.deadline):
        worker.run(Job(request), out)


if __name__ == "__main__":
    main(base.read_request(sys.argv[1]), sys.argv[2])
