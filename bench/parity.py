"""Do the two stacks agree? Both against the float64 reference, and against each other, cell by cell.

    python -m bench.parity                      # the whole matrix that this machine can run
    python -m bench.parity --resume             # what is left of it
    python -m bench.parity --kernels=naive --masks=causal --shapes=tiny --passes=backward
    python -m bench.parity --status             # how much of the matrix --out holds; runs nothing
    python -m bench.parity --schemes=ring --masks=causal_document --shapes=ranks --worlds=2,4

A cell is a kernel, a mask, a shape and a pass that both stacks offer, or a scheme, a mask and a world of ranks. Its
inputs are made once and stored as an Orbax checkpoint: JAX restores it, PyTorch is handed the raw buffers; of schemes,
by shards. Exits with 1 if a cell fails, and prints the command that repeats just that cell.

Several jobs, each with workers of its own, compile and check cells side by side; on a GPU the cells of shapes that are
to be timed come first and are timed alone, the stacks in turns.
"""

import concurrent.futures
import contextlib
import math
import os
from pathlib import Path

from absl import flags
from rich.console import Console
from rich.table import Table

from bench import engine, options, parity_kernels, parity_schemes, parity_status, program, records
from bench.cases import STACKS
from bench.parity_cells import Problems, Rows
from bench.report import tables
from bench.workers import Worker
from parity.matrix import CPU_SHAPES, GPU_SHAPES, KERNEL_SHAPES, RANK_SHAPES, SHAPES
from workload.problem import PASSES
from workload.scratch import scratch
from workload.sharding import KINDS
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES

MOST_JOBS, MOST_JUDGES = 8, 4


