"""What changed between two record files: regressions and gains beyond noise, rows that broke or appeared.

    python -m bench.compare old.jsonl new.jsonl

A change counts when the medians differ by more than both runs' spreads together and by more than --threshold. Exits
with 1 where something became slower, broke or is missing.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench import options, program, records
from bench.timing import Timing
from workload.problem import PASSES

THRESHOLD = options.define_float("threshold", 0.03, "Smallest change that counts, as a share.", lower_bound=0)

VERDICTS = ("broken", "slower", "missing", "mended", "faster", "new", "same")
COUNTED, MOST_COUNTED = ("missing", "new"), 20  # where two runs cover different ground, only their numbers are told
WIDE = 200


@dataclasses.dataclass(frozen=True)
class Change:
    """One row's fate.

    Attributes:
      verdict: one of VERDICTS.
      ratio: new over old median seconds; noise: both spreads together, as a share.
    """

    key: str
    verdict: str
    ratio: float | None = None
    noise: float | None = None
    detail: str = ""


def compare(old: Sequence[dict], new: Sequence[dict], threshold: float = 0.03) -> list[Change]:
    """The change of every key of either file, ceilings left out; of every pass or stack that a row times."""
    before, after = ({(r["kind"], r["key"]): r for r in rows if r["kind"] != "ceiling"} for rows in (old, new))
    return [change for row in dict.fromkeys([*before, *after])
            for change in _changes(row[1], before.get(row), after.get(row), threshold)]


def times(row: dict) -> dict[str, tuple[float, float]]:
    """What a row times, by pass, stack or contender where there are several: median seconds, spread as a share."""
    if row["kind"] in ("replay", "replay_estimate"):
        return {which: (row[which]["predicted"], 0.0) for which in PASSES if which in row}
    seconds = row.get("seconds", {})
    if row["kind"] == "context_parallel":
        return {which: _summary(found["samples"]) for which, found in seconds.items()}
    if row["kind"] == "peers":
        return {name: (row["flops"] / rate / 1e12, row["spread"][name]) for name, rate in row.get("tflops", {}).items()}
    if row["kind"] == "parity":
        return {stack: _summary(samples) for stack, samples in row.get("rounds", {}).items()}
    return {"": (seconds["median"], seconds["spread"])} if "median" in seconds else {}


def _summary(samples: Sequence[float]) -> tuple[float, float]:
    timing = Timing(tuple(samples))
    return timing.median, timing.spread


def _changes(key, old, new, threshold) -> list[Change]:
    if new is None:
        return [Change(key, "missing")]
    if old is None:
        return [Change(key, "new", detail=new["status"])]
    if (old["status"] == "ok") != (new["status"] == "ok"):
        verdict = "broken" if old["status"] == "ok" else "mended"
        return [Change(key, verdict, detail=new["reason"] or old["reason"])]
    before, after = times(old), times(new)
    found = [_change(f"{key} {name}".strip(), before[name], after[name], threshold)
             for name in before if name in after]
    return found or [Change(key, "same")]


def _change(key, old, new, threshold) -> Change:
    ratio, noise = new[0] / old[0], old[1] + new[1]
    allowed = max(threshold, noise)
    verdict = "slower" if ratio > 1 + allowed else "faster" if ratio < 1 / (1 + allowed) else "same"
    return Change(key, verdict, ratio, noise)


def main(paths: Sequence[str]) -> int:
    """Prints what changed from one record file to another; 1 where anything got worse, 2 for bad arguments."""
    if len(paths) != 2:
        raise ValueError("compare: give two record files, the old and the new")
    old, new = (records.read(path) for path in records.there(paths))
    changes = compare(old, new, THRESHOLD.value)
    counts = Counter(c.verdict for c in changes)
    table = Table("change", "row", "new / old time", "noise", "")
    for c in sorted(changes, key=lambda c: (VERDICTS.index(c.verdict), -(c.ratio or 0))):
        if c.verdict != "same" and (c.verdict not in COUNTED or counts[c.verdict] <= MOST_COUNTED):
            ratio, noise = f"{c.ratio:.3f}" if c.ratio else "", f"{c.noise:.1%}" if c.noise is not None else ""
            table.add_row(c.verdict, c.key, ratio, noise, c.detail)
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    if table.row_count:
        console.print(table)
    console.print(", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v]), markup=False)
    bad = [c for c in changes if c.verdict in ("slower", "broken", "missing")]
    console.print(f"{len(changes)} compared, {len(bad)} worse", markup=False)
    return 1 if bad else 0


if __name__ == "__main__":
    program.run(main, files=True)
