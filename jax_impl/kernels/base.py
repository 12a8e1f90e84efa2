"""The kernel record of the JAX stack; its twin is torch_impl/kernels/base.py."""

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


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One named kernel: what it takes, and its three functions (WORKSPACE.md has their contract).

    Attributes:
      name: its name in the table.
      capability: the problems it takes.
      prepare: (problem, **options) -> operands, a pytree of arrays with hashable static parts.
      forward: (q, k, v, operands, scale, *, out_dtype=None) -> (out, lse).
      backward: (q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None) -> (dq, dk, dv).
      available: None where it runs on this machine, else the reason.
      running: how it adds to what earlier calls made; None where results are merged outside of it.
    """

    name: str
    capability: Capability
    prepare: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    available: Callable[[], str | None] = _always
    running: Running | None = None

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
            raise Unsupported(f"jax kernel {self.name}", reason)

    def require_options(self, options: Iterable[str]) -> None:
        """Raises TypeError naming the kernel and the option that its `prepare` does not have."""
        parameters = inspect.signature(self.prepare).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                raise TypeError(f"jax kernel {self.name}: no option {name!r}; it has {', '.join(known) or 'none'}")
