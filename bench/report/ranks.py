"""What real ranks showed besides their times: links, predictions beside measurements, head groups, hidden links."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from bench.context_parallel_cases import from_record
from bench.link_model import links_of, predict
from bench.report import page, pictures, timeline
from bench.report.efficiency import sharding
from bench.report.tables import grid, number
from workload.problem import PASSES
from workload.topology import SCHEMES

Row = dict[str, Any]


def real(rows: Sequence[Row]) -> list[Row]:
    """The rows of real ranks that were timed."""
    return [row for row in rows if row["kind"] == "context_parallel" and row["status"] == "ok" and "seconds" in row]


# ---- links ---------------------------------------------------------------------------------------


def links(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, head, lines) of each job's links: microseconds and GB/s that leave a rank, by operand."""
    out = []
    for row in rows:
        if row["kind"] == "links" and row["status"] == "ok":
            kinds = list(row["links"])
            sizes = [x["operand_bytes"] for x in row["links"][kinds[0]]]
            lines = [[_size(size), *(f"{at[n]['seconds'] * 1e6:.1f} us, {number((at[n]['bandwidth'] or 0) / 1e9)} GB/s"
                                     for at in row["links"].values())] for n, size in enumerate(sizes)]
            out.append((f"Links of {row['case']['world']} ranks, {row['case']['stack']}", ["operand", *kinds], lines))
    return out


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size / 1024:g} KiB"


# ---- predictions ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pass of a case on real ranks and what is predicted for it; seconds.

    Attributes:
      source: where the local work of the prediction is from: "replay", measured on one device, or "tiles", counted.
      compute: the local work.
    """

    row: Row
    which: str
    source: str
    measured: float
    predicted: float
    compute: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Every timed pass that has a replay, or an estimate from tiles; links are those that the job itself measured.

    An estimate is scaled so that one device's time is the one that was measured beside the ranks' (T1).
    """
    played = {(row["kind"], row["key"]): row for row in rows
              if row["kind"] in ("replay", "replay_estimate") and row["status"] == "ok"}
    measured = {(row["case"]["stack"], row["case"]["world"]): links_of(row["links"], row["case"]["world"])
                for row in rows if row["kind"] == "links" and row["status"] == "ok"}
    found = []
    for row in sorted(real(rows), key=_order):
        case = from_record(row["case"])
        plain = dataclasses.replace(case, head_groups=1).key  # groups of heads compute the same, in turn
        replay = played.get(("replay", plain))
        guess = replay or played.get(("replay_estimate", plain))
        links = measured.get((row["case"]["stack"], row["case"]["world"]))
        if guess is None or links is None:
            continue
        signature = case.schedule().signature
        for which in PASSES:
            scale = 1.0 if replay else row["single_seconds"][which] / guess["one_device"][which]["seconds"]
            local = [scale * seconds for seconds in guess[which]["slowest"]]
            predicted = predict(signature, which, local, links, case.head_groups)
            found.append(Comparison(row, which, "replay" if replay else "tiles", row["seconds"][which]["median"],
                                    predicted.total, predicted.compute))
    return found


def _order(row: Row):
    case = row["case"]
    return case["stack"], SCHEMES.index(case["scheme"]), case["spec"]["mask"], case["sharding"], case["head_groups"]


SUMMARY = ("stack", "scheme", "pass", "local work from", "cases", "median error", "worst error", "worst at")


def prediction_summary(found: Sequence[Comparison]) -> list[list[str]]:
    """One line a stack, scheme and pass, in `SUMMARY`'s columns; the error is predicted over measured, less one."""
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for each in found:
        key = each.row["case"]["stack"], each.row["case"]["scheme"], each.which, each.source
        groups.setdefault(key, []).append(each)
    lines = []
    for key, members in groups.items():
        worst = max(members, key=lambda c: abs(c.error))
        lines.append([*key, str(len(members)), f"{statistics.median(c.error for c in members):+.0%}",
                      f"{worst.error:+.0%}", f"{worst.row['case']['spec']['mask']}, {sharding(worst.row)}"])
    return lines


PREDICTIONS = ("stack", "scheme", "mask", "sharding", "pass", "ms measured", "ms predicted", "of it local", "error")


def prediction_lines(found: Sequence[Comparison]) -> list[list[str]]:
    """One line a comparison, in `PREDICTIONS`' columns."""
    lines = []
    for c in found:
        case, times = c.row["case"], (c.measured, c.predicted, c.compute)
        lines.append([case["stack"], case["scheme"], case["spec"]["mask"], sharding(c.row), c.which,
                      *(f"{t * 1e3:.3f}" for t in times), f"{c.error:+.0%}"])
    return lines


