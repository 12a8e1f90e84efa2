"""Kernels of both stacks against each other in one process, interleaved, so that ratios are read at one temperature.

    python -m bench.peers --contenders=jax:flashmask,jax:cudnn,torch:fa3,torch:cudnn_flex,torch:flex \
        --mask=full --mask=causal --mask=causal_document --seq_lens=8192,32768 --heads=64:8 --out=peers.jsonl

A contender is stack:kernel. In each round every contender runs once, in an order drawn anew: it first runs untimed for
--warm_up seconds, since the card's clock follows the power that the one before it drew, then for --seconds. A rate is
the pass's exact FLOPs over the median of the rounds; the ratio is to --against. One JSON line a case and pass.
"""

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags, logging

from bench import environment
from bench.cases import ProblemSpec
from workload.errors import Unsupported
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

CONTENDERS = flags.DEFINE_list(
    "contenders", ["jax:flashmask", "jax:fa3", "jax:cudnn", "torch:fa3"], "stack:kernel pairs."
)
AGAINST = flags.DEFINE_string("against", "torch:fa3", "The contender that ratios are to.")
MASKS = flags.DEFINE_multi_enum("mask", ["full", "causal"], tuple(ALL_BUILDERS), "Masks (repeat the flag).")
SEQ_LENS = flags.DEFINE_list("seq_lens", ["8192"], "Tokens.")
HEADS = flags.DEFINE_list("heads", ["64:8"], "q_heads:kv_heads pairs.")
HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Head dimension.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ("bfloat16", "float16"), "Of all tensors.")
PASSES_FLAG = flags.DEFINE_multi_enum("pass", list(PASSES), PASSES, "Passes (repeat the flag).")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds of a case.", lower_bound=1)
SECONDS = flags.DEFINE_float("seconds", 0.1, "Timed seconds of a contender in a round.", lower_bound=0)
WARM_UP = flags.DEFINE_float("warm_up", 0.1, "Untimed seconds before them.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "File that JSON lines are added to.")


@dataclasses.dataclass(frozen=True)
class Contender:
    """A compiled pass on its operands.

    Attributes:
      name: stack:kernel.
      call: runs it once, without waiting.
      finish: waits for a result of call.
    """

    name: str
    call: Callable[[], object]
    finish: Callable[[object], object]

    def seconds(self, runs: int) -> float:
        """Seconds of a call, as the mean over `runs` calls in a row."""
        result, begin = None, time.perf_counter()
        for _ in range(runs):
            result = self.call()
        self.finish(result)
        return (time.perf_counter() - begin) / runs


def contender(stack, kernel_name: str, problem, which: str) -> Contender:
    """Prepares and compiles a pass of a kernel; raises `Unsupported` where it cannot take the problem."""
    kernel = stack.kernel(kernel_name)
    kernel.require(problem, ("forward",) if which == "forward" else PASSES)
    q, k, v, dout = stack.random(problem)
    operands = stack.prepare(kernel, problem)

    def forward(q, k, v, operands):
        return kernel.forward(q, k, v, operands, problem.scale)

    def backward(q, k, v, out, lse, dout, operands):
        return kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)

    arguments = (q, k, v, operands)
    run, _, first = stack.compile((kernel_name, "forward", problem.scale), forward, *arguments)
    if which == "backward":
        arguments = (q, k, v, *first, dout, operands)
        run, _, _ = stack.compile((kernel_name, "backward", problem.scale), backward, *arguments)
    return Contender(f"{stack.name}:{kernel_name}", lambda: run(*arguments), stack.finish)


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


def row_of(spec: ProblemSpec, which: str, flops: int, found: dict, refused: dict, against: str) -> dict:
    """The record of a case: median rates in TFLOP/s, the spread of the rounds, ratios to `against`, refusals."""
    middle = {name: float(np.median(x)) for name, x in found.items()}
    base = middle.get(against)
    return {
        "case": dataclasses.asdict(spec), "pass": which, "flops": flops, "against": against,
        "tflops": {name: flops / x / 1e12 for name, x in middle.items()},
        "spread": {name: float(np.ptp(x) / np.median(x)) for name, x in found.items()},
        "ratio": {name: base / x for name, x in middle.items()} if base else {},
        "refused": refused, "environment": environment.machine(),
    }


def run_case(stacks: dict, spec: ProblemSpec, which: str) -> dict:
    """Measures one problem and pass with every contender that takes it."""
    problem, ready, refused = spec.problem(), [], {}
    for name in CONTENDERS.value:
        stack, kernel = name.split(":")
        try:
            ready.append(contender(stacks[stack], kernel, problem, which))
        except Unsupported as reason:
            refused[name] = str(reason)
    found = interleave(ready, ROUNDS.value, SECONDS.value, WARM_UP.value)
    return row_of(spec, which, problem.flops(which), found, refused, AGAINST.value)


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    # Both stacks live in this process: JAX must not take the card's memory for itself.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    names = {name.split(":")[0] for name in CONTENDERS.value}
    stacks = {name: importlib.import_module(f"bench.{name}_stack").Stack() for name in sorted(names)}
    for seq_len in map(int, SEQ_LENS.value):
        for heads in HEADS.value:
            q_heads, kv_heads = map(int, heads.split(":"))
            for mask in MASKS.value:
                spec = ProblemSpec(mask, seq_len, 0, 1, q_heads, kv_heads, HEAD_DIM.value, DTYPE.value)
                for which in PASSES_FLAG.value:
                    row = run_case(stacks, spec, which)
                    rates = ", ".join(f"{n} {x:.0f}" for n, x in sorted(row["tflops"].items(), key=lambda x: -x[1]))
                    logging.info("%s %d %s %s: %s TFLOP/s", mask, seq_len, heads, which, rates)
                    if OUT.value:
                        with Path(OUT.value).open("a", encoding="utf-8") as file:
                            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    app.run(main)
