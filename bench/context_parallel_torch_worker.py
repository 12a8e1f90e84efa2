"""A rank of the context-parallel bench in PyTorch; its twin is bench/context_parallel_jax_worker.py.

    python -m torch_impl.launch --ranks 2 -- python -m bench.context_parallel_torch_worker REQUEST.json ROWS.jsonl

What a rank does is told in bench/context_parallel_worker.py, how PyTorch does it stands here.
"""

import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench import context_parallel_job as base
from bench import context_parallel_worker as worker
from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.timing import Protocol, measure, wall
from bench.torch_stack import Stack
from torch_impl import context_parallel, kernels, launch
from torch_impl.context_parallel.attention import backward, forward
from torch_impl.context_parallel.local import row_sums
from torch_impl.context_parallel.plan import default_kernel
from workload.problem import AttentionProblem
from workload.schedule import Schedule

AHEAD_CYCLES = 6_000_000  # about 3 ms: longer than a host needs to enqueue a pass


class Ready(base.Ready):
    """See the base class."""

    def __init__(self, job: "Job", plan, schedule: Schedule, tensors: Sequence[torch.Tensor]):
        self.job, self.plan, self.schedule = job, plan, schedule
        self.kernel, self.groups = plan.local.kernel, plan.local.groups
        self.q, self.k, self.v, self.dout = tensors
        self.saved: Any = None

    def begin(self) -> None:
        self.saved = self.run("forward")[1]

    def run(self, which: str) -> Any:
        if which == "forward":
            return forward(self.plan, self.q, self.k, self.v)
        return backward(self.plan, self.saved, self.dout)

    def results(self) -> dict[str, torch.Tensor]:
        (out, _), _ = self.run("forward")
        found = dict(zip(base.RESULTS, (out, *self.run("backward")), strict=True))
        self.job.stack.finish()
        return found

    def same(self, a, b) -> bool:
        return all(torch.equal(a[name], b[name]) for name in a)

    def whole(self, results):
        return {name: context_parallel.unshard(x, self.plan, base.SIDES[name]) for name, x in results.items()}

    def moved(self, which: str) -> dict[str, int]:
        mesh = self.plan.local.mesh
        mesh.forget()
        self.run(which)
        return mesh.bytes

    def peak(self) -> int:
        def both():
            self.run("forward")
            self.run("backward")
        return self.job.stack.peak_bytes(both, both)

    def traced(self, which: str) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CUDA] if self.job.stack.on_gpu else [ProfilerActivity.CPU]
        with tempfile.TemporaryDirectory() as folder:
            with profile(activities=kinds) as seen:
                for _ in range(base.TRACED_CALLS):
                    self.run(which)
                self.job.stack.finish()
            seen.export_chrome_trace(f"{folder}/trace.json")
            return json.loads(Path(folder, "trace.json").read_text())

    def steps(self, which: str, protocol: Protocol) -> list[float]:
        local, problem = self.plan.local, self.schedule.local_problem(0, self.plan.local.mesh.rank)
        q, k, v, dout = draw(problem, problem.q_len, problem.kv_len, self.job.device, 1)
        running, scale, made, seconds = local.running, local.signature.scale, None, []
        for operands in self.plan.data.masks:
            if operands is None:
                seconds.append(0.0)
                continue
            if which == "forward" and len(self.plan.data.masks) == 1:
                step = functools.partial(local.forward, q, k, v, operands, out_dtype=q.dtype)
            elif which == "forward":
                step = functools.partial(running.forward, made, q, k, v, operands, scale)
            else:
                out, lse = running.result(running.forward(None, q, k, v, operands, scale), q)
                out = out.to(q.dtype)
                step = functools.partial(running.backward, made and made[0], q, k, v, out, lse, dout, operands, scale,
                                         delta=row_sums(out, dout))
            made = step()
            seconds.append(measure(self.job.stack.sampler(lambda n, step=step: step(), False), protocol).median)
        return seconds


