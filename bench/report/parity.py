"""The part of the page on agreement: a matrix of both stacks' cells, the failing ones in full, all of them folded."""

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from bench import options, parity_status
from bench.cases import ProblemSpec
from bench.report import aggregate, efficiency, page, tables
from workload.problem import PASSES, AttentionProblem
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES

Row = dict[str, Any]
HEAD = ("kernel or scheme", "mask", "tokens", "pass", "dtype", "JAX", "PyTorch", "each other", "JAX / PyTorch rate",
        "verdict", "remark")
STEADY = 0.1
UNSTEADY = f"Behind ± how far the rounds differ, where it is above {STEADY:.0%}; !: with a remark, among all cells."


def rows_of(rows: Sequence[Row]) -> list[Row]:
    """The parity rows."""
    return [row for row in rows if row["kind"] == "parity"]


def section(rows: Sequence[Row]) -> str:
    """HTML; empty where there is no row."""
    peaks: dict[str, float] = {}
    for row in aggregate.ceilings(rows):
        dtype = row["case"]["dtype"]
        peaks[dtype] = max(row["peak_flops"], peaks.get(dtype, 0.0))
    return _agreement(rows, peaks) + _names(aggregate.entries(rows)) + _on_ranks(rows)


def _agreement(rows: Sequence[Row], peaks: dict[str, float]) -> str:
    found = rows_of(rows)
    if not found:
        return ""
    ran = [row for row in found if row["status"] != "unsupported"]
    body = [_line(row) for row in ran]
    bad = [line for line, row in zip(body, ran) if row["status"] != "ok"]
    note = (
        f"<p>{sum(row['status'] == 'ok' for row in ran):,} of {len(ran):,} cells pass; {len(found) - len(ran):,} more "
        "are refused by one stack or both. Both stacks read the same bits; each is held to float64 attention, then to "
        "the other. A cell of the matrix is the worst error of all shapes, passes, numbers of ranks and results (out, "
        "lse, dq, dk, dv) as a share of its budget: 1 is the limit. The budget is a small multiple of what a naive run "
        "in that dtype loses on the same data. <code>bench.report</code> writes every error and budget into "
        "<code>parity.csv</code>.</p>")
    return note + _status(found) + _matrix(found) + _throughput(ran, peaks) + (page.table(HEAD, bad) if bad else "") \
        + f"<details><summary>{len(body):,} cells</summary>{page.table(HEAD, body)}</details>"


def _status(found: Sequence[Row]) -> str:
    """How much of the matrices has been run."""
    counts = parity_status.status(found)
    whole = sum(counts.values(), parity_status.Status())
    head, body = parity_status.table(counts)
    return (
        f"<p>The whole matrix, each kernel name, mask, shape and pass, each scheme, mask and number of ranks: {whole}. "
        "Refused are cells that one stack or both do not offer; the table of what runs where has the reasons.</p>"
        "<details><summary>By kernel and shape: agree / refused / not run</summary>"
        f"{page.table(head, body)}</details>")


def _line(row: Row) -> list[str]:
    css = page.STATUS_CLASS.get(row["status"], "bad")
    verdict = "pass" if row["status"] == "ok" else row["status"]
    again = f" &mdash; {page.esc(row['repeat'])}" if css == "bad" and row.get("repeat") else ""
    return [
        *tables.parity_names(row), *(tables.share(row, side) for side in ("jax", "torch", "cross")), tables.ratio(row),
        f'<td class="{css}" title="{page.esc(row["reason"])}">{page.esc(verdict)}</td>',
        f'<td class="text">{page.esc("; ".join(filter(None, (row["reason"], *row.get("flags", ())))))}{again}</td>',
    ]


def _matrix(found: Sequence[Row]) -> str:
    """Kernels, and schemes of all worlds, by mask."""
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        what, mask, *_ = tables.parity_names(row)
        what = row["case"].get("scheme", what)
        cells.setdefault((what, mask), []).append(row)
    masks = [m for m in ALL_BUILDERS if any(m == mask for _, mask in cells)]
    order = {name: n for n, name in enumerate((*options.ALL_KERNELS, *SCHEMES))}
    body = [[what, *(_cell(cells.get((what, mask), [])) for mask in masks)]
            for what in sorted(dict.fromkeys(what for what, _ in cells), key=lambda what: order.get(what, len(order)))]
    return page.table(["", *(m.replace("_", "_|") for m in masks)], body)


