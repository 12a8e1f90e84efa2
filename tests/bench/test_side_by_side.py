"""Several workers of a stack: what is timed is alone, what is checked is not, and who measures what."""

import collections
import dataclasses
import itertools
import threading
import time

import pytest

from bench import engine, records
from bench.cases import Case, ProblemSpec
from bench.shares import Shares, shares
from bench.shorter import Shorter
from bench.turns import Turns
from bench.workers import Failure

MASKS = ("causal", "full", "causal_document", "full_document", "prefix_lm_causal")


def case(kernel="naive", mask="causal", seq_len=64, which="forward", stack="torch"):
    return Case(stack, kernel, which, ProblemSpec(mask, seq_len, dtype="float32"))


def overlaps(a, b):
    return a[0] < b[1] and b[0] < a[1]


def test_one_alone_is_alone_and_others_are_together():
    turns, spans, both = Turns(), collections.defaultdict(list), threading.Barrier(3)

    def take(kind):
        both.wait()
        for _ in range(4):
            with getattr(turns, kind)():
                began = time.monotonic()
                time.sleep(0.01)
                spans[kind].append((began, time.monotonic()))

    threads = [threading.Thread(target=take, args=(kind,)) for kind in ("together", "together", "alone")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(spans["together"]) == 8 and len(spans["alone"]) == 4
    assert not any(overlaps(a, b) for a in spans["alone"] for b in spans["together"])
    assert any(overlaps(a, b) for a, b in itertools.combinations(spans["together"], 2))


def test_those_who_wait_to_be_alone_go_in_order():
    turns, went = Turns(), []

    def take(order):
        with turns.alone(order):
            went.append(order)

    with turns.alone():
        threads = [threading.Thread(target=take, args=(order,)) for order in ((64, True), (32, False), (64, False))]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 20
        while len(turns._waiting) < 3 and time.monotonic() < until:
            time.sleep(0.001)
    for thread in threads:
        thread.join(20)
    assert went == [(32, False), (64, False), (64, True)]


def test_all_who_wait_to_be_alone_go_before_anyone_works_together_again():
    """Who has been alone comes back at once with its next piece: it waits until the others have been alone, too."""
    turns, went, inside = Turns(), [], threading.Event()

    def worker(name):
        with turns.alone():
            went.append(name)
        with turns.together():
            went.append("together")

    def others():
        with turns.together():
            inside.set()
            until = time.monotonic() + 20
            while len(turns._waiting) < 3 and time.monotonic() < until:
                time.sleep(0.001)

    first = threading.Thread(target=others)
    first.start()
    assert inside.wait(20)
    threads = [threading.Thread(target=worker, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in (first, *threads):
        thread.join(20)
    assert sorted(went[:3]) == ["a", "b", "c"] and went[3:] == ["together"] * 3


def test_nobody_is_let_in_while_one_waits_to_be_alone():
    """Who comes late, or again and again, would keep all who wait waiting."""
    turns, went, inside = Turns(), [], threading.Event()

    def first():
        with turns.together():
            inside.set()
            until = time.monotonic() + 20
            while not turns._waiting and time.monotonic() < until:
                time.sleep(0.001)
            late.start()
            time.sleep(0.02)  # in which it would have gone in

    def take(kind):
        with getattr(turns, kind)():
            went.append(kind)

    late = threading.Thread(target=take, args=("together",))
    threads = [threading.Thread(target=first), threading.Thread(target=take, args=("alone",))]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    for thread in (*threads, late):
        thread.join(20)
    assert went == ["alone", "together"]


def test_who_is_alone_lets_go_when_it_fails():
    turns = Turns()
    for kind in ("alone", "together", "alone"):
        with pytest.raises(RuntimeError), getattr(turns, kind)():
            raise RuntimeError("a timing that failed")


def test_what_is_timed_is_alone_while_builds_go_on(answers, tmp_path):
    spans, _ = answers
    run = [case(kernel, mask, which=which) for kernel in ("naive", "sdpa") for mask in MASKS
           for which in ("forward", "backward")]
    rows = engine.run(run, engine.Options(tmp_path / "r.jsonl", workers=4))
    assert sum(row["kind"] == "attention" and row["status"] == "ok" for row in rows) == len(run) == len(spans["clock"])
    quiet = spans["check"] + spans["reference"]
    assert not any(overlaps(a, b) for a in spans["clock"] for b in quiet)
    assert not any(overlaps(a, b) for a, b in itertools.combinations(spans["clock"], 2))
    assert any(overlaps(a, b) for a, b in itertools.combinations(spans["check"], 2))
    assert any(overlaps(a, b) for a in spans["clock"] for b in spans["build"])
    assert len(spans["reference"]) == len(MASKS)
    timed = records.select(rows, kind="attention")
    assert all({"refuse", "build", "check", "clock", "waiting"} <= set(row["took"]) for row in timed)
    assert sum(row["took"]["waiting"] for row in timed) > 0 and timed[0]["took"]["clock"] >= 0.004


def test_a_problem_is_judged_once_and_ahead_of_its_rows(answers, tmp_path):
    """Nor does who wants a reference that is there wait for another that is being made."""
    spans, special = answers
    made, all_made = [], threading.Event()

    def judge(arguments):
        made.append(arguments["spec"]["mask"])
        if len(made) == len(MASKS):
            all_made.set()
        return {}

    special["reference"] = judge
    special["describe"] = lambda arguments: {"flops": 1e12, "bytes": 1 if all_made.wait(20) else 0}
    engine.run([case(kernel, mask) for kernel in ("naive", "sdpa") for mask in MASKS],
               engine.Options(tmp_path / "r.jsonl", workers=2))
    assert sorted(made) == sorted(MASKS)
    assert max(x[1] for x in spans["reference"]) <= min(x[0] for x in spans["check"])

    reading, entered = threading.Event(), threading.Event()

    class Judge:
        def ask(self, task, deadline, spec, **_):
            if spec["mask"] == "full":
                entered.set()
                assert reading.wait(20)

    references = engine.References({"judge": Judge()}, tmp_path, 1.0)
    here = references.of(case())
    slow = threading.Thread(target=references.of, args=(case(mask="full"),))
    slow.start()
    assert entered.wait(20) and references.of(case("sdpa")) == here
    reading.set()
    slow.join(20)
    assert references.of(case(mask="full")) != here


@pytest.mark.parametrize("ahead", [True, False])
def test_a_build_that_tries_things_on_the_device_is_not_beside_a_timing(answers, tmp_path, ahead):
    spans, special = answers
    special["disturbs"] = lambda arguments: True
    built = []
    special["build"] = lambda arguments: built.append(arguments["case"]["seq_len"])
    engine.run([case(mask=mask, seq_len=n) for mask in MASKS for n in (64, 128)],
               engine.Options(tmp_path / "r.jsonl", workers=3, ahead=ahead))
    assert built.count(64) == built.count(128) == (1 + ahead) * len(MASKS)  # ahead, and found again at its own time
    assert not any(overlaps(a, b) for a in spans["clock"] for b in spans["build"])
    assert (sum(b[0] < spans["clock"][0][0] for b in spans["build"]) >= len(MASKS)) == ahead


def test_a_case_that_cannot_be_compiled_ahead_is_compiled_by_its_first_call(answers, tmp_path):
    """It says so; a lack of memory or a refusal ends it."""
    spans, special = answers
    failures = {"causal": Failure("error", "no fakes"), "full": Failure("out_of_memory", "300 GiB")}
    special["build"] = lambda arguments: failures.get(arguments["case"]["mask"])
    run = [case(mask=mask) for mask in ("causal", "full", "full_document")]
    rows = records.select(engine.run(run, engine.Options(tmp_path / "r.jsonl", workers=2)), kind="attention")
    found = {row["case"]["mask"]: row for row in rows}
    assert found["causal"]["status"] == "ok" and found["causal"]["not_compiled_ahead"] == "no fakes"
    assert found["full"]["status"] == "out_of_memory" and "not_compiled_ahead" not in found["full_document"]
    assert len(spans["check"]) == 2


def test_memory_that_was_short_beside_others_is_asked_for_alone(answers, tmp_path):
    spans, special = answers
    tries = itertools.count()
    special["check"] = lambda arguments: (
        Failure("out_of_memory", "full") if next(tries) == 0 else {"wrong": []})
    rows = engine.run([case()], engine.Options(tmp_path / "r.jsonl", workers=2))
    assert [row["status"] for row in records.select(rows, kind="attention")] == ["ok"] and len(spans["check"]) == 2
    tries = itertools.count()
    rows = engine.run([case()], engine.Options(tmp_path / "one.jsonl"))
    assert [row["status"] for row in records.select(rows, kind="attention")] == ["out_of_memory"]


def test_a_worker_that_hoards_is_renewed_where_shapes_change(answers, tmp_path):
    spans, special = answers
    special["clock"] = lambda arguments: {"seconds": {"median": 1.0, "min": 1.0, "spread": 0.0},
                                          "peak_bytes": 1 << 40}
    run = [case(mask=mask, seq_len=n, stack=stack) for stack in ("jax", "torch") for n in (64, 128)
           for mask in ("full", "causal")]
    engine.run(run, engine.Options(tmp_path / "r.jsonl", workers=1))
    before = len(spans["kill"])
    engine.run(run, engine.Options(tmp_path / "two.jsonl", workers=2))
    hoarders = [worker.stack for worker in spans["kill"][before:]]
    assert hoarders.count("jax") - hoarders.count("torch") == 2  # all end with the run; each of JAX's two once before


def test_each_worker_has_its_kernels_and_masks_at_every_length():
    run = [case(kernel, mask, n, which, stack) for n in (128, 64) for stack in ("jax", "torch")
           for kernel in ("naive", "sdpa", "flex") for mask in MASKS for which in ("forward", "backward")]
    lists = shares(run, 4)
    assert sorted(c.key for share in lists for _, c in share) == sorted(c.key for c in run) and len(lists) == 8
    for share in lists:
        assert len({(number, c.stack) for number, c in share}) == 1
        assert [c.spec.seq_len for _, c in share] == sorted(c.spec.seq_len for _, c in share)
        by_length = [[(c.kernel, c.spec.mask, c.which) for _, c in share if c.spec.seq_len == n] for n in (64, 128)]
        assert by_length[0] == by_length[1]
        assert all(by_length[0][n][2] == ("forward", "backward")[n % 2] for n in range(len(by_length[0])))
    assert shares(run, 1) == [[(0, c) for c in run]]
    assert shares([], 3) == []
    densities = [dataclasses.replace(run[0], spec=dataclasses.replace(run[0].spec, settings=(("density", x),)))
                 for x in (0.1, 0.2, 0.5)]
    assert len(shares(densities, 3)) == 3  # of one kernel, under masks that differ in their settings alone


def test_who_has_finished_its_share_takes_of_the_longest_of_its_stack():
    run = [case(kernel, mask, n, which, stack) for n in (64, 128) for stack in ("jax", "torch")
           for kernel in ("naive", "sdpa") for mask in MASKS for which in ("forward", "backward")]
    given = Shares(run, 2)
    assert [stack for stack, _ in given.workers] == ["jax", "jax", "torch", "torch"]
    taken = []
    while group := given.take(0):
        taken.append(group)
    assert sorted(c.key for group in taken for c in group) == sorted(c.key for c in run if c.stack == "jax")
    assert all([c.which for c in group] == ["forward", "backward"] for group in taken)
    assert not given.take(1) and len(given.left(2, 64)) == len(given.left(2, 128)) == 2 * len(MASKS)
    mine, others = taken[: len(taken) // 2], taken[len(taken) // 2 :]
    assert all([c.spec.seq_len for g in x for c in g] == sorted(c.spec.seq_len for g in x for c in g)
               for x in (mine, others))
    assert given.take(2)[0].stack == "torch"
    alone = Shares(run, 1)
    assert alone.workers == [(run[0].stack, 0)] and [c for _ in run[::2] for c in alone.take(0)] == run
    assert not Shares([], 2).workers


def test_a_row_too_slow_by_its_shorter_rows_is_skipped_with_the_reason():
    shorter = Shorter(2.0)
    rows = {n: {"case": case(seq_len=n).record(), "flops": n * n, "status": "ok"} for n in (64, 128, 256, 512)}
    assert shorter.skip(rows[64]) is None
    shorter.add(rows[64] | {"seconds": {"median": 0.25}})
    assert shorter.skip(rows[128]) is None and shorter.skip(rows[64]) is None
    said = shorter.skip(rows[256])
    assert said["status"] == "skipped" and "4 s" in said["reason"] and "64 tokens" in said["reason"]
    shorter.add(rows[256] | said)
    assert "16 s" in shorter.skip(rows[512])["reason"]  # the estimate goes on from the skipped row
    other = {**rows[512], "case": case("sdpa", seq_len=512).record()}
    assert shorter.skip(other) is None
    shorter.add({**other, "case": case("sdpa", seq_len=64).record(), "status": "out_of_memory", "reason": "full"})
    assert shorter.skip(other) == {"status": "out_of_memory", "reason": "not run: at 64 tokens full"}
    asked = Shorter(None, [("sdpa", 128)])
    assert asked.skip(rows[512]) is None and "128 tokens asked" in asked.skip(other)["reason"]
    patient = Shorter(None)
    patient.add(rows[64] | {"seconds": {"median": 100.0}})
    assert patient.skip(rows[512]) is None


@pytest.mark.parametrize("peaks, status", [
    ([1.0, 1e30], "ok"), ([1.0, 2.0, 1e30], "ok"), ([1.0, 2.0, 1.0, 2.0], "error")])
def test_a_ceiling_measured_in_a_bad_moment_is_measured_again_before_it_rejects(answers, tmp_path, peaks, status):
    """Nor is a rate believed because of that: what the patient measurements do not bear out stays rejected."""
    spans, special = answers
    left = iter(peaks)
    special["ceiling"] = lambda _: {"peak_flops": next(left), "bandwidth": 1.0}
    row = engine.run([case()], engine.Options(tmp_path / "r"))[-1]
    assert row["status"] == status and len(spans["clock"]) == len(peaks) - 1
    assert next(left, None) is None
