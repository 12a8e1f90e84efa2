"""Compiling a third-party kernel without running it."""

from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workload.problem import PASSES, AttentionProblem


def compile_on_fakes(prepare: Callable, forward: Callable, backward: Callable) -> Callable[..., None]:
    """A kernel's `compile_ahead` where its package compiles, and launches nothing, when its tensors are fake."""
    def compile_ahead(problem: AttentionProblem, device: torch.device, passes: Iterable[str] = PASSES) -> None:
        dtype = getattr(torch, problem.dtype)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            q, k, v = (torch.empty(s, dtype=dtype, device=device) for s in (problem.q_shape, *[problem.kv_shape] * 2))
            operands = prepare(problem, device)
            out, lse = forward(q, k, v, operands, problem.scale)
            if "backward" in passes:
                backward(q, k, v, out, lse, torch.empty_like(q), operands, problem.scale)
    return compile_ahead
