"""Kernels of both stacks against each other in one process, interleaved, so that ratios are read at one temperature.

    python -m bench.peers --contenders=jax:flashmask,jax:cudnn,torch:fa3,torch:cudnn_flex,torch:flex \
        --mask=full --mask=causal --mask=causal_document --seq_lens=8192,32768 --heads=64:8 --out=peers.jsonl

A contender is stack:kernel. In each round every contender runs once, in an order drawn anew: it first runs untimed for
--warm_up seconds, since the card's clock follows the power that the one before it drew, then for --seconds. A rate is
the pass's exact FLOPs over the median of the rounds; the ratio is to --against. One JSON line a case and pass.
"""

import importlib
import json
import os
from pathlib import Path

from absl import app, flags, logging

from bench import options
from bench.cases import ProblemSpec
from bench.interleave import contender, interleave, row_of
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
SECONDS = options.define_float("seconds", 0.1, "Timed seconds of a contender in a round.", lower_bound=0)
WARM_UP = options.define_float("warm_up", 0.1, "Untimed seconds before them.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "File that JSON lines are added to.")


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
