"""The parity command: both stacks' naive kernels agree, a cell that fails says how to repeat it, a stop is no loss."""

import contextlib
import dataclasses
import functools
import json
import shlex
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import flags
from rich.console import Console

from bench import attention_task, engine, parity_kernels, parity_schemes, parity_status, records
from bench import parity as parity_main
from bench import parity_torch_ranks as torch_ranks
from bench.cases import STACKS
from bench.parity_cells import ROUNDS, Problems, Rows
from bench.turns import Turns
from bench.workers import Failure, Worker
from parity.compare import OF_PASS, RESULTS
from parity.matrix import GPU_SHAPES
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES


def parity(out, *more):
    command = [sys.executable, "-m", "bench.parity", "--kernels=naive", "--masks=shared_question,uniform_block",
               "--shapes=tiny", f"--out={out}", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_naive_agrees_in_both_stacks_and_a_stopped_run_goes_on(tmp_path):
    out = tmp_path / "p.jsonl"
    done = parity(out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records.read(out)
    assert len(rows) == 4 and {row["status"] for row in rows} == {"ok"}
    for row in rows:
        wanted = set(OF_PASS[row["case"]["pass"]])
        assert all(set(row["errors"][side]) == wanted for side in ("jax", "torch", "cross"))
        assert all(row["errors"]["cross"][name] <= row["budget_cross"][name] for name in wanted)
        assert set(row["sources"]) == {"jax", "torch"}
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:40])
    assert parity(out, "--resume").returncode == 0
    again = records.read(out)
    assert again[:3] == rows[:3] and [row["key"] for row in again] == [row["key"] for row in rows]


@pytest.fixture
def flagged(monkeypatch):
    """(*flags) -> what the command reads of them."""
    values = flags.FlagValues()
    with monkeypatch.context() as patched:
        for name in ("DEFINE_list", "DEFINE_integer", "DEFINE_string", "DEFINE_bool", "DEFINE_float",
                     "register_validator"):
            patched.setattr(flags, name, functools.partial(getattr(flags, name), flag_values=values))
        parity_main.define()

    def read(*given):
        values(["parity", *given])
        return values

    return read


@pytest.mark.parametrize("rows,left,told", [
    ([], 2, "no cell is done; 2 of this run are left: --resume"), ([{"status": "unsupported"}], 0, "1 unsupported"),
])
def test_the_last_line_tells_what_is_done_and_what_is_left(rows, left, told, monkeypatch, capsys, flagged):
    """Where the time was up before the first cell it began with a semicolon."""
    monkeypatch.setattr(parity_main, "run", lambda values, console: (rows, left))
    monkeypatch.setattr(parity_main, "flags", types.SimpleNamespace(FLAGS=flagged()))
    assert parity_main.main() == 0 and capsys.readouterr().out.splitlines()[-1] == told


def test_a_failing_cell_fails_the_run_and_repeats_by_its_command(tmp_path, monkeypatch, capsys, flagged):
    monkeypatch.setattr(parity_kernels, "cross_budget", lambda budget: dict.fromkeys(budget, 1e-12))
    cell = parity_kernels.cells(["sdpa"], ["causal"], ["tiny"], ["forward"], 3)[0]
    with engine.Workers() as workers, Worker("judge") as judge, records.Writer(tmp_path / "p.jsonl") as writer:
        rows = Rows(writer, 1, Console(soft_wrap=True))
        parity_kernels.run([cell], rows, Problems(tmp_path, 120.0, [judge]), 120.0, [workers])
    row = records.read(tmp_path / "p.jsonl")[0]
    assert row["status"] == "mismatch" and "jax to torch out" in row["reason"]
    assert f"again: {row['repeat']}" in capsys.readouterr().out
    command = shlex.split(row["repeat"])
    assert command[:3] == ["python", "-m", "bench.parity"]
    assert parity_main.cells_of(flagged(*command[3:]), gpus=0) == ([cell], [])


