"""Contenders of one race: every one runs in every round, so that their ratios are read at one temperature."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.passes import passes_of
from parity.compare import OF_PASS, errors, over_budget
from parity.reference import Reference, Sample
from workload.problem import PASSES


@dataclasses.dataclass(frozen=True)
class Contender:
    """A compiled pass on its operands.

    Attributes:
      name: stack:kernel.
      call: runs it once, without waiting.
      finish: waits for a result of call.
      results: of the pass, by name, as `call` returns them.
    """

    name: str
    call: Callable[[], Any]
    finish: Callable[[object], object]
    results: tuple[str, ...] = ()

    def seconds(self, runs: int) -> float:
        """Seconds of a call, as the mean over `runs` calls in a row."""
        result, begin = None, time.perf_counter()
        for _ in range(runs):
            result = self.call()
        self.finish(result)
        return (time.perf_counter() - begin) / runs


def contender(stack, kernel_name: str, problem, which: str, tensors=None) -> Contender:
    """Prepares and compiles a pass of a kernel; raises `Unsupported` where it cannot take the problem.

    Args:
      tensors: q, k, v, dout of the stack; random ones if None.
    """
    kernel = stack.kernel(kernel_name)
    kernel.require(problem, ("forward",) if which == "forward" else PASSES)
    q, k, v, dout = tensors or stack.random(problem)
    operands = stack.prepare(kernel, problem)

    forward, backward = passes_of(kernel, problem.scale)
    arguments = (q, k, v, operands)
    run, _, first = stack.compile((kernel_name, "forward", problem.scale), forward, *arguments)
    if which == "backward":
        arguments = (q, k, v, *first, dout, operands)
        run, _, _ = stack.compile((kernel_name, "backward", problem.scale), backward, *arguments)
    return Contender(f"{stack.name}:{kernel_name}", lambda: run(*arguments), stack.finish, OF_PASS[which])


def judged(contender: Contender, stack, problem, sample: Sample, reference: Reference) -> dict[str, Any]:
    """{"errors": ..., "wrong": lines} of one call of a contender, held to the reference at the sampled places."""
    found = dict(zip(contender.results, contender.call(), strict=True))
    got = {name: stack.take(sample.take(name, x, problem.group)) for name, x in found.items()}
    measured = errors(got, reference.results)
    return {"errors": measured, "wrong": over_budget(measured, reference.budget)}


def interleave(contenders: Sequence[Contender], rounds: int, seconds: float, warm_up: float, seed: int = 0):
    """name -> seconds of a call in each round; every contender runs once a round, in an order drawn anew."""
    rng, found = np.random.default_rng(seed), {c.name: [] for c in contenders}
    estimates = {c.name: (c.seconds(1), c.seconds(2))[1] for c in contenders}
    for _ in range(rounds):
        for number in rng.permutation(len(contenders)):
            chosen = contenders[number]
            runs = [max(1, round(share / estimates[chosen.name])) for share in (warm_up, seconds)]
            chosen.seconds(runs[0])
            found[chosen.name].append(chosen.seconds(runs[1]))
    return found


def rates_of(flops: Mapping[str, int], found: Mapping[str, list[float]], against: str) -> dict[str, Any]:
    """Median rates in TFLOP/s, the spread of the rounds, and ratios of rates to that of `against`.

    Args:
      flops: of each contender's call; found: its seconds in each round.
    """
    rates = {name: flops[name] / float(np.median(x)) / 1e12 for name, x in found.items()}
    base = rates.get(against)
    return {
        "against": against, "tflops": rates,
        "spread": {name: float(np.ptp(x) / np.median(x)) for name, x in found.items()},
        "ratio": {name: x / base for name, x in rates.items()} if base else {},
    }