# ---- head groups ---------------------------------------------------------------------------------


def head_groups(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(head, lines): E forward / backward of a case by its number of head groups, of cases that have several."""
    by_case: dict[str, dict[int, Row]] = {}
    for row in sorted(real(rows), key=_order):
        case = from_record(row["case"])
        by_case.setdefault(dataclasses.replace(case, head_groups=1).key, {})[case.head_groups] = row
    several = [rows for rows in by_case.values() if len(rows) > 1]
    counts = sorted({n for rows in several for n in rows})
    lines = []
    for rows_of in several:
        case = rows_of[min(rows_of)]["case"]
        lines.append([case["stack"], case["scheme"], case["spec"]["mask"], case["sharding"],
                      *(_both(rows_of[n]) if n in rows_of else "" for n in counts)])
    return ["stack", "scheme", "mask", "sharding", *(f"E, {n} group{'s' if n > 1 else ''}" for n in counts)], lines


def _both(row: Row) -> str:
    found = [row["efficiency"][which] for which in PASSES]
    return " / ".join("" if e is None else f"{e:.2f}" for e in found)


# ---- traces --------------------------------------------------------------------------------------


TRACED = ("case", "pass", "rank", "ms of links", "of it hidden", "ms of kernels", "ms in all")


def traced(rows: Sequence[Row]) -> list[list[str]]:
    """One line a rank of each traced pass, in `TRACED`'s columns."""
    lines = []
    for row in _traces(rows):
        for which, ranks in row["trace"].items():
            for rank, seen in enumerate(ranks):
                end = max((span[1] for span in (*seen["links"], *seen["work"])), default=0.0)
                share = seen["hidden_seconds"] / seen["link_seconds"] if seen["link_seconds"] else 1.0
                lines.append([from_record(row["case"]).key, which, str(rank), f"{seen['link_seconds'] * 1e3:.3f}",
                              f"{share:.0%}", f"{seen['work_seconds'] * 1e3:.3f}", f"{end * 1e3:.3f}"])
    return lines


def _traces(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "trace" and row["status"] == "ok"]


# ---- the page ------------------------------------------------------------------------------------


def section(rows: Sequence[Row]) -> str:
    """HTML: the tables above and a picture of each traced pass."""
    parts = [f"<h3>{page.esc(title)}</h3>{page.table(head, lines)}" for title, head, lines in links(rows)]
    found = comparisons(rows)
    if found:
        parts.append(
            "<h3>Predictions beside measurements</h3><p class='soft'>Each rank's local work is from a replay on one "
            "device, or counted in tiles and scaled so that one device's time is the measured one; links are added as "
            "the job measured them, each collective by the times of its kind. The error is predicted over measured, "
            f"less one.</p>{page.table(SUMMARY, prediction_summary(found))}"
            f"<details><summary>{len(found)} passes</summary>"
            f"{page.table(PREDICTIONS, prediction_lines(found))}</details>")
    head, lines = head_groups(rows)
    if lines:
        parts.append(f"<h3>Head groups: some heads travel while others compute</h3><p class='soft'>E forward / "
                     f"backward.</p>{page.table(head, lines)}")
    if traced(rows):
        parts.append("<h3>Links and kernels of a call, from traces</h3><p class='soft'>A link that waits for its peer "
                     "counts as busy. Two lines a rank: kernels above, links below.</p>"
                     f"{page.table(TRACED, traced(rows))}{_pictures(rows)}")
    return "".join(parts)


def _pictures(rows: Sequence[Row]) -> str:
    parts = []
    for row in _traces(rows):
        for which, ranks in row["trace"].items():
            if any(seen["work"] for seen in ranks):
                figure = timeline.traced_picture(ranks)
                parts.append(f"<h4>{page.esc(from_record(row['case']).key)}, {which}</h4>{pictures.svg(figure)}")
                pictures.plt.close(figure)
    return "".join(parts)


def markdown(rows: Sequence[Row]) -> str:
    """The tables in Markdown, empty where there are none."""
    parts = [f"### {title}\n\n{grid(head, lines)}\n" for title, head, lines in links(rows)]
    found = comparisons(rows)
    if found:
        parts.append(f"### Predictions beside measurements\n\n{grid(SUMMARY, prediction_summary(found))}\n")
        parts.append(f"### Every prediction\n\n{grid(PREDICTIONS, prediction_lines(found))}\n")
    head, lines = head_groups(rows)
    if lines:
        parts.append(f"### Head groups, E forward / backward\n\n{grid(head, lines)}\n")
    if traced(rows):
        parts.append(f"### Links and kernels of a call, from traces\n\n{grid(TRACED, traced(rows))}\n")
    return "\n".join(parts)
