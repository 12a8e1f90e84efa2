"""A replay computes the whole problem, and says what its local work costs."""

import contextlib
import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from bench import records, replay, replay_task
from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.engine import Options, Workers, open_records
from bench.link_model import Links
from bench.spot_check import spot_errors
from bench.timing import Protocol
from bench.workers import Failure
from parity.compare import relative_error
from parity.inputs import make_inputs
from workload import masks
from workload.oracle import attention_oracle
from workload.problem import PASSES, AttentionProblem

SETTINGS = (("block", 8), ("density", 0.5), ("documents", (3, 40, 0, 20)), ("sparse_block", 9), ("window", 11))
CASES = [
    ("ring", "causal_document", 3, "zigzag", {}), ("ulysses", "global_sliding_window", 4, "contiguous", {}),
    ("all_gather", "uniform_block", 3, "balanced", {}), ("usp", "block_causal_document", 4, "striped", {"ulysses": 2}),
    ("loongtrain", "variable_block", 8, "zigzag", {"ulysses": 2, "window": 2}),
]


def case_of(stack, scheme, mask, world, kind, grid):
    spec = ProblemSpec(mask, 63, 0, 2, 6, 3, 8, "float32", 3, SETTINGS)
    return Case(stack, scheme, spec, world, kind, **grid)


@pytest.mark.parametrize("stack,scheme,mask,world,kind,grid", [
    pytest.param(stack, *case, marks=[] if n % 2 == (stack == "torch") else [pytest.mark.slow])
    for n, case in enumerate(CASES) for stack in ("jax", "torch")])
def test_outputs_equal_the_dense_oracle(stack, scheme, mask, world, kind, grid):
    case = case_of(stack, scheme, mask, world, kind, grid)
    schedule = case.schedule()
    arrays = make_inputs(schedule.problem, case.spec.inputs())
    got = replay_task.outputs(stack, schedule, "naive", arrays)
    want = attention_oracle(arrays["q"], arrays["k"], arrays["v"], schedule.problem.mask, schedule.problem.scale,
                            arrays["dout"])
    for name, x in got.items():
        assert relative_error(x, getattr(want, name)) < 1e-6, name


def test_document_lengths_that_are_given_are_checked_at_another_length():
    case = case_of("torch", *CASES[0])
    plain = dataclasses.replace(case, spec=dataclasses.replace(case.spec, q_heads=3))  # 2 of 3 kv heads are checked
    errors = replay_task.check(plain.record(), 7)
    assert set(errors) == {"out", "dq", "dk", "dv"} and max(errors.values()) < 1e-6
    shorter = replay.one_device(dataclasses.replace(case, spec=case.spec.at_length(63 * 64)), 1.0).spec
    assert shorter.seq_len == 63 * 16 and shorter.problem().mask.params["lengths"].tolist() == [48, 640, 0, 320]


def test_a_wrong_local_mask_is_noticed():
    """The comparison can fail: with the masks of another step the outputs are not the oracle's."""
    case = case_of("jax", *CASES[0])
    schedule = case.schedule()

    class Wrong(type(schedule)):
        def local_problem(self, step, rank):
            return super().local_problem((step + 1) % len(self.signature.steps), rank)

    wrong = Wrong(schedule.signature, schedule.problem, schedule.q_sharding, schedule.kv_sharding)
    arrays = make_inputs(schedule.problem, case.spec.inputs())
    want = attention_oracle(arrays["q"], arrays["k"], arrays["v"], schedule.problem.mask, schedule.problem.scale)
    assert relative_error(replay_task.outputs("jax", wrong, "naive", arrays)["out"], want.out) > 0.1


@pytest.mark.parametrize("mask", ["causal_document", "variable_block"])
def test_spot_check_sees_a_wrong_row_and_a_wrong_key(mask):
    case = case_of("jax", "ring", mask, 1, "contiguous", {})
    stack, problem = replay_task.stack_of("jax"), case.spec.problem()
    kernel = stack.kernel("naive")
    inputs, operands = stack.random(problem), stack.prepare(kernel, problem)
    out, lse = kernel.forward(*inputs[:3], operands, problem.scale)
    grads = kernel.backward(*inputs[:3], out, lse, inputs[3], operands, problem.scale)
    good = spot_errors(stack, problem, inputs, (out, lse, *grads))
    assert set(good) == {"out", "dq", "dk", "dv"} and max(good.values()) < 1e-6
    for n, name in ((0, "out"), (2, "dq"), (3, "dk"), (4, "dv")):
        results = [out, lse, *grads]
        results[n] = results[n] * 1.01
        assert spot_errors(stack, problem, inputs, results)[name] > 5e-3


