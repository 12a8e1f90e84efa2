"""The part of the page on contenders that took turns at one card, and so ran at one temperature."""

from collections.abc import Sequence
from typing import Any

from bench.report import aggregate, page, tables
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

Row = dict[str, Any]
STEADY = 0.2


def rows_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of `bench.peers` that have rates."""
    return [row for row in rows if row["kind"] == "peers" and row.get("tflops")]


def settings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by length, heads, settings, dtype and pass, in words; of each, rows in the masks' order."""
    def place(row: Row):
        case = row["case"]
        return (case["seq_len"], aggregate.shape_of(case), case["dtype"], PASSES.index(case["pass"]),
                list(ALL_BUILDERS).index(case["mask"]), row["against"])
    found: dict[str, list[Row]] = {}
    for row in sorted(rows_of(rows), key=place):
        case = row["case"]
        label = f"{case['pass']}, {case['seq_len']:,} tokens, {aggregate.shape_of(case)}, {case['dtype']}"
        found.setdefault(label, []).append(row)
    return found


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["tflops"]))


def entries(rows: Sequence[Row]) -> list[aggregate.Entry]:
    """The contenders that ran under half of a setting's masks or more, as entries for a picture."""
    out = []
    for several in settings(rows).values():
        for name in _names(several):
            ran = [row for row in several if name in row["tflops"]]
            stack, _, kernel = name.partition(":")
            if 2 * len(ran) >= len(several):
                out += [aggregate.Entry(
                    stack, kernel, row["case"]["mask"], row["case"]["pass"], row["case"]["seq_len"],
                    aggregate.shape_of(row["case"]), row["case"]["dtype"], "ok", "", 1, rate=row["tflops"][name] * 1e12,
                    flags=("unsteady",) if row["spread"][name] > STEADY else ()) for row in ran]
    return out


def section(rows: Sequence[Row]) -> str:
    """HTML; empty where there is no row."""
    parts = []
    for label, several in settings(rows).items():
        names = _names(several)
        top = max(rate for row in several for rate in row["tflops"].values())
        body = [[row["case"]["mask"], *(_cell(row, name, top) for name in names)] for row in several]
        head = ["mask", *(name.replace(":", "|", 1) for name in names)]
        parts.append(f"<div><h3>{page.esc(label)}: TFLOP/s</h3>{page.table(head, body)}</div>")
    if not parts:
        return ""
    note = ("<p class='soft'>All contenders of a row took turns at one card, each behind a warm-up of its own; rows of "
            "one mask are different races; –: refused. Behind @ heads of its own, where a contender has some. In "
            "brackets the ratio to the contender in bold, behind ± the spread of the rounds where it is above "
            f"{STEADY:.0%}: such a figure decides nothing. Point at a cell for more.</p>")
    return f'{note}<div class="pair">{"".join(parts)}</div>'


def _cell(row: Row, name: str, top: float) -> str:
    rate = row["tflops"].get(name)
    if rate is None:
        reason, sign = _absent(row, name)
        return f'<td class="{"bad" if sign == "WRONG" else "none"}" title="{page.esc(reason)}">{sign}</td>'
    ratio = f" ({row['ratio'][name]:.2f})" if name in row.get("ratio", {}) and name != row["against"] else ""
    told = f"spread of the rounds {row['spread'][name]:.0%}, against {row['against']}"
    return (f'<td style="background: rgba(var(--heat), {0.75 * rate / top:.2f})" title="{page.esc(told)}">'
            f"{_bold(tables.number(rate), name == row['against'])}{ratio}{_unsteady(row, name)}</td>")


def _absent(row: Row, name: str) -> tuple[str, str]:
    """Why a contender has no rate in a race, and what is shown of it; both empty where it was none of the race."""
    failed, refused = (row.get(which, {}).get(name, "") for which in ("failed", "refused"))
    return (failed, "WRONG") if failed else (refused, "–" if refused else "")


def _bold(text: str, whether: bool) -> str:
    return f"<b>{text}</b>" if whether else text


def _unsteady(row: Row, name: str) -> str:
    return f" ±{row['spread'][name]:.0%}" if row["spread"][name] > STEADY else ""


def markdown(rows: Sequence[Row]) -> str:
    """The tables in Markdown; empty where there is no row."""
    parts = []
    for label, several in settings(rows).items():
        names = _names(several)
        body = [[row["case"]["mask"], *(_text(row, name) for name in names)] for row in several]
        parts.append(f"### Side by side: {label}, TFLOP/s (ratio)\n\n{tables.grid(['mask', *names], body)}\n")
    return "\n".join(parts)


def _text(row: Row, name: str) -> str:
    rate = row["tflops"].get(name)
    if rate is None:
        return _absent(row, name)[1]
    ratio = f" ({row['ratio'][name]:.2f})" if name in row.get("ratio", {}) else ""
    return f"{tables.number(rate)}{ratio}{_unsteady(row, name)}"
