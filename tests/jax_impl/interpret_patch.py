"""Test-only additions to the Mosaic GPU interpreter of jax 0.11.2, so that the Hopper kernels run on a CPU.

Adds `run_state` (accumulators that start from a value), wgmma with its left operand in registers, stores into an
accumulator, tiles in the order of registers and TMA reductions that add. Relies on private names of that version of
jax, which constraints.txt pins.
"""

import contextlib
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback as jcallback
from jax._src import core as jcore
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels import hopper_kernel

_Interpreter = jaxpr_interpret.JaxprInterpreter
_interpret = _Interpreter.interpret
_interpret_wgmma = _Interpreter._interpret_wgmma_ref_p
_interpret_inline = _Interpreter._interpret_inline_mgpu_p
_copy_smem_to_gmem = callbacks.copy_smem_to_gmem
_to_integer = shared_memory._to_int
_wait = shared_memory.GPUSharedMemory.wait_smem_to_gmem


def _allocate(self, token, value, eqn):
    """A register buffer holding value; (token, key)."""
    token, request = callbacks.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
        initial_ref_count=1,
    )
    return callbacks.call_allocate_buffer(
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_request_as_array=request,
        value=value,
        source_info=eqn.source_info,
    )


def _deallocate(self, token, key, eqn):
    return callbacks.call_deallocate_buffer(
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_key_as_array=key,
        source_info=eqn.source_info,
    )


def _run_state(self, eqn, token, values):
    """Values become register buffers for the inner program; references pass through as their keys."""
    inner, values, keys, shapes = eqn.params["jaxpr"], iter(values), [], []
    outer = iter(eqn.invars)
    for variable, initialised in zip(inner.invars, eqn.params["is_initialized"], strict=True):
        if initialised and isinstance(next(outer).aval, state_types.AbstractRef):
            keys.append(next(values))
            shapes.append(None)
            continue
        aval = variable.aval.inner_aval
        value = next(values) if initialised else jnp.zeros(aval.shape, aval.dtype)
        token, key = _allocate(self, token, value, eqn)
        keys.append(key)
        shapes.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    token, _ = self.interpret(inner, token, *keys)
    results = []
    for key, shape in zip(keys, shapes, strict=True):
        if shape is not None:
            token, result = callbacks.call_get(
                token=token,
                result_shape_and_dtype=shape,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=key,
                transforms=(),
                source_info=eqn.source_info,
            )
            token = _deallocate(self, token, key, eqn)
        results.append(key if shape is None else result)
    return token, results


def _store(self, eqn, token, key, transforms, value):
    token, _ = callbacks.call_swap(
        token=token,
        result_shape_and_dtype=jax.ShapeDtypeStruct(value.shape, value.dtype),
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_key_as_array=key,
        transforms=transforms,
        val=value,
        mask=None,
        source_info=eqn.source_info,
    )
    return token


def _store_accumulator(self, eqn, token, values):
    key, value = values
    return _store(self, eqn, token, key, (), value), [value]


def _wgmma(self, eqn, token, get_values):
    """A left operand in registers is staged in a register buffer, then the ordinary rule applies."""
    if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
        return _interpret_wgmma(self, eqn, token, get_values)
    accumulator, left, right, *leaves = get_values()
    token, key = _allocate(self, token, left, eqn)
    token, out = _interpret_wgmma(self, eqn, token, lambda: (accumulator, key, right, *leaves))
    return _deallocate(self, token, key, eqn), out


def _inline(self, eqn, token, values):
    """What is pure is done on the values; a fence is what `commit_smem` is to one thread; all else is ignored."""
    name = eqn.params["mgpu_fn"].__name__
    if name == "fenced":
        return self._interpret_commit_smem_p(eqn.replace(primitive=gpu_primitives.commit_smem_p), token, None)
    if name == "stored":
        return _store_tile(self, eqn, token, values)
    if name not in _PURE:
        return _interpret_inline(self, eqn, token, lambda: values)
    return token, [_PURE[name](values[0]).astype(eqn.outvars[0].aval.dtype)]


def _store_tile(self, eqn, token, values):
    key, value, *leaves = values
    transforms, _ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
    key, transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, key, transforms)
    return _store(self, eqn, token, key, transforms, value), []


def register_order(x):
    """What `hopper_add.in_register_order` gives, from wgmma's layout as its definition has it."""
    rows, columns = x.shape
    x = x.reshape(rows // 16, 2, 8, columns // 8, 4, 2)  # warp, upper or lower 8 rows, row, columns / 8, thread, 2
    return x.transpose(0, 3, 2, 4, 1, 5).reshape(-1, 128)


def row_order(x):
    """The inverse of `register_order`."""
    x = x.reshape(4, -1, 8, 4, 2, 2)  # warp, columns / 8, row, thread, upper or lower 8 rows, 2
    return x.transpose(0, 4, 2, 1, 3, 5).reshape(64, -1)


_PURE = {"rearranged": register_order, "arranged": row_order, "in_pairs": jnp.asarray, "from_pairs": jnp.asarray}

_RULES = {
    gpu_primitives.inline_mgpu_p: _inline,
    discharge.run_state_p: _run_state,
    gpu_primitives.wgmma_accumulator_store_p: _store_accumulator,
}


def _interpret_with_rules(self, jaxpr, token, *args):
    """Runs the equations that `_RULES` covers by them and every other one through the original interpreter."""
    if not any(eqn.primitive in _RULES for eqn in jaxpr.eqns):
        return _interpret(self, jaxpr, token, *args)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(variable):
        return variable.val if isinstance(variable, jcore.Literal) else env[variable]

    for eqn in jaxpr.eqns:
        if rule := _RULES.get(eqn.primitive):
            token, results = rule(self, eqn, token, [read(v) for v in eqn.invars])
        else:
            inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jcore.Literal)))
            debug_info = jaxpr.debug_info.with_unknown_names()
            single = jcore.Jaxpr((), inputs, list(eqn.outvars), [eqn], eqn.effects, debug_info)
            token, results = _interpret(self, single, token, *[env[v] for v in inputs])
        env.update(zip(eqn.outvars, results, strict=True))
    return token, [read(v) for v in jaxpr.outvars]


