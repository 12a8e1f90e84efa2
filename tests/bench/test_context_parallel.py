"""Jobs of the context-parallel bench: a failed one costs the row it was at, the rest goes on."""

import concurrent.futures
import dataclasses
import importlib
import json
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from bench import context_parallel, context_parallel_job, records
from bench import context_parallel_worker as worker
from bench.cases import STACKS, ProblemSpec
from bench.context_parallel_cases import Case, from_record, work_of
from bench.timing import MOST_AHEAD
from workload import ranks
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


def test_rows_are_told_as_they_come_also_of_a_job_that_is_lost(tmp_path, monkeypatch, capfd):
    """They were told when their job had ended, minutes later, and those of a lost one never."""
    def spawn(command, count, **options):
        command = [sys.executable, "-c", "print('a row'); raise SystemExit(3)"]
        return ranks.spawn(command, 1, "127.0.0.1:1", deadline_s=9.0, show=options.get("show", False))

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    context_parallel.Jobs(tmp_path / "rows.jsonl", {}, 5.0).run(CASES[:1])
    assert capfd.readouterr().out.splitlines()[0] == "a row"


def test_a_job_that_writes_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(context_parallel, "_launcher",
                        lambda stack: types.SimpleNamespace(spawn=lambda *a, **k: [""]))
    with pytest.raises(RuntimeError, match="wrote no row"):
        context_parallel.Jobs(tmp_path / "rows.jsonl", {}, 5.0).run(CASES)


def test_a_scheme_that_loses_jobs_is_given_up(tmp_path, monkeypatch):
    """Two lost jobs at a scheme are enough: its other cases get a row that says so, those of others are run."""
    out, jobs = tmp_path / "rows.jsonl", []
    cases = [Case("jax", scheme, SPEC, 2, kind)
             for kind in ("zigzag", "balanced", "striped") for scheme in ("ring", "usp")]

    def spawn(command, ranks, **options):
        for case in [from_record(c) for c in json.loads(Path(command[-2]).read_text())["cases"]]:
            if case.scheme == "ring":
                jobs.append(case.sharding)
                raise RankFailure(0, {}, "Timeout (0:00:05)!")
            with records.Writer(out) as writer:
                writer.write(row_of(case))
        return [""]

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    context_parallel.Jobs(out, {}, 5.0).run(cases)
    rows = {row["key"]: row for row in records.read(out)}
    assert jobs == ["zigzag", "balanced"] and len(rows) == 6
    assert [rows[c.key]["status"] for c in cases] == ["timeout", "ok", "timeout", "ok", "error", "ok"]
    assert "2 jobs were lost at ring" in rows[cases[4].key]["reason"]


def test_a_lost_trace_costs_no_row(tmp_path, monkeypatch):
    """Traces come last, in rows of their own; a row that is there is not measured again for its trace."""
    out, jobs = tmp_path / "rows.jsonl", []

    def spawn(command, ranks, **options):
        jobs.append([from_record(c).scheme for c in json.loads(Path(command[-2]).read_text())["cases"]])
        with records.Writer(out) as writer:
            for case in CASES:
                if case.key not in writer.keys:
                    writer.write(row_of(case))
        raise RankFailure(0, {}, "rank 0 of 2 was lost (SIGSEGV)")

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    context_parallel.Jobs(out, {"trace": [["ring", "causal"]]}, 5.0).run(CASES)
    rows = records.read(out)
    assert jobs == [["ring", "usp", "ulysses"]] and [r["status"] for r in rows] == ["ok"] * 3 + ["error"]
    assert rows[3]["key"] == f"trace/{CASES[0].key}" and rows[3]["kind"] == "trace" and "SIGSEGV" in rows[3]["reason"]


