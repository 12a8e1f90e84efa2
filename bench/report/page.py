"""One self-contained HTML page from any set of records: no network, light and dark."""

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from bench import options
from bench.report import aggregate, pictures, tables
from bench.report.aggregate import Entry
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --back: #fff; --card: #f6f8fa; --line: #d1d9e0;
  --good: #1a7f37; --bad: #cf222e; --note: #9a6700; --heat: 68, 119, 170; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --back: #0d1117; --card: #161b22;
  --line: #3d444d; --good: #3fb950; --bad: #f85149; --note: #d29922; --heat: 102, 170, 238; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 0 auto;
  max-width: 1240px; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid
  var(--line); } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p, li { max-width: 75ch; } .soft { color: var(--soft); } nav a { margin-right: 1rem; } a { color: inherit; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; } td.text { white-space: normal; min-width: 12rem; }
td.names { white-space: normal; text-align: left; min-width: 5.2rem; }
thead th { vertical-align: bottom; font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad);
  font-weight: 600; } .note { color: var(--note); } .none { color: var(--soft); }
.masks { display: grid; grid-template-columns: repeat(auto-fill, minmax(135px, 1fr)); gap: .8rem; }
figure { margin: 0; } figure img { width: 100%; image-rendering: pixelated; border: 1px solid var(--line); }
figcaption { font-size: 12px; color: var(--soft); overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1rem 0; } .tile { background: var(--card); border: 1px
  solid var(--line); border-radius: 8px; padding: .6rem 1rem; } .tile b { display: block; font-size: 1.3rem; }
.pair { display: flex; flex-wrap: wrap; column-gap: 2.5rem; align-items: flex-start; } .pair > div { min-width: 0;
  max-width: 100%; } @media (max-width: 700px) { .wide > svg { max-width: none; } }
h4 { font-size: .85rem; margin: .8rem 0 .2rem; } details { margin: .8rem 0; } summary { cursor: pointer; }
section { content-visibility: auto; contain-intrinsic-size: auto 60rem; }
"""
TOLD = {"ok": "rows right", "unsupported": "refused, with reason"}
STATUS_CLASS = {"ok": "good", "unsupported": "none", "out_of_memory": "note", "timeout": "note",
                "skipped": "note"}


def esc(x) -> str:
    """Text as HTML."""
    return html.escape(str(x))


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table; a cell that starts with "<td" is taken as it is, others are escaped."""
    def tag(x):
        return x if str(x).startswith("<td") else f"<td>{esc(x)}</td>"
    at_left = ('<td class="text', '<td class="names')
    texts = {n for line in body for n, x in enumerate(line) if str(x).startswith(at_left)}
    heads = "".join(
        f'<th{" class=text" if n in texts else ""}>{esc(h).replace("|", "<br>")}</th>' for n, h in enumerate(head))
    lines = "".join("<tr>" + "".join(tag(x) for x in line) + "</tr>" for line in body)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'


Section = tuple[str, str, str]  # anchor, title, HTML


