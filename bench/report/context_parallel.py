"""The context-parallel part of the page: efficiencies, their causes, timelines. From replay and real rows alike."""

import csv
import io
from collections.abc import Sequence

from bench.report import aggregate, page, pictures, ranks, ring, timeline
from bench.report.efficiency import HOW, KINDS, Row, efficiency, overall, plan, rows_of, seconds, sharding
from bench.report.tables import NAMES, grid, number
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES

CLOSE, TELLING_SCHEMES = 0.03, 3
TELLING_MASKS = ("causal", "causal_document")
EVIDENCE = ("real", "replay", "estimate")


def cause(row: Row) -> str:
    """Why a scheme is where it is, in words, from the row's own figures."""
    if row["status"] != "ok":
        return row["reason"]
    told, reasons = plan(row), []
    if told["step_balance"] < 0.9:
        reasons.append(
            f"at each step all ranks wait for the busiest: they work {told['step_balance']:.0%} of the time")
        if told["total_balance"] > told["step_balance"] + 0.1:
            reasons.append(f"although their totals are balanced to {told['total_balance']:.0%}")
    if told.get("worst_step", 1) > 2:
        reasons.append(f"at the worst step the busiest has {told['worst_step']:.3g} x the mean")
    if told.get("idle_deliveries", 0) > 0.1:
        reasons.append(f"{told['idle_deliveries']:.0%} of the delivered blocks are of no use to who gets them")
    if told["redundancy"] > 1.5:
        reasons.append(f"{told['redundancy']:.3g} x the bytes that are needed travel")
    for which in ("forward", "backward"):
        if timeline.replayed(row) and row[which]["predicted"]:
            share = row[which]["exposed_links"] / row[which]["predicted"]
            if share > 0.03:
                reasons.append(f"{which}: links take {share:.0%} that no computation hides")
    return "; ".join(reasons) or "balanced, little to wait for"


def grouped(rows: Sequence[Row]) -> dict[tuple[int, int, str, str], dict[tuple[str, str], Row]]:
    """(world, tokens, stack, kind) -> (mask, scheme) -> the row of the best sharding."""
    groups: dict[tuple, dict[tuple[str, str], Row]] = {}
    for row in rows_of(rows):
        case = row["case"]
        if row["status"] != "ok" or overall(row) is None:
            continue
        key = case["world"], case["spec"]["seq_len"], case["stack"], KINDS[row["kind"]]
        cell = case["spec"]["mask"], case["scheme"]
        held = groups.setdefault(key, {}).get(cell)
        if held is None or (overall(held) or 0) < (overall(row) or 0):
            groups[key][cell] = row
    return dict(sorted(groups.items()))


def pivots(rows: Sequence[Row]) -> list[tuple[str, list[str], list[list[Row | None]]]]:
    """(title, schemes, lines) for each world, stack and kind: the best sharding's row of each mask and scheme."""
    out = []
    for (world, tokens, stack, kind), cells in grouped(rows).items():
        schemes = [s for s in SCHEMES if any(s == scheme for _, scheme in cells)]
        masks = [m for m in ALL_BUILDERS if any(m == mask for mask, _ in cells)]
        out.append((f"{world} ranks, {tokens:,} tokens, {stack}, {kind}", ["mask", *schemes],
                    [[cells.get((m, s)) for s in schemes] for m in masks]))
    return out


HEAD = ("mask", "world", "scheme", "stack", "sharding", "tokens", "E forward", "E backward", "E of local work",
        "ms forward", "ms backward", "balance by step", "balance in total", "wire MB forward", "redundancy", "from")


