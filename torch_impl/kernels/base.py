"""The kernel record of the PyTorch stack; its twin is jax_impl/kernels/base.py."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from workload.capability import Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem, check_kind, of_problem


def _always() -> None:
    return None


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
class Kernel:
    """One named kernel: what it takes, and its three functions (WORKSPACE.md has their contract).

    Attributes:
      name: its name in the table.
      capability: the problems it takes.
      prepare: (problem, device, **options) -> operands, a dataclass of tensors on that device.
      forward: (q, k, v, operands, scale, *, out_dtype=None) -> (out, lse).
      backward: (q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None) -> (dq, dk, dv).
      available: None where it runs on this machine, else the reason.
      running: how it adds to what earlier calls made; None where results are merged outside of it.
      compile_ahead: (problem, device, passes) -> None, compiles what the passes need and launches nothing, device
        named with its index; None where the compiler runs at a first call alone.
    """

    name: str
    capability: Capability
    prepare: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    available: Callable[[], str | None] = _always
    running: Running | None = None
    compile_ahead: Callable[..., None] | None = None

    def __post_init__(self):
        object.__setattr__(self, "prepare", of_problem(self.prepare))

    def refuse(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> str | None:
        """Why it cannot run this problem here, the machine's reason first; TypeError on what is no problem."""
        check_kind("problem", problem, AttentionProblem)
        return self.available() or self.capability.refuse(problem, passes)

    def require(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> None:
        """Raises `Unsupported` with the reason where `refuse` has one."""
        reason = self.refuse(problem, passes)
        if reason:
            raise Unsupported(f"torch kernel {self.name}", reason)

    def require_options(self, options: Iterable[str]) -> None:
        """Raises TypeError naming the kernel and the option that its `prepare` does not have."""
        parameters = inspect.signature(self.prepare).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                raise TypeError(f"torch kernel {self.name}: no option {name!r}; it has {', '.join(known) or 'none'}")
