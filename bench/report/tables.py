"""Records as text: a terminal table, CSV, Markdown."""

import csv
import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from bench.report import aggregate
from bench.report.aggregate import Entry
from parity.compare import RESULTS

NAMES = {"jax": "JAX", "torch": "PyTorch"}
SHORT = {
    "unsupported": "–", "out_of_memory": "memory", "mismatch": "WRONG", "error": "ERROR", "timeout": "timeout",
    "skipped": "skipped",
}


def cell(entry: Entry | None, unit: float) -> str:
    """A rate, or why there is none, in a word."""
    if entry is None:
        return ""
    if entry.status != "ok":
        return SHORT[entry.status]
    if entry.rate is None:
        return "checked"
    return number(entry.rate / unit) + ("!" if entry.flags else "")


def number(x: float) -> str:
    """Three digits; infinity as it is."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def heading(setting: tuple) -> str:
    """A setting in words."""
    which, seq_len, shape, dtype = setting
    return f"{which}, {seq_len:,} tokens, {shape}, {dtype}"


def terminal(rows: Sequence[dict], console: Console) -> None:
    """Prints a rate table per setting, then what did not run and why."""
    found = aggregate.entries(rows)
    unit, name = aggregate.unit_of(found)
    for setting in aggregate.settings(found):
        masks, columns, cells = aggregate.pivot(found, setting)
        shown = [c for c in columns if any(cells.get((m, c)) and cells[m, c].status != "unsupported" for m in masks)]
        table = Table(Column("mask", no_wrap=True), title=f"{heading(setting)}: {name}", title_justify="left")
        for column in shown:
            table.add_column(column.replace(" ", "\n"), justify="right", min_width=5)
        for mask in masks:
            table.add_row(mask, *(cell(cells.get((mask, c)), unit) for c in shown))
        if shown:
            console.print(table)
    reasons = unavailable(found)
    if reasons:
        table = Table("kernel", "stack", "does not run", "because", title="Not run", title_justify="left")
        for kernel, stack, what, reason in reasons:
            table.add_row(kernel, stack, what, reason)
        console.print(table)
    parity_table(rows, console)


def unavailable(found: Sequence[Entry]) -> list[tuple[str, str, str, str]]:
    """(kernel, stack, what, reason) of everything that is not ok, equal reasons together."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in found:
        if entry.status != "ok":
            told = re.sub(r"^measured \S+ s: ", "", entry.reason)  # equal reasons, whatever the figure
            reason = f"{entry.status}: {told}".replace(f"mask {entry.mask}", "these masks")
            groups.setdefault((entry.kernel, entry.stack, reason), []).append(entry)
    lines = []
    for (kernel, stack, reason), group in groups.items():
        every = [e for e in found if (e.kernel, e.stack) == (kernel, stack)]
        masks = list(dict.fromkeys(e.mask for e in group))
        passes = list(dict.fromkeys(e.which for e in group))
        lengths = list(dict.fromkeys(e.seq_len for e in group))
        if len(group) == len(every):
            what = "at all"
        else:
            what = f"{', '.join(passes)}; " + (
                f"{len(masks)} masks" if len(masks) > 4 else ", ".join(masks)) + f"; {', '.join(map(str, lengths))}"
        lines.append((kernel, stack, what, reason))
    return lines


def parity_table(rows: Sequence[dict], console: Console) -> None:
    """Prints the parity rows, the failing ones in full."""
    found = [row for row in rows if row["kind"] == "parity"]
    if not found:
        return
    table = Table("kernel or scheme", Column("mask", no_wrap=True), "tokens", "pass", "JAX", "PyTorch", "each other",
                  "JAX / PyTorch", "verdict",
                  title="Parity: worst error as a share of its budget", title_justify="left")
    for row in found:
        what, mask, tokens, which, _ = parity_names(row)
        table.add_row(what, mask, tokens, which, *(share(row, side) for side in ("jax", "torch", "cross")),
                      ratio(row), "pass" if row["status"] == "ok" else row["status"])
    console.print(table)


def parity_names(row: dict) -> tuple[str, str, str, str, str]:
    """Kernel or scheme and ranks, mask, tokens, pass and dtype of a parity row."""
    case = row["case"]
    if "scheme" in case:
        spec = case["spec"]
        return f"{case['scheme']}, {case['world']} ranks", spec["mask"], f"{spec['seq_len']:,}", "both", spec["dtype"]
    return case["kernel"], case["mask"], f"{case['seq_len']:,}", case["pass"], case["dtype"]


def ratio(row: dict) -> str:
    """JAX's throughput over PyTorch's, where a parity row was timed."""
    return f"{row['throughput_ratio']:.2f}" if row.get("throughput_ratio") else ""


