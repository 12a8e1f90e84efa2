"""Runs of the bench: one row a case whatever happens, resumed without loss or repetition, bad flags named."""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from bench import attention_task, cases, engine, options, records
from bench.cases import Case, ProblemSpec
from bench.timing import Protocol
from tests.bench.conftest import ANSWERS

SPEC = ProblemSpec("causal_document", 90, 70, 2, 3, 1, 16, "float32", 5, (("documents", (40, 0, 50)),))
FAST = Protocol(samples=2, least=1, seconds=0.01, warmups=3)
FLAGS = ["--q_heads=2", "--kv_heads=1", "--head_dim=16", "--dtype=float32", "--samples=2", "--seconds=0.01"]


HEEDING = ("-c", "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
           "runpy.run_module('bench.dense', run_name='__main__', alter_sys=True)")  # a job in the background ignores it


def dense(*flags, start=("-m", "bench.dense"), **more):
    return subprocess.Popen(
        [sys.executable, *start, *FLAGS, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, **more)


def test_a_killed_run_resumes_with_no_row_lost_and_none_twice(tmp_path):
    out = tmp_path / "r.jsonl"
    wanted = ["--stack=torch", "--kernels=naive,sdpa", "--masks=full,causal", "--seqlens=40,50", "--workers=2",
              f"--out={out}"]
    run = dense(*wanted)
    until = time.monotonic() + 120
    while len(records.read(out)) < 5 and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    kept = records.read(out)
    assert 5 <= len(kept) < 17
    refused = dense(*wanted)
    assert refused.wait(120) == 2 and "--resume" in refused.communicate()[1]
    again = dense(*wanted, "--resume")
    assert again.wait(120) == 0, again.communicate()
    again.communicate()
    rows = records.read(out)
    keys = [row["key"] for row in rows]
    assert len(keys) == len(set(keys)) == 17  # 2 kernels, 2 masks, 2 lengths, 2 passes, and a ceiling
    assert rows[: len(kept)] == kept and {row["status"] for row in rows} == {"ok"}


def test_an_interrupt_ends_a_run_at_once_and_costs_no_row(tmp_path):
    out = tmp_path / "r.jsonl"
    wanted = ["--stack=torch", "--kernels=naive", "--masks=full", "--seqlens=40,50", "--passes=forward", f"--out={out}"]
    run = dense(*wanted, "--samples=1000000", "--seconds=600", start=HEEDING)
    try:
        said = run.stdout.readline()  # how many rows there are: then workers start, and measure for minutes
        time.sleep(2.0)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130 and run.communicate()[1] == "interrupted\n", said
    finally:
        run.kill()
    again = dense(*wanted, "--resume")
    assert again.wait(120) == 0, again.communicate()
    assert [row["status"] for row in records.read(out)] == ["ok"] * 3


def test_rows_that_failed_are_asked_again(tmp_path, answers):
    """Alone; at a longer length they say nothing any more, and what fails again is there once."""
    spans, special = answers
    run = [Case("torch", "naive", which, dataclasses.replace(SPEC, q_len=0, seq_len=n))
           for n in (40, 80) for which in ("forward", "backward")]

    def broken(arguments):
        return engine.Failure("out_of_memory", "none is left") if arguments["case"]["pass"] == "backward" else \
            ANSWERS["clock"]

    special["clock"] = broken
    how = engine.Options(tmp_path / "r.jsonl", patience=1e9)
    first = {row["key"]: row["status"] for row in engine.run(run, how)}
    assert [first[case.key] for case in run] == ["ok", "out_of_memory"] * 2 and len(spans["clock"]) == 3
    again = dataclasses.replace(how, resume=True, again=lambda row: row["status"] != "ok")
    assert {row["key"]: row["status"] for row in engine.run(run, again)} == first and len(spans["clock"]) == 4
    del special["clock"]
    assert {row["status"] for row in engine.run(run, again)} == {"ok"} and len(spans["clock"]) == 6
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 5  # a ceiling


def test_no_row_is_begun_after_the_time_is_up(tmp_path, monkeypatch, capsys):
    class Slow(engine.Session):
        def start(self, cases):
            pass

        def measure(self, case, number=0):
            time.sleep(0.3)
            row = engine.new_row(case.key, "attention", case.record(), {})
            self.writer.write(row)
            return row

    monkeypatch.setattr(engine, "Session", Slow)
    run = [Case("torch", "naive", "forward", dataclasses.replace(SPEC, seed=seed)) for seed in range(4)]
    rows = engine.run(run, engine.Options(tmp_path / "r.jsonl", seconds=0.4))
    assert 1 <= len(rows) < 4 and f"{4 - len(rows)} rows are left" in capsys.readouterr().out
    assert [row["key"] for row in rows] == [case.key for case in run[: len(rows)]]


def test_building_a_mask_is_no_part_of_the_rate(tmp_path, monkeypatch):
    """L2: it has a column of its own."""
    stack = attention_task.stack_of("torch")
    kernel = stack.kernel("naive")

    def slow(problem, device):
        time.sleep(0.3)
        return kernel.prepare(problem, device)

    monkeypatch.setattr(stack, "kernel", lambda name: dataclasses.replace(kernel, prepare=slow))
    case, path = Case("torch", "naive", "forward", SPEC).record(), str(tmp_path / "reference.npz")
    attention_task.reference(case, path)
    checked = attention_task.check(case, path)
    timed = attention_task.clock(case, dataclasses.asdict(FAST))
    assert checked["prepare_seconds"] >= 0.3 > timed["seconds"]["min"]


@pytest.mark.parametrize("which, asked", [("forward", [True, False]), ("backward", [True])])
def test_a_row_of_a_gpu_tells_both_states_of_the_cache(tmp_path, monkeypatch, which, asked):
    """M6: a warm cache made it look 1.6 times faster. The rate is the cold one's; a long pass does not feel it."""
    stack, times, seen = attention_task.stack_of("torch"), {"forward": 2e-3, "backward": 0.2}, []
    case, path = Case("torch", "naive", which, SPEC).record(), str(tmp_path / "reference.npz")
    attention_task.reference(case, path)
    attention_task.check(case, path)

    def sampler(call, cold):
        seen.append(cold)
        return lambda n: times[which] if cold else 1e-3

    for name, value in (("on_gpu", True), ("sampler", sampler), ("finish", lambda result=None: None),
                        ("watch_memory", lambda: lambda compiled, arguments: 1)):
        monkeypatch.setattr(stack, name, value)
    row = attention_task.clock(case, dataclasses.asdict(FAST))
    assert seen == asked and row["cache"] == "cold" and row["seconds"]["median"] == times[which]
    assert (row["warm_seconds"] or {}).get("median") == (1e-3 if False in asked else None)


def test_a_row_tells_what_made_its_program_slow(tmp_path, monkeypatch):
    case, path = Case("jax", "naive", "forward", SPEC).record(), str(tmp_path / "reference.npz")
    monkeypatch.setattr(attention_task.stack_of("jax"), "handicaps", lambda compiled: ["slow"])
    attention_task.reference(case, path)
    assert attention_task.check(case, path)["flags"] == ["slow"]
    assert attention_task.clock(case, dataclasses.asdict(FAST))["flags"] == ["slow"]


def test_results_that_do_not_depend_on_the_inputs_are_wrong(tmp_path, monkeypatch):
    """M9: a kernel that gives its first result again. Of one row on one key dq is 0, whatever the inputs are."""
    stack, path = attention_task.stack_of("torch"), str(tmp_path / "reference.npz")
    kernel, held = stack.kernel("naive"), []

    def again(*args, **kwargs):
        held.append(kernel.forward(*args, **kwargs))
        return held[0]

    def exact(*args, **kwargs):
        dq, dk, dv = kernel.backward(*args, **kwargs)
        return 0 * dq, 0 * dk, dv

    monkeypatch.setattr(stack, "kernel", lambda name: dataclasses.replace(kernel, forward=again, backward=exact))
    one = ProblemSpec("full", 1, head_dim=16, dtype="float32")
    for spec, which, wrong in ((one, "backward", []), (SPEC, "forward", ["out, lse: the same for different inputs"])):
        case = Case("torch", "naive", which, spec).record()
        attention_task.reference(case, path)
        assert attention_task.check(case, path)["wrong"] == wrong
        held.clear()


def test_a_row_names_the_program_that_ran():
    """L4: past a limit a library went on with another program and said nothing.

    Every kernel has a source, which its rows carry, and nothing is handed to a compiler that may fall back to eager.
    """
    for stack in cases.STACKS:
        table = importlib.import_module(f"{stack}_impl.kernels")
        assert all(table.get(name).capability.source for name in table.NAMES)
    folder = Path(engine.__file__).parents[1] / "torch_impl"
    assert not [path for path in folder.rglob("*.py") if re.search(r"(?<!`)torch\.compile\b", path.read_text())]


def test_rows_say_what_they_measured(tmp_path):
    run = [Case(stack, "naive", which, SPEC) for stack in cases.STACKS for which in ("forward", "backward")]
    rows = engine.run(run, engine.Options(tmp_path / "r.jsonl", protocol=FAST))
    measured = {row["key"]: row for row in rows if row["kind"] == "attention"}
    assert set(measured) == {case.key for case in run}
    for row in measured.values():
        assert row["status"] == "ok" and row["source"] and row["oracle"] == "NumPy float64, all heads"
        assert row["flops"] == {"forward": 4, "backward": 10}[row["case"]["pass"]] * row["area"] * 2 * 3 * 16
        assert row["rate"] == row["flops"] / row["seconds"]["median"] and row["peak_bytes"] > 0
        assert row["prepare_seconds"] >= 0 and row["compile_seconds"] >= 0
        assert row["tiles"]["visited_area"] == 128 * 128
        assert cases.from_record(json.loads(json.dumps(row["case"]))).key == row["key"]
    environments = [measured[case.key]["environment"] for case in run]
    assert "xla_flags" in environments[0]  # K10: what a compiler was told is part of the result
    assert "jax" in environments[0] and "torch" not in environments[0] and "torch" in environments[2]


FAULTS = {1: ("killed", "error"), 2: ("hang", "timeout"), 3: ("exhaust", "out_of_memory")}


@pytest.mark.parametrize("masks", [("causal_document",), ("causal_document", "full_document")])
def test_a_fault_costs_one_row(masks, tmp_path, monkeypatch):
    """Killed -9, hung, out of memory: the faults happen in real workers, in place of the check of a seed's case.

    With several workers each has faults of its own, and memory that is short beside others is asked for once more.
    """
    asked = engine.Worker.ask

    def ask(worker, name, deadline, **arguments):
        if not name.endswith(":check"):
            return ANSWERS[name.partition(":")[2]]
        task, _ = FAULTS.get(arguments["case"]["seed"], ("right", "ok"))
        return asked(worker, f"tests.bench.faulty_tasks:{task}", 3.0 if task == "hang" else 60.0)

    monkeypatch.setattr(engine.Worker, "ask", ask)
    run = [Case("torch", "naive", "forward", dataclasses.replace(SPEC, mask=mask, seed=seed))
           for mask in masks for seed in (1, 2, 3, 4)]
    options = engine.Options(tmp_path / "r.jsonl", timed=False, memory=1 << 30, workers=len(masks))
    rows = engine.run(run, options)
    for mask in masks:
        mine = [row for row in rows if row["case"]["mask"] == mask]
        assert [(row["case"]["seed"], row["status"]) for row in mine] == [
            *((seed, status) for seed, (_, status) in FAULTS.items()), (4, "ok")]
        assert "signal 9" in mine[0]["reason"] and "within 3 s" in mine[1]["reason"]


def test_a_wrong_kernel_is_a_mismatch_and_is_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "TASKS", "tests.bench.wrong_tasks")
    rows = engine.run([Case("torch", "naive", "forward", SPEC)], engine.Options(tmp_path / "r.jsonl", protocol=FAST))
    row = rows[-1]
    assert row["status"] == "mismatch" and "out: error" in row["reason"] and "seconds" not in row