@pytest.mark.parametrize("ahead", [False, True])
def test_stacks_measure_in_turn(tmp_path, monkeypatch, ahead):
    """A stack that is started ahead is told of a file that is there once the one before it is done; else it is not
    started before.
    """
    out, told = tmp_path / "rows.jsonl", []

    def spawn(command, ranks, **options):
        request = json.loads(Path(command[-2]).read_text())
        case = from_record(request["cases"][0])
        told.append((case.stack, "begins"))
        while request["after"] and not Path(request["after"]).exists():
            time.sleep(0.01)
        if case.stack == "torch":
            time.sleep(0.2)
        with records.Writer(out) as writer:
            writer.write(row_of(case))
        told.append((case.stack, "ends"))
        return [""]

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    context_parallel.Jobs(out, {}, 5.0, ahead=ahead).run([Case(stack, "ring", SPEC, 2) for stack in ("torch", "jax")])
    assert told.index(("torch", "ends")) < told.index(("jax", "ends"))
    assert (told.index(("jax", "begins")) < told.index(("torch", "ends"))) == ahead


def test_a_row_that_is_asked_again_is_run_once(tmp_path, monkeypatch):
    """By ranks, which write beside the run that has the file open."""
    out, jobs = tmp_path / "rows.jsonl", []

    def spawn(command, ranks, **options):
        request = json.loads(Path(command[-2]).read_text())
        jobs.append([case["scheme"] for case in request["cases"]])
        with records.Writer(out) as writer:
            for fields in request["cases"]:
                writer.write(row_of(from_record(fields)))
        return [""]

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    with records.Writer(out) as writer:
        for case in CASES:
            writer.write(row_of(case) | {"n": 1})
    with records.Writer(out, alone=True, again=lambda row: row["case"]["scheme"] == "usp"):
        context_parallel.Jobs(out, {}, 5.0).run(CASES)
    assert jobs == [["usp"]] and [(row["key"], row.get("n")) for row in records.read(out)] == \
        [(case.key, None if case.scheme == "usp" else 1) for case in CASES]


def test_ranks_that_are_ended_with_the_run_are_no_failure(tmp_path, monkeypatch, capsys):
    def spawn(*_, **__):
        run.stop()
        raise RankFailure(0, {}, "rank 0 of 2 was lost (SIGTERM)")

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    run = context_parallel.Jobs(tmp_path / "rows.jsonl", {}, 5.0)
    run.run(CASES)
    assert not records.read(tmp_path / "rows.jsonl") and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("host", [0, 1])
def test_a_job_on_several_hosts_is_not_begun_again(tmp_path, monkeypatch, capsys, host):
    """The other hosts would have to begin it, too: it ends on all, host 0 has its row, and --resume goes on."""
    out, jobs = tmp_path / "rows.jsonl", []

    def spawn(command, ranks, **options):
        jobs.append(ranks)
        raise RankFailure(0, {}, "Timeout (0:00:05)!")

    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: types.SimpleNamespace(spawn=spawn))
    run = context_parallel.Jobs(out, {}, 5.0, hosts=2, host=host, coordinator="h:1")
    run.run([*CASES, dataclasses.replace(CASES[0], world=4)])
    assert jobs == [1] and run.stopped and "--resume on every host" in capsys.readouterr().err
    assert [row["status"] for row in records.read(out)] == (["timeout"] if host == 0 else [])


class Rank:
    """A rank of a job whose processes are threads, as far as `context_parallel_worker.run` asks."""

    def __init__(self, rank, request, held):
        self.rank, self.request, self.held = rank, request, held
        self.progress, self.stack, self.world = \
            types.SimpleNamespace(at=lambda step: None), types.SimpleNamespace(name="jax"), 2

    build = staticmethod(lambda cases: None)

    def gather(self, value):
        """By way of a list that both fill before either reads."""
        values, barrier = self.held
        barrier.wait()
        values[self.rank] = value
        barrier.wait()
        return list(values)


