"""Kernels under masks, in both stacks: checked against a float64 reference, then timed.

    python -m bench.dense --kernels=naive,sdpa --seqlens=1K,8K --out=out/dense.jsonl
    python -m bench.report out/dense.jsonl

With --workers=8 eight processes of each stack build, compile and check side by side, and time one after another.
One JSON line a row, written as it is made: a row is a kernel of a stack on a problem in one pass. A run that was
interrupted goes on with --resume. A kernel that cannot run a row here, crashes, hangs or runs out of memory costs that
row, which says why.
"""

from absl import flags

from bench import engine, options, program


def main() -> int:
    """Runs the cases that the flags name; 1 where a row failed, 2 for bad flags."""
    cases, settings = options.cases(flags.FLAGS), options.options(flags.FLAGS)
    engine.run(cases, settings)
    return program.ended(settings.out)


if __name__ == "__main__":
    options.define()
    program.run(main)