def build(rows: Sequence[dict], first: Sequence[Section] = (), sections: Sequence[Section] = (),
          answers: Mapping[str, Sequence[str]] = MappingProxyType({})) -> str:
    """The page.

    Args:
      rows: records of any kinds, failures among them.
      first: further sections in front of all rates; sections: those behind the capability table.
      answers: by anchor, a section's answer in lines of text, for the summary.
    """
    found = aggregate.entries(rows)
    anchors = {anchor for anchor, _, text in (*first, *sections) if text}
    anchors |= {anchor for _, _, text in sections for anchor in re.findall(r'<h3 id="(\w+)"', text)}
    parts = [
        ("summary", "What this is", _summary(rows, found, anchors, answers)),
        ("masks", "The masks", _masks()),
        *first,
        ("rates", "Rates: mask by kernel", _rates(found)),
        ("curves", "Rates over length", _curves(found)),
        ("causes", "Where the time goes", _causes(found)),
        ("capability", "What runs where, and why not", _capability([*found, *aggregate.compared(rows)])),
        *sections,
        ("machine", "Machine and versions", _machine(rows)),
        ("rows", "Every row", _every(found)),
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{anchor}">{esc(title)}</a> ' for anchor, title, _ in parts)
    body = "".join(f'<section id="{anchor}"><h2>{esc(title)}</h2>{text}</section>' for anchor, title, text in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><title>Attention in two stacks</title>'
        f"<style>{STYLE}</style></head><body><h1>Attention in two stacks</h1><nav>{links}</nav>{body}</body></html>\n"
    )


def _summary(rows, found, anchors, answers) -> str:
    counts = {s: sum(r["status"] == s for r in rows) for s in dict.fromkeys(r["status"] for r in rows)}
    tiles = [(f"{n:,}", TOLD.get(status, f"rows: {status.replace('_', ' ')}"))
             for status, n in sorted(counts.items(), key=lambda x: -x[1])]
    where = Counter(map(_device, _environments(rows))).most_common(1)
    tiles = [(device, f"where {n:,} of {len(rows):,} rows ran") for device, n in where] + tiles
    unit, name = aggregate.unit_of(found)
    for row in aggregate.ceilings(rows):
        tiles.append((f"{tables.number(row['peak_flops'] / unit)} {name}",
                      f"matrix peak, {row['case']['dtype']}, {row['case']['stack']}"))
    copy = aggregate.bandwidths(rows)
    tiles += [(f"{copy / 1e9:.4g} GB/s", "copy bandwidth")] if copy else []
    boxes = "".join(f'<div class="tile"><b>{esc(n)}</b>{esc(label)}</div>' for n, label in tiles)
    text = (
        "<p>The same attention problems, under the same masks and on the same bits, run by kernels of two stacks: JAX "
        "with Pallas, and PyTorch. A row is compared with float64 attention before it is timed (one without an error "
        "figure comes from a run that checked otherwise; its source says which). A rate counts "
        "the <em>visible</em> cells of the mask only: 4 &times; cells &times; head size forward, 2.5 times that "
        "backward; a kernel that computes hidden cells shows a lower rate. Times are medians; on a GPU device time "
        "with a cold L2 cache, on a CPU wall time.</p>"
    )
    return text + f'<div class="tiles">{boxes}</div>' + _findings(rows, found, anchors, answers) + _best(found)


def _findings(rows: Sequence[dict], found: Sequence[Entry], anchors: set[str], answers: Mapping[str, Sequence[str]]
              ) -> str:
    """What a newcomer should see first, from the rows at hand; anchors: of the sections that the page has."""
    def with_answer(text: str, anchor: str) -> str:
        lines = "".join(f"<li>{esc(line)}</li>" for line in answers.get(anchor, ()))
        return text + (f"<ul>{lines}</ul>" if lines else "")

    told = []
    if "choice" in anchors:
        told.append(with_answer('<a href="#choice">Which kernel to take</a> for a mask and a length.', "choice"))
    if "parallel" in anchors:
        told.append(with_answer(
            '<a href="#parallel">Which scheme to take</a> when a sequence is split over ranks. In brackets E, one '
            "device's time over (ranks &times; the slowest rank's): 1 is perfect, and a little more where a rank's "
            "part ran at a better rate than the whole.", "parallel"))
    if "ring" in anchors:
        told.append('<a href="#ring">Why a ring falls behind on documents</a>, with a picture of who waits.')
    compared = [row for row in rows if row["kind"] == "parity" and row["status"] != "unsupported"]
    if compared:
        good = sum(row["status"] == "ok" for row in compared)
        told.append(f'<a href="#parity">The stacks agree</a> in {good:,} of {len(compared):,} cells that both can run.')
    unit, name = aggregate.unit_of(found)
    peak = max((row["peak_flops"] for row in aggregate.ceilings(rows)), default=None)
    for setting in aggregate.settings(found)[:2]:
        timed = [e for e in found if e.setting == setting and e.rate]
        tops = [max((e for e in timed if e.stack == s), key=lambda e: e.rate or 0) for s in
                sorted({e.stack for e in timed})]
        if tops:
            told.append(f"{esc(tables.heading(setting).capitalize())}: fastest are " + ", ".join(
                f"{esc(e.kernel)} of {e.stack} under {esc(e.mask)} ({tables.number((e.rate or 0) / unit)} {name}"
                + (f", {(e.rate or 0) / peak:.0%} of the matrix peak)" if peak else ")") for e in tops) + ".")
        told += _price(timed) if setting[0] == "forward" else []
    lines = "".join(f"<li>{line}</li>" for line in told)
    return f"<h3>What it says</h3><ul>{lines}</ul>" if told else ""


def _price(timed: Sequence[Entry]) -> list[str]:
    """What documents cost the kernel that is fastest on them."""
    masked = [e for e in timed if e.mask == "causal_document" and e.rate]
    if not masked:
        return []
    best = max(masked, key=lambda e: e.rate or 0)
    causal = next((e for e in timed if e.column == best.column and e.mask == "causal"), None)
    if causal is None or not causal.rate or not best.rate:
        return []
    waste = f": 128-tiles hold {best.waste:.2f} &times; the visible cells" if best.waste else ""
    return [f'<a href="#causes">Documents cost</a> {1 - best.rate / causal.rate:.0%} of the causal rate there '
            f"({esc(best.column)}){waste}."]


def _best(found: Sequence[Entry]) -> str:
    unit, name = aggregate.unit_of(found)
    lines = []
    for setting in aggregate.settings(found):
        here = [e for e in found if e.setting == setting and e.rate]
        for stack in sorted({e.stack for e in here}):
            top = max((e for e in here if e.stack == stack), key=lambda e: e.rate or 0)
            lines.append([f'<td class="text">{esc(tables.heading(setting))}</td>', stack, top.kernel, top.mask,
                          tables.number((top.rate or 0) / unit)])
    return "<details><summary>Fastest row of each setting</summary>" \
        + table(["setting", "stack", "kernel", "mask", name], lines) + "</details>" if lines else ""


def _rates(found) -> str:
    """A table a setting, the passes side by side; a shape's telling length is open, its others are folded.

    Settings of a single mask stand in one table a pass.
    """
    unit, name = aggregate.unit_of(found)
    shapes: dict[tuple, dict[int, list[str]]] = {}
    single: dict[str, list[tuple[str, dict[str, Entry]]]] = {}
    for setting in aggregate.settings(found):
        masks, columns, cells = aggregate.pivot(found, setting)
        shown = [c for c in columns if any((m, c) in cells and cells[m, c].status != "unsupported" for m in masks)]
        if shown and len(masks) == 1:
            label = f"{masks[0]}, {tables.heading(setting).partition(', ')[2]}"
            single.setdefault(setting[0], []).append((label, {c: cells[masks[0], c] for c in shown}))
        elif shown:
            lines = [(mask, {c: cells[mask, c] for c in shown if (mask, c) in cells}) for mask in masks]
            lines = [line for line in lines if any(e.status != "unsupported" for e in line[1].values())]
            text = _rate_table(f"{tables.heading(setting)}: {name}", "mask", lines, shown, unit)
            shapes.setdefault(setting[2:], {}).setdefault(setting[1], []).append(text)
    note = ('<p class="soft">The stronger its colour, the nearer a cell is to the fastest of its table. &ndash; is not '
            "supported, an empty cell was not run; ! marks a rate that looks too good beside the other pass or the "
            "dense one; point at a cell for time, spread and cause.</p>")
    parts = []
    for shape, (opened, *folded) in ((shape, list(by_length.items())) for shape, by_length in shapes.items()):
        parts.append(f'<div class="pair">{"".join(opened[1])}</div>')
        if folded:
            rest = "".join(f'<div class="pair">{"".join(texts)}</div>' for _, texts in folded)
            lengths = ", ".join(f"{n:,}" for n, _ in folded)
            parts.append(f"<details><summary>{esc(' '.join(shape))}: {lengths} tokens</summary>{rest}</details>")
    tabled = [
        _rate_table(f"{which}: {name}", "setting", lines, list(dict.fromkeys(c for _, row in lines for c in row)), unit)
        for which, lines in single.items()]
    if tabled:
        count = sum(len(lines) for lines in single.values())
        parts.append(f"<details><summary>Settings of one mask each: {count} lines</summary>{''.join(tabled)}</details>")
    return note + "".join(parts) if shapes or single else ""


def _rate_table(title: str, first: str, lines: Sequence[tuple[str, dict[str, Entry]]], columns: Sequence[str],
                unit: float) -> str:
    """(label, entry by column) lines as a table under a title."""
    top = max((e.rate for _, row in lines for e in row.values() if e.rate), default=0.0)
    body = [[f'<td class="text">{esc(label)}</td>', *(_rate_cell(row.get(c), unit, top) for c in columns)]
            for label, row in lines]
    head = [first, *(c.replace(" ", "|") for c in columns)]
    return f"<div><h3>{esc(title)}</h3>{table(head, body)}</div>"


def _rate_cell(entry: Entry | None, unit: float, top: float) -> str:
    if entry is None:
        return '<td class="none"></td>'
    if entry.rate is None or entry.seconds is None:
        css = STATUS_CLASS.get(entry.status, "bad")
        return f'<td class="{css}" title="{esc(entry.reason)}">{esc(tables.cell(entry, unit))}</td>'
    told = f"{entry.seconds * 1e3:.3f} ms, spread {entry.spread:.0%}; {aggregate.cause(entry)}"
    told += "".join(f"; {flag}" for flag in entry.flags)
    heat = 0.75 * entry.rate / top
    return (f'<td style="background: rgba(var(--heat), {heat:.2f})" title="{esc(told)}">'
            f"{esc(tables.cell(entry, unit))}</td>")


def _curves(found) -> str:
    parts = [f'<div><h3>{esc(title)}</h3><div class="wide">{pictures.svg(figure)}</div></div>'
             for title, figure in pictures.curves(found).items()]
    note = "<p class='soft'>Solid: JAX. Dashed: PyTorch. One colour a kernel.</p>"
    return f'{note}<div class="pair">{"".join(parts)}</div>' if parts else ""


def _causes(found) -> str:
    """The fastest kernel of each stack under each mask of the first setting; the others stand among all rows."""
    order, masks = aggregate.settings(found), list(ALL_BUILDERS)
    known = sorted((e for e in found if e.seconds and e.floor and e.setting in order[:2]), key=lambda e: (
        order.index(e.setting), masks.index(e.mask), -(e.rate or 0)))
    if not known:
        return ""
    first: dict[tuple, Entry] = {}
    for e in known:
        first.setdefault((e.setting, e.mask, e.stack), e)
    note = (
        "<p>The <em>floor</em> of a row is the larger of its FLOPs over the measured matrix peak and its fewest bytes "
        "over the measured copy bandwidth: no version runs much faster. <em>Tile waste</em> is what a kernel that "
        "works in 128 &times; 128 tiles computes over what the mask shows. A <em>walk</em> is the tiles that 128 "
        "queries visit, or 128 keys backward; it begins and ends with work that no tile hides, so short walks cost "
        "more a tile"
        + _walk_costs(list(first.values())) + ". Here is the fastest kernel of each stack; "
        '<a href="#rows">every row</a> has the same.</p>')
    body = [[e.column, e.mask, e.which, f"{e.seq_len:,}", f"{(e.seconds or 0) * 1e3:.3f}", *_cause_line(e)]
            for e in first.values()]
    return note + table(["kernel", "mask", "pass", "tokens", "ms", *CAUSE_HEAD], body)


CAUSE_HEAD = ("floor ms", "floor set by", "x floor", "visible", "tile waste", "walk", "GB/s", "in words")


def _walk_costs(found: Sequence[Entry]) -> str:
    """What a walk's two ends cost, by pass, as the rows have it; empty where they do not tell."""
    costs = {which: aggregate.walk_cost([e for e in found if e.which == which]) for which in PASSES}
    told = [f"{cost:.1f} {which}" for which, cost in costs.items() if cost]
    return f" (by least squares over these rows as much as {' and '.join(told)} more tiles)" if told else ""


def _cause_line(e: Entry) -> list[str]:
    """In `CAUSE_HEAD`'s columns; empty for a row without a time or a floor."""
    if not (e.seconds and e.floor and e.bandwidth):
        return [""] * len(CAUSE_HEAD)
    return [
        f"{e.floor * 1e3:.4f}", e.bound, f"{e.seconds / e.floor:.3g}", "" if e.density is None else f"{e.density:.1%}",
        "" if e.waste is None else f"{e.waste:.2f}", "" if e.walk is None else f"{e.walk:.1f}",
        tables.number(e.bandwidth / 1e9),
        f'<td class="text">{esc(aggregate.cause(e))}</td>',
    ]


def _capability(found) -> str:
    masks, columns, cells = aggregate.capability(found)
    if not masks:
        return ""
    signs = {"both": ("good", "F B"), "forward": ("good", "F"), "backward": ("note", "B")}
    body = []
    for column in sorted(columns, key=lambda column: (_place(column.partition(" ")[0]), column)):
        line = [column]
        for mask in masks:
            verdict, reason = cells.get((mask, column), ("", ""))
            css, text = signs.get(verdict, (STATUS_CLASS.get(verdict, "bad"), tables.SHORT.get(verdict, "")))
            line.append(f'<td class="{css}" title="{esc(reason)}">{text}</td>')
        body.append(line)
    reasons = [[k, s, f'<td class="text">{esc(w)}</td>', f'<td class="text">{esc(r)}</td>']
               for k, s, w, r in tables.unavailable(found)]
    why = f"<details><summary>Why not: {len(reasons)} reasons</summary>" + table(
        ["kernel", "stack", "does not run", "because"], reasons) + "</details>" if reasons else ""
    return ('<p class="soft">F: the forward pass is right here, B: the backward pass; &ndash;: refused, for a reason '
            'told below; empty: not asked here.</p>'
            + table(["kernel", *(m.replace("_", "_|") for m in masks)], body) + why + _sources(found))


def _place(kernel: str) -> int:
    """Where a kernel stands among all, the plain ones first."""
    return options.ALL_KERNELS.index(kernel) if kernel in options.ALL_KERNELS else len(options.ALL_KERNELS)


def _sources(found: Sequence[Entry]) -> str:
    """Whose program a kernel is in each stack."""
    told: dict[str, dict[str, str]] = {}
    for e in found:
        if e.source:
            told.setdefault(e.kernel, {})[e.stack] = e.source
    stacks = sorted({stack for sources in told.values() for stack in sources})
    body = [[kernel, *(f'<td class="text">{esc(sources.get(s, ""))}</td>' for s in stacks)]
            for kernel, sources in sorted(told.items(), key=lambda x: _place(x[0]))]
    return "<h3>What the names stand for</h3>" + table(["kernel", *stacks], body) if told else ""


def _masks() -> str:
    figures = "".join(
        f'<figure><img alt="{name}" src="{url}"><figcaption>{name.replace("_", "_<wbr>")}</figcaption></figure>'
        for name, url in pictures.mask_pictures().items())
    return ("<p class='soft'>Rows are queries, columns keys, blue is visible; 96 tokens, five documents.</p>"
            f'<div class="masks">{figures}</div>')


def _environments(rows: Sequence[dict]) -> list[dict[str, Any]]:
    """Each row's: what its stacks say of themselves among the rest; for one that ran nothing its host's device."""
    found = []
    for row in rows:
        here = dict(row["environment"])
        for own in here.pop("stacks", {}).values():
            here = own | here
        found.append(here)
    devices = {_host(here): here["device"] for here in found if "device" in here}
    return [{"device": devices[_host(here)]} | here if _host(here) in devices else here for here in found]


def _host(environment: Mapping[str, Any]) -> tuple[Any, Any]:
    return environment.get("processor"), environment.get("cores")


def _device(environment: Mapping[str, Any]) -> str:
    """What computed a row."""
    found = environment.get("device", environment.get("gpu", "no device"))
    return f"CPU, {environment.get('processor', 'unknown')}" if found == "cpu" else found


def _machine(rows) -> str:
    """A column a machine: what its rows say of it, several values where they differ."""
    machines: dict[tuple, dict[str, dict[str, None]]] = {}
    counts: dict[tuple, int] = {}
    for environment in _environments(rows):
        key = _device(environment), *_host(environment)
        counts[key] = counts.get(key, 0) + 1
        held = machines.setdefault(key, {})
        for name, value in environment.items():
            held.setdefault(name, {})[str(value) or "none"] = None
    names = dict.fromkeys(name for held in machines.values() for name in held)
    body = [[name, *(f'<td class="text">{esc("; ".join(held.get(name, ())))}</td>' for held in machines.values())]
            for name in names]
    return table(["", *(f"{key[0]}|{n:,} row{'s' * (n > 1)}" for key, n in counts.items())], body)


def _every(found) -> str:
    """All rows but those of refused cases, which the capability table has."""
    def text(x, form):
        return "" if x is None else format(x, form)
    body = [[
        e.column, e.mask, e.which, f"{e.seq_len:,}", e.shape, e.dtype,
        f'<td class="{STATUS_CLASS.get(e.status, "bad")}" title="{esc(e.reason)}">{esc(e.status)}</td>',
        text(e.seconds and e.seconds * 1e3, ".3f"), text(e.spread, ".0%"), *_cause_line(e),
        text(e.warm_seconds and e.warm_seconds * 1e3, ".3f"), text(e.compile_seconds, ".2f"),
        text(e.prepare_seconds and e.prepare_seconds * 1e3, ".2f"),
        text(e.peak_bytes and e.peak_bytes / 2**20, ",.0f"), f"{text(e.error_share, '.2f')} {e.worst}", e.packs,
        f'<td class="text">{esc(e.source)}</td>', f'<td class="text note">{esc("; ".join(e.flags))}</td>',
    ] for e in found if e.status != "unsupported"]
    head = ["kernel", "mask", "pass", "tokens", "shape", "dtype", "status", "ms", "spread", *CAUSE_HEAD, "warm ms",
            "compile s", "mask build ms", "peak MiB", "error / budget", "packs", "source", "flags"]
    return f"<details><summary>{len(body):,} rows that ran</summary>{table(head, body)}</details>" if body else ""
