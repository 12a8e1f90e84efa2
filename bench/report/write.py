"""Writes the whole report of some records into a folder."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.report import aggregate, choice, context_parallel, page, parity, peers, pictures, tables, timeline


def write_report(rows: Sequence[dict], folder: Path, console: Console) -> Path:
    """Writes report.html, report.md, CSV files, PNGs and traces, then prints the tables; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    found = aggregate.entries(rows)
    beside = peers.entries(rows)
    drawn = {"heat": pictures.heat_maps(found), "curves": pictures.curves(found), "peers": pictures.heat_maps(beside)}
    for kind, figures in drawn.items():
        for number, figure in enumerate(figures.values()):
            pictures.save_png(figure, folder / f"{kind}_{number}.png")
            pictures.plt.close(figure)
    for name, text in (("report", tables.as_csv(rows)), ("parity", tables.parity_csv(rows)),
                       ("context_parallel", context_parallel.as_csv(rows))):
        if text.count("\n") > 1:  # more than the head
            (folder / f"{name}.csv").write_text(text)
    answers = {"choice": choice.answers(rows), "parallel": context_parallel.answers(rows)}
    short = "".join(f"- {line}\n" for lines in answers.values() for line in lines)
    parts = short, tables.as_markdown(rows), peers.markdown(rows), context_parallel.markdown(rows)
    (folder / "report.md").write_text("\n".join(part for part in parts if part))
    timeline.write_traces(rows, folder / "traces")
    target = folder / "report.html"
    choose = ("choice", "Which kernel for my mask?", choice.section(rows))
    parallel = ("parallel", "Context parallelism: who waits for whom", context_parallel.section(rows))
    agree = ("parity", "Do the stacks agree?", parity.section(rows))
    races = ("peers", "Side by side on one card", peers.section(rows))
    target.write_text(page.build(rows, [choose], [races, agree, parallel], answers))
    tables.terminal(rows, console)  # last: who reads it may go early
    console.print(f"page: {target}")
    return target
