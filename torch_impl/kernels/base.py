"""The kernel record of the PyTorch stack; its twin is jax_impl/kernels/base.py."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from workload.capability import Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem


def _always() -> None:
    return None


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
      compile_ahead: (problem, device, passes) -> None, compiles what the passes need and launches nothing; None where
        the compiler runs at a first call alone.
    """

    name: str
    capability: Capability
    prepare: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    available: Callable[[], str | None] = _always
    compile_ahead: Callable[..., None] | None = None

    def refuse(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> str | None:
        """Why it cannot run this problem here: the machine's reason first, then the argument's."""
        return self.available() or self.capability.refuse(problem, passes)

    def require(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> None:
        """Raises `Unsupported` with the reason where `refuse` has one."""
        reason = self.refuse(problem, passes)
        if reason:
            raise Unsupported(f"torch kernel {self.name}", reason)
