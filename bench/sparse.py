"""Block-sparse kernels in both stacks, beside the dense kernel at the same length: checked, then timed.

    python -m bench.sparse --stack=jax --seqlens=32K --heads=64:64,64:8 --blocks=64,128 --densities=0.2,0.5
    python -m bench.sparse --kernels=vsa:64,flashinfer:128 --dense=fa3 --seqlens=32K --workers=4 --noselection
    python -m bench.report out/sparse.jsonl

FLOPs are counted from the blocks kept. One JSON line a row, as in `bench.dense`; --resume goes on with a file. The
table at the end has each row's speed-up: the dense kernel's time under the full mask over the row's own. Selecting the
blocks (pooled scores, top-k, top-p) is timed in rows, and shown in a table, of its own.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Column, Table

from bench import engine, options, program, records
from bench.cases import STACKS, Case, ProblemSpec, differing
from bench.selection_task import STEPS, options_of
from bench.workers import Failure
from workload.capability import DYNAMIC_MASKS
from workload.problem import PASSES

KERNELS = ("vsa", "triton_vsa", "fa2_sparse", "flex_sparse", "flashinfer", "cudnn_sparse")
DENSE = ("fa3", "flashmask", "cudnn", "sdpa")
SELECTION = "bench.selection_task:clock"


def define() -> None:
    """Defines the flags; once, before `program.run`."""
    options.define_run("out/sparse.jsonl")
    options.define_list("kernels", list(KERNELS), f"Block-sparse kernels: some of {', '.join(options.ALL_KERNELS)}, or "
                        "kernel:block for one at one of --blocks only.")
    options.define_list("dense", list(DENSE), "Dense kernels to hold against; the fastest of a stack counts.")
    options.define_seqlens(["16K", "32K", "64K", "128K"])
    options.define_shapes_of_heads(["64:64", "64:8"])
    options.define_list("blocks", ["64", "128", "256", "variable"], "Block sizes in tokens; variable: of mean 128.")
    options.define_list("densities", ["0.1", "0.2", "0.5", "1.0"], "Shares of key blocks kept.")
    flags.DEFINE_bool("causal", False, "Only key blocks not after the query block, the diagonal masked by element.")
    flags.DEFINE_bool("selection", True, "Also time the selection of blocks.")


def settings_of(block: str, density: float, causal: bool) -> tuple[str, tuple]:
    """(mask, suite settings) of a --blocks entry. ValueError names the flag."""
    if block == "variable":
        return "variable_block", differing(density=density, sparse_causal=causal)
    if not block.isdigit() or not int(block):
        raise ValueError(f"--blocks: {block!r} is neither a number of tokens nor variable")
    return "uniform_block", differing(sparse_block=int(block), density=density, sparse_causal=causal)


def density_of(text: str) -> float:
    """A --densities entry. ValueError names the flag."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise ValueError(f"--densities: {text!r} is not within (0, 1]")
    return value