class _AddTask(callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that adds to what the target holds, atomically; several may meet in one place without a race."""

    lock = threading.Lock()

    def __call__(self, tma_thread_id):
        memory = callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)

        def content(key, access):
            return memory.get_buffer_content(key, access, self.thread, logging_info=self.logging_info)[0]

        with self.lock:
            total = content(self.dst_allocation_key, self.dst_access) + content(
                self.src_allocation_key, self.src_access
            )
            memory.store_buffer_content(
                self.dst_allocation_key, self.dst_access, total, self.thread, logging_info=self.logging_info
            )
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
        self.post_write(tma_thread_id, memory)


@callbacks.fail_on_exception
def _add(*, reduction_op, src_transforms, dst_transforms, **options):
    """`copy_smem_to_gmem` with the reduction that adds."""
    if reduction_op is None:
        return _copy_smem_to_gmem(
            reduction_op=None, src_transforms=src_transforms, dst_transforms=dst_transforms, **options
        )
    if reduction_op != "add" or options["predicate"] is not None:
        raise NotImplementedError(f"reduction_op {reduction_op} with predicate {options['predicate']}")
    memory = callbacks._get_shared_memory()

    def side(key, transforms):
        key = callbacks.HostAllocationKey.from_array(key)
        return key, memory.access(key, jax.tree.map(int, callbacks._remove_noop_transforms(transforms)))

    source = side(options["src_allocation_key_as_array"], src_transforms)
    target = side(options["dst_allocation_key_as_array"], dst_transforms)
    clock = memory.incr_clock(options["thread"]) if memory.detect_races else None
    where = options["mesh_location"], options["thread"]
    memory.execute_async_task(_AddTask(*where, *source, *target, options["source_info"], clock))
    return options["token"]


def _wait_for_copies(self, thread, n, wait_read_only):
    """A warpgroup's copies are issued by a thread of its first warp, which waits for them where all warps wait."""
    _wait(self, thread, n, wait_read_only)
    if isinstance(thread, shared_memory.Warp) and thread.warp_id == 0:
        whole = shared_memory.Warpgroup(thread.device_id, thread.cluster_id, thread.block_id, thread.warpgroup_id)
        _wait(self, whole, n, wait_read_only)


def _outside_registers(check):
    """A race check without registers: they belong to one warpgroup, and wgmma's writes to them are ordered."""
    registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)

    def wrapped(self, thread, clock, buffer_key, *rest, **options):
        if buffer_key.memory_space_id != registers:
            check(self, thread, clock, buffer_key, *rest, **options)

    return wrapped


_check_read = _outside_registers(callbacks.GPURaceDetectionState.check_read)
_check_write = _outside_registers(callbacks.GPURaceDetectionState.check_write)


def _on_the_host(*arguments, callback, **_):
    """What stands behind `io_callback`, handing NumPy arrays on: the interpreter reads them piece by piece."""
    return jax.tree.map(np.asarray, callback(*map(np.array, arguments)))


def _integer(x):
    """A coordinate, of the program or of the host."""
    return x.item() if isinstance(x, np.ndarray) else _to_integer(x)


def install() -> None:
    """Extends the interpreter of this process."""
    jcallback.io_callback_impl, shared_memory._to_int = _on_the_host, _integer
    callbacks.GPURaceDetectionState.check_read = _check_read
    callbacks.GPURaceDetectionState.check_write = _check_write
    callbacks.copy_smem_to_gmem = _add
    shared_memory.GPUSharedMemory.wait_smem_to_gmem = _wait_for_copies
    _Interpreter.interpret = _interpret_with_rules
    _Interpreter._interpret_wgmma_ref_p = _wgmma


@contextlib.contextmanager
def interpreted(detect_races: bool = False):
    """Traces under it run Mosaic GPU kernels in the extended interpreter, with its race detector if asked for.

    The Hopper kernels are then available without a GPU. The detector starts anew with every kernel: AssertionError at
    the end if it found a race in any.
    """
    install()
    found, make = [], callbacks.GPURaceDetectionState

    def kept(**options):
        found.append(make(**options))
        return found[-1]

    hardware = mock.patch.object(hopper_kernel, "missing_hardware", lambda: None)
    try:
        parameters = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
        keeping = mock.patch.object(callbacks, "GPURaceDetectionState", kept)
        with hardware, keeping, plgpu.force_gpu_interpret_mode(parameters):
            yield
        assert not any(state.races_found for state in found)
    finally:
        callbacks.reset_gpu_interpret_mode_state()
