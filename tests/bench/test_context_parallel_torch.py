"""The program of a PyTorch rank in the context-parallel bench: its rows, on two gloo processes."""

import json
import sys

import pytest

from bench import records
from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case, from_record
from torch_impl.launch import spawn

SPEC = ProblemSpec("causal_document", 96, q_heads=4, kv_heads=2, head_dim=16, dtype="float32")
CASES = (
    Case("torch", "ring", SPEC, 2),
    Case("torch", "usp", SPEC, 2, "balanced", ulysses=2),
    Case("torch", "loongtrain", SPEC, 2, ulysses=1, window=1),
    Case("torch", "all_gather", SPEC, 1),
    Case("torch", "ring", SPEC, 3),
    Case("torch", "ring", SPEC, 2, kernel="fa2"),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of all cases, made by one job."""
    folder = tmp_path_factory.mktemp("context_parallel")
    request = {"cases": [c.record() for c in CASES], "protocol": {"samples": 3, "least": 2, "seconds": 0.02},
               "check_len": 64, "links": [256, 4096], "deadline": 30, "inside": True}
    (folder / "cases.json").write_text(json.dumps(request))
    command = [sys.executable, "-m", "bench.context_parallel_torch_worker", str(folder / "cases.json"),
               str(folder / "rows.jsonl")]
    spawn(command, 2, deadline_s=150)
    return {row["key"]: row for row in records.read(folder / "rows.jsonl")}


@pytest.mark.parametrize("number", range(4))
def test_row_is_checked_counted_and_timed(rows, number):
    row = rows[CASES[number].key]
    assert row["status"] == "ok" and row["kind"] == "context_parallel", row["reason"]
    assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
    assert all(row["errors"][n] <= row["budget"][n] for n in row["errors"]) and row["check_len"] == 64
    assert row["bit_identical"]
    assert row["bytes_match"] == {"forward": True, "backward": True}
    for which in ("forward", "backward"):
        samples = row["seconds"][which]["samples"]
        assert len(samples) >= 2 and min(samples) > 0
        whole = row["rate"][which] * CASES[number].world * row["seconds"][which]["median"]
        assert whole == pytest.approx(row["flops"][which])
        assert row["efficiency"][which] > 0 and 0 <= row["skew"][which] <= 1
        inside = row["inside"][which]
        assert len(inside["step_seconds"]) == CASES[number].world
        assert all(len(s) == row["schedule"]["steps"] for s in inside["step_seconds"])
        assert inside["predicted"] >= inside["compute"] > 0
    assert row["peak_bytes"] > 0 and row["kernel"] == "naive"


def test_record_and_back():
    assert all(from_record(json.loads(json.dumps(c.record()))) == c for c in CASES)


def test_world_that_the_job_lacks(rows):
    row = rows[CASES[4].key]
    assert row["status"] == "unsupported" and "world 3" in row["reason"]


def test_kernel_that_this_machine_lacks(rows):
    row = rows[CASES[5].key]
    assert row["status"] == "unsupported" and "rank 0: torch kernel fa2" in row["reason"]


def test_links_are_measured(rows):
    links = rows["links/torch/w2"]["links"]
    assert set(links) == {"permute", "all_to_all", "all_gather", "reduce_scatter"}
    for sizes in links.values():
        assert [x["operand_bytes"] for x in sizes] == [256, 4096] and all(x["bandwidth"] > 0 for x in sizes)
    assert links["permute"][1]["wire_bytes"] == 4096 and links["reduce_scatter"][1]["wire_bytes"] == 2048
