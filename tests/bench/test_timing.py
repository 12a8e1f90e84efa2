"""The timing protocol and its plausibility checks; ids are those of faults seen in public."""

import types

import pytest
import torch

from bench import attention_task, rates, timing
from bench.rates import above_ceiling, above_dense
from bench.timing import EventSampler, Protocol, Timing, measure, wall_sampler
from workload.masks import causal
from workload.problem import AttentionProblem


def test_the_least_is_the_least():
    """M13: "min" once printed the maximum."""
    found = Timing((3.0, 1.0, 2.0)).record()
    assert (found["min"], found["median"], found["max"]) == (1.0, 2.0, 3.0)


def test_the_spread_is_between_the_quartiles():
    assert Timing((1.0, 2.0, 3.0, 4.0)).spread == pytest.approx((3.25 - 1.75) / 2.5)
    assert Timing((2.0,)).spread == 0.0


def test_a_rate_above_the_peak_is_rejected():
    """M3: 2,598 TFLOP/s above the roofline."""
    row = {"flops": 2.598e12, "bytes": 1, "seconds": Timing((1e-3,)).record(), "status": "ok", "reason": ""}
    rejected = rates.with_rates(row, 790e12)
    assert rejected["status"] == "error" and "2598 TFLOP/s is above" in rejected["reason"]
    assert rates.with_rates(row, 2.6e15)["status"] == "ok"
    assert above_ceiling(791e12, 790e12) is None


def test_a_time_the_timer_cannot_tell_is_no_rate():
    row = {"flops": 1, "bytes": 1, "seconds": Timing((-1e-9,)).record(), "status": "ok", "reason": ""}
    assert rates.with_rates(row, 1e15)["status"] == "error"


def attention_row(mask, seconds, flops, which="forward", backend="cuda"):
    case = dict.fromkeys(("stack", "kernel", "pass", "seq_len", "q_len", "batch", "q_heads", "kv_heads", "head_dim",
                          "dtype"), 1) | {"mask": mask, "pass": which}
    row = {"case": case, "environment": {"backend": backend}, "status": "ok", "reason": "", "flags": [],
           "flops": flops, "bytes": 1, "seconds": Timing((seconds,)).record()}
    return rates.with_rates(row, 1e15)


def test_a_masked_rate_above_the_dense_rate_is_flagged():
    """M4: a sparse backward of 693 above a dense one of 541."""
    seen = {}
    assert rates.flag(attention_row("full", 1.0, 541), seen)["flags"] == []
    assert "1.28 x" in rates.flag(attention_row("causal", 1.0, 693), seen)["flags"][0]
    assert rates.flag(attention_row("causal", 1.0, 590), seen)["flags"] == []
    assert above_dense(1.2, 1.0) and not above_dense(1.05, 1.0)


def test_a_backward_that_does_not_fit_its_forward_is_flagged():
    """L5: a backward 12 times slower than it need be."""
    seen = {}
    rates.flag(attention_row("causal", 1.0, 100), seen)
    assert rates.flag(attention_row("causal", 12.0, 250, "backward"), seen)["flags"] == [
        "backward takes 12 x the forward's time"]
    assert rates.flag(attention_row("causal", 2.5, 250, "backward"), seen)["flags"] == []
    assert rates.flag(attention_row("causal", 1.2, 250, "backward"), seen)["flags"] == [
        "backward takes 1.2 x the forward's time"]
    assert rates.flag(attention_row("causal", 12.0, 250, "backward", "cpu"), seen)["flags"] == []


def test_warm_up_ends_when_steady_and_is_not_counted():
    times = iter([9.0, 5.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.01])
    found = measure(lambda n: next(times), Protocol(samples=2, seconds=60))
    assert found.warmups == 6 and found.samples == (1.0, 1.01)


def test_a_warm_up_that_never_settles_ends_too():
    found = measure(lambda n: float(1 + n % 2), Protocol(samples=3, seconds=60, warmups=5))
    assert found.warmups == 5 and len(found.samples) == 3


def test_work_that_has_just_run_needs_no_warm_up():
    found = measure(lambda n: 2.0 + n, Protocol(samples=2, least=1, seconds=60, warmups=0))
    assert found.warmups == 0 and found.samples == (2.0, 3.0)


