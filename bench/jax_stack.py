"""The bench's view of the JAX stack, inside a worker; its twin is bench/torch_stack.py."""

import functools
import math
import os
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import ml_dtypes
import numpy as np

from bench.device_events import BEGIN, END, DeviceEvents
from bench.passes import passes_of
from bench.timing import EventSampler, wall_sampler
from jax_impl import kernels
from jax_impl.context_parallel.plan import put
from jax_impl.kernels.stack import stack_operands
from workload.problem import AttentionProblem

FLUSH_BYTES = 1 << 30  # many times the L2 of any card, and longer on the device than two dispatches on the host
UNTUNED = "--xla_gpu_autotune_level=0"  # of XLA_FLAGS: nothing is tried on the device while compiling
CUBLAS = 'custom_call_target="__cublas'  # in a compiled program: a product that XLA leaves to cuBLAS


class Stack:
    """What a measurement needs of a stack: arrays, compiled passes, timers, memory, environment."""

    name = "jax"

    def __init__(self):
        self._compiled: dict[Hashable, tuple[Callable, float]] = {}
        self.device = jax.default_backend()
        self.on_gpu = self.device == "gpu"
        self.timer = "CUDA events around each call" if self.on_gpu else "wall time"
        self.memory_method = "XLA's memory analysis: operands, results and temporaries"

    @functools.cache  # noqa: B019 - one stack lives as long as its process
    def _events(self, device: jax.Device | None) -> DeviceEvents:
        """A device's own: made when first asked, since that runs a program on it."""
        return DeviceEvents(device)

    def environment(self) -> dict[str, Any]:
        """Versions, device and compiler flags of this stack."""
        found = {
            "jax": jax.__version__, "jaxlib": jaxlib.__version__, "backend": self.device,
            "device": jax.devices()[0].device_kind, "xla_flags": os.environ.get("XLA_FLAGS", ""),
        }
        return found | ({"platform_version": jax.devices()[0].client.platform_version} if self.on_gpu else {})

    def kernel(self, name: str):
        """The kernel record; ValueError where the stack has none of that name."""
        return kernels.get(name)

    def put(self, array: np.ndarray) -> jax.Array:
        """A stored array (uint16 is bfloat16) on the device."""
        return jax.device_put(array.view(ml_dtypes.bfloat16) if array.dtype == np.uint16 else array)

    def tiled(self, pool: jax.Array, offset: int, shape: tuple[int, ...]) -> jax.Array:
        """The pool from `offset` on, over and over, in a shape: `parity.inputs.tiled`, on the device."""
        return _tiled(pool, offset, shape)

    def take(self, x: jax.Array) -> np.ndarray:
        """A result as float64 NumPy."""
        return np.asarray(x).astype(np.float64)

    float32 = jnp.float32

    def like(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """x in another array's dtype."""
        return x.astype(other.dtype)

    def head(self, x: jax.Array, n: int, axis: int = 2) -> np.ndarray:
        """Head n of the first batch entry, as float64 NumPy; one compilation serves all heads."""
        return self.take(_head(x, n, axis))

    def shape(self, shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
        """What stands for an array in `compile_ahead`."""
        return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))

    compiles_ahead = True
    shapes_of = staticmethod(jax.eval_shape)  # (function, *arguments) -> what stands for its results

    def random(self, problem: AttentionProblem) -> list[jax.Array]:
        """q, k, v, dout of a problem, standard normal, made on the device."""
        return self.random_ahead(problem)()

    def random_ahead(self, problem: AttentionProblem) -> Callable[[], list[jax.Array]]:
        """`random` of a problem, compiled already."""
        shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)

        def draw(seed):
            keys = jax.random.split(jax.random.key(seed), len(shapes))
            return [jax.random.normal(k, s, problem.dtype) for k, s in zip(keys, shapes, strict=True)]

        drawn, _ = self.compile_ahead(("random", shapes, problem.dtype), draw, self.shape((), "int32"))
        return lambda: drawn(np.int32(0))

    def prepare_alike(self, kernel, problems: Sequence[AttentionProblem]) -> list[Any]:
        """Operands of problems of one shape, zero-padded to equal shapes, so that one compilation serves them all."""
        host = jax.local_devices(backend="cpu")[0]
        stacked = stack_operands([kernel.prepare(p, host) for p in problems])
        alike = [jax.tree.map(lambda x, n=n: jnp.asarray(x[n]), stacked) for n in range(len(problems))]
        return jax.block_until_ready(alike)

    def finish(self, result: Any = None) -> None:
        """Waits until the result is there."""
        jax.block_until_ready(result)

    def prepare(self, kernel, problem: AttentionProblem) -> Any:
        """The kernel's operands, finished."""
        return jax.block_until_ready(kernel.prepare(problem))

    def compile(self, name: Hashable, function: Callable, *arguments) -> tuple[Callable, float, Any]:
        """(callable, seconds of tracing and compiling, its first result); see `compile_ahead`."""
        compiled, seconds = self.compile_ahead(name, function, *arguments)
        self._require_memory(compiled)
        return compiled, seconds, jax.block_until_ready(compiled(*arguments))

    def peak_bytes(self, call: Callable[[], Any], compiled: Callable) -> int | None:
        """Memory of the compiled program: its operands, results and temporaries."""
        return _bytes(compiled)

    def compile_ahead(self, name: Hashable, function: Callable, *arguments, donate: bool = False
                      ) -> tuple[Callable, float]:
        """(callable, seconds of tracing and compiling), without any work on the device; arguments may be shapes.

        donate: whether the first argument's memory is handed over for the result, as a running sum's is.

        A function of the same name on operands of the same shapes and static parts is compiled once: another mask
        of the same signature costs nothing, and is told the seconds of the first.
        """
        leaves, tree = jax.tree.flatten(arguments)
        key = (name, tree, tuple((x.shape, str(x.dtype)) for x in leaves))
        if key not in self._compiled:
            began = time.perf_counter()
            compiled = jax.jit(function, donate_argnums=(0,) if donate else ()).lower(*arguments).compile()
            self._compiled[key] = compiled, time.perf_counter() - began
        return self._compiled[key]

    def _require_memory(self, compiled) -> None:
        """Raises MemoryError where a program needs more than this process may take, before it takes any."""
        need, limits = _bytes(compiled), jax.devices()[0].memory_stats() if self.on_gpu else None
        if need and limits and need > limits["bytes_limit"]:
            raise MemoryError(f"the program needs {need / 2**30:.1f} GiB, a process may take "
                              f"{limits['bytes_limit'] / 2**30:.1f} GiB of the device")

    def sampler(self, call: Callable[[int], Any], cold: bool, flushes: int = 1,
                devices: Sequence[jax.Device | None] = (None,)) -> Callable[[int], float]:
        """sample(n) -> seconds of call(n); on a GPU between two events, behind so many flushes that are not timed.

        The flushes are the host's head start, see `bench.timing.EventSampler`; for a warm cache the call runs once more
        between the two. devices: as of `between_events`.
        """
        if not self.on_gpu:
            return wall_sampler(call, self.finish)

        def take(n, ahead):
            before = (lambda: None) if cold else lambda: call(n)
            return self.between_events(lambda: call(n), flushes * ahead, before, devices)
        return EventSampler(take)

    def between_events(self, call: Callable[[], Any], ahead: int, before: Callable[[], Any],
                       devices: Sequence[jax.Device | None] = (None,)) -> tuple[float, bool]:
        """Seconds of a call between two events, behind `ahead` flushes and `before`; whether a device may have waited
        for the host meanwhile.

        Args:
          devices: whose seconds count, of several the slowest's; JAX's default one, which alone is flushed, if None.
        """
        events, flush = [self._events(device) for device in devices], self._flush()
        for _ in range(ahead):
            flush()
        before()
        for each in events:
            each.mark(BEGIN)
        result = call()
        last = [each.mark(END) for each in events]
        seconds = max(each.seconds(end) for each, end in zip(events, last, strict=True))
        del result
        return seconds, any(each.behind() for each in events)

    @functools.cache  # noqa: B019 - one stack lives as long as its process
    def _flush(self) -> Callable[[], Any]:
        add = jax.jit(lambda x: x + 1, donate_argnums=0)
        held = [jnp.zeros(FLUSH_BYTES // 4, jnp.int32)]

        def flush():
            held[0] = add(held[0])
            return held[0]
        return flush

    def watch_memory(self) -> Callable[[Callable, Any], int | None]:
        """What it returns tells the memory of a compiled pass, as `peak_bytes` does; nothing is to be watched."""
        return lambda compiled, arguments: _bytes(compiled)

    def build(self, kernel, problem: AttentionProblem, passes: Sequence[str]) -> None:
        """Compiles a kernel's passes for a problem."""
        operands = self._operands_ahead(kernel, problem)
        q, k, v, dout = (self.shape(s, problem.dtype) for s in (
            problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape))
        forward, backward = passes_of(kernel, problem.scale)
        arguments = (q, k, v, operands)
        compiled, _ = self.compile_ahead((kernel.name, "forward", problem.scale), forward, *arguments)
        self._require_memory(compiled)
        if "backward" in passes:
            saved = jax.eval_shape(forward, *arguments)
            arguments = (q, k, v, *saved, dout, operands)
            compiled, _ = self.compile_ahead((kernel.name, "backward", problem.scale), backward, *arguments)
            self._require_memory(compiled)

    def _operands_ahead(self, kernel, problem: AttentionProblem) -> Any:
        """What stands for a kernel's operands in `compile_ahead`: prepared on the host, for their shapes alone."""
        operands = kernel.prepare(problem, jax.local_devices(backend="cpu")[0])
        return jax.tree.map(lambda x: self.shape(x.shape, x.dtype), operands)

    def program(self, kernel, problem: AttentionProblem) -> Hashable:
        """Equal for masks of one kernel and shape that `build` compiles once."""
        leaves, tree = jax.tree.flatten(self._operands_ahead(kernel, problem))
        return tree, tuple((x.shape, str(x.dtype)) for x in leaves)

    def disturbs(self, kernel) -> bool:
        """Whether `build` may not run beside a timing: XLA tries variants on the device, unless it is told not to.

        Also where a kernel is all there is, of the fusions around it.
        """
        return self.on_gpu and UNTUNED not in os.environ.get("XLA_FLAGS", "")

    def handicaps(self, compiled: Any) -> list[str]:
        """What makes a compiled program slower than a user has it: products of XLA's own that it may not tune."""
        if not self.on_gpu or UNTUNED not in os.environ.get("XLA_FLAGS", "") or CUBLAS not in compiled.as_text():
            return []
        return [f"XLA's products are not tuned: XLA_FLAGS has {UNTUNED}"]

    def matmul(self, size: int, dtype: str) -> tuple[Callable[[int], Any], int]:
        """call(n) of a square matrix product in a dtype, and its FLOPs."""
        a, b = (jax.random.normal(jax.random.key(n), (size, size)).astype(dtype) for n in range(2))
        product = jax.jit(functools.partial(jnp.matmul, precision="highest" if dtype == "float32" else None))
        return lambda n: product(a, b), 2 * size**3

    def copy(self, size: int) -> tuple[Callable[[int], Any], int]:
        """call(n) of a copy of `size` bytes on the device, and the bytes it reads and writes."""
        source = jnp.ones(size // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1)  # a plain copy would be left out by the compiler
        return lambda n: add(source), 2 * size

    def release(self) -> None:
        """Gives unused memory back: live buffers are dropped with their last reference, nothing else to do."""


@functools.cache
def meeting(devices: tuple[jax.Device, ...]) -> Callable[[], jax.Array]:
    """A call, compiled already, that makes all these devices go on together; no host waits for it."""
    mesh, spec = jax.sharding.Mesh(np.array(devices), ("all",)), jax.sharding.PartitionSpec("all")
    token = put(np.zeros(len(devices), np.float32), jax.sharding.NamedSharding(mesh, spec))
    meet = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec,
                         out_specs=jax.sharding.PartitionSpec())
    return functools.partial(jax.jit(meet).lower(token).compile(), token)


@functools.partial(jax.jit, static_argnums=2)
def _tiled(pool, offset, shape):
    """One program, so that no step of it is a tensor of its own; the offset is data, so it serves q and dout alike."""
    count = math.prod(shape)
    return jnp.tile(jnp.roll(pool, -offset), -(-count // pool.size))[:count].reshape(shape)


def _bytes(compiled) -> int | None:
    """Operands, results and temporaries of a compiled program."""
    found = compiled.memory_analysis()
    if found is None:
        return None
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


@functools.partial(jax.jit, static_argnums=2)
def _head(x, n, axis):
    return jnp.take(x[0], n, axis=axis - 1)


def set_threads() -> None:
    """XLA's CPU client takes all cores by itself."""
