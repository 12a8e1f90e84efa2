"""What a rank of PyTorch does for a parity cell of a scheme, inside a worker; its twin is bench/parity_jax_ranks.py.

The ranks are workers that stay for many cells: `open_store` on one, `join` on all, then `run` on all for each cell.
"""

import datetime
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.attention_task import stack_of
from bench.context_parallel_cases import Case, from_record
from parity.compare import RESULTS
from parity.inputs import TENSORS
from torch_impl import context_parallel as cp
from torch_impl import launch
from torch_impl.context_parallel.attention import backward, forward
from torch_impl.context_parallel.plan import default_kernel

CALLS = 5
KEPT = 16  # cells whose inputs stay on the device, to be timed
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


_ready: dict[Case, tuple[Any, list[torch.Tensor]]] = {}  # by cell: this rank's plan, and the inputs that it was handed


def _make_ready(case: Case, folder: str) -> tuple[Any, list[torch.Tensor]]:
    if len(_ready) == KEPT:
        del _ready[next(iter(_ready))]
    job, problem = _held["job"], case.spec.problem()
    mesh = cp.make_mesh(case.topology, job, job.rank)
    kernel = case.kernel or default_kernel(problem.mask, job.device.type)
    plan = cp.plan_of(case.schedule(problem, with_lse=True), mesh, kernel)
    with np.load(f"{folder}/inputs{job.rank}.npz") as held:
        _ready[case] = plan, [stack_of("torch").put(held[name]).to(job.device) for name in TENSORS]
    return _ready[case]


def run(case: dict[str, Any], folder: str) -> str:
    """Both passes on the shards of this rank's file; writes its results beside it. Returns the local kernel's name."""
    plan, tensors = _make_ready(from_record(case), folder)
    *given, dout = tensors
    q, k, v = (x.detach().requires_grad_() for x in given)
    out, lse = cp.attend(q, k, v, plan)
    out.backward(dout)
    results = zip(RESULTS, (out.detach(), lse, q.grad, k.grad, v.grad), strict=True)
    np.savez(f"{folder}/results{_held['job'].rank}.npz", **{name: _stored(x) for name, x in results})
    return plan.local.kernel


def _stored(x: torch.Tensor) -> np.ndarray:
    """bfloat16 as its 16 bits."""
    x = x.cpu()
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def clock(case: dict[str, Any]) -> float:
    """Of a cell that has run: seconds of both passes on this rank, the median of calls that all begin together."""
    plan, (q, k, v, dout) = _ready[from_record(case)]
    stack, seconds = stack_of("torch"), []

    def both():
        _, saved = forward(plan, q, k, v)
        backward(plan, saved, dout)
        stack.finish()

    both()
    for _ in range(CALLS):
        dist.barrier()
        stack.finish()
        began = time.perf_counter()
        both()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