def test_what_is_to_be_timed_comes_first_and_is_timed_alone_what_the_end_cuts_off_is_left(tmp_path, monkeypatch):
    """Once a cell of flashinfer held its job until the run was killed, and no checked cell was ever timed."""
    told, cells = [], parity_kernels.cells(["naive", "sdpa"], ["causal"], ["tiny", "long"], ["forward"], 0)
    workers = [engine.Workers()]

    def judge(cell, workers, problems, turns, patience):
        told.append(("judge", cell.shape))
        if (cell.shape, cell.kernel) == ("tiny", "sdpa"):
            rows._until = 0.0
            assert patience() == 1.0
            return {"status": "timeout", "reason": "x", "key": cell.key}
        return {"status": "ok", "reason": "", "key": cell.key, "kind": "parity", "case": {}, "environment": {}}

    monkeypatch.setattr(parity_kernels, "judge", judge)
    alone = []

    @contextlib.contextmanager
    def only(_):
        alone.append(True)
        yield
        alone.pop()

    def clock(cell, workers, protocol, patience, stack):
        told.append(("clock" if alone else "glance", cell.shape))
        return 1.0

    monkeypatch.setattr(Turns, "alone", only)
    monkeypatch.setattr(parity_kernels, "clock", clock)
    monkeypatch.setattr(engine, "on_gpu", lambda *_: True)
    monkeypatch.setattr(engine.Workers, "start", lambda *_: None)
    monkeypatch.setattr(Worker, "ask", lambda *_, of, **__: list(range(len(of))))
    with records.Writer(tmp_path / "p.jsonl") as writer:
        rows = Rows(writer, 4, Console(soft_wrap=True))
        assert rows.patience(7.0) == 7.0
        parity_kernels.run(cells, rows, Problems(tmp_path, 1.0, []), 1.0, workers)
    assert told[0] == ("judge", "long") and told.count(("judge", "long")) == 2
    assert told.count(("glance", "long")) == 4 and told.count(("clock", "long")) == 2 * 2 * ROUNDS
    assert told.index(("judge", "tiny")) > told.index(("clock", "long"))
    assert cells[1].kernel == "sdpa" and writer.keys == {c.key for c in cells} - {cells[1].key}


@pytest.mark.parametrize("flag, value", [
    ("kernels", "fa9"), ("schemes", "star"), ("masks", "none"), ("shapes", "huge"), ("passes", "both"),
    ("worlds", "two"), ("worlds", "0"), ("worlds", "9999"), ("sharding", "random")])
def test_bad_values_are_named_before_anything_starts(flag, value, monkeypatch, flagged):
    monkeypatch.setattr(engine, "Workers", None)
    monkeypatch.setattr(flags, "FLAGS", flagged(f"--{flag}={value}"))
    with pytest.raises(ValueError, match=f"^--{flag}: "):
        parity_main.main()


def test_cells_of_one_program_stay_together_and_what_is_timed_comes_first():
    cells = parity_kernels.cells(["flashmask"], ["full", "causal", "causal_document"], ["ragged", "long"], PASSES, 0)
    numbers = {"full": 0, "causal": 1, "causal_document": 0}
    groups = parity_kernels.grouped(cells, {cell.place: numbers[cell.spec.mask] for cell in cells})
    assert [{(cell.shape, cell.spec.mask) for cell in group} for group in groups] == [
        {("long", "causal")}, {("long", "causal_document")}, {("ragged", "full"), ("ragged", "causal_document")},
        {("ragged", "causal")}]
    assert sorted(c.key for group in groups for c in group) == sorted(c.key for c in cells)
    large = parity_kernels.cells(["naive", "sdpa", "fa1"], ["causal", "causal_document"], ["long"], PASSES, 0)
    groups = parity_kernels.grouped(large, {cell.place: cell.spec.mask for cell in large})
    assert [{cell.kernel for cell in group} for group in groups] == [{"naive", "sdpa"}, {"fa1"}, {"fa1"}]
    large = parity_kernels.cells(["naive", "sdpa"], ALL_BUILDERS, ["long", "long_plain"], PASSES, 0)
    assert len(parity_kernels.grouped(large, {cell.place: 0 for cell in large})) == 1