def _cell(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if row["status"] != "unsupported"]
    if not ran:
        told = "; ".join(dict.fromkeys(row["reason"] for row in rows))
        return f'<td class="none" title="{page.esc(told)}">{"&ndash;" if rows else ""}</td>'
    failed = [row for row in ran if row["status"] != "ok"]
    if failed:
        told = "; ".join(f"{tables.parity_names(row)[2:]}: {row['reason']}" for row in failed)
        return f'<td class="bad" title="{page.esc(told)}">{len(failed)} of {len(ran)} fail</td>'
    share, name = aggregate.worst(x for row in ran for x in tables.shares(row))
    return f'<td class="good" title="{len(ran)} cells pass; the worst is {name}">{share:.2f}</td>'


def _throughput(ran: Sequence[Row], peaks: dict[str, float]) -> str:
    """Ratios of the timed rows: kernels a line a problem, both passes; schemes by mask."""
    timed = [row for row in ran if row.get("throughput_ratio")]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in timed:
        what, mask, tokens, which, dtype = tables.parity_names(row)
        if "scheme" not in row["case"]:
            line = what, mask, tokens, aggregate.shape_of(row["case"]), dtype
            lines.setdefault(line, {})[which] = row
    parts = []
    if lines:
        order = {kernel: n for n, kernel in enumerate(options.ALL_KERNELS)}
        body = [[*line, *(_times(lines[line].get(which)) for which in PASSES)]
                for line in sorted(lines, key=lambda line: (order.get(line[0], len(order)), line[1:]))]
        parts.append(
            "<h3>Throughput, JAX over PyTorch</h3><p class='soft'>Timed in turns on one card; above 1 JAX is faster; "
            f"behind it ms of JAX, ms of PyTorch. {UNSTEADY} Under one name stand different programs: ours, or a "
            "library's.</p>" + page.table(["kernel", "mask", "tokens", "shape", "dtype", *PASSES], body))
    return "".join(parts) + _schemes([row for row in timed if "scheme" in row["case"]], peaks)


def _schemes(timed: Sequence[Row], peaks: dict[str, float]) -> str:
    """Ratios of schemes by mask, beside the time that the FLOPs would take if the ranks shared them evenly."""
    grids: dict[str, dict[tuple[str, str], dict[str, Row]]] = {}
    for row in timed:
        case, spec = row["case"], row["case"]["spec"]
        heads = aggregate.shape_of(spec | {"mask": "full"})
        title = f"{case['world']} ranks, {spec['seq_len']:,} tokens, {heads}, {spec['dtype']}"
        blocks = aggregate.shape_of(spec).removeprefix(heads)
        grids.setdefault(title, {}).setdefault((spec["mask"], blocks), {})[case["scheme"]] = row
    parts = []
    for title, lines in grids.items():
        schemes = [s for s in SCHEMES if any(s in line for line in lines.values())]
        body = [[f'<td class="text">{mask}{blocks}</td>', _kernels(line), _floor(next(iter(line.values())), peaks),
                 *(_times(line.get(scheme), ".2f") for scheme in schemes)]
                for (mask, blocks), line in sorted(lines.items(), key=lambda x: list(ALL_BUILDERS).index(x[0][0]))]
        parts.append(
            f"<h3>Schemes, JAX over PyTorch: {page.esc(title)}</h3><p class='soft'>Both passes, calls one behind the "
            "other, between two events on the device at which all ranks meet, the host ahead; the stacks in turns on "
            f"the same cards. Above 1 JAX is faster; behind it ms of JAX, ms of PyTorch. {UNSTEADY} <em>Local "
            "kernel</em> is what each rank runs, both stacks' where they differ; naive and sdpa compute hidden cells, "
            "too. <em>Floor</em>: the FLOPs, shared evenly, at the measured matrix peak. Above it stand what the local "
            "kernels are above theirs, shorter pieces, links and merges; "
            '<a href="#parallel">the part on context parallelism</a> tells them apart.</p>'
            + page.table(["mask", "local kernel", "floor ms", *schemes], body))
    return "".join(parts)


def _kernels(line: dict[str, Row]) -> str:
    """The local kernels of a line's rows, both stacks' where they differ."""
    some = [row["kernels"].values() for row in line.values() if "kernels" in row]
    return "; ".join(dict.fromkeys(" / ".join(dict.fromkeys(names)) for names in some))