def table_rows(rows: Sequence[Row]) -> list[list[str]]:
    """One line a row, in `HEAD`'s columns."""
    def text(x, form):
        return "" if x is None else format(x, form)
    body = []
    for row in sorted(rows_of(rows), key=_order):
        case, told = row["case"], plan(row)
        spec = case["spec"]
        line = [spec["mask"], str(case["world"]), case["scheme"], case["stack"], sharding(row),
                f"{spec['seq_len']:,}"]
        if row["status"] != "ok":
            body.append([*line, row["status"], *[""] * 8, row["kind"]])
            continue
        times = [seconds(row, w) for w in ("forward", "backward")]
        body.append([
            *line, *(text(efficiency(row, w), ".3f") for w in ("forward", "backward")), _of_local_work(row),
            *(text(t and t * 1e3, ".3f") for t in times), f"{told['step_balance']:.3f}", f"{told['total_balance']:.3f}",
            number(told["wire_bytes"]["forward"] / 1e6), number(told["redundancy"]),
            KINDS[row["kind"]],
        ])
    return body


def _of_local_work(row: Row) -> str:
    """E forward / backward of a replay as if links cost nothing."""
    alone = row.get("efficiency", {}).get("compute") if timeline.replayed(row) else None
    return f"{alone['forward']:.3f} / {alone['backward']:.3f}" if alone else ""


def _order(row):
    case = row["case"]
    return case["spec"]["mask"], case["world"], case["spec"]["seq_len"], case["scheme"], case["stack"]


def markdown(rows: Sequence[Row]) -> str:
    """The tables in Markdown; empty where there is no row."""
    body = table_rows(rows)
    if not body:
        return ""
    parts = []
    for title, head, lines in pivots(rows):
        cells = [[next(r["case"]["spec"]["mask"] for r in line if r),
                  *("" if r is None else f"{overall(r) or 0:.2f} ({sharding(r)})" for r in line)]
                 for line in lines]
        parts.append(f"### E of both passes, {title}\n\n{grid(head, cells)}\n")
    return "\n".join([*parts, ranks.markdown(rows), "### Context parallelism, every row\n", grid(HEAD, body), ""])


def as_csv(rows: Sequence[Row]) -> str:
    """Every row with its cause, in `HEAD`'s columns."""
    out = io.StringIO()
    lines = zip(table_rows(rows), sorted(rows_of(rows), key=_order), strict=True)
    csv.writer(out, lineterminator="\n").writerows([(*HEAD, "why"), *((*line, cause(row)) for line, row in lines)])
    return out.getvalue()


AGREEMENT = ("scheme", "mask", "world", "sharding", "tokens checked", "JAX", "PyTorch", "verdict")


def agreement(rows: Sequence[Row]) -> list[list[str]]:
    """One line for each scheme, mask, world and sharding that both stacks ran on real ranks, in `AGREEMENT`'s columns.

    A side shows its worst error against the float64 reference over the budget, and which result that is. Two sides
    within their budget are within twice the budget of each other.
    """
    groups: dict[tuple, dict[str, Row]] = {}
    for row in rows_of(rows):
        if row["kind"] == "context_parallel":
            case = row["case"]
            key = case["scheme"], case["spec"]["mask"], case["world"], sharding(row), str(case["spec"])
            groups.setdefault(key, {})[case["stack"]] = row
    lines = []
    for (scheme, mask, world, how, _), sides in sorted(groups.items()):
        if len(sides) == 2:
            good = all(row["status"] == "ok" for row in sides.values())
            lines.append([scheme, mask, str(world), how, str(sides["jax"].get("check_len", "")),
                          *(_worst(sides[stack]) for stack in ("jax", "torch")), "pass" if good else "fails"])
    return lines


def _worst(row: Row) -> str:
    if not row.get("errors"):
        return f"{row['status']}: {row['reason']}"[:80]
    share, name = aggregate.worst((e / row["budget"][n], n) for n, e in row["errors"].items())
    return f"{share:.2f} {name}"


