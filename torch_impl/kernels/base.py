"""The kernel record of the PyTorch stack; its twin is jax_impl/kernels/base.py."""

import dataclasses
from collections.abc import Callable
from typing import Any

from workload.kernel import KernelRecord


@dataclasses.dataclass(frozen=True)
class Running:
    """How the keys of one call are added to what earlier calls made of others: the steps of a ring.

    What is carried from call to call is None before the first, and changed in place.

    Attributes:
      forward: (part, q, k, v, operands, scale, *, out_dtype=float32) -> part: out and lse; only the last call's out may
        be of another dtype.
      backward: (total, q, k, v, out, lse, dout, operands, scale, *, delta) -> (total, dk, dv), float32: dq so far, and
        dk, dv of these keys; out, lse and delta of all keys.
      parts: the arguments of backward -> (query, keys): query() gives its total, keys() its dk, dv, called in either
        order; None where the kernel makes them together.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    parts: Callable[..., Any] | None = None

    def result(self, part, q):
        """out and lse of all calls; (0, -inf) where there was none."""
        if part is not None:
            return part
        batch, rows, heads, _ = q.shape
        return q.new_zeros(q.shape).float(), q.new_full((batch, heads, rows), float("-inf")).float()

    def gradient(self, total, q, scale: float):
        """dq float32 of all calls."""
        del scale  # it is in already
        return q.new_zeros(q.shape).float() if total is None else total


@dataclasses.dataclass(frozen=True)
class Kernel(KernelRecord):
    """A kernel of this stack; its operands are a dataclass of tensors on the device that `prepare` is given.

    Attributes:
      running: how it adds to what earlier calls made; None where results are merged outside of it.
      compile_ahead: (problem, device, passes) -> None, compiles what the passes need and launches nothing, device
        named with its index; None where the compiler runs at a first call alone.
    """

    stack = "torch"
    running: Running | None = None
    compile_ahead: Callable[..., None] | None = None
