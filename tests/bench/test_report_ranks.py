"""What the report says of real ranks: links, predictions beside measurements, head groups, traces."""

import pytest

from bench import context_parallel_cases as cp
from bench import records
from bench.cases import ProblemSpec
from bench.report import context_parallel, ranks

SPEC = ProblemSpec("causal", 128, 0, 1, 4, 2, 16, "float32")


def real(scheme="ring", groups=1, forward=2.0, backward=5.0, efficiency=0.8, **more):
    case = cp.Case("torch", scheme, SPEC, 2, head_groups=groups)
    seconds = {"forward": {"median": forward}, "backward": {"median": backward}}
    return {"key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
            "seconds": seconds, "efficiency": dict.fromkeys(seconds, efficiency),
            "single_seconds": dict.fromkeys(seconds, 3.0), "schedule": cp.plan_of_schedule(case.schedule()), **more}


def replay(scheme="ring", **passes):
    row = real(scheme)
    return {**row, "kind": "replay", **{name: {"predicted": p, "compute": c, "slowest": [c], "exposed_links": p - c}
                                        for name, (p, c) in passes.items()},
            "efficiency": {"predicted": {"both": 1.0, "forward": 1.0, "backward": 1.0}}, **row["schedule"]}


def test_predictions_stand_beside_measurements():
    rows = [real(), real("usp"), replay(forward=(1.0, 0.75), backward=(5.5, 5.0))]
    found = ranks.comparisons(rows)
    assert [(c.which, c.measured, c.predicted) for c in found] == [("forward", 2.0, 1.0), ("backward", 5.0, 5.5)]
    assert found[0].error == pytest.approx(-0.5)
    assert ranks.prediction_summary(found)[0] == ["torch", "ring", "forward", "1", "-50%", "-50%", "causal, zigzag"]
    assert ranks.prediction_lines(found)[1] == ["torch", "ring", "causal", "zigzag", "backward", "5000.000", "5500.000",
                                                "5000.000", "+10%"]


def test_measured_links_replace_those_of_the_replay():
    hops = [{"operand_bytes": 4096, "seconds": 0.25, "bandwidth": 1e9}, {"operand_bytes": 8192, "seconds": 1.0,
                                                                        "bandwidth": 8192.0}]
    links = {"key": "links/torch/w2", "kind": "links", "case": {"stack": "torch", "world": 2}, "status": "ok",
             "reason": "", "links": {"permute": hops}}
    rows = [real(), replay(forward=(1.0, 0.75), backward=(5.5, 5.0)), links]
    signature = cp.Case("torch", "ring", SPEC, 2).schedule().signature
    for row in rows[1:2]:
        for which in ("forward", "backward"):
            row[which]["slowest"] = [0.5] * len(signature.steps)
    assert signature.collectives("forward")[0].operand_bytes == 8192  # k, then v: the largest hop measured
    assert ranks.comparisons(rows)[0].predicted == pytest.approx(2 * 1.0 + 0.5)
    assert len(records.latest(rows)) == 3


def test_head_groups_of_one_case_share_a_line():
    rows = [real("ulysses"), real("ulysses", groups=4, efficiency=0.9), real("ring")]
    head, lines = ranks.head_groups(rows)
    assert head[-2:] == ["E, 1 group", "E, 4 groups"]
    assert lines == [["torch", "ulysses", "causal", "zigzag", "0.80 / 0.80", "0.90 / 0.90"]]


def test_the_section_holds_links_and_traces():
    seen = {"link_seconds": 2e-3, "hidden_seconds": 1e-3, "work_seconds": 3e-3, "links": [(0.0, 2e-3)],
            "work": [(1e-3, 4e-3)]}
    links = {"permute": [{"operand_bytes": 4096, "seconds": 1e-5, "bandwidth": 4.096e8},
                         {"operand_bytes": 1 << 20, "seconds": 2e-5, "bandwidth": 5e10}]}
    rows = [real(trace={"forward": [seen, seen]}),
            {"key": "links/torch/w2", "kind": "links", "case": {"stack": "torch", "world": 2}, "status": "ok",
             "reason": "", "links": links}]
    assert ranks.traced(rows)[1] == [rows[0]["key"], "forward", "1", "2.000", "50%", "3.000", "4.000"]
    text = context_parallel.section(rows)
    assert "4 KiB" in text and "20.0 us, 50" in text and text.count("<svg") == 1
    assert "Links and kernels of a call" in context_parallel.markdown(rows)
    assert ranks.section([real()]) == "" and ranks.markdown([real()]) == ""