def section(rows: Sequence[Row]) -> str:
    """HTML: why a ring falls behind, which scheme to take, every figure with its cause, timelines, real ranks."""
    found = rows_of(rows)
    if not found:
        return ""
    body = []
    for line, row in zip(table_rows(rows), sorted(found, key=_order)):
        cells = [f'<td class="{page.STATUS_CLASS.get(row["status"], "bad")}">{page.esc(x)}</td>' if n == 6 and
                 row["status"] != "ok" else x for n, x in enumerate(line)]
        body.append([*cells, f'<td class="text">{page.esc(cause(row))}</td>'])
    return (
        "<p>E is the time of one device for the whole problem over (ranks &times; the time of the slowest rank): 1 is "
        "perfect, and a little more where a rank's part ran at a better rate than the whole. A <em>replay</em> runs "
        "every rank's local work on one device and adds links "
        f"{_links(found)}; an <em>estimate</em> counts tiles in place of running them; <em>real</em> ranks are "
        "measured. <em>Balance by step</em> is what E can be at most where each step ends when its busiest rank does, "
        "as a ring's steps do; <em>balance in total</em> where ranks only meet at the end. Redundancy is bytes moved "
        "over bytes needed.</p>"
        + ring.section(found) + _choice(found) + _pivot_tables(found)
        + f"<details><summary>{len(body)} rows, each with its cause"
        f"</summary>{page.table([*(h.replace(' ', '|') for h in HEAD), 'why'], body)}</details>" + _timelines(found)
        + ranks.section(rows) + _agreement(found)
    )


def _links(found: Sequence[Row]) -> str:
    """The links of the replays, in words."""
    known = {tuple(row["links"][name] / 1e9 for name in ("inner_bandwidth", "outer_bandwidth")) for row in found
             if timeline.replayed(row) and row.get("links")}
    speeds = "; ".join(f"{inner:.0f} GB/s inside a node, {outer:.0f} between" for inner, outer in sorted(known))
    return f"as fast as its flags say ({speeds})" if speeds else "as fast as its flags say"


def _agreement(found: Sequence[Row]) -> str:
    lines = agreement(found)
    if not lines:
        return ""
    return ("<h3>Do the stacks agree on ranks?</h3><p class='soft'>Worst error over its budget (1 is the limit), and "
            f"which result it is.</p><details><summary>{sum(line[-1] == 'pass' for line in lines)} of {len(lines)} pass"
            f"</summary>{page.table(AGREEMENT, lines)}</details>")


def choices(found: Sequence[Row]) -> dict[tuple[int, int, str], dict[str, list[Row]]]:
    """(world, tokens, stack) -> mask -> the schemes' rows, the best first: as they ran, else replayed, else estimated.

    Where fewer than TELLING_SCHEMES were tried the best is not known.
    """
    columns: dict[tuple[int, int, str], dict[str, list[Row]]] = {}
    ranked = sorted(grouped(found).items(), key=lambda x: (x[0][:3], EVIDENCE.index(x[0][3])))
    for (world, tokens, stack, _), cells in ranked:
        for mask in ALL_BUILDERS:
            ran = sorted((row for (m, _), row in cells.items() if m == mask), key=lambda row: -(overall(row) or 0))
            if len(ran) >= TELLING_SCHEMES:
                columns.setdefault((world, tokens, stack), {}).setdefault(mask, ran)
    return columns


def answers(rows: Sequence[Row]) -> list[str]:
    """The best scheme by the number of ranks, under the masks that most train with; a line of text for each stack."""
    told: dict[str, dict[str, list[str]]] = {}
    for (world, _, stack), of_mask in choices(rows_of(rows)).items():
        for mask in TELLING_MASKS:
            if ran := of_mask.get(mask):
                best = f"{ran[0]['case']['scheme']} on {world} ranks ({overall(ran[0]):.2f}, {HOW[ran[0]['kind']]})"
                told.setdefault(stack, {}).setdefault(mask, []).append(best)
    return [f"{NAMES[stack]}: " + "; ".join(f"{mask} by {', '.join(best)}" for mask, best in of_mask.items()) + "."
            for stack, of_mask in sorted(told.items())]


