"""The peers' protocol: all contenders in every round, medians and ratios, refusals kept, both stacks in one process."""

import collections
import json
import subprocess
import sys

import pytest

from bench import interleave
from bench.cases import ProblemSpec


def test_every_contender_runs_warm_up_and_timed_calls_in_every_round():
    calls = collections.Counter()

    def stub(name):
        return interleave.Contender(name, lambda: calls.update([name]), lambda _: None)

    found = interleave.interleave([stub("a"), stub("b")], rounds=5, seconds=0, warm_up=0)
    assert {name: len(x) for name, x in found.items()} == {"a": 5, "b": 5}
    assert calls == {"a": 3 + 2 * 5, "b": 3 + 2 * 5}  # three for the estimate


def test_rates_are_flops_over_the_median_and_ratios_are_to_the_one_named():
    spec = ProblemSpec("causal", 64)
    found = {"x": [1.0, 2.0, 9.0], "y": [3.0, 3.0, 3.0]}
    row = interleave.row_of(spec, "forward", 6 * 10**12, found, {"z": "why"}, "y")
    assert row["tflops"] == {"x": 3.0, "y": 2.0} and row["ratio"] == {"x": 1.5, "y": 1.0}
    assert row["spread"] == {"x": 4.0, "y": 0.0} and row["refused"] == {"z": "why"}
    assert interleave.row_of(spec, "forward", 1, {"x": [1.0]}, {}, "absent")["ratio"] == {}


@pytest.mark.slow
def test_both_stacks_meet_in_one_process(tmp_path):
    out = tmp_path / "peers.jsonl"
    command = [
        sys.executable, "-m", "bench.peers", "--contenders=jax:naive,torch:naive,jax:flashmask",
        "--against=torch:naive", "--mask=causal", "--seq_lens=64", "--heads=2:1", "--head_dim=64", "--rounds=1",
        "--seconds=0", "--warm_up=0", f"--out={out}",
    ]
    subprocess.run(command, check=True, timeout=120)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert set(row["tflops"]) == {"jax:naive", "torch:naive"} and "Hopper" in row["refused"]["jax:flashmask"]