def test_spot_check_looks_at_other_rows_in_every_head_of_a_group():
    """One head that is wrong is found, and a row of all heads wherever it was drawn; also where no row sees a key."""
    stack = replay_task.stack_of("torch")
    for mask in (masks.full(80, 90), masks.from_intervals([np.zeros(80)], [np.zeros(80)], 90)):
        problem = AttentionProblem(mask, 1, 40, 1, 8, "float32")
        kernel, inputs = stack.kernel("naive"), stack.random(problem)
        operands = stack.prepare(kernel, problem)
        out, lse = kernel.forward(*inputs[:3], operands, problem.scale)
        results = [out, lse, *kernel.backward(*inputs[:3], out, lse, inputs[3], operands, problem.scale)]
        assert max(spot_errors(stack, problem, inputs, results).values()) < 1e-5
        found = []
        for head in (0, 25, 39):
            wrong = out.clone()
            wrong[:, :, head] += 1
            found.append(spot_errors(stack, problem, inputs, [wrong, *results[1:]])["out"])
        assert min(found) > 0.05
        rows = []
        for row in range(0, 80, 4):
            wrong = out.clone()
            wrong[:, row] += 1
            rows.append(spot_errors(stack, problem, inputs, [wrong, *results[1:]])["out"] > 0.05)
        assert sum(rows) > 10


@pytest.mark.parametrize("stack_name", ["jax", "torch"])
def test_gradients_that_cancel_are_judged_by_what_cancels(stack_name):
    """Where a row sees one key, dq and dk are 0 but for roundings of what they are the difference of."""
    spec = ProblemSpec("causal_document", 8, 0, 1, 4, 2, 16, "float32", 3, (("documents", (1,) * 8),))
    case = Case(stack_name, "ring", spec, 2, "zigzag")
    errors = replay_task.check(case.record(), 4)
    assert max(errors.values()) < 1e-6
    stack, problem = replay_task.stack_of(stack_name), spec.problem()
    kernel = stack.kernel("naive")
    inputs, operands = stack.random(problem), stack.prepare(kernel, problem)
    out, lse = kernel.forward(*inputs[:3], operands, problem.scale)
    results = [out, lse, *kernel.backward(*inputs[:3], out, lse, inputs[3], operands, problem.scale)]
    assert max(spot_errors(stack, problem, inputs, results).values()) < 1e-6
    for n, name in ((2, "dq"), (3, "dk")):
        wrong = results.copy()
        wrong[n] = wrong[n] + 0.1
        assert spot_errors(stack, problem, inputs, wrong)[name] > 1e-2


def test_equal_local_problems_are_run_once():
    causal = dataclasses.replace(case_of("jax", "ring", "causal", 4, "zigzag", {}),
                                 spec=ProblemSpec("causal", 64, q_heads=2, kv_heads=1, head_dim=8, dtype="float32"))
    works = replay_task.works_of(0, causal.schedule(), 0)
    assert len(works) == 4 * 4 and len({w.name for w in works}) == 3  # own, from before, from behind