def _choice(found: Sequence[Row]) -> str:
    """The best scheme of each mask, a column for each size of job and stack."""
    columns = choices(found)
    masks = [m for m in ALL_BUILDERS if any(m in cells for cells in columns.values())]
    if not masks:
        return ""
    body = [[mask, *(_best_cell(cells[mask]) if mask in cells else '<td class="none"></td>'
                     for cells in columns.values())] for mask in masks]
    note = (f"<h3>Which scheme for my mask?</h3><p class='soft'>The best by E of both passes, those within {CLOSE:.0%} "
            "of it behind it, each with its best sharding: on real ranks where there are some, else replayed, else "
            "estimated. Point at a cell for the others.</p>")
    return note + page.table(["mask", *(f"{w} ranks|{n:,} tokens|{stack}" for w, n, stack in columns)], body)


def _best_cell(ran: Sequence[Row]) -> str:
    """ran: the schemes' rows, the best first."""
    best = overall(ran[0]) or 0.0
    names = [row["case"]["scheme"] for row in ran if (overall(row) or 0) >= (1 - CLOSE) * best]
    told = "; ".join(f"{row['case']['scheme']} {overall(row):.2f} ({sharding(row)})" for row in ran)
    return (f'<td class="names" style="background: rgba(var(--heat), {min(1.0, best) * 0.6:.2f})" '
            f'title="{page.esc(told)}"><b>{best:.2f}</b> {page.esc(", ".join(names))} '
            f'<span class="soft">{KINDS[ran[0]["kind"]]}</span></td>')


def _pivot_tables(found: Sequence[Row]) -> str:
    parts = []
    for title, head, lines in pivots(found):
        body = []
        for line in lines:
            mask = next(row["case"]["spec"]["mask"] for row in line if row)
            body.append([mask, *(_pivot_cell(row) for row in line)])
        parts.append(f"<div><h3>{page.esc(title)}</h3>{page.table(head, body)}</div>")
    if not parts:
        return ""
    return (f"<details><summary>E of both passes of every scheme, {len(parts)} tables</summary><p class='soft'>The "
            "best sharding of each; point at a cell for which, and for the cause.</p>"
            f'<div class="pair">{"".join(parts)}</div></details>')


def _pivot_cell(row: Row | None) -> str:
    if row is None:
        return '<td class="none"></td>'
    value = overall(row) or 0.0
    told = f"{sharding(row)}: {cause(row)}"
    return (f'<td style="background: rgba(var(--heat), {min(1.0, value) * 0.75:.2f})" title="{page.esc(told)}">'
            f"{value:.2f}</td>")


def _timelines(found: Sequence[Row]) -> str:
    """One of each scheme, but of the ring that is drawn already."""
    drawable = [r for r in found if timeline.can_draw(r) and r["case"]["world"] <= timeline.MOST_RANKS]
    told = ring.drawn([r for r in drawable if overall(r) is not None])
    near = told["case"]["spec"]["mask"] if told else ""
    drawable.sort(key=lambda r: (r["case"]["spec"]["mask"] != near, "document" not in r["case"]["spec"]["mask"],
                                 abs(r["case"]["world"] - ring.TELLING_RANKS), r["kind"] == "replay_estimate"))
    of_scheme: dict[str, Row] = {}
    for row in drawable:
        if not (told and row["case"]["scheme"] == "ring"):
            of_scheme.setdefault(row["case"]["scheme"], row)
    parts = []
    for row in of_scheme.values():
        figure, case, spec = timeline.picture(row), row["case"], row["case"]["spec"]
        title = (f"{case['scheme']} under {spec['mask']}: {case['world']} ranks, {spec['seq_len']:,} tokens, "
                 f"{sharding(row)}, {case['stack']}, forward, {HOW[row['kind']]}")
        parts.append(f"<h4>{page.esc(title)}</h4>{pictures.svg(figure)}")
        pictures.plt.close(figure)
    if not parts:
        return ""
    note = (f"<p class='soft'>{timeline.LEGEND} <code>bench.report</code> writes both passes of every such row "
            "into a folder <code>traces</code>, for Perfetto.</p>")
    return f"<h3>Timelines of the other schemes</h3>{note}{''.join(parts)}"
