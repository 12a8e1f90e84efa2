"""Jobs of the context-parallel bench: a failed one costs the row it was at, the rest goes on."""

import json
import types
from pathlib import Path

import pytest

from bench import context_parallel, records
from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case, from_record
from workload.ranks import RankFailure

SPEC = ProblemSpec("causal", 128, 0, 1, 4, 2, 16, "float32")
CASES = [Case("jax", scheme, SPEC, 2) for scheme in ("ring", "usp", "ulysses")]


def row_of(case):
    return {"key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
            "environment": {}}


@pytest.mark.parametrize("message,status", [
    ("rank 1 of 2 was lost (SIGKILL) at step 'hop 1', peer 0", "error"),
    ("rank 0 of 2 is the furthest behind at the deadline of 9 s at step 'check'", "timeout"),
    ("rank 0 of 2 failed (exit status 1) at step 'clock'\n  | RESOURCE_EXHAUSTED: out of memory", "out_of_memory"),
])
def test_a_failed_job_costs_one_row(tmp_path, monkeypatch, message, status):
    out, jobs = tmp_path / "rows.jsonl", []

    def spawn(command, ranks, **options):
        """A job that does its first case and fails at the second, once."""
        cases = [from_record(c) for c in json.loads(Path(command[-2]).read_text())["cases"]]
        jobs.append((len(cases), ranks))
        with records.Writer(out) as writer:
            for n, case in enumerate(cases):
                if n == 1 and len(jobs) == 1:
                    raise RankFailure(1, {}, message)
                writer.write(row_of(case))
        return [""]

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    context_parallel.Jobs(out, {}, 5.0).run(CASES)
    rows = records.read(out)
    assert [r["status"] for r in rows] == ["ok", status, "ok"] and jobs == [(3, 2), (1, 2)]
    assert message.splitlines()[0] in rows[1]["reason"]


def test_a_job_that_writes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(context_parallel, "_launcher",
                        lambda stack: types.SimpleNamespace(spawn=lambda *a, **k: [""]))
    with pytest.raises(RuntimeError, match="wrote no row"):
        context_parallel.Jobs(tmp_path / "rows.jsonl", {}, 5.0).run(CASES)


@pytest.mark.slow
def test_both_stacks_measure_and_agree_on_the_bytes(tmp_path):
    out = tmp_path / "rows.jsonl"
    request = {"protocol": {"samples": 2, "least": 1, "seconds": 0.01}, "check_len": 96, "deadline": 100, "links": []}
    cases = [Case(stack, "ring", SPEC, 2) for stack in ("jax", "torch")]
    context_parallel.Jobs(out, request, 100.0).run(cases)
    rows = records.read(out)
    assert [r["status"] for r in rows] == ["ok", "ok"], [r["reason"] for r in rows]
    for row in rows:
        assert row["bytes_match"] == {"forward": True, "backward": True}
        assert row["seconds"]["forward"]["median"] > 0 and row["efficiency"]["backward"] > 0
    assert rows[0]["schedule"] == rows[1]["schedule"]