def test_masks_of_one_signature_have_one_program():
    """What `build` would compile once, told without compiling; numbers are those of the first case."""
    cells = parity_kernels.cells(["naive"], ["causal", "full", "uniform_block"], ["tiny"], ["forward"], 0)
    assert attention_task.programs([cell.of("jax") for cell in cells]) == [0, 0, 2]


def test_a_check_whose_memory_others_hold_is_done_again_alone(monkeypatch):
    """Naive attention at 8K in both stacks, with other jobs on the card."""
    cell, turns, told = parity_kernels.cells(["naive"], ["causal"], ["long"], ["forward"], 0)[0], Turns(), []

    class Asked:
        def __init__(self, stack):
            self.stack = stack

        def ask(self, task, _, **arguments):
            if not task.endswith(":check"):
                return None
            told.append((self.stack, turns._busy))
            if self.stack == "jax" and not turns._busy:
                return Failure("out_of_memory", "x")
            np.savez(arguments["keep"], out=np.ones(3))
            return {"budget": {"out": 1.0}, "oracle": "x", "errors": {"out": 0.1}, "source": "", "wrong": [],
                    "prepare_seconds": 0.0, "compile_seconds": 0.0, "flags": []}

    workers = {stack: Asked(stack) for stack in ("jax", "torch")}
    monkeypatch.setattr(engine.Workers, "__getitem__", lambda _, stack: workers[stack])
    monkeypatch.setattr(engine.Workers, "environment", lambda *_: {})
    monkeypatch.setattr(Problems, "of", lambda *_: {"reference": "r", "jax": "a", "torch": "b"})
    row = parity_kernels.judge(cell, engine.Workers(), Problems("", 1.0, []), turns, lambda: 1.0)
    assert row["status"] == "ok" and sorted(told[:2]) == [("jax", False), ("torch", False)], row
    assert told[2:] == [("jax", True)]


def rows_of(cells, *statuses):
    return [engine.new_row(cell.key, "parity", cell.of("jax") | {"shape": cell.shape}, {})
            | {"status": status, "reason": "x"} for cell, status in zip(cells, statuses, strict=False)]


def test_a_record_tells_how_much_of_the_matrix_it_holds(capsys):
    """A cell of a GPU's shape makes the GPU's matrix the one that counts; a failing cell is named."""
    kernels = parity_kernels.cells(["naive"], ["causal"], ["long"], PASSES, 0)
    schemes = parity_schemes.cells(["ring"], ["full", "causal"], [2], ["striped"], "ranks", 0)
    rows = rows_of(kernels, "ok", "mismatch") + rows_of(schemes, "ok", "unsupported")
    found = parity_status.status(rows)
    assert found["naive", "long"] == parity_status.Status(1, 0, 4, (kernels[1].key,))
    assert found["ring", "ranks"] == parity_status.Status(1, 1, len(ALL_BUILDERS) - 2)
    assert {shape for _, shape in found} == {*GPU_SHAPES, "ranks"} and found["usp", "ranks"].missing == 14
    head, body = parity_status.table(found)
    assert [len(line) for line in body] == [len(head)] * (len(parity_kernels.SHARED) + len(SCHEMES) + 1)
    assert parity_status.status([]) == {}
    assert parity_main.tell(rows, Console(width=200)) == 1 and f"fails: {kernels[1].key}" in capsys.readouterr().out
    assert parity_main.tell(rows[:1], Console(width=200)) == 0


