"""Timelines of context-parallel rows: what each rank does at each step, as bars, a picture and a trace file."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from bench import context_parallel_cases as cp
from bench.report.pictures import STYLE

COLOURS = {"compute": "#4477aa", "estimated": "#88aacc", "wait": "#ddaa33", "links": "#ee6677"}
MOST_RANKS = 64  # a picture with more lines is not read
LEGEND = ("One line a rank. Blue computes (light: told by its cells, at the rate of the step's busiest rank), yellow "
          "waits for the step's slowest rank, red are links that no computation hides.")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stretch of a rank's time: kind is compute, estimated (compute, scaled by cells), wait or links; seconds."""

    rank: int
    step: int
    kind: str
    begin: float
    seconds: float


def step_seconds(row: dict[str, Any], which: str) -> tuple[list[list[float]], list[set[int]]]:
    """Seconds of local work by step and rank, and the ranks of each step that were not measured but estimated.

    A real job's row has them all. A replay runs the busiest ranks of a step; the others are told by their visible
    cells, at the rate of the slowest rank of that step.
    """
    if row["kind"] == "context_parallel":
        by_rank = row["inside"][which]["step_seconds"]
        return [list(step) for step in zip(*by_rank)], [set() for _ in by_rank[0]]
    world = row["case"]["world"]
    runs: dict[int, dict[int, dict]] = {}
    for run in row["runs"]:
        runs.setdefault(run["step"], {})[run["rank"]] = run
    complete = all(len(runs.get(t, {})) == world for t in range(row["steps"]))
    cells = None if complete else cp.from_record(row["case"]).schedule().cells
    seconds, guessed = [], []
    for t in range(row["steps"]):
        ran = runs.get(t, {})
        busiest = max(ran.values(), key=lambda r: r[which], default=None)
        rate = busiest[which] / busiest["cells"] if busiest and busiest["cells"] else 0.0
        missing = {rank for rank in range(world) if rank not in ran}
        seconds.append([
            ran[rank][which] if rank in ran else 0.0 if cells is None else float(rate * cells[t, rank])
            for rank in range(world)
        ])
        guessed.append(missing)
    return seconds, guessed


def bars(row: dict[str, Any], which: str) -> list[Bar]:
    """The bars of a pass: steps in turn, each as long as its slowest rank; links that nothing hides come last."""
    seconds, guessed = step_seconds(row, which)
    slowest = row[which]["slowest"] if replayed(row) else [max(step) for step in seconds]
    out, now = [], 0.0
    for t, (step, length) in enumerate(zip(seconds, slowest)):
        for rank, busy in enumerate(step):
            if busy:
                out.append(Bar(rank, t, "estimated" if rank in guessed[t] else "compute", now, busy))
            if length > busy:
                out.append(Bar(rank, t, "wait", now + busy, length - busy))
        now += length
    exposed = _exposed(row, which)
    if exposed > 0:
        out += [Bar(rank, len(seconds), "links", now, exposed) for rank in range(row["case"]["world"])]
    return out


def _exposed(row, which) -> float:
    if replayed(row):
        return row[which]["exposed_links"]
    inside = row["inside"][which]
    return inside["predicted"] - inside["compute"] if "predicted" in inside else 0.0


def replayed(row: dict[str, Any]) -> bool:
    """Whether a row tells of a job that was played on one device, or estimated, and not of real ranks."""
    return row["kind"] in ("replay", "replay_estimate")


def can_draw(row: dict[str, Any]) -> bool:
    """Whether a row holds the seconds of its steps."""
    if row["status"] != "ok" or not (replayed(row) or row["kind"] == "context_parallel"):
        return False
    return bool(row.get("runs")) if replayed(row) else "inside" in row


def picture(row: dict[str, Any], which: str = "forward", width: float = 9.0) -> plt.Figure:
    """One line a rank, time to the right."""
    drawn = bars(row, which)
    world = row["case"]["world"]
    shown = min(world, MOST_RANKS)
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, axis = plt.subplots(figsize=(width, 1.3 + 0.17 * max(4, shown)), layout="constrained")
        for kind, colour in COLOURS.items():
            these = [b for b in drawn if b.kind == kind and b.rank < shown]
            if these:
                ranks, lengths, begins = zip(*((b.rank, b.seconds * 1e3, b.begin * 1e3) for b in these))
                axis.barh(ranks, lengths, left=begins, height=0.8, color=colour, label=kind, linewidth=0)
        axis.invert_yaxis()
        axis.set_xlabel("ms")
        axis.set_ylabel("rank")
        axis.margins(x=0)
        axis.set_yticks(range(0, shown, max(1, shown // 8)))
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def traced_picture(ranks: Sequence[dict[str, Any]]) -> plt.Figure:
    """Two lines a rank, kernels above links, of a traced call; ranks: of `bench.trace.overlap`, by rank."""
    shown = ranks[:MOST_RANKS]
    with plt.rc_context({**STYLE, "axes.grid": False}):
        figure, axis = plt.subplots(figsize=(9, 1.0 + 0.4 * max(2, len(shown))), layout="constrained")
        for kind, name, above in (("compute", "work", 0.2), ("links", "links", -0.2)):
            spans = [(rank - above, begin, end) for rank, seen in enumerate(shown) for begin, end in seen[name]]
            if spans:
                heights, begins, ends = zip(*spans)
                axis.barh(heights, [(e - b) * 1e3 for b, e in zip(begins, ends)], left=[b * 1e3 for b in begins],
                          height=0.36, color=COLOURS[kind], label=kind, linewidth=0)
        axis.invert_yaxis()
        axis.set_xlabel("ms")
        axis.set_ylabel("rank")
        axis.margins(x=0)
        axis.set_yticks(range(len(shown)))
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return figure


def trace(row: dict[str, Any], passes: Sequence[str] = ("forward", "backward")) -> dict[str, Any]:
    """The row as a trace that chrome://tracing and Perfetto open: a process a pass, a thread a rank, microseconds."""
    events: list[dict[str, Any]] = []
    for number, which in enumerate(passes):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{which} {row['key']}"}})
        for rank in range(row["case"]["world"]):
            name = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": rank, "args": name})
        events += [
            {"ph": "X", "name": b.kind, "cat": which, "pid": number, "tid": b.rank, "ts": b.begin * 1e6,
             "dur": b.seconds * 1e6, "args": {"step": b.step}}
            for b in bars(row, which)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_traces(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """One trace file for each row that has a timeline."""
    written = []
    for row in rows:
        if can_draw(row):
            folder.mkdir(parents=True, exist_ok=True)
            name = "".join(c if c.isalnum() or c in "-_." else "_" for c in row["key"])
            path = folder / f"{name}.trace.json"
            path.write_text(json.dumps(trace(row)))
            written.append(path)
    return written
