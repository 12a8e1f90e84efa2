"""Timelines of context-parallel rows: nobody is lost, waits are the rest of a step, traces are what viewers read."""

import json

import pytest

from bench import context_parallel_cases as cp
from bench import engine
from bench.cases import ProblemSpec
from bench.report import context_parallel, pictures, timeline
from workload.schedule import Schedule

SPEC = ProblemSpec("causal_document", 96, 0, 1, 4, 2, 16, "float32", 0, (("documents", (40, 6, 50)),))
RATE = 1e6  # cells a second


def replayed(scheme="ring", ranks=4, world=4):
    """A replay row whose times are its cells at one rate; `ranks` busiest ranks a step were run."""
    case = cp.Case("torch", scheme, SPEC, world)
    schedule: Schedule = case.schedule()
    runs = []
    for t, cells in enumerate(schedule.cells):
        for rank in sorted(range(world), key=lambda r: -cells[r])[:ranks]:
            if cells[rank]:
                runs.append({"step": t, "rank": rank, "cells": int(cells[rank]), "forward": float(cells[rank] / RATE),
                             "backward": float(cells[rank] * 2.5 / RATE)})
    row = engine.new_row(case.key, "replay", json.loads(json.dumps(case.record())), {}) | {"runs": runs}
    row |= json.loads(json.dumps(cp.plan_of_schedule(schedule)))
    for which, factor in (("forward", 1.0), ("backward", 2.5)):
        slowest = [float(c.max() * factor / RATE) for c in schedule.cells]
        row[which] = {"slowest": slowest, "compute": sum(slowest), "predicted": sum(slowest) + 0.01,
                      "exposed_links": 0.01}
    return row, schedule


@pytest.mark.parametrize("ranks", [1, 4])
def test_bars_fill_every_rank_from_begin_to_end(ranks):
    row, schedule = replayed(ranks=ranks)
    drawn = timeline.bars(row, "backward")
    for rank in range(4):
        mine = sorted((b for b in drawn if b.rank == rank), key=lambda b: b.begin)
        now = 0.0
        for bar in mine:
            assert bar.begin == pytest.approx(now)
            now += bar.seconds
        assert now == pytest.approx(row["backward"]["predicted"])
        busy = sum(b.seconds for b in mine if b.kind in ("compute", "estimated"))
        assert busy == pytest.approx(schedule.cells[:, rank].sum() * 2.5 / RATE)
    kinds = {b.kind for b in drawn}
    assert ("estimated" in kinds) == (ranks < 4) and {"compute", "wait", "links"} <= kinds


def test_a_real_row_has_its_own_seconds():
    row, _ = replayed()
    real = {**row, "kind": "context_parallel", "schedule": row,
            "inside": {"forward": {"step_seconds": [[1.0, 2.0], [3.0, 1.0]]}}}
    real["case"] = {**row["case"], "world": 2}
    drawn = timeline.bars(real, "forward")
    assert {(b.rank, b.step, b.kind, b.begin, b.seconds) for b in drawn} == {
        (0, 0, "compute", 0.0, 1.0), (0, 0, "wait", 1.0, 2.0), (1, 0, "compute", 0.0, 3.0),
        (0, 1, "compute", 3.0, 2.0), (1, 1, "compute", 3.0, 1.0), (1, 1, "wait", 4.0, 1.0)}


def test_a_trace_is_what_viewers_read(tmp_path):
    rows = [replayed()[0], replayed("ulysses", world=2)[0], {**replayed()[0], "key": "x/y", "status": "error"}]
    paths = timeline.write_traces(rows, tmp_path / "traces")
    assert len(paths) == 2
    found = json.loads(paths[0].read_text())
    bars = [e for e in found["traceEvents"] if e["ph"] == "X"]
    assert bars and all(e["dur"] > 0 and {"ts", "pid", "tid", "name"} <= set(e) for e in bars)
    assert {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"} == {
        f"rank {n}" for n in range(4)}


def test_the_section_says_why_a_ring_waits():
    row, schedule = replayed()
    text = context_parallel.section([row, replayed("ulysses", world=2)[0],
                                     {**row, "key": "z", "status": "unsupported", "reason": "no <such> grid"}])
    assert f"work {schedule.step_balance:.0%} of the time" in text and "no &lt;such&gt; grid" in text
    assert text.count("<svg") == 2 and context_parallel.section([]) == ""
    assert "| causal_document | 4 | ring |" in context_parallel.markdown([row])
    figure = timeline.picture(row)
    assert len(figure.axes[0].patches) == len(timeline.bars(row, "forward"))
    pictures.plt.close("all")


def test_agreement_on_ranks_pairs_the_stacks():
    row, _ = replayed()
    sides = []
    for stack, error, status in (("jax", 1e-3, "ok"), ("torch", float("nan"), "mismatch")):
        sides.append({**row, "kind": "context_parallel", "key": stack, "case": {**row["case"], "stack": stack},
                      "schedule": row, "status": status, "reason": "" if status == "ok" else "out: error nan",
                      "errors": {"out": error}, "budget": {"out": 2e-3}, "check_len": 96})
    lines = context_parallel.agreement(sides)
    assert lines == [["ring", "causal_document", "4", "zigzag", "96", "0.50 out", "nan out", "fails"]]
    assert context_parallel.agreement(sides[:1]) == []
    grouped = [{**side, "case": {**side["case"], "head_groups": 2}} for side in sides]
    assert [line[3] for line in context_parallel.agreement([*sides, *grouped])] == ["zigzag", "zigzag, 2 head groups"]
    assert "Do the stacks agree on ranks?" in context_parallel.section(sides)
