"""What a kernel's record holds in either stack, and how it refuses what it cannot take."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from workload.capability import Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem, check_kind, of_problem


def _always() -> None:
    return None


@dataclasses.dataclass(frozen=True)
class KernelRecord:
    """One named kernel: what it takes, and its three functions (WORKSPACE.md has their contract).

    Attributes:
      stack: whose it is.
      name: its name in the stack's table.
      capability: the problems it takes.
      prepare: (problem, device=None, **options) -> operands; TypeError on what is no `AttentionProblem`.
      forward: (q, k, v, operands, scale, *, out_dtype=None) -> (out, lse).
      backward: (q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None) -> (dq, dk, dv).
      available: None where it runs on this machine, else the reason.
    """

    stack: ClassVar[str]
    name: str
    capability: Capability
    prepare: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    available: Callable[[], str | None] = _always

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
            raise Unsupported(f"{self.stack} kernel {self.name}", reason)

    def require_options(self, options: Iterable[str]) -> None:
        """Raises TypeError naming the kernel and the option that its `prepare` does not have."""
        parameters = inspect.signature(self.prepare).parameters.values()
        known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                has = ", ".join(known) or "none"
                raise TypeError(f"{self.stack} kernel {self.name}: no option {name!r}; it has {has}")