class Job(base.Job):
    """See the base class; `control` is a gloo group for what is agreed on the host."""

    def __init__(self, request: base.Request, place: launch.Place):
        super().__init__(request)
        self.stack = Stack()
        self.device = torch.device("cuda", place.local_rank) if self.stack.on_gpu else torch.device("cpu")
        self.ranks = context_parallel.Job(self.device, deadline_s=request.deadline)
        self.control = dist.new_group(backend="gloo")
        self.rank, self.world, self.progress = place.rank, place.world, self.ranks.watch.progress
        self.timer = "CUDA events around each call, the host ahead" if self.stack.on_gpu else self.stack.timer
        self._token = torch.zeros(1, device=self.device)

    def gather(self, value: Any) -> list[Any]:
        got: list[Any] = [None] * self.world
        dist.all_gather_object(got, value, group=self.control)
        return got

    def build(self, cases: Sequence[tuple[Case, int]]) -> None:
        """Nothing: Triton compiles a kernel when it first runs."""

    def ready(self, case: Case, schedule: Schedule, arrays: dict[str, np.ndarray] | None = None) -> Ready | None:
        mesh = context_parallel.make_mesh(case.topology, self.ranks, self.rank)
        if mesh is None:
            return None
        kernel = case.kernel or self.default_kernel(schedule.problem)
        plan = context_parallel.plan_of(schedule, mesh, kernel, case.head_groups)
        if arrays is None:
            signature = plan.local.signature
            tensors = draw(schedule.problem, signature.q_length, signature.kv_length, self.device, self.rank)
        else:
            tensors = [context_parallel.shard(self.stack.put(x), plan, base.SIDES[n]) for n, x in arrays.items()]
        return Ready(self, plan, schedule, tensors)

    def default_kernel(self, problem: AttentionProblem) -> str:
        return default_kernel(problem.mask, self.device.type)

    def together(self) -> None:
        """All ranks go on from here together: their streams on a GPU, which does not hold up the host."""
        dist.all_reduce(self._token)

    def sampler(self, call):
        def take(ahead: int) -> tuple[float, bool]:
            if call is not None and self.stack.on_gpu:
                return self.stack.between_events(call, ahead * AHEAD_CYCLES, self.together)
            self.together()
            return 0.0 if call is None else wall(call, self.stack.finish), False

        take(1)  # compiles
        ahead = self.head_start(take)
        return lambda: take(ahead)[0], take(ahead)[0]

    def single(self, spec: ProblemSpec, kernel: str, which: str) -> float | None:
        try:
            return self._single(base.problem_of(spec), kernels.get(kernel), which)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None

    def _single(self, problem: AttentionProblem, kernel, which: str) -> float:
        q, k, v, dout = draw(problem, problem.q_len, problem.kv_len, self.device, 0)
        operands = kernel.prepare(problem, self.device)
        call = lambda: kernel.forward(q, k, v, operands, problem.scale)  # noqa: E731
        if which == "backward":
            out, lse = call()
            call = lambda: kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)  # noqa: E731
        return measure(self.stack.sampler(lambda n: call(), False), Protocol(**self.request.protocol)).median

    def link_calls(self, size: int):
        everyone = self.ranks.communicator(self.rank, [tuple(range(self.world))], "main")
        assert everyone is not None  # the group of all ranks
        x = torch.ones(self.world, max(1, size // 2 // self.world), dtype=torch.bfloat16, device=self.device)
        return {
            "permute": lambda: everyone.rotate([x], 1, "link permute").wait(),
            "all_to_all": lambda: everyone.all_to_all(x, "link all_to_all").wait(),
            "all_gather": lambda: everyone.all_gather(x, "link all_gather").wait(),
            "reduce_scatter": lambda: everyone.reduce_scatter(x, "link reduce_scatter").wait(),
        }, x.numel() * 2


def draw(problem: AttentionProblem, rows: int, keys: int, device, seed: int) -> list[torch.Tensor]:
    """q, k, v, dout with these many tokens, normal draws made where they are used."""
    generator, dtype = torch.Generator(device=device).manual_seed(seed), getattr(torch, problem.dtype)
    sizes = ((rows, problem.q_heads), (keys, problem.kv_heads), (keys, problem.kv_heads), (rows, problem.q_heads))
    return [torch.randn(problem.batch, *size, problem.head_dim, generator=generator, device=device, dtype=dtype)
            for size in sizes]


def main(request: base.Request, out: str) -> None:
    """Joins the job that a launcher started (or is one of its own), and runs it."""
    place = launch.detect() or launch.Place(0, 1, 0, 1, "127.0.0.1:29500")
    with launch.join(place, timeout_s=request.deadline):
        worker.run(Job(request, place), out)


if __name__ == "__main__":
    main(base.read_request(sys.argv[1]), sys.argv[2])
