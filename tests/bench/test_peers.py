"""The peers' protocol: all contenders in every round, medians and ratios, refusals kept, both stacks in one process."""

import collections
import concurrent.futures
import dataclasses
import subprocess
import sys
import threading
import types

import pytest

from bench import interleave, peers, records
from bench.cases import ProblemSpec


def test_every_contender_runs_warm_up_and_timed_calls_in_every_round():
    calls = collections.Counter()

    def stub(name):
        return interleave.Contender(name, lambda: calls.update([name]), lambda _: None)

    found = interleave.interleave([stub("a"), stub("b")], rounds=5, seconds=0, warm_up=0)
    assert {name: len(x) for name, x in found.items()} == {"a": 5, "b": 5}
    assert calls == {"a": 3 + 2 * 5, "b": 3 + 2 * 5}  # three for the estimate


def test_rates_are_flops_over_the_median_and_ratios_are_to_the_one_named():
    found = {"x": [1.0, 2.0, 9.0], "y": [3.0, 3.0, 3.0]}
    other = interleave.rates_of({"x": 10**12, "y": 6 * 10**12}, found, "y")
    assert other["tflops"] == {"x": 0.5, "y": 2.0} and other["ratio"] == {"x": 0.25, "y": 1.0}
    row = interleave.rates_of(dict.fromkeys("xy", 6 * 10**12), found, "y")
    assert row["tflops"] == {"x": 3.0, "y": 2.0} and row["ratio"] == {"x": 1.5, "y": 1.0}
    assert row["spread"] == {"x": 4.0, "y": 0.0} and row["against"] == "y"
    assert interleave.rates_of({"x": 1}, {"x": [1.0]}, "absent")["ratio"] == {}


def test_a_contender_that_is_wrong_or_fails_takes_no_part(monkeypatch):
    """One result off by a hundredth, one exception: told in the row, and the others race."""
    names = [peers.Entrant("torch", name) for name in ("naive", "sdpa", "fa1", "flex")]
    race = peers.Race(names, "torch:naive", rounds=2, seconds=0, warm_up=0)
    stack = race._stacks["torch"]
    real = stack.kernel
    faults = {"sdpa": lambda out, lse: (out * 1.01, lse), "fa1": lambda out, lse: 1 / 0}

    def kernel(name):
        base, fault = real("naive"), faults.get(name, lambda *results: results)
        return dataclasses.replace(base, name=name, forward=lambda *args: fault(*base.forward(*args)))

    monkeypatch.setattr(stack, "kernel", kernel)
    row = race.row(ProblemSpec("causal_document", 300, q_heads=4, kv_heads=2, head_dim=32, dtype="float32"), "forward")
    assert set(row["tflops"]) == {"torch:naive", "torch:flex"} and set(row["failed"]) == {"torch:sdpa", "torch:fa1"}
    assert "out: error 0.01" in row["failed"]["torch:sdpa"] and "ZeroDivisionError" in row["reason"]
    assert row["status"] == "error" and row["errors"]["torch:naive"]["out"] < 1e-6


def test_a_contender_at_heads_of_its_own_races_under_its_own_reference_and_flops():
    """Variable blocks: the mask of two kv heads is not that of four, and has other FLOPs."""
    entrants = [peers.entrant_of("contenders", text) for text in ("torch:naive", "torch:naive@4:2")]
    race = peers.Race(entrants, "torch:naive", rounds=1, seconds=0, warm_up=0)
    spec = ProblemSpec("variable_block", 300, q_heads=4, kv_heads=4, head_dim=32, dtype="float32")
    for which in ("forward", "backward"):
        row = race.row(spec, which)
        assert row["status"] == "ok" and set(row["errors"]) == {"torch:naive", "torch:naive@4:2"}
        assert row["flops"] == spec.problem().flops(which) and row["ratio"]["torch:naive"] == 1
        assert row["flops"] != entrants[1].spec(spec).problem().flops(which)
        assert row["key"].endswith("torch:naive+torch:naive@4:2")


