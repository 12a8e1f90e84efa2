"""What any measurement of a kernel runs: its two passes as functions of tensors alone, and the tensors."""

from collections.abc import Callable
from typing import Any

from parity.inputs import TENSORS, InputSpec, places, pool
from workload.problem import AttentionProblem


def passes_of(kernel, scale: float) -> tuple[Callable, Callable]:
    """(forward(q, k, v, operands), backward(q, k, v, out, lse, dout, operands)) of a kernel of either stack."""
    def forward(q, k, v, operands):
        return kernel.forward(q, k, v, operands, scale)

    def backward(q, k, v, out, lse, dout, operands):
        return kernel.backward(q, k, v, out, lse, dout, operands, scale)

    return forward, backward


class Inputs:
    """Inputs of problems on a stack's device, the judge's own bits; those of the last shape are kept.

    All masks of a shape read the same tensors.
    """

    def __init__(self, stack):
        self._stack, self._shape = stack, None
        self._made: dict[InputSpec, tuple] = {}
        self._pools: dict[tuple, Any] = {}

    def of(self, problem: AttentionProblem, spec: InputSpec) -> tuple:
        """q, k, v, dout."""
        shape = (problem.q_shape, problem.kv_shape, problem.dtype)
        if shape != self._shape:
            self._made.clear()
            self._shape = shape
        if spec not in self._made:
            drawn = (spec.seed, problem.dtype)
            if drawn not in self._pools:
                self._pools = {drawn: self._stack.put(pool(*drawn))}
            found = places(problem.q_shape, problem.kv_shape, spec)
            if any(other.seed != spec.seed for other in self._made):
                self._made.clear()
            self._made[spec] = tuple(self._stack.tiled(self._pools[drawn], *found[name]) for name in TENSORS)
        return self._made[spec]
