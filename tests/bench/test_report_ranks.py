"""What the report says of real ranks: links, predictions beside measurements, head groups, traces."""

import dataclasses

import pytest

from bench import context_parallel_cases as cp
from bench import records
from bench.cases import ProblemSpec
from bench.report import context_parallel, efficiency, parity, ranks, ring

SPEC = ProblemSpec("causal", 128, 0, 1, 4, 2, 16, "float32")


def real(scheme="ring", groups=1, forward=2.0, backward=5.0, efficiency=0.8, **more):
    case = cp.Case("torch", scheme, SPEC, 2, head_groups=groups)
    seconds = {"forward": {"median": forward}, "backward": {"median": backward}}
    return {"key": case.key, "kind": "context_parallel", "case": case.record(), "status": "ok", "reason": "",
            "seconds": seconds, "efficiency": dict.fromkeys(seconds, efficiency),
            "single_seconds": dict.fromkeys(seconds, 3.0), "schedule": cp.plan_of_schedule(case.schedule()), **more}


def replay(scheme="ring", **passes):
    row = real(scheme)
    return {**row, "kind": "replay", **{name: {"predicted": p, "compute": c, "slowest": [c, c], "exposed_links": p - c}
                                        for name, (p, c) in passes.items()},
            "efficiency": {"predicted": {"both": 1.0, "forward": 1.0, "backward": 1.0}}, **row["schedule"]}


HOPS = [{"operand_bytes": 4096, "seconds": 0.25, "bandwidth": 1e9},
        {"operand_bytes": 8192, "seconds": 1.0, "bandwidth": 8192.0}]
LINKS = {"key": "links/torch/w2", "kind": "links", "case": {"stack": "torch", "world": 2}, "status": "ok", "reason": "",
         "links": {"permute": HOPS}}


def test_predictions_stand_beside_measurements():
    """k and v of a hop are the largest message measured, one after the other: 2 s, then the second step's work."""
    rows = [real(), real("usp"), replay(forward=(1.0, 0.5), backward=(5.5, 0.5)), LINKS]
    found = ranks.comparisons(rows)
    assert [(c.which, c.source, c.measured, c.compute) for c in found] == [
        ("forward", "replay", 2.0, 1.0), ("backward", "replay", 5.0, 1.0)]
    assert found[0].predicted == pytest.approx(2.5) and found[0].error == pytest.approx(0.25)
    assert ranks.prediction_summary(found)[0] == [
        "torch", "ring", "forward", "replay", "1", "+25%", "+25%", "causal, zigzag"]
    assert ranks.prediction_lines(found)[0][4:] == ["forward", "2000.000", "2500.000", "1000.000", "+25%"]
    assert ranks.comparisons(rows[:3]) == []  # without measured links there is nothing to add
    assert len(records.latest(rows)) == 4


def test_counted_tiles_are_scaled_to_the_measured_device():
    """T1 is 3 s in the row and 1.5 s in the estimate: its steps take twice as long."""
    guess = replay(forward=(1.0, 0.5), backward=(5.5, 0.5)) | {
        "kind": "replay_estimate", "one_device": dict.fromkeys(("forward", "backward"), {"seconds": 1.5})}
    found = ranks.comparisons([real(), guess, LINKS])
    assert found[0].source == "tiles" and found[0].compute == pytest.approx(2.0)
    assert found[0].predicted == pytest.approx(3.0)


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
    rows = [real(), {**real(), "key": "trace/" + real()["key"], "kind": "trace", "trace": {"forward": [seen, seen]}},
            {"key": "links/torch/w2", "kind": "links", "case": {"stack": "torch", "world": 2}, "status": "ok",
             "reason": "", "links": links}]
    assert ranks.traced(rows)[1] == [rows[0]["key"], "forward", "1", "2.000", "50%", "3.000", "4.000"]
    text = context_parallel.section(rows)
    assert "4 KiB" in text and "20.0 us, 50" in text and text.count("<svg") == 1
    assert "Links and kernels of a call" in context_parallel.markdown(rows)
    assert ranks.section([real()]) == "" and ranks.markdown([real()]) == ""