def share(row: dict, side: str) -> str:
    """The worst error of a side of a parity row over its budget, as text."""
    found = shares(row, side)
    if not found:
        return "–"
    value, name = aggregate.worst(found)
    return f"{value:.2f} {name}"


def shares(row: dict, *sides: str) -> list[tuple[float, str]]:
    """(error over budget, result) of some sides of a parity row, of all sides where none is named."""
    return [
        (float(error) / row["budget_cross" if side == "cross" else "budget"][name], name)
        for side, errors in row.get("errors", {}).items() if side in sides or not sides
        for name, error in errors.items()
    ]


CSV_COLUMNS = (
    "key", "kind", "status", "reason", "stack", "kernel", "pass", "mask", "seq_len", "batch", "q_heads", "kv_heads",
    "head_dim", "dtype", "seed", "milliseconds", "spread", "warm_milliseconds", "tflops_per_second",
    "gigabytes_per_second", "flops", "bytes", "area", "density", "tile_waste", "compile_seconds", "prepare_seconds",
    "peak_bytes", "error_out", "error_lse", "error_dq", "error_dk", "error_dv", "oracle", "timer", "source", "flags",
)


def as_csv(rows: Sequence[dict]) -> str:
    """All attention rows, one line each, for a spreadsheet."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in aggregate.attention_rows(rows):
        flat = dict(row["case"]) | {k: v for k, v in row.items() if k not in ("case", "seconds", "errors", "flags")}
        flat |= {f"error_{name}": value for name, value in row.get("errors", {}).items()}
        flat["flags"] = "; ".join(row["flags"])
        flat["tile_waste"] = row.get("tiles", {}).get("waste")
        if "seconds" in row:
            flat |= {"milliseconds": 1e3 * row["seconds"]["median"], "spread": row["seconds"]["spread"]}
            flat["warm_milliseconds"] = 1e3 * row["warm_seconds"]["median"] if row.get("warm_seconds") else None
        if "rate" in row:
            flat |= {"tflops_per_second": row["rate"] / 1e12, "gigabytes_per_second": row["bandwidth"] / 1e9}
        writer.writerow(flat)
    return out.getvalue()


PARITY_NAMES = ("kernel_or_scheme", "mask", "tokens", "pass", "dtype")
PARITY_COLUMNS = (
    "key", *PARITY_NAMES, "status", "reason",
    *(f"{side}_{name}" for side in ("jax", "torch", "budget", "cross", "budget_cross") for name in RESULTS),
    "jax_milliseconds", "torch_milliseconds", "throughput_ratio", "repeat",
)


def parity_csv(rows: Sequence[dict]) -> str:
    """All parity rows: the error of each result on either side and between them, with budgets, and times."""
    out = io.StringIO()
    writer = csv.DictWriter(out, PARITY_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in (row for row in rows if row["kind"] == "parity"):
        flat = row | dict(zip(PARITY_NAMES, parity_names(row), strict=True))
        flat["tokens"] = row["case"].get("spec", row["case"])["seq_len"]
        sides = row.get("errors", {}) | {name: row.get(name, {}) for name in ("budget", "budget_cross")}
        flat |= {f"{side}_{name}": value for side, values in sides.items() for name, value in values.items()}
        flat |= {f"{stack}_milliseconds": 1e3 * seconds for stack, seconds in row.get("seconds", {}).items()}
        writer.writerow(flat)
    return out.getvalue()


def as_markdown(rows: Sequence[dict]) -> str:
    """The rate tables and the reasons, in Markdown."""
    found = aggregate.entries(rows)
    unit, name = aggregate.unit_of(found)
    parts = []
    for setting in aggregate.settings(found):
        masks, columns, cells = aggregate.pivot(found, setting)
        shown = [c for c in columns if any(cells.get((m, c)) and cells[m, c].status == "ok" for m in masks)]
        if shown:
            body = [[mask, *(cell(cells.get((mask, c)), unit) for c in shown)] for mask in masks]
            parts.append(f"### {heading(setting)}: {name}\n\n" + grid(["mask", *shown], body))
    reasons = unavailable(found)
    if reasons:
        parts.append("### Not run\n\n" + grid(["kernel", "stack", "does not run", "because"], reasons))
    checked = [r for r in rows if r["kind"] == "parity"]
    if checked:
        body = [[*parity_names(r)[:4], *(share(r, side) for side in ("jax", "torch", "cross")), ratio(r), r["status"]]
                for r in checked]
        parts.append("### Parity: worst error as a share of its budget\n\n" + grid(
            ["kernel or scheme", "mask", "tokens", "pass", "JAX", "PyTorch", "each other", "JAX / PyTorch", "verdict"],
            body))
    return "\n\n".join(parts) + "\n"


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines)