def test_ranks_of_several_hosts_go_by_the_rows_of_rank_0(tmp_path, monkeypatch):
    """Another host may have no file of records, or another clock; who measured what is said by one."""
    files = [tmp_path / "host0.jsonl", tmp_path / "host1.jsonl"]
    with records.Writer(files[0]) as writer:
        writer.write(row_of(CASES[0]))
    held, done = ([None, None], threading.Barrier(2, timeout=20)), {0: [], 1: []}
    monkeypatch.setattr(worker, "measure_case", lambda job, case, *_: done[job.rank].append(case.key) or row_of(case))
    monkeypatch.setattr(worker, "line", lambda row: row["key"])
    monkeypatch.setattr(worker, "_begin", lambda job, step: None)
    late = time.time() - 5

    def rank(n, until):
        request = context_parallel_job.Request([c.record() for c in CASES], until=until)
        worker.run(Rank(n, request, held), str(files[n]))

    for until, keys in (((1e12, 1e12), [c.key for c in CASES[1:]]), ((1e12, late), [])):
        done.update({0: [], 1: []})
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for each in [threads.submit(rank, n, x) for n, x in enumerate(until)]:
                each.result()
        assert done == {0: keys, 1: keys}
        files[0].unlink(missing_ok=True)


def test_no_row_is_begun_past_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(context_parallel, "_launcher", lambda stack: pytest.fail("a job was started"))
    jobs = context_parallel.Jobs(tmp_path / "rows.jsonl", {}, 5.0, budget=0.0)
    jobs.run(CASES)
    assert records.read(jobs.out) == []