def kernels_of(entries: Sequence[str], blocks: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """block -> the kernels to run at it, of --kernels entries kernel or kernel:block. ValueError names the flag."""
    names, only = zip(*(entry.partition(":")[::2] for entry in entries), strict=True) if entries else ((), ())
    options.choose("kernels", names, options.ALL_KERNELS)
    for entry, block in zip(entries, only, strict=True):
        if block and block not in blocks:
            raise ValueError(f"--kernels: {entry!r} names a block that --blocks={','.join(blocks)} lacks")
    chosen = {}
    for block in blocks:
        here = [name for name, one in zip(names, only, strict=True) if one in ("", block)]
        chosen[block] = options.choose("kernels", here, options.ALL_KERNELS) if here else ()
    return chosen


def cases(values: flags.FlagValues) -> list[Case]:
    """The rows that the flags ask for: dense ones first, a set for each length and heads. ValueError names the flag."""
    stacks, passes = (options.choose(label, getattr(values, label), allowed)
                      for label, allowed in (("stack", STACKS), ("passes", PASSES)))
    kernels = kernels_of(values.kernels, values.blocks)
    dense = options.choose("dense", values.dense, options.ALL_KERNELS)
    patterns = [(kernels[block], *settings_of(block, density_of(text), values.causal))
                for block in values.blocks for text in values.densities]
    out = []
    for n in options.numbers("seqlens", values.seqlens):
        for heads in values.heads:
            size = (n, 0, values.batch, *options.heads_of(heads), values.head_dim, values.dtype, values.seed)
            specs = [(dense, ProblemSpec("full", *size))]
            specs += [(names, ProblemSpec(mask, *size, settings)) for names, mask, settings in patterns]
            out += [Case(stack, kernel, which, spec) for names, spec in specs for stack in stacks for kernel in names
                    if kernel in options.KERNELS[stack] for which in passes]
    return out


def time_selection(chosen: Sequence[Case], settings: engine.Options) -> None:
    """Adds a row for each stack, problem and step of the selection that the file lacks."""
    todo = {(case.stack, case.spec): case for case in chosen if case.spec.mask in DYNAMIC_MASKS}
    going_on = dataclasses.replace(settings, resume=True)
    with engine.open_records(going_on) as writer, engine.Workers(settings.memory) as workers:
        for (stack, spec), case in todo.items():
            for step in STEPS:
                key = f"selection/{stack}/{step}/{spec.label}"
                if key in writer.keys:
                    continue
                found = workers[stack].ask(SELECTION, settings.deadline, case=case.record(), step=step,
                                           protocol=options_of(settings.protocol))
                told = case.record() | {"step": step}
                row = engine.new_row(key, "selection", told, workers.environment(stack, settings.deadline))
                failed = isinstance(found, Failure)
                writer.write(row | ({"status": found.status, "reason": found.reason} if failed else found))


def speed_ups(rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float | None]]:
    """Each timed block-sparse row, and the dense time of its stack, pass and shape over its own; None without one."""
    def shape(row):
        return tuple(row["case"][x] for x in ("stack", "pass", "seq_len", "batch", "q_heads", "kv_heads", "head_dim"))

    timed = [r for r in rows if r["kind"] == "attention" and r["status"] == "ok" and "seconds" in r]
    dense: dict[tuple, float] = {}
    for row in timed:
        if row["case"]["mask"] == "full":
            dense[shape(row)] = min(row["seconds"]["median"], dense.get(shape(row), float("inf")))
    sparse = [r for r in timed if r["case"]["mask"] in DYNAMIC_MASKS]
    return [(r, dense[shape(r)] / r["seconds"]["median"] if shape(r) in dense else None) for r in sparse]


def _block(case: dict[str, Any]) -> str:
    return "variable" if case["mask"] == "variable_block" else str(case["settings"].get("sparse_block", 128))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Rate and speed-up over dense of every block-sparse row."""
    names = ("stack", "kernel", "pass", "tokens", "heads", "blocks", "density", "ms", "TFLOP/s", "over dense")
    out = Table(*(Column(name, no_wrap=True) for name in names), box=None)
    for row, gain in speed_ups(rows):
        case = row["case"]
        out.add_row(
            case["stack"], case["kernel"], case["pass"], f"{case['seq_len']:,}",
            f"{case['q_heads']}:{case['kv_heads']}", _block(case), f"{row['density']:.2f}",
            f"{row['seconds']['median'] * 1e3:.3f}", f"{row['rate'] / 1e12:.4g}", f"{gain:.2f} x" if gain else "")
    return out


def selections(rows: Sequence[dict[str, Any]]) -> Table:
    """Times of every step of the selection."""
    names = ("selection", "stack", "tokens", "heads", "blocks", "ms")
    out = Table(*(Column(name, no_wrap=True) for name in names), box=None)
    for row in rows:
        if row["kind"] == "selection" and row["status"] == "ok":
            case = row["case"]
            out.add_row(case["step"], case["stack"], f"{case['seq_len']:,}", f"{case['q_heads']}:{case['kv_heads']}",
                        _block(case), f"{row['seconds']['median'] * 1e3:.3f}")
    return out


def run(values: flags.FlagValues) -> list[dict[str, Any]]:
    """Measures what the flags ask for; returns all rows of the file."""
    chosen, settings = cases(values), options.options(values)
    engine.run(chosen, settings)
    if values.selection:
        time_selection(chosen, settings)
    return records.read(Path(settings.out))


def main() -> int:
    """Runs the cases that the flags name; 1 where a row failed, 2 for bad flags."""
    rows = run(flags.FLAGS)
    console = Console(width=120)
    for made in (table(rows), selections(rows)):
        if made.row_count:
            console.print(made)
    return program.ended(flags.FLAGS.out)


if __name__ == "__main__":
    define()
    program.run(main)
