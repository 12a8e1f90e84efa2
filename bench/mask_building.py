"""Times the building of every static mask, and what is derived from it, at a length; counts peak memory.

    python -m bench.mask_building --seqlen=1M

The bar: a million tokens in under a second and 100 MB, for every pattern. Exits with 1 where one misses it.
"""

import functools
import time
import tracemalloc

from absl import flags
from rich.console import Console
from rich.table import Column, Table

from bench import options, program
from workload.masks import STATIC_MASKS
from workload.suite import static_arguments

SEQLEN = options.define_tokens("seqlen", "1M", "Sequence length in tokens")
REPEATS = flags.DEFINE_integer("repeats", 3, "Builds of each mask; the fastest counts.", lower_bound=1)
SECONDS = options.define_float("seconds", 1.0, "Bar of the time of a build.", lower_bound=0)
MEGABYTES = options.define_float("megabytes", 100.0, "Bar of a build's peak memory, in 1e6 bytes.", lower_bound=0)
TILE = flags.DEFINE_integer("tile", 128, "Tile size of the tile runs.", lower_bound=1)


def measure(work, repeats: int):
    """(result, least seconds, peak bytes) of work()."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    del result
    tracemalloc.start()
    result = work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, min(seconds), peak


def rows(seq_len: int, repeats: int, tile: int):
    """For each pattern: name, then (seconds, peak bytes) of the build, the transpose and the tile runs."""
    for name in STATIC_MASKS:
        arguments = static_arguments(name, seq_len)
        mask, *build = measure(functools.partial(STATIC_MASKS[name], seq_len, seq_len, **arguments), repeats)
        _, *transpose = measure(mask.transpose, repeats)
        _, *tiles = measure(functools.partial(mask.tile_runs, tile, tile), repeats)
        yield name, build, transpose, tiles


def main() -> int:
    """Prints time and memory of each mask; 1 where one exceeds the limits."""
    seq_len = options.tokens(SEQLEN.value)
    table = Table(Column("mask", no_wrap=True), title=f"{seq_len:,} tokens; MB is the peak of a stage")
    for heading in ("build", "transpose", f"tiles of {TILE.value}"):
        table.add_column(f"{heading}\nms", justify="right", no_wrap=True)
        table.add_column("\nMB", justify="right", no_wrap=True)
    missed = []
    for name, *stages in rows(seq_len, REPEATS.value, TILE.value):
        table.add_row(name, *(text for s, b in stages for text in (f"{1e3 * s:.0f}", f"{b / 1e6:.0f}")))
        if stages[0][0] > SECONDS.value or stages[0][1] > 1e6 * MEGABYTES.value:
            missed.append(name)
    Console().print(table)
    if missed:
        print(f"over {SECONDS.value} s or {MEGABYTES.value} MB: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    program.run(main)
