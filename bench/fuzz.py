"""Random problems through both stacks against the float64 reference, until the time is up.

    python -m bench.fuzz --seconds=60 --seed=1

Shapes, masks and their parameters, heads and dtypes are drawn from the seed; every kernel that takes a problem here
runs it, forward and backward. Nothing is timed. Prints the case of every row that is wrong or fails, and exits with 1
then; a problem is drawn again from its number alone: --seed and --first find it.
"""

import time
from pathlib import Path

import numpy as np
from absl import flags
from rich.console import Console

from bench import engine, options, program
from bench.cases import STACKS, Case, ProblemSpec, differing
from workload.capability import DYNAMIC_MASKS
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

SAME_SHAPE = 6


def draw(seed: int, number: int, longest: int) -> ProblemSpec:
    """Problem `number` of a seed: the same in every process. SAME_SHAPE problems in a row share what is compiled."""
    of_shape = np.random.Generator(np.random.PCG64([seed, number // SAME_SHAPE, 1]))
    seq_len = int(of_shape.integers(1, longest + 1))
    q_len = 0 if of_shape.random() < 0.3 else int(of_shape.integers(1, longest + 1))
    batch, kv_heads, group = (int(of_shape.integers(1, most + 1)) for most in (2, 3, 3))
    head_dim = int(of_shape.choice([16, 32, 64, 72, 128]))
    dtype = str(of_shape.choice(["float32", "bfloat16", "float16"]))
    rng = np.random.Generator(np.random.PCG64([seed, number]))
    block = int(rng.choice([16, 64, 128]))
    share = float(np.round(rng.random(), 2))
    settings = differing(
        window=int(rng.integers(0, seq_len + 2)), block=int(rng.integers(1, seq_len + 1)),
        prefix_share=share, global_share=float(np.round(rng.random() ** 2, 2)), documents="pile",
        cap=float(rng.choice([0.25, 1.0])), answers=int(rng.integers(1, 5)),
        sparse_block=block, sparse_minimum=max(1, min(block, seq_len, q_len or seq_len) // 2),
        density=float(rng.choice([0.1, 0.5, 1.0])),
        sparse_causal=bool(rng.random() < 0.5))
    mask = str(rng.choice(ALL_BUILDERS))
    heads = kv_heads * group, kv_heads
    mask_heads = int(rng.choice([1, *heads])) if mask in DYNAMIC_MASKS else 0
    return ProblemSpec(mask, seq_len, q_len, batch, *heads, head_dim, dtype, number, settings, mask_heads)


def rows_of(spec: ProblemSpec, kernels: tuple[str, ...]) -> list[Case]:
    """Every kernel of both stacks on a problem, both passes."""
    return [Case(stack, kernel, which, spec) for stack in STACKS for kernel in kernels
            if kernel in options.KERNELS[stack] for which in PASSES]


def define() -> None:
    """Defines the flags."""
    options.define_float("seconds", 60.0, "No further problem is begun after this.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Of everything that is drawn.", lower_bound=0)
    flags.DEFINE_integer("first", 0, "Number of the first problem.", lower_bound=0)
    flags.DEFINE_integer("count", 10_000, "Most problems.", lower_bound=1)
    flags.DEFINE_integer("longest", 400, "Longest sequence in tokens.", lower_bound=2)
    options.define_list("kernels", ["all"], f"Kernels: all, or some of {', '.join(options.ALL_KERNELS)}.")
    options.define_out("out/fuzz.jsonl", "Record file; replaced.")
    options.define_float("deadline", 120.0, "Seconds a row may take.", lower_bound=1)


def main() -> int:
    """Draws and runs problems until the time or the count is up; 1 where one failed, 2 for bad flags."""
    values = flags.FLAGS
    console = Console(highlight=False, soft_wrap=True)
    kernels = options.choose("kernels", values.kernels, options.ALL_KERNELS)
    out = Path(values.out)
    out.unlink(missing_ok=True)
    settings = engine.Options(out, deadline=values.deadline, timed=False)
    began, number, ran, bad = time.monotonic(), values.first, 0, []
    with engine.Session(settings) as session:
        while number < values.first + values.count and time.monotonic() - began < values.seconds:
            spec = draw(values.seed, number, values.longest)
            for case in rows_of(spec, kernels):
                row = session.measure(case)
                ran += row["status"] == "ok"
                if row["status"] not in ("ok", "unsupported"):
                    bad.append(row)
                    console.print(f"problem {number}: {engine.line(row)}", markup=False)
                    console.print(f"    again: python -m bench.fuzz --seed={values.seed} --first={number} --count=1 "
                                  f"--kernels={case.kernel}", markup=False)
            number += 1
    print(f"{number - values.first} problems, {ran} rows right, {len(bad)} not")
    return 1 if bad else 0


if __name__ == "__main__":
    define()
    program.run(main)