def test_rows_tell_efficiency_and_a_refused_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "FRESH_SECONDS", 0.0)  # T1 is timed again behind each case
    spec = ProblemSpec("causal", 256, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    cases = [Case("jax", "ring", spec, 2, "zigzag"), Case("jax", "usp", spec, 2, "zigzag", ulysses=3)]
    settings = replay.Settings(tmp_path / "rows.jsonl", False, 120.0, 0, Protocol(2, 1, 0.01), 1e15, Links(), False, 2)
    with open_records(Options(settings.out)) as writer, Workers() as workers:
        run = replay.Replay(settings, workers, writer)
        run.run(cases)
    rows = {row["case"]["scheme"]: row for row in records.read(settings.out)}
    ring = rows["ring"]
    assert ring["status"] == "ok", ring["reason"]
    assert {(r["step"], r["rank"]) for r in ring["runs"]} == {(t, r) for t in range(2) for r in range(2)}
    assert len(ring["forward"]["slowest"]) == 2 and ring["distinct"] == 3
    one, both = ring["one_device"], ring["efficiency"]["compute"]
    [timed] = run._ones.values()
    first, second = timed.timings
    assert rows["ulysses"]["runs"] == [first] and second["forward"] > 0
    assert one["backward"]["seconds"] == min(first["backward"], second["backward"]) == timed.best["backward"]
    assert both["forward"] == pytest.approx(one["forward"]["seconds"] / (2 * ring["forward"]["compute"]))
    assert ring["efficiency"]["predicted"]["both"] <= both["both"]
    assert rows["usp"]["status"] == "unsupported" and "ulysses" in rows["usp"]["reason"]


def test_a_large_problem_of_one_device_gives_its_memory_back():
    """Its worker would keep half of the device, and rings beside it run out of memory."""
    def one(tokens):
        spec = ProblemSpec("causal", tokens, q_heads=64, kv_heads=8, head_dim=128, dtype="bfloat16")
        return replay.one_device(Case("jax", "ring", spec, 8, "zigzag"), 1e30)
    assert [replay.Replay._kept(one(n)) for n in (1 << 16, 1 << 18)] == [True, False]
    assert not replay.Replay._kept(dataclasses.replace(one(1 << 10), world=8))


def test_what_gives_its_memory_back_has_done_so_when_the_next_one_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "HELD_BYTES", 0)
    beside = []

    class Watched(replay.Replay):
        def _timed(self, worker, number, case):
            beside.extend(one for one in large if one is not worker and one._process is not None)
            if case.world == 1:
                large.append(worker)
            return super()._timed(worker, number, case)

    large: list = []
    spec = ProblemSpec("causal", 256, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    cases = [Case("jax", "all_gather", dataclasses.replace(spec, seq_len=n), 2) for n in (128, 256)]
    settings = replay.Settings(tmp_path / "rows.jsonl", False, 120.0, 0, Protocol(2, 1, 0.01), 1e15, Links(), False, 4)
    with open_records(Options(settings.out)) as writer, Workers() as workers:
        Watched(settings, workers, writer).run(cases)
    assert [row["status"] for row in records.read(settings.out)] == ["ok"] * 4
    assert len(large) == 2 and not beside


def test_a_case_of_a_group_knows_nothing_of_the_one_before_but_the_spot_check(tmp_path):
    """Rings at 64 ranks under documents, whose one device is not kept, stood beside that of a full mask at 8 ranks."""
    spec = ProblemSpec("causal", 256, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    kept, other = (Case("jax", "ring", dataclasses.replace(spec, seq_len=n), 2) for n in (256, 512))
    asked = []

    class Asked(contextlib.nullcontext):
        def ask(self, task, deadline, **arguments):
            asked.append(task.partition(":")[2])
            return {"times": {"news": False, "runs": [{}]}, "spots": {"out": 0.5}}.get(asked[-1], {})

    settings = replay.Settings(tmp_path / "rows.jsonl", False, 120.0, 0, Protocol(2, 1, 0.01), 1e15, Links(), False, 1)
    with open_records(Options(settings.out)) as writer, Workers() as workers:
        run = replay.Replay(settings, workers, writer)
        run._order = {kept.key: 0, other.key: 1}
        run._ones[run._one(kept).key] = replay.One(None, 0, [dict.fromkeys(PASSES, 1.0)], 0.0)
        list(run._group(Asked(), [(case, case.schedule()) for case in (kept, other)]))
    assert asked == ["build", "times", "spots", "times"]
    assert run._found[kept.key]["one_device_run"] == dict.fromkeys(PASSES, 1.0)
    assert "one_device_run" not in run._found[other.key]
    assert run._found[kept.key]["spot_errors"] == run._found[other.key]["spot_errors"] == {"out": 0.5}


@pytest.mark.parametrize("lost", ["build", "times", "spots"])
def test_what_follows_a_failure_in_a_group_is_lost_with_it(tmp_path, lost):
    """Its worker holds nothing any more: a new one would be asked for cases that it never built."""
    spec = ProblemSpec("causal", 256, q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    group = [Case("jax", "ring", dataclasses.replace(spec, seq_len=n), 2) for n in (256, 512)]
    failure, asked = Failure("error", "it died"), []

    class Dies(contextlib.nullcontext):
        def ask(self, task, deadline, **arguments):
            asked.append(task.partition(":")[2])
            return failure if asked[-1] == lost else {"news": False, "runs": [{}]}

    settings = replay.Settings(tmp_path / "rows.jsonl", False, 120.0, 0, Protocol(2, 1, 0.01), 1e15, Links(), False, 1)
    with open_records(Options(settings.out)) as writer, Workers() as workers:
        run = replay.Replay(settings, workers, writer)
        run._order = {case.key: n for n, case in enumerate(group)}
        list(run._group(Dies(), [(case, case.schedule()) for case in group]))
    tasks = ["build", "times", "spots"]
    assert asked == tasks[: 1 + tasks.index(lost)] and [run._found[case.key] for case in group] == [failure] * 2


def test_rows_of_other_binaries_are_left_alone(tmp_path):
    """A file may hold several kinds of rows; only a replay's own T1 is not measured again."""
    settings = replay.Settings(tmp_path / "rows.jsonl", True, 120.0, 0, Protocol(2, 1, 0.01), 1e15, Links())
    with open_records(Options(settings.out, True)) as writer:
        for kind, case in (("attention", {}), ("replay", {"world": 1}), ("replay_estimate", {"world": 1})):
            writer.write({"key": kind, "kind": kind, "case": case, "status": "ok", "reason": "", "environment": {}})
        assert list(replay.Replay(settings, Workers(), writer)._found) == ["replay"]


def test_slowest_rank_of_each_step_counts():
    case = case_of("jax", "ring", "causal_document", 3, "zigzag", {})
    schedule = case.schedule()
    runs = [{"step": 0, "rank": 0, "forward": 1.0, "backward": 2.0}, {"step": 0, "rank": 1, "forward": 3.0,
                                                                     "backward": 1.0}]
    measured = {"runs": runs, "once": (0.125, 0.0625)}
    found = replay.summary(schedule, measured, Links(0.0, 1e30, 0.0, 1e30))
    assert found["forward"]["compute"] == pytest.approx(3.125)
    assert found["backward"]["compute"] == pytest.approx(2.0625)
    assert np.isclose(found["forward"]["predicted"], found["forward"]["compute"])


def test_an_estimate_needs_no_device_and_counts_tiles(tmp_path):
    """Causal on one rank and two: whole tiles at the rate, partial ones 1.5 times; halves add up to the whole."""
    spec = ProblemSpec("causal", 1024, q_heads=2, kv_heads=2, head_dim=8)
    cases = [Case("jax", "all_gather", spec, 2, "zigzag"), Case("jax", "ulysses", spec, 2, "contiguous")]
    settings = replay.Settings(tmp_path / "rows.jsonl", False, 1.0, 0, Protocol(), 1e30, Links(0.0, 1e30, 0.0, 1e30),
                               False, 1, 1e12)
    with open_records(Options(settings.out)) as writer, Workers() as workers:
        replay.Estimate(settings, workers, writer).run(cases)
    rows = {(row["case"]["scheme"], row["case"]["world"]): row for row in records.read(settings.out)}
    assert {row["kind"] for row in rows.values()} == {"replay_estimate"}
    whole = rows["ulysses", 1]["runs"][0]
    cells = (28 + 1.5 * 8) * 128**2 * 2
    assert whole["forward"] == pytest.approx(4 * cells * 8 / 1e12)
    assert whole["backward"] == pytest.approx(2.5 * whole["forward"])
    for key in (("all_gather", 2), ("ulysses", 2)):
        assert rows[key]["efficiency"]["compute"]["both"] == pytest.approx(1.0)


@pytest.mark.parametrize("flag", ["--worlds=0", "--tokens_per_rank=8Q", "--documents=1+2", "--kernel=fa9"])
def test_bad_flags_are_named(tmp_path, flag):
    command = [sys.executable, "-m", "bench.replay", "--estimate_rate=1e12", f"--out={tmp_path}/rows.jsonl", flag]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and flag.partition("=")[0] in done.stderr and "Traceback" not in done.stderr
