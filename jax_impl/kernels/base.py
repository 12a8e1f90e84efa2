"""The kernel record of the JAX stack; its twin is torch_impl/kernels/base.py."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from workload.kernel import KernelRecord


def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, traced with JAX's own rules of promotion whatever a caller's code is held to."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        import jax  # here: whoever asks what there is reads these records without the stack

        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def _wrap(record: Any, *names: str) -> None:
    for name in names:
        if getattr(record, name) is not None:
            object.__setattr__(record, name, _promoting(getattr(record, name)))


@dataclasses.dataclass(frozen=True)
class Running:
    """How a kernel adds the keys of one call to what earlier calls made of others: the steps of a ring.

    What is carried from call to call is the kernel's own, a pytree of arrays, None before the first call.

    Attributes:
      forward: (part, q, k, v, operands, scale, *, out_dtype=float32) -> part; another dtype in the last call alone.
      result: (part, q) -> (out, lse).
      backward: (total, q, k, v, out, lse, dout, operands, scale, *, delta) -> (total, dk, dv), dk, dv float32 of these
        keys; out, lse and delta of all keys.
      gradient: (total, q, scale) -> dq float32.
    """

    forward: Callable[..., Any]
    result: Callable[..., Any]
    backward: Callable[..., Any]
    gradient: Callable[..., Any]

    def __post_init__(self):
        _wrap(self, "forward", "result", "backward", "gradient")


@dataclasses.dataclass(frozen=True)
class Kernel(KernelRecord):
    """A kernel of this stack; its operands are a pytree of arrays with hashable static parts.

    Attributes:
      running: how it adds to what earlier calls made; None where results are merged outside of it.
    """

    stack = "jax"
    running: Running | None = None

    def __post_init__(self):
        super().__post_init__()
        _wrap(self, "prepare", "forward", "backward")