@pytest.mark.parametrize("flag,words", [
    ("--worlds=0", "--worlds: '0' is no positive number"), ("--worlds=9999", "--worlds: 9999, a host of "),
    ("--trace=ring", "--trace: 'ring' is no scheme:mask"),
    ("--trace=ring:prefix_lm_causal", "--trace: 'ring:prefix_lm_causal' is no case of this run"),
    ("--kernel=all", "--kernel: 'all' is none of naive"), ("--checked=none", "--checked: records: no such file: none"),
    ("--schemes=ring --ulysses=2", "--ulysses: only usp and loongtrain take one"),
    ("--inside", "--inside: jax times no step alone"),
    ("--head_groups=2 --schemes=ring", "--head_groups: only ulysses and all_gather take more than 1"),
    ("--head_groups=3 --q_heads=8 --kv_heads=8",
     "--head_groups: ulysses: head_groups 3: a rank has 4 kv heads, on 2 ranks"),
    ("--head_groups=2 --masks=uniform_block", "--head_groups: ulysses: head_groups 2: the mask differs by head"),
])
def test_a_bad_flag_is_named(flag, words, tmp_path):
    command = [sys.executable, "-m", "bench.context_parallel", *flag.split(), f"--out={tmp_path / 'rows.jsonl'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and words in done.stderr, done.stderr


def test_cases_of_the_same_work_are_known():
    """A head exchange restores the order of any sharding; usp without one is the ring; others are work of their own."""
    def work(scheme, kind, **more):
        case = Case("jax", scheme, SPEC, 2, kind, **more)
        return work_of(case, case.schedule())

    assert work("ulysses", "zigzag") == work("ulysses", "balanced") == work("ulysses", "contiguous")
    assert work("usp", "zigzag") == work("ring", "zigzag") != work("ring", "contiguous")
    assert work("usp", "zigzag", ulysses=2) != work("ring", "zigzag")
    assert work("ulysses", "zigzag", head_groups=2) != work("ulysses", "zigzag") != work("all_gather", "zigzag")


@pytest.mark.slow
def test_both_stacks_measure_and_agree_on_the_bytes(tmp_path):
    """One builds while the other is measured; a second run at another length takes over the checks of the first."""
    out, again = tmp_path / "rows.jsonl", tmp_path / "again.jsonl"
    request = {"protocol": {"samples": 2, "least": 1, "seconds": 0.01}, "check_len": 96, "deadline": 100,
               "links": [256, 4096], "trace": [["ring", "causal"]]}
    cases = [Case(stack, scheme, SPEC, 2, head_groups=groups) for stack in ("torch", "jax")
             for scheme, groups in (("ring", 1), ("usp", 1), ("all_gather", 2))]
    context_parallel.Jobs(out, request, 100.0, ahead=True).run(cases)
    rows = records.read(out)
    links, traces, rows = ([r for r in rows if r["kind"] == kind] for kind in ("links", "trace", "context_parallel"))
    assert [r["status"] for r in rows] == ["ok"] * 6, [r["reason"] for r in rows]
    assert [r.get("measured_as") for r in rows] == [None, rows[0]["key"], None, None, rows[3]["key"], None]
    assert [r["case"]["stack"] for r in links] == ["torch", "jax"] and all(r["status"] == "ok" for r in links)
    for row in rows:
        assert row["bytes_match"] == {"forward": True, "backward": True} and row["check_len"] == 96
        assert row["seconds"]["forward"]["median"] > 0 and row["efficiency"]["backward"] > 0
    assert [r["status"] for r in traces] == ["ok"] * 2, [r["reason"] for r in traces]
    for row in traces:
        assert row["case"]["scheme"] == "ring" and [len(row["trace"][w]) for w in ("forward", "backward")] == [2, 2]
    assert len(list((tmp_path / "traces").glob("*.trace.json.gz"))) == 8
    by_stack = {stack: [r for r in rows if r["case"]["stack"] == stack] for stack in ("torch", "jax")}
    assert [r["schedule"] for r in by_stack["torch"]] == [r["schedule"] for r in by_stack["jax"]]

    shorter = [dataclasses.replace(c, spec=dataclasses.replace(SPEC, seq_len=64)) for c in (cases[0], cases[2])]
    context_parallel.Jobs(again, request | {"checked": str(out), "links": [], "trace": []}, 100.0).run(shorter)
    checked = {from_record(r["case"]).any_length: r for r in rows}
    assert len(records.read(again)) == 2
    for row in records.read(again):
        assert row["status"] == "ok" and row["check_len"] == 96
        assert row["errors"] == checked[from_record(row["case"]).any_length]["errors"]


@pytest.mark.slow
def test_bytes_of_bfloat16_are_the_schedules_on_a_cpu_too(tmp_path):
    """XLA hands float32 to a CPU's collectives there."""
    cases = [Case("jax", "ring", dataclasses.replace(SPEC, dtype="bfloat16"), 2)]
    context_parallel.Jobs(tmp_path / "rows.jsonl", {"timed": False}, 100.0).run(cases)
    row, = records.read(tmp_path / "rows.jsonl")
    assert row["status"] == "ok", row["reason"]


@pytest.mark.parametrize("needs,others,ahead", [(1, False, 1), (3, False, 4), (1, True, MOST_AHEAD)])
@pytest.mark.parametrize("name", STACKS)
def test_all_ranks_take_the_head_start_that_the_slowest_host_needs(name, needs, others, ahead):
    """A rank that took a sample again alone would call a collective alone: the head start is settled beforehand.

    needs: the head start that the device of this rank needs; others: whether a peer's may have waited all the same.
    """
    rank = importlib.import_module(f"bench.context_parallel_{name}_worker")
    made, taken, unit = object.__new__(rank.Job), [], getattr(rank, "AHEAD_CYCLES", 1)

    def between_events(call, behind, before):
        before()
        call()
        taken.append(behind)
        return unit / behind, behind < needs * unit

    made.stack = types.SimpleNamespace(on_gpu=True, between_events=between_events)
    made.gather = lambda value: [value, others]
    made.together = lambda: taken.append("meet")
    sample, estimate = made.sampler(lambda: taken.append("call"))
    before = len(taken)
    assert sample() == estimate == 1.0 / ahead
    assert taken[before:] == ["meet", "call", ahead * unit]