def test_rates_of_schemes_stand_beside_each_other():
    ours = real(forward=1.0, backward=4.0)
    theirs = [real(forward=2.0, backward=9.0), real(forward=3.0, backward=8.0)]
    ours["case"] = ours["case"] | {"stack": "jax"}
    text = parity.section([ours, *theirs])
    assert "by scheme: 2 ranks" in text and ">2.00 / 2.00<" in text
    assert parity.section(theirs) == ""


def of_scheme(scheme, mask, took, kind="context_parallel"):
    """A row whose E is 1.5 / took."""
    case = cp.Case("torch", scheme, dataclasses.replace(SPEC, mask=mask), 2)
    row = real(scheme, forward=took, backward=took)
    row |= {"key": f"{kind}/{case.key}", "kind": kind, "case": case.record(),
            "schedule": cp.plan_of_schedule(case.schedule())}
    return row if kind == "context_parallel" else row | {
        "efficiency": {"predicted": dict.fromkeys(("both", "forward", "backward"), 1.5 / took)},
        **dict.fromkeys(("forward", "backward"), {"predicted": took, "exposed_links": 0.0}), **row["schedule"]}


def test_the_page_says_which_scheme_to_take_and_why_a_ring_falls_behind():
    """What ran counts more than an estimate, and of two schemes the better is not known to be the best."""
    found = [of_scheme(scheme, "full_document", took, kind)
             for kind, times in (("context_parallel", (3.0, 2.0, 2.02)), ("replay_estimate", (1.6, 3.0, 3.0)))
             for scheme, took in zip(("ring", "ulysses", "all_gather"), times, strict=True)]
    found += [of_scheme(scheme, "causal", 2.0) for scheme in ("ring", "usp")]
    text = context_parallel.section(found)
    choice = text[text.index("Which scheme for my mask?"):text.index("E of both passes of every scheme")]
    assert "<b>0.75</b> ulysses, all_gather" in choice and "estimate</span>" not in choice
    assert ">full_document<" in choice and ">causal<" not in choice
    assert context_parallel.answers(found) == []  # of the masks that are named there none ran under three schemes
    documents = [of_scheme(scheme, "causal_document", took) for scheme, took in (("ring", 3.0), ("ulysses", 2.0),
                                                                              ("usp", 2.5))]
    assert context_parallel.answers(documents) == ["PyTorch: causal_document by ulysses on 2 ranks (0.75, measured)."]
    assert context_parallel.as_csv(found).count("\n") == 1 + len(found)
    told = text[text.index("Why does a ring"):text.index("Which scheme for my mask?")]
    balance = efficiency.plan(found[0])["step_balance"]
    assert f"works <b>{balance:.0%} of the time</b>" in told and "E is 0.50, measured" in told
    assert "Under causal every pair of ranks has the same work" in told and "E is 0.75, measured" in told
    assert "ulysses has 1 step where the ring has 2 steps" in told and "E is 0.75, measured" in told


def test_a_rings_rescue_is_of_its_own_stack_and_what_links_cost_is_told():
    """Once JAX's ring was to be helped by PyTorch's usp."""
    def of(stack, scheme, took, sharding="zigzag"):
        row = of_scheme(scheme, "full_document", took, "replay")
        row["efficiency"]["compute"] = {"both": 0.9}
        case = row["case"] | {"stack": stack, "sharding": sharding}
        return row | {"case": case, "key": f"{stack}/{scheme}/{sharding}"}

    rows = [of("jax", "ring", 3.0), of("jax", "ring", 5.0, "striped"), of("jax", "usp", 2.0), of("torch", "usp", 1.0)]
    told = ring.section(rows)
    assert "on 2 ranks they work" in told and "E is 0.75, replayed" in told and "1.50" not in told
    assert "E is 0.30 (0.90 if links took no time) on 2" in told