def test_cells_of_schemes_are_timed_once_no_job_checks_and_an_interrupt_loses_none(tmp_path, monkeypatch):
    """Groups are of one program; what a worker that was lost held is written as it is."""
    told = []
    cells = parity_schemes.cells(["ring", "usp"], ["full", "causal", "shared_question"], [2], ["zigzag"], "ranks", 0)

    class Asked:
        def ask(self, task, _, *, of=(), **__):
            return [[0, 0, 2, 0, 0, 2][n] for n in range(len(of))]

    def judge(self, cell, beside, folder):
        told.append(cell)
        assert {c.case.spec.mask == "shared_question" for c in beside} == {cell.case.spec.mask == "shared_question"}
        lost = cell == cells[1] and not interrupted
        return {"status": "timeout" if lost else "ok", "reason": "x", "key": cell.key, "kind": "parity", "case": {},
                "environment": {}}

    def throughput(self, cell):
        assert set(told) == set(cells)
        if interrupted:
            raise KeyboardInterrupt
        return {"throughput_ratio": 2.0}

    monkeypatch.setattr(engine.Workers, "__getitem__", lambda *_: Asked())
    monkeypatch.setattr(parity_schemes.Run, "start", lambda _: None)
    monkeypatch.setattr(parity_schemes.Run, "on_gpu", lambda _: True)
    monkeypatch.setattr(parity_schemes.Run, "judge", judge)
    monkeypatch.setattr(parity_schemes.Run, "_throughput", throughput)
    for interrupted in (False, True):
        told.clear()
        with records.Writer(tmp_path / f"p{interrupted}.jsonl") as writer:
            rows = Rows(writer, len(cells), Console(soft_wrap=True))
            with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
                parity_schemes.run(cells, rows, Problems(tmp_path, 1.0, []), 1.0, 1)
            found = {row["key"]: row.get("throughput_ratio") for row in records.read(writer.path)}
        assert set(found) == {cell.key for cell in cells}
        assert [found[cell.key] for cell in cells] == ([None] * 6 if interrupted else [None, None, 2.0, 2.0, 2.0, 2.0])


def test_a_scheme_is_as_slow_as_its_slowest_rank():
    cell = parity_schemes.cells(["ring"], ["full"], [2], ["zigzag"], "ranks", 0)[0]

    class Ranks:
        def __init__(self, *ranks):
            self.answer = list(ranks) if len(ranks) > 1 else ranks[0]

        def ask(self, *_, **__):
            return self.answer

    run = parity_schemes.Run.__new__(parity_schemes.Run)
    run._patience = lambda: 1.0
    run._workers = {"jax": Ranks({"samples": [2.0, 5.0, 1.0], "waited": 2})}
    run._gang = Ranks({"samples": [1.0, 2.0, 9.0], "waited": 1}, {"samples": [4.0, 3.0, 1.0], "waited": 0})
    told = run._throughput(cell)
    assert told["seconds"] == {"jax": 2.0, "torch": 4.0} and told["throughput_ratio"] == 2.0
    assert told["flags"] == [f"{stack}: a device may have waited for the host in {n} of 9 samples"
                             for stack, n in (("jax", 6), ("torch", 3))]
    run._workers = {"jax": Ranks({"samples": [2.0, 5.0, 1.0], "waited": 0})}
    assert [flag[:5] for flag in run._throughput(cell)["flags"]] == ["torch"]