def define() -> None:
    """Defines the flags."""
    options.define_list("kernels", ["all"], f"Kernels: all, or some of {', '.join(parity_kernels.SHARED)}.")
    options.define_list("schemes", ["all"], f"Schemes: all, or some of {', '.join(SCHEMES)}.")
    options.define_list("masks", ["all"], f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    options.define_list(
        "shapes", ["machine"], "Shapes: machine (those that suit it), all, or some of "
        f"{', '.join(KERNEL_SHAPES)} for kernels and {', '.join(RANK_SHAPES)} for schemes.")
    options.define_list("passes", ["all"], "Passes of kernels: all, or some of forward, backward.")
    options.define_list("worlds", ["machine"], "Ranks of schemes: machine (2, 3, 4 on a CPU; 2, 4, 8 as there are "
                        "GPUs), or numbers.")
    options.define_list("sharding", ["zigzag"], f"Shardings of schemes: all, or some of {', '.join(KINDS)}.")
    flags.DEFINE_integer("seed", 0, "Of documents, mask parameters and inputs.", lower_bound=0)
    flags.DEFINE_integer("jobs", 0, "Cells of kernels that are compiled and checked side by side, of schemes as many "
                         "ranks; 0: as suits the machine.", lower_bound=0)
    options.define_float("seconds", 0.0, "No further cell is begun after this; 0: no limit.", lower_bound=0)
    options.define_out("out/parity.jsonl")
    options.define_resume()
    flags.DEFINE_bool("status", False, "Tells how much of the matrix --out holds, and runs nothing.")
    options.define_float("deadline", 180.0, "Seconds a step of a cell may take.", lower_bound=1)


def cells_of(values: flags.FlagValues, gpus: int) -> tuple[list[parity_kernels.Cell], list[parity_schemes.Cell]]:
    """The cells that the flags ask for on a machine with so many GPUs. ValueError names the flag."""
    kernels = options.choose("kernels", values.kernels, parity_kernels.SHARED)
    schemes = options.choose("schemes", values.schemes, SCHEMES)
    masks = options.choose("masks", values.masks, ALL_BUILDERS)
    which = options.choose("passes", values.passes, PASSES)
    sharding = options.choose("sharding", values.sharding, KINDS)
    shapes = (*(GPU_SHAPES if gpus else CPU_SHAPES), RANK_SHAPES[bool(gpus)]) if values.shapes == ["machine"] else \
        options.choose("shapes", values.shapes, tuple(SHAPES))
    if values.worlds == ["machine"]:
        worlds = [n for n in (2, 4, 8) if n <= gpus] if gpus else [2, 3, 4]
    else:
        worlds = options.worlds(values.worlds)
    return (
        parity_kernels.cells(kernels, masks, [s for s in shapes if s in KERNEL_SHAPES], which, values.seed),
        [cell for shape in shapes if shape in RANK_SHAPES
         for cell in parity_schemes.cells(schemes, masks, worlds, sharding, shape, values.seed)],
    )


def run(values: flags.FlagValues, console: Console) -> tuple[list[dict], int]:
    """All rows of the record file, and how many cells are left. ValueError names the flag that is wrong."""
    kernels, _ = cells_of(values, gpus=0)  # bad values are named before anything starts
    asks = bool(kernels) or not values.jobs or "machine" in (*values.shapes, *values.worlds)  # what machine it is
    with contextlib.ExitStack() as held:
        out = Path(values.out)
        writer = held.enter_context(engine.open_records(engine.Options(out, *options.resumption(values))))
        workers = [held.enter_context(engine.Workers()) for _ in range((values.jobs if kernels else 0) or 1)]
        judges = [held.enter_context(Worker("judge")) for _ in range(MOST_JUDGES)]
        threads = held.enter_context(concurrent.futures.ThreadPoolExecutor(len(workers) + MOST_JUDGES))
        for judge in judges[: values.jobs or 1]:  # importing takes seconds
            threads.submit(judge.ask, f"{engine.TASKS}:ready", values.deadline, stack="judge")
        if asks:
            list(threads.map(lambda several: several.start(STACKS, values.deadline), workers))
        gpu = asks and engine.on_gpu(workers[0], values.deadline)
        gpus = workers[0]["jax"].ask(f"{engine.TASKS}:devices", values.deadline) if gpu else 0
        of_kernels, of_schemes = cells_of(values, gpus)
        todo = {cell.key for cell in of_kernels} | {cell.key for cell in of_schemes}
        left = len(todo - writer.keys)
        console.print(f"{len(todo)} cells, {len(todo) - left} of them done; records: {out}")
        rows = Rows(writer, left, console, values.seconds or math.inf)
        jobs = values.jobs or (min(MOST_JOBS, len(os.sched_getaffinity(0)) // 2) if gpus else 1)
        problems = Problems(held.enter_context(scratch("parity")), values.deadline, judges)
        kernels = [cell for cell in of_kernels if cell.key not in writer.keys]
        workers += [held.enter_context(engine.Workers()) for _ in range(min(jobs, len(kernels)) - len(workers))]
        if kernels:
            parity_kernels.run(kernels, rows, problems, values.deadline, workers)
        for several in workers:
            several.close()  # the schemes' ranks take their place
        schemes = [cell for cell in of_schemes if cell.key not in writer.keys]
        most = max(1, jobs // max(cell.case.world for cell in schemes)) if schemes else 0
        parity_schemes.run(schemes, rows, problems, values.deadline, most)
        return records.read(out), len(todo - writer.keys)


def tell(rows: list[dict], console: Console) -> int:
    """Prints how much of the matrix the rows hold; 1 where a cell failed."""
    found = parity_status.status(rows)
    head, body = parity_status.table(found)
    table = Table(*head, title="Cells of the matrix: agree / refused / not run", title_justify="left")
    for line in body:
        table.add_row(*line)
    console.print(table)
    failed = [key for one in found.values() for key in one.failed]
    for key in failed:
        console.print(f"fails: {key}", markup=False)
    return 1 if failed else 0


def main() -> int:
    """Runs the cells that the flags name; 1 where one failed, 2 for bad flags."""
    values = flags.FLAGS
    console = Console(highlight=False, soft_wrap=True)
    if values.status:
        if not Path(values.out).is_file():
            raise ValueError(f"--out: no such file: {values.out}")
        return tell(records.read(Path(values.out)), console)
    rows, left = run(values, console)
    tables.parity_table([row for row in rows if row["status"] != "unsupported"], console)
    count = {s: sum(row["status"] == s for row in rows) for s in records.STATUSES}
    told = ", ".join(f"{n} {status}" for status, n in count.items() if n) or "no cell is done"
    print(told + (f"; {left} of this run are left: --resume" if left else ""))
    return 1 if len(rows) > count["ok"] + count["unsupported"] else 0


if __name__ == "__main__":
    define()
    program.run(main)
