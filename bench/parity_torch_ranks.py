"""What a rank of PyTorch does for a parity cell of a scheme, inside a worker; its twin is bench/parity_jax_ranks.py.

The ranks are workers that stay for many cells: `open_store` on one, `join` on all, then `run` on all for each cell.
"""

import datetime
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.attention_task import stack_of
from bench.context_parallel_cases import Case, from_record
from bench.parity_cells import KEPT, SAMPLES
from bench.timing import EventSampler, wall_sampler
from parity.compare import RESULTS
from parity.inputs import TENSORS
from torch_impl import context_parallel as cp
from torch_impl import launch
from torch_impl.context_parallel.attention import backward, forward
from torch_impl.context_parallel.plan import default_kernel

CALLS = 5
AHEAD_CYCLES = 60_000_000  # about 30 ms: longer than a host needs to enqueue these calls
_held: dict[str, Any] = {}  # the store, the process group and the job, while the worker lives


def open_store(wait: float) -> int:
    """Opens the store that the ranks meet at; returns its port."""
    _held["store"] = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False,
                                   timeout=datetime.timedelta(seconds=wait))
    return _held["store"].port


def join(rank: int, world: int, port: int, wait: float) -> None:
    """Makes the worker a rank; on a machine with GPUs, of the GPU of its number."""
    os.environ[launch.HOSTED] = "True"  # the store is there already
    place = launch.Place(rank, world, rank, world, f"127.0.0.1:{port}")
    _held["group"] = launch.join(place, timeout_s=wait)
    _held["group"].__enter__()
    if not stack_of("torch").on_gpu:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    device = torch.device("cuda", rank) if stack_of("torch").on_gpu else torch.device("cpu")
    _held["job"] = cp.Job(device, deadline_s=wait)


_built: dict[Case, list[Any]] = {}  # by cell: this rank's plan and, once it has run, the inputs that it was handed


def build(case: dict[str, Any]) -> None:
    """Makes a cell's plan and runs both passes on zeros, which compiles; Unsupported where the plan is refused."""
    while len(_built) >= KEPT:
        del _built[next(iter(_built))]
    chosen, job = from_record(case), _held["job"]
    problem, mesh = chosen.spec.problem(), cp.make_mesh(chosen.topology, job, job.rank)
    kernel = chosen.kernel or default_kernel(problem.mask, job.device.type)
    plan = cp.plan_of(chosen.schedule(problem, with_lse=True), mesh, kernel)
    _built[chosen] = [plan]
    zeros = {side: torch.zeros(shape, dtype=getattr(torch, problem.dtype), device=job.device)
             for side, shape in (("q", problem.q_shape), ("kv", problem.kv_shape))}
    _passes(plan, [cp.shard(zeros[side], plan, side) for side in ("q", "kv", "kv", "q")])


def _passes(plan: Any, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results of both passes, on shards of q, k, v and dout."""
    *given, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in given)
    out, lse = cp.attend(q, k, v, plan)
    out.backward(dout)
    return out.detach(), lse, q.grad, k.grad, v.grad


def run(case: dict[str, Any], folder: str) -> str:
    """Of a cell that is built: both passes on the shards of this rank's file; writes its results beside it.

    Returns: the local kernel's name.
    """
    built, job = _built[from_record(case)], _held["job"]
    plan = built[0]
    with np.load(f"{folder}/inputs{job.rank}.npz") as held:
        tensors = [stack_of("torch").put(held[name]).to(job.device) for name in TENSORS]
    built[1:] = tensors
    results = zip(RESULTS, _passes(plan, tensors), strict=True)
    np.savez(f"{folder}/results{job.rank}.npz", **{name: _stored(x) for name, x in results})
    return plan.local.kernel


def _stored(x: torch.Tensor) -> np.ndarray:
    """bfloat16 as its 16 bits."""
    x = x.cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def clock(case: dict[str, Any]) -> dict[str, Any]:
    """Of a cell that has run: how long both passes take, calls one behind the other.

    On GPUs between two events on each rank's stream, the slowest's, at either of which all have met, the host ahead.

    Returns: samples, seconds of a call as a mean; waited, for how many of them a device may have waited for the host.
    """
    plan, q, k, v, dout = _built[from_record(case)]
    token = torch.zeros(1, device=_held["job"].device)

    def calls() -> None:
        for _ in range(CALLS):
            _, saved = forward(plan, q, k, v)
            backward(plan, saved, dout)
        dist.all_reduce(token)

    calls()
    sample: Callable[[int], float] = wall_sampler(lambda _: calls(), lambda _: None)
    if stack_of("torch").on_gpu:
        sample = EventSampler(functools.partial(_between_events, calls, token))
    return {"samples": [sample(n) / CALLS for n in range(SAMPLES)], "waited": getattr(sample, "waited", 0)}


def _between_events(calls: Callable[[], None], token: torch.Tensor, _: int, ahead: int) -> tuple[float, bool]:
    """What `EventSampler` takes, of all ranks: by it each decides whether to take a sample again, as the others do."""
    of_mine = stack_of("torch").between_events(calls, ahead * AHEAD_CYCLES, lambda: dist.all_reduce(token))
    told = torch.tensor(of_mine, dtype=torch.float64, device=token.device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    seconds, waited = told.tolist()
    return seconds, bool(waited)
