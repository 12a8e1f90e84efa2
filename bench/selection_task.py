"""What a worker does for a selection row: time pooled scores, top-k and top-p of one stack on a problem's blocks."""

import dataclasses
import functools
import importlib
from typing import Any

from bench import cases
from bench.attention_task import stack_of
from bench.timing import Protocol, measure

STEPS = ("pooled_scores", "top_k", "top_p")
MASS = 0.9  # of the softmax, that top-p keeps


def clock(case: dict[str, Any], step: str, protocol: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step of the selection for a case's mask, cold cache on a GPU.

    Args:
      case: as `Case.record` wrote it, of a dynamic mask; step: one of STEPS.
    """
    chosen = cases.from_record(case)
    stack, problem = stack_of(chosen.stack), chosen.spec.problem()
    selection, mask = importlib.import_module(f"{chosen.stack}_impl.selection"), problem.mask
    q, k, *_ = stack.random(problem)
    pool = functools.partial(selection.pooled_scores, q_bounds=mask.q_bounds, kv_bounds=mask.kv_bounds)
    compiled, _, scores = stack.compile(("pooled_scores", chosen.spec.label), pool, q, k)
    arguments: tuple = (q, k)
    if step != "pooled_scores":
        given: dict[str, dict[str, Any]] = {"top_k": {"k": int(mask.counts.max())}, "top_p": {"p": MASS}}
        choose = functools.partial(getattr(selection, step), **given[step])
        arguments = (scores,)
        compiled, _, _ = stack.compile((step, chosen.spec.label), choose, scores)
    stack.finish(compiled(*arguments))
    timing = measure(stack.sampler(lambda n: compiled(*arguments), True), Protocol(**protocol))
    return {"timer": stack.timer, "seconds": timing.record(), "blocks": [mask.heads, mask.q_blocks, mask.kv_blocks]}


def options_of(protocol: Protocol) -> dict[str, Any]:
    """A protocol as `clock` takes it."""
    return dataclasses.asdict(protocol)
