"""The bench's view of the PyTorch stack, inside a worker; its twin is bench/jax_stack.py."""

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing import EventSampler, wall_sampler
from torch_impl import kernels
from workload.problem import AttentionProblem

FLUSH_BYTES = 1 << 30  # many times the L2 of any card
HEAD_START = 1_500_000  # cycles that the device spins before a timed call, 0.8 ms: packages in Python take as long


class Stack:
    """What a measurement needs of a stack: arrays, compiled passes, timers, memory, environment."""

    name = "torch"

    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.on_gpu = self.device == "cuda"
        self.timer = "CUDA events around each call" if self.on_gpu else "wall time"
        self.memory_method = (
            "most allocated by torch, operands included" if self.on_gpu else "peak resident set of the process")

    def environment(self) -> dict[str, Any]:
        """Versions and device of this stack."""
        found = {"torch": torch.__version__, "backend": self.device}
        if self.on_gpu:
            found |= {
                "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(), "capability": list(torch.cuda.get_device_capability()),
            }
        else:
            found |= {"threads": torch.get_num_threads()}
        return found

    def kernel(self, name: str):
        """The kernel record; ValueError where the stack has none of that name."""
        return kernels.get(name)

    def put(self, array: np.ndarray) -> torch.Tensor:
        """A stored array (uint16 is bfloat16) on the device."""
        if array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).to(self.device).view(torch.bfloat16)
        return torch.from_numpy(array).to(self.device)

    def tiled(self, pool: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The pool from `offset` on, over and over, in a shape: `parity.inputs.tiled`, on the device."""
        count = math.prod(shape)
        return pool.roll(-offset).repeat(-(-count // pool.numel()))[:count].reshape(shape)

    def take(self, x: torch.Tensor) -> np.ndarray:
        """A result as float64 NumPy."""
        return x.detach().double().cpu().numpy()

    float32 = torch.float32

    def like(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """x in another tensor's dtype."""
        return x.to(other.dtype)

    def head(self, x: torch.Tensor, n: int, axis: int = 2) -> np.ndarray:
        """Head n of the first batch entry, as float64 NumPy."""
        return self.take(x[0].select(axis - 1, n))

    def random(self, problem: AttentionProblem) -> list[torch.Tensor]:
        """q, k, v, dout of a problem, standard normal, made on the device."""
        shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
        dtype = getattr(torch, problem.dtype)
        return [torch.randn(s, dtype=torch.float32, device=self.device).to(dtype) for s in shapes]

    def shape(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """What stands for a tensor in `compile_ahead`."""
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    compiles_ahead = False

    def shapes_of(self, function: Callable, *arguments) -> None:
        """Nothing: see `compile_ahead`."""

    def random_ahead(self, problem: AttentionProblem) -> Callable[[], list[torch.Tensor]]:
        """`random` of a problem, nothing of which is to be compiled."""
        return functools.partial(self.random, problem)

    def prepare_alike(self, kernel, problems: Sequence[AttentionProblem]) -> list[Any]:
        """Operands of problems of one shape; their own shapes may differ."""
        return [self.prepare(kernel, p) for p in problems]

    def finish(self, result: Any = None) -> None:
        """Waits until all work is done."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def prepare(self, kernel, problem: AttentionProblem) -> Any:
        """The kernel's operands, finished."""
        operands = kernel.prepare(problem, torch.device(self.device))
        self.finish()
        return operands

    def compile(self, name: Hashable, function: Callable, *arguments) -> tuple[Callable, float, Any]:
        """(callable, seconds of its first call, its first result): Triton and Inductor compile at the first call."""
        run, _ = self.compile_ahead(name, function)
        began = time.perf_counter()
        first = run(*arguments)
        self.finish()
        return run, time.perf_counter() - began, first

    def peak_bytes(self, call: Callable[[], Any], compiled: Callable) -> int:
        """Most memory held while the call runs, whatever else the process holds included."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            result = call()
            self.finish()
            del result
            return torch.cuda.max_memory_allocated()
        told = self.watch_memory()
        result = call()
        del result
        return told(compiled, ())

    def compile_ahead(self, name: Hashable, function: Callable, *arguments, donate: bool = False
                      ) -> tuple[Callable, float]:
        """(callable, 0.0): nothing is compiled before the first call."""
        del name, arguments, donate  # its compilers keep their own caches

        def run(*args):
            with torch.no_grad():
                return function(*args)

        return run, 0.0

    def sampler(self, call: Callable[[int], Any], cold: bool) -> Callable[[int], float]:
        """sample(n) -> seconds of call(n); on a GPU between two events, behind a flush (cold) that is not timed.

        The device first spins: the host's head start, see `bench.timing.EventSampler`.
        """
        if not self.on_gpu:
            return wall_sampler(call, self.finish)
        before = self._flush_buffer().zero_ if cold else lambda: None
        return EventSampler(lambda n, ahead: self.between_events(lambda: call(n), ahead * HEAD_START, before))

    def between_events(self, call: Callable[[], Any], cycles: int, before: Callable[[], Any]) -> tuple[float, bool]:
        """Seconds of a call between two events, behind so many cycles of spinning and `before`; whether the device may
        have waited for the host meanwhile.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        before()
        begin.record()
        result = call()
        end.record()
        waited = begin.query()
        end.synchronize()
        del result
        return begin.elapsed_time(end) / 1e3, waited

    @functools.cache  # noqa: B019 - one stack lives as long as its process
    def _flush_buffer(self):
        return torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    def watch_memory(self) -> Callable[[Callable, Any], int]:
        """Begins to watch; what it returns tells, of a compiled pass and its arguments, the most held since by both."""
        if self.on_gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return lambda compiled, arguments: torch.cuda.max_memory_allocated() - before + _bytes(arguments, set())
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident set
        return lambda compiled, arguments: (
            int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10)

    def build(self, kernel, problem: AttentionProblem, passes: Sequence[str]) -> None:
        """Compiles what a kernel can compile without the device; the rest is compiled at its first call."""
        if self.on_gpu and kernel.compile_ahead:
            kernel.compile_ahead(problem, torch.device("cuda", torch.cuda.current_device()), passes)

    def disturbs(self, kernel) -> bool:
        """Whether `build` may not run beside a timing: events on the device do not feel the host behind a flush."""
        return False

    def handicaps(self, compiled: Any) -> list[str]:
        """Nothing: its compilers tune as a user has them."""
        return []

    def matmul(self, size: int, dtype: str) -> tuple[Callable[[int], Any], int]:
        """call(n) of a square matrix product in a dtype, and its FLOPs."""
        a, b = (torch.randn(size, size, device=self.device).to(getattr(torch, dtype)) for _ in range(2))
        return lambda n: a @ b, 2 * size**3

    def copy(self, size: int) -> tuple[Callable[[int], Any], int]:
        """call(n) of a copy of `size` bytes on the device, and the bytes it reads and writes."""
        source = torch.ones(size // 4, device=self.device)
        target = torch.empty_like(source)
        return lambda n: target.copy_(source), 2 * size

    def release(self) -> None:
        """Gives unused memory back, so that the other stack's worker on the same card can have it."""
        if self.on_gpu:
            torch.cuda.empty_cache()


def _bytes(x: Any, seen: set[int]) -> int:
    """Bytes of all tensors in nested tuples and dataclasses, shared storage once."""
    if isinstance(x, torch.Tensor):
        storage = x.untyped_storage()
        known = storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        return 0 if known else storage.nbytes()
    if dataclasses.is_dataclass(x):
        x = [getattr(x, f.name) for f in dataclasses.fields(x)]
    return sum(_bytes(y, seen) for y in x) if isinstance(x, tuple | list) else 0


def set_threads() -> None:
    """Both stacks compute on all cores of a CPU."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