def test_ranks_of_pytorch_take_a_sample_again_where_one_may_have_waited(monkeypatch):
    """Together: a rank that went on alone would wait for the others' next cell. The slowest rank's seconds count."""
    went, case = [], parity_schemes.cells(["ring"], ["full"], [2], ["zigzag"], "ranks", 0)[0].case
    others = iter([(0.04, True), (0.03, False), (0.005, False), (0.01, False)])  # the other rank, a sample each

    class Event:
        def __init__(self, **_):
            pass

        record = query = synchronize = lambda self: False

        def elapsed_time(self, end):
            return 10.0

    def all_reduce(x, op=torch_ranks.dist.ReduceOp.SUM):
        if op != torch_ranks.dist.ReduceOp.MAX:
            return went.append("meet")
        went.append("agree")
        return x.copy_(x.maximum(torch_ranks.torch.tensor(next(others), dtype=x.dtype)))

    monkeypatch.setattr(attention_task.stack_of("torch"), "on_gpu", True)
    monkeypatch.setattr(torch_ranks.torch.cuda, "Event", Event)
    monkeypatch.setattr(torch_ranks.torch.cuda, "_sleep", lambda cycles: went.append(cycles))
    monkeypatch.setattr(torch_ranks.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(torch_ranks, "forward", lambda plan, *qkv: (None, went.append("forward")))
    monkeypatch.setattr(torch_ranks, "backward", lambda *_: went.append("backward"))
    monkeypatch.setattr(torch_ranks, "_held", {"job": types.SimpleNamespace(device="cpu")})
    monkeypatch.setattr(torch_ranks, "_built", {case: [None] * 5})
    told = torch_ranks.clock(case.record())
    assert told == {"samples": [0.03 / 5, 0.01 / 5, 0.01 / 5], "waited": 0}
    calls, ahead = ["forward", "backward"] * 5 + ["meet"], torch_ranks.AHEAD_CYCLES
    assert went == calls + [x for n in (1, 2, 2, 2) for x in (n * ahead, "meet", *calls, "agree")]


def test_schemes_exchange_their_shards_and_a_wrong_shard_is_found(tmp_path, monkeypatch):
    """Two ranks a stack: right as they are; a shard of PyTorch's spoilt on its way is that stack's mismatch."""
    cell = parity_schemes.cells(["ring"], ["shared_question"], [2], ["zigzag"], "ranks", 0)[0]
    with records.Writer(tmp_path / "p.jsonl") as writer, Worker("judge") as judge:
        rows, problems = Rows(writer, 1, Console(soft_wrap=True)), Problems(tmp_path, 120.0, [judge])
        with parity_schemes.Run(rows, problems, 120.0, 2) as going:
            good = going.judge(cell, [cell], tmp_path / "good")
            timed = going._throughput(cell)
            hopper = dataclasses.replace(cell, case=dataclasses.replace(cell.case, kernel="fa3"))
            refused = going.judge(hopper, [cell, hopper], tmp_path / "refused")
            assert refused["status"] == "unsupported" and "jax kernel fa3" in refused["reason"], refused["reason"]
            ask = going._gang.ask

            def spoilt(task, deadline, *, folder="", **arguments):
                if task != "run":
                    return ask(task, deadline, **arguments)
                found = ask(task, deadline, folder=folder, **arguments)
                with np.load(f"{folder}/results1.npz") as held:
                    results = dict(held)
                results["dk"] = np.roll(results["dk"], 1, axis=1)
                np.savez(f"{folder}/results1.npz", **results)
                return found

            monkeypatch.setattr(going._gang, "ask", spoilt)
            bad = going.judge(cell, [cell], tmp_path / "bad")
    assert good["status"] == "ok" and set(good["errors"]["torch"]) == set(RESULTS), good["reason"]
    assert {len(timed["rounds"][stack]) for stack in STACKS} == {ROUNDS}, timed
    assert timed["throughput_ratio"] == pytest.approx(timed["seconds"]["torch"] / timed["seconds"]["jax"])
    assert bad["status"] == "mismatch" and "torch dk" in bad["reason"] and "torch dv" not in bad["reason"]
    assert good["errors"]["jax"] == bad["errors"]["jax"]
    command = shlex.split(good["repeat"].replace("out/again.jsonl", str(tmp_path / "again.jsonl")))
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=200)
    repeated = records.read(tmp_path / "again.jsonl")
    assert done.returncode == 0 and [r["key"] for r in repeated] == [good["key"]], done.stdout + done.stderr
    assert json.dumps(repeated[0]["case"]) == json.dumps(good["case"])
