"""What a context-parallel row tells of efficiency: real ranks, replays and estimates alike. Pure functions of rows."""

from collections.abc import Sequence
from typing import Any

from bench.report import timeline

Row = dict[str, Any]
KINDS = {"replay": "replay", "replay_estimate": "estimate", "context_parallel": "real"}
HOW = {"replay": "replayed", "replay_estimate": "estimated", "context_parallel": "measured"}


def rows_of(rows: Sequence[Row]) -> list[Row]:
    """The context-parallel rows."""
    return [row for row in rows if row["kind"] in KINDS and row["case"]["world"] > 1]


def plan(row: Row) -> Row:
    """What a row tells of its schedule."""
    return row["schedule"] if "schedule" in row else row


def efficiency(row: Row, which: str) -> float | None:
    """T1 / (world * time) of a pass: measured on real ranks; of a replay with its predicted links."""
    found = row.get("efficiency")
    if not found:
        return None
    return found["predicted"][which] if timeline.replayed(row) else found[which]


def seconds(row: Row, which: str) -> float | None:
    """Seconds of a pass: the slowest rank's; of a replay with its predicted links."""
    if timeline.replayed(row):
        return row[which]["predicted"] if which in row else None
    return row["seconds"][which]["median"] if "seconds" in row else None


def overall(row: Row) -> float | None:
    """E of both passes together."""
    if timeline.replayed(row):
        return row["efficiency"]["predicted"]["both"] if "efficiency" in row else None
    singles, times = row.get("single_seconds") or {}, [seconds(row, w) for w in ("forward", "backward")]
    if not all(singles.values()) or not all(times) or not singles:
        return None
    return sum(singles.values()) / (row["case"]["world"] * sum(t for t in times if t))


def sharding(row: Row) -> str:
    """How tokens are split among ranks, and heads into groups that travel by turns, in words."""
    groups = row["case"].get("head_groups", 1)
    return row["case"]["sharding"] + (f", {groups} head groups" if groups > 1 else "")


def steps(row: Row) -> str:
    """How many steps a rank makes, in words."""
    count = plan(row)["steps"]
    return f"{count} step" + "s" * (count > 1)
