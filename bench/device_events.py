"""CUDA events on the stream that XLA computes on: JAX hands out neither, its foreign function interface hands out the
stream.

An event is recorded by a program of its own: one custom call, whose handler records it when XLA enqueues the program.
Programs of a device run on one stream in the order of their calls, so two such programs stand around what is called
between them, as events stand around a call in PyTorch. The structures below are those of XLA's `ffi/api/c_api.h`, as
far as they are read here; the driver's functions are called through `ctypes`.
"""

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

API_VERSION = (0, 4)  # of the structures below; XLA takes handlers of older versions, too
METADATA = 1  # kind of the extension by which XLA asks a handler for the version it was made for
NOT_READY = 600  # CUDA_ERROR_NOT_READY: the device has not come to an event
BEGIN, END = range(2)

_names = (f"attention_bench_event_{n}" for n in itertools.count())  # XLA takes a name once


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("kind", ctypes.c_int), ("next", ctypes.c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _StreamGet(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extensions", ctypes.c_void_p), ("version", _Version),
        ("internal", ctypes.c_void_p), ("error_create", ctypes.c_void_p), ("error_details", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p), ("register", ctypes.c_void_p),
        ("stream_get", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extensions", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p), ("stage", ctypes.c_int),
    ]


_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


def handler(execute: Callable[[_CallFrame], None]) -> Any:
    """A C function that XLA can call, which calls `execute`; it raises nothing, since XLA could not take it."""
    @_Handler
    def handle(frame):
        extension = frame.contents.extensions
        if extension and extension.contents.kind == METADATA:
            told = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
            told.version.major, told.version.minor = API_VERSION
            told.traits = 0
        else:
            execute(frame.contents)
    return handle


def stream_of(frame: _CallFrame) -> int:
    """The CUDA stream of a call; RuntimeError where XLA gives none."""
    asked = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
    if frame.api.contents.stream_get(ctypes.byref(asked)) or not asked.stream:
        raise RuntimeError("XLA gave no stream")
    return asked.stream


class DeviceEvents:
    """Two events on a device's stream; between `mark(BEGIN)` and `mark(END)` stands what is timed.

    Args:
      device: JAX's default one if None.

    Raises OSError where there is no CUDA driver.
    """

    def __init__(self, device: jax.Device | None = None, platform: str = "CUDA", driver: Any = None,
                 stream: Callable[[_CallFrame], int] = stream_of):
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        self._stream = stream
        self._events: list[ctypes.c_void_p] = []
        self._streams = [0, 0]
        self._context = ctypes.c_void_p()
        self._fault: Exception | None = None
        self._behind = False
        self._handlers, self._marks = [], []  # XLA holds pointers to the handlers, not references
        there = None if device is None else jax.sharding.SingleDeviceSharding(device)
        for which in (BEGIN, END):
            name = next(_names)
            self._handlers.append(handler(functools.partial(self._record, which)))
            function = ctypes.cast(self._handlers[-1], ctypes.c_void_p)
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function.value), platform=platform)
            self._marks.append(jax.jit(jax.ffi.ffi_call(
                name, jax.ShapeDtypeStruct((), jnp.int32), has_side_effect=True), out_shardings=there))

    def mark(self, which: int) -> jax.Array:
        """Enqueues a program that records an event, BEGIN or END."""
        return self._marks[which]()

    def behind(self) -> bool:
        """Whether the device had come to BEGIN before END was enqueued: then it may have waited for the host."""
        return self._behind

    def seconds(self, last: jax.Array) -> float:
        """Seconds between the two, on the device.

        Args:
          last: what `mark(END)` gave.

        Raises RuntimeError where an event could not be recorded, or the two were on different streams.
        """
        jax.block_until_ready(last)
        fault, self._fault = self._fault, None
        if fault:
            raise RuntimeError(f"no event was recorded: {fault}") from fault
        if self._streams[BEGIN] != self._streams[END]:
            raise RuntimeError("the two events are on different streams")
        milliseconds = ctypes.c_float()
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuEventSynchronize", self._events[END])
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return milliseconds.value / 1e3

    def _record(self, which: int, frame: _CallFrame) -> None:
        """In a thread of XLA's, which may have served another device last."""
        try:
            self._streams[which] = self._stream(frame)
            stream = ctypes.c_void_p(self._streams[which])
            self._call("cuStreamGetCtx", stream, ctypes.byref(self._context))
            self._call("cuCtxPushCurrent_v2", self._context)
            try:
                while len(self._events) < 2:
                    made = ctypes.c_void_p()
                    self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(0))
                    self._events.append(made)
                self._call("cuEventRecord", self._events[which], stream)
                if which == END:
                    self._behind = self._driver.cuEventQuery(self._events[BEGIN]) != NOT_READY
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        except Exception as fault:  # XLA could not take it; `seconds` raises it
            self._fault = fault

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise RuntimeError(f"{function}: CUDA error {status}")