def test_races_that_share_a_turns_file_judge_together_and_race_alone(tmp_path, monkeypatch):
    class Most:
        """Counts who is at it at once; goes on when two are, or after a while."""

        def __init__(self):
            self.now, self.most, self.changed = 0, 0, threading.Condition()

        def __call__(self, result):
            with self.changed:
                self.now += 1
                self.most = max(self.most, self.now)
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.most > 1, timeout=0.2)
                self.now -= 1
            return result

    spec = ProblemSpec("causal", 64, q_heads=2, kv_heads=2, head_dim=32)
    for turns, want in ((str(tmp_path / "turns"), 1), ("", 2)):
        judging, racing = Most(), Most()
        monkeypatch.setattr(peers.Race, "_judge", lambda *args, at=judging: at(({}, [], {})))
        monkeypatch.setattr(peers, "interleave", lambda *args, at=racing: at({}))
        races = [peers.Race([peers.Entrant("torch", "naive")], "torch:naive", 1, 0, 0, turns) for _ in range(2)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda race: race.row(spec, "forward"), races))
        assert (judging.most, racing.most) == (2, want)


VALUES = {"contenders": ["torch:naive"], "masks": ["causal"], "seqlens": ["8K"], "heads": ["64:8"], "head_dim": 64,
          "dtype": "bfloat16", "seed": 0, "against": "torch:naive", "sparse_block": 128, "density": 0.25}


def test_block_and_density_are_settings_of_dynamic_masks_alone():
    values = VALUES | {"masks": ["causal", "uniform_block"], "sparse_block": 64, "density": 0.2}
    causal, blocks = peers.specs_of(types.SimpleNamespace(**values))
    assert causal.settings == () and blocks.settings == (("density", 0.2), ("sparse_block", 64))
    assert "sparse_block" in peers.Race([], "", 1, 0, 0).key(blocks, "forward")
    with pytest.raises(ValueError, match="--density: 0"):
        peers.specs_of(types.SimpleNamespace(**values | {"density": 0.0}))


@pytest.mark.parametrize("flag, value, said", [
    ("contenders", "torch:nonesuch", "--contenders: 'torch:nonesuch'"),
    ("contenders", "naive", "--contenders: 'naive'"), ("contenders", "torch:naive@4:3", "--contenders: '4:3'"),
    ("masks", "causl", "--masks: 'causl'"), ("seqlens", "8Q", "--seqlens: '8Q'"), ("heads", "4:3", "--heads: '4:3'")])
def test_bad_values_are_named(flag, value, said):
    values = types.SimpleNamespace(**VALUES | {flag: [value]})
    with pytest.raises(ValueError, match=said):
        peers.entrants_of(values), peers.specs_of(values)


def test_bad_values_end_the_run_before_it_begins(tmp_path):
    done = subprocess.run([sys.executable, "-m", "bench.peers", f"--out={tmp_path / 'r.jsonl'}", "--passes=both"],
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "--passes: 'both'" in done.stderr and not (tmp_path / "r.jsonl").exists()


def test_a_race_that_all_contenders_refuse_is_no_success():
    race = peers.Race([peers.Entrant("torch", "fa3"), peers.Entrant("torch", "vsa")], "torch:fa3", 1, 0, 0)
    row = race.row(ProblemSpec("causal", 64, q_heads=2, kv_heads=1, head_dim=64), "forward")
    assert row["status"] == "unsupported" and not row["tflops"]
    assert "no contender ran; unsupported: torch:fa3: " in peers.told(row) and "torch:vsa: " in row["reason"]
    raced = row | {"tflops": {"a": 0.01234, "b": 620.51}, "reason": ""}
    assert peers.told(raced).endswith(": b 620.5, a 0.01234 TFLOP/s")


def test_both_stacks_meet_in_one_process(tmp_path):
    out = tmp_path / "peers.jsonl"
    command = [
        sys.executable, "-m", "bench.peers", "--contenders=jax:naive,torch:naive,jax:flashmask",
        "--against=torch:naive", "--masks=causal", "--seqlens=64", "--heads=2:1", "--head_dim=64", "--rounds=1",
        "--seconds=0", "--warm_up=0", f"--turns={tmp_path / 'turns'}", f"--out={out}",
    ]
    subprocess.run(command, check=True, timeout=120)
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and "--resume" in again.stderr
    subprocess.run([*command, "--resume"], check=True, timeout=120)
    rows = records.read(out)
    assert [row["case"]["pass"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert set(row["tflops"]) == {"jax:naive", "torch:naive"} and "Hopper" in row["refused"]["jax:flashmask"]
        assert row["status"] == "ok" and row["key"].endswith("jax:naive+torch:naive+jax:flashmask")
        assert all(max(errors.values()) < 0.02 for errors in row["errors"].values())
