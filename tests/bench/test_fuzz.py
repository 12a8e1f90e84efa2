"""The fuzz draws the same problems everywhere, finds what is wrong, and says how to find it again."""

import dataclasses
import subprocess
import sys

import pytest

from bench import fuzz, records
from bench.cases import ProblemSpec
from workload.problem import AttentionProblem


def test_problems_are_drawn_from_their_number_alone():
    drawn = [fuzz.draw(3, n, 200) for n in range(120)]
    assert drawn == [fuzz.draw(3, n, 200) for n in range(120)]
    assert len({spec.mask for spec in drawn}) > 9 and len({spec.dtype for spec in drawn}) == 3
    assert any(spec.q_len > spec.seq_len for spec in drawn) and any(spec.kv_heads < spec.q_heads for spec in drawn)
    assert all(a.seq_len == b.seq_len and a.dtype == b.dtype for a, b in zip(drawn[::6], drawn[5::6], strict=True))
    assert {"per query head", "per key head", "one"} == {
        "one" if spec.mask_heads == 1 else "per key head" if spec.mask_heads == spec.kv_heads else "per query head"
        for spec in drawn if spec.mask_heads}
    assert all(isinstance(spec.problem(), AttentionProblem) for spec in drawn)


@pytest.mark.parametrize("mask, heads", [("causal", 1), ("uniform_block", 3)])
def test_masks_that_heads_cannot_share_are_refused_by_name(mask, heads):
    with pytest.raises(ValueError, match=f"^mask_heads: {heads} of {mask} with 6:2 heads"):
        ProblemSpec(mask, 64, q_heads=6, kv_heads=2, mask_heads=heads)


def test_some_problems_are_right_in_both_stacks(tmp_path):
    """Every kernel that runs here, the fuzz's minute of each test run; `make fuzz` takes longer."""
    out = tmp_path / "f.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "bench.fuzz", "--seconds=40", "--longest=60", "--seed=6", f"--out={out}"],
        capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and " 0 not" in done.stdout, done.stdout + done.stderr
    right = [row for row in records.read(out) if row["status"] == "ok"]
    assert len(right) >= 10 and {row["case"]["stack"] for row in right} == {"jax", "torch"}


def test_cases_whose_masks_are_shared_otherwise_have_names_of_their_own():
    spec = ProblemSpec("uniform_block", 64, q_heads=6, kv_heads=2)
    labels = [dataclasses.replace(spec, mask_heads=n).label for n in (0, 1, 2, 6)]
    assert len(set(labels)) == 4 and labels[0] == spec.label == labels[3].replace("m6", "")
