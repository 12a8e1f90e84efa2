"""A quick run of the bench on this machine: every mask, both stacks, checked, timed; ends with the report.

    make bench

On a CPU it takes short lengths in float32 and stays under four minutes on two cores; where both stacks find a GPU it
takes 8K tokens of 64:8 heads in bfloat16, mask by mask until --seconds are over. The record file of an earlier quick
run is replaced.
"""

import os
import sys
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console

from bench import engine, options, program
from bench.cases import STACKS, Case, ProblemSpec, differing
from bench.engine import Options
from bench.report.write import write_report
from bench.timing import Protocol
from workload.masks import STATIC_MASKS
from workload.problem import PASSES

CPU_SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
GPU_SHAPE: dict[str, Any] = {"q_heads": 64, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
DYNAMIC = (("uniform_block", 64), ("uniform_block", 128), ("variable_block", 64))
CPU_LENGTHS, GPU_LENGTHS = (256, 640), (8192,)
INTERPRETED = ("fa1", "fa2", "triton_vsa", "fa2_sparse")  # in JAX, on a CPU: checked, for their times tell little
DENSE = (("jax", "naive"), ("torch", "naive"), ("jax", "sdpa"))
FIRST = ("full", "causal", "causal_document", "uniform_block", "shared_question")  # should the time end before the rest
MOST_WORKERS = 6


def quick_cases(gpu: bool) -> list[Case]:
    """The rows of the quick run, telling masks first.

    On a GPU without kernels that hold all logits there (DENSE: 17 GB each); interpreted ones at the first length alone.
    Windows and blocks keep the share of a length that the paper's have of 8K.
    """
    shape, lengths = (GPU_SHAPE, GPU_LENGTHS) if gpu else (CPU_SHAPE, CPU_LENGTHS)
    specs = [
        ProblemSpec(mask, n, settings=differing(window=max(16, n // 8), block=max(16, n // 8)), **shape)
        for n in lengths for mask in STATIC_MASKS
    ] + [
        ProblemSpec(mask, n, settings=differing(sparse_block=block, density=0.5), **shape)
        for n in lengths for mask, block in DYNAMIC
    ]

    def skipped(stack, kernel, spec):
        if gpu:
            return (stack, kernel) in DENSE
        return stack == "jax" and kernel in INTERPRETED and spec.seq_len != lengths[0]

    specs.sort(key=lambda spec: FIRST.index(spec.mask) if spec.mask in FIRST else len(FIRST))
    return [
        Case(stack, kernel, which, spec)
        for spec in specs for stack in STACKS for kernel in options.KERNELS[stack] for which in PASSES
        if not skipped(stack, kernel, spec)
    ]


def define() -> None:
    """Defines the flags."""
    options.define_folder("out/quick", "Where records and report go.")
    options.define_float("deadline", 60.0, "Seconds a row may take.", lower_bound=1)
    options.define_float("seconds", 200.0, "No further row is begun after this.", lower_bound=0)


def main() -> int:
    """Runs every part in turn and writes the report; 1 where a row failed."""
    values = flags.FLAGS
    with engine.Workers() as workers:
        workers.start(STACKS, values.deadline)
        gpu = engine.on_gpu(workers, values.deadline)
    folder = Path(values.folder)
    out = folder / "records.jsonl"
    out.unlink(missing_ok=True)
    protocol = Protocol(samples=15, seconds=0.3) if gpu else Protocol(samples=7, seconds=0.1, warmups=4)
    console = Console(highlight=False, soft_wrap=True)
    workers = min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0)) // 2)) if gpu else 1
    how = Options(out, deadline=values.deadline, protocol=protocol, seconds=values.seconds, workers=workers,
                  ahead=False)
    rows = engine.run(quick_cases(gpu), how, console)
    write_report(rows, folder, console)
    bad = [row for row in rows if row["status"] not in ("ok", "unsupported")]
    for row in bad:
        print(engine.line(row), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    define()
    program.run(main)