def _floor(row: Row, peaks: dict[str, float]) -> str:
    """Milliseconds of a scheme row's FLOPs at the matrix peak, shared evenly; empty where none was measured."""
    spec, world = ProblemSpec(**row["case"]["spec"]), row["case"]["world"]
    peak = peaks.get(spec.dtype)
    return f"{1e3 * sum(map(_problem(spec).flops, PASSES)) / world / peak:.2f}" if peak else ""


@functools.cache
def _problem(spec: ProblemSpec) -> AttentionProblem:
    return spec.problem()


def _times(row: Row | None, form: str = ".3g") -> str:
    """The ratio of a timed row, the milliseconds of both stacks, and how far rounds differ where that is much."""
    if row is None:
        return ""
    jax, torch = (format(row["seconds"][stack] * 1e3, form) for stack in ("jax", "torch"))
    spread = max(((max(x) - min(x)) / statistics.median(x) for x in row.get("rounds", {}).values()), default=0.0)
    return f"{tables.ratio(row)} ({jax}, {torch})" + (f" ±{spread:.0%}" if spread > STEADY else "") \
        + ("!" if row.get("flags") else "")


def _names(found: Sequence[aggregate.Entry]) -> str:
    """Rates of JAX over PyTorch under one kernel name, at the length with most names and masks that both have timed."""
    pairs: dict[tuple, dict[tuple[str, str, str], float]] = {}
    rates = {(e.setting[1:], e.kernel, e.mask, e.which, e.stack): e.rate for e in found if e.rate}
    for (setting, kernel, mask, which, stack), rate in rates.items():
        other = rates.get((setting, kernel, mask, which, "torch"))
        if stack == "jax" and other:
            pairs.setdefault(setting, {})[kernel, mask, which] = rate / other
    if not pairs:
        return ""
    _, shape, dtype = max(pairs, key=lambda s: len(pairs[s]))
    length = aggregate.telling({s[0]: len(found) for s, found in pairs.items() if s[1:] == (shape, dtype)})
    setting = length, shape, dtype
    here = pairs[setting]
    masks = [m for m in ALL_BUILDERS if any(m == mask for _, mask, _ in here)]
    body = [[kernel, *(_both(here, kernel, mask) for mask in masks)] for kernel in dict.fromkeys(k for k, *_ in here)]
    return (
        f"<h3>Rates of JAX over PyTorch, by kernel name: {length:,} tokens, {page.esc(shape)}, {page.esc(dtype)}</h3>"
        "<p class='soft'>Forward / backward; above 1 JAX is faster. From the rates above, each stack in a run of its "
        "own. Under one name stand different programs: ours, or a library's.</p>"
        + page.table(["kernel", *(m.replace("_", "_|") for m in masks)], body))


def _on_ranks(rows: Sequence[Row]) -> str:
    """Rates of JAX over PyTorch of each scheme on real ranks, the best sharding of either."""
    best: dict[str, dict[tuple[str, str, str], dict[str, float]]] = {}
    for row in efficiency.rows_of(rows):
        case, spec = row["case"], row["case"]["spec"]
        counts = row["kind"] == "context_parallel" and row["status"] == "ok" and case.get("head_groups", 1) == 1
        for which in PASSES if counts else ():
            title = f"{case['world']} ranks, {spec['seq_len']:,} tokens, {aggregate.shape_of(spec)}, {spec['dtype']}"
            cell = best.setdefault(title, {}).setdefault((spec["mask"], case["scheme"], which), {})
            took = efficiency.seconds(row, which)
            if took:
                cell[case["stack"]] = min(took, cell.get(case["stack"], took))
    parts = []
    for title, cells in best.items():
        here = {place: cell["torch"] / cell["jax"] for place, cell in cells.items() if len(cell) == 2}
        schemes = [s for s in SCHEMES if any(s == scheme for _, scheme, _ in here)]
        body = [[mask, *(_both(here, mask, scheme) for scheme in schemes)]
                for mask in ALL_BUILDERS if any(m == mask for m, *_ in here)]
        if body:
            parts.append(
                f"<h3>Rates of JAX over PyTorch, by scheme: {page.esc(title)}</h3><p class='soft'>Forward / backward "
                "of the slowest rank, the best sharding of each; above 1 JAX is faster. Each stack in a job of its own."
                f"</p>{page.table(['mask', *schemes], body)}")
    return "".join(parts)


def _both(here: dict[tuple[str, str, str], float], *place: str) -> str:
    told = [here.get((place[0], place[1], which)) for which in PASSES]
    return " / ".join("–" if x is None else f"{x:.2f}" for x in told) if any(told) else ""