def test_what_cannot_run_says_why(tmp_path):
    spec = dataclasses.replace(SPEC, mask="causal", settings=())
    run = [Case("jax", "cudnn", "forward", spec), Case("jax", "nonesuch", "forward", spec)]
    rows = engine.run(run, engine.Options(tmp_path / "r.jsonl", timed=False))
    assert {row["status"] for row in rows} == {"unsupported"}
    assert any("no kernel of this name" in row["reason"] for row in rows)


@pytest.mark.parametrize("flag, said", [
    ("--kernels=nonesuch", "--kernels: 'nonesuch'"), ("--masks=causl", "--masks: 'causl'"),
    ("--stack=numpy", "--stack: 'numpy'"), ("--seqlens=8Q", "--seqlens: '8Q'"), ("--passes=both", "--passes: 'both'"),
    ("--kv_heads=3", "--kv_heads must divide --q_heads"), ("--documents=web", "--documents: 'web'"),
    ("--density=0", "--density: 0"), ("--masks=", "--masks must not be empty"),
    ("--documents=3+4", "--documents: 3+4 sums to 7"), ("--dtype=int8", "dtype"),
    ("--longest=all:8K", "--longest: 'all'"), ("--longest=naive:8Q", "--longest: '8Q'"),
    ("--long_share=2", "long_share")])
def test_bad_values_are_named_before_anything_runs(flag, said, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "bench.dense", *FLAGS, "--seqlens=64", f"--out={tmp_path / 'r.jsonl'}", flag],
        capture_output=True, text=True)
    assert done.returncode != 0 and said in done.stderr + done.stdout
    assert not (tmp_path / "r.jsonl").exists()


def test_a_window_may_be_a_share_of_the_sequence():
    """A sweep over lengths keeps the window in tokens, or its share."""
    values = types.SimpleNamespace(
        stack=["torch"], kernels=["naive"], masks=["full_sliding_window"], passes=["forward"], seqlens=["64", "128"],
        documents="auto", document_cap=0.25, density=0.25, long_share=0.0, window=9, window_share=0.0, block=1024,
        sparse_block=128, batch=1, q_heads=2, kv_heads=1, head_dim=16, dtype="float32", seed=0, packs=1)
    def windows():
        return [case.spec.problem().mask.params["window"] for case in options.cases(values)]
    assert windows() == [9, 9]
    values.window_share = 0.125
    assert windows() == [8, 16]


def test_tokens():
    assert [options.tokens(x) for x in ("100", "8K", "2m")] == [100, 8192, 2 << 20]