def test_new_inputs_in_every_sample():
    """M9: a result cached between calls."""
    seen = []
    measure(lambda n: seen.append(n) or 1.0, Protocol(samples=4))
    assert seen == list(range(len(seen)))


class Device:
    """A queue of work on a clock of its own, as a GPU is: calls return when they are enqueued, `finish` waits."""

    def __init__(self, monkeypatch, dispatch=0.0):
        self.now, self.busy_until, self.dispatch = 0.0, 0.0, dispatch
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)  # exact whatever else the machine does

    def enqueue(self, seconds):
        self.now += self.dispatch
        self.busy_until = max(self.busy_until, self.now) + seconds
        return self

    def finish(self, _):
        self.now = max(self.now, self.busy_until)


def test_asynchronous_work_is_waited_for(monkeypatch):
    """M8: the dispatch was timed, not the work."""
    device = Device(monkeypatch)
    times = [wall_sampler(lambda n, t=t: device.enqueue(t), device.finish)(0) for t in (0.001, 0.1)]
    assert times[1] == pytest.approx(100 * times[0])


@pytest.mark.parametrize("stack_name", ["jax", "torch"])
def test_longer_work_times_longer_in_both_stacks(stack_name):
    """M8, for real: the larger product has 4096 times the FLOPs."""
    stack = attention_task.stack_of(stack_name)
    protocol = Protocol(samples=200, least=20, seconds=1.0)  # the fastest of many: a busy machine slows most
    small, large = (
        measure(stack.sampler(stack.matmul(n, "float32")[0], True), protocol).minimum for n in (64, 1024))
    assert large > 8 * small


def test_flops_and_their_formula_are_those_of_the_mask():
    """M1: causal FLOPs halved neither never nor twice."""
    problem = AttentionProblem(causal(4, 4), head_dim=1)
    assert (problem.flops("forward"), problem.flops("backward")) == (40, 100)


@pytest.mark.parametrize("cold", [True, False])
def test_events_stand_behind_work_that_hides_the_host(cold, monkeypatch):
    """M7, M8: without it the warm time of a short call was its launch: four times the cold one on an H200."""
    went = []

    class Event:
        def __init__(self, enable_timing):
            self.name = f"event {len([x for x in went if x == 'event'])}"
            went.append("event")

        def record(self):
            went.append(self.name)

        def query(self):
            went.append("query")
            return False

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 2.0

    stack = attention_task.stack_of("torch")
    monkeypatch.setattr(stack, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: went.append("spin"))
    flush = types.SimpleNamespace(zero_=lambda: went.append("flush"))
    monkeypatch.setattr(type(stack), "_flush_buffer", lambda self: flush)
    assert stack.sampler(lambda n: went.append("call"), cold)(0) == 2e-3
    assert went[2:] == ["spin", *["flush"] * cold, "event 0", "call", "event 1", "query"]


def test_where_the_device_waited_for_the_host_the_head_start_grows():
    """M8, on a busy host: what the device waits for is not its own time."""
    asked = []

    def take(n, ahead):
        asked.append((n, ahead))
        return seconds / ahead, ahead < enough

    sample, enough, seconds = EventSampler(take), 4, 0.064
    assert [sample(0), sample(1)] == [0.016, 0.016]
    assert asked == [(0, 1), (0, 2), (0, 4), (1, 4)]  # a head start that was enough is kept
    assert sample.waited == 0
    enough = 1000
    assert sample(2) == 0.064 / timing.MOST_AHEAD and sample.waited == 1
    asked.clear()
    sample, seconds = EventSampler(take), 1.0
    assert sample(3) == 1.0 and asked == [(3, 1)] and not sample.waited  # a long run does not feel it


def test_a_long_run_that_a_busy_host_made_long_is_taken_again():
    """A call of 46 ms once stood as one of 120, behind a host that was 73 ms late."""
    for taken, want in (([(0.12, True), (0.046, False)], 0.046), ([(0.2, True), (0.15, True)], 0.15),
                        ([(0.12, True), (0.05, True), (0.046, False)], 0.046)):
        left = iter(taken)
        assert EventSampler(lambda n, ahead, left=left: next(left))(0) == want and next(left, None) is None
