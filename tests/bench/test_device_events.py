"""Events on XLA's stream: a real custom call on the CPU, on a driver that writes down what it is asked."""

import types

import jax
import pytest

from bench import attention_task
from bench.device_events import BEGIN, END, NOT_READY, DeviceEvents

STREAM = 77


class Driver:
    """Of the CUDA driver what `DeviceEvents` calls; every function returns a status."""

    def __init__(self):
        self.recorded, self.made, self.query, self.record_status = [], 0, NOT_READY, 0
        self.contexts = [3]  # of another device

    def cuStreamGetCtx(self, stream, context):
        context._obj.value = 5
        return 0 if stream.value in (STREAM, 2 * STREAM) else 400

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.contexts.pop()
        return 0

    def cuCtxSetCurrent(self, context):
        return 0 if context.value == 5 else 201

    def cuEventCreate(self, event, flags):
        self.made += 1
        event._obj.value = self.made
        return 0 if self.contexts[-1] == 5 else 201

    def cuEventRecord(self, event, stream):
        self.recorded.append((event.value, stream.value))
        return self.record_status if self.contexts[-1] == 5 else 400

    def cuEventQuery(self, event):
        return self.query if event.value == 1 else 999

    def cuEventSynchronize(self, event):
        return 0

    def cuEventElapsedTime(self, milliseconds, begin, end):
        milliseconds._obj.value = 1.5 * (end.value - begin.value)
        return 0


def around(events):
    events.mark(BEGIN)
    return events.seconds(events.mark(END))


def test_two_events_are_recorded_on_xlas_stream():
    driver = Driver()
    events = DeviceEvents(None, "cpu", driver, lambda frame: STREAM)
    assert [around(events), around(events)] == [1.5e-3, 1.5e-3]
    assert driver.recorded == [(1, STREAM), (2, STREAM)] * 2
    assert driver.made == 2 and driver.contexts == [3]


def test_marks_run_on_the_device_whose_they_are():
    """On a machine of one CPU it shows by whether their results are bound to it."""
    [device] = jax.devices("cpu")[:1]
    for given in (None, device):
        x = DeviceEvents(given, "cpu", Driver(), lambda frame: STREAM).mark(BEGIN)
        assert x.devices() == {device} and x.committed == (given is not None)


def test_it_is_told_whether_the_device_was_there_before_the_host():
    driver = Driver()
    events = DeviceEvents(None, "cpu", driver, lambda frame: STREAM)
    around(events)
    assert not events.behind()
    driver.query = 0
    around(events)
    assert events.behind()


def test_what_fails_in_xlas_thread_is_raised_by_the_timer():
    driver = Driver()
    events = DeviceEvents(None, "cpu", driver, lambda frame: STREAM)
    driver.record_status = 400
    with pytest.raises(RuntimeError, match="cuEventRecord: CUDA error 400"):
        around(events)
    driver.record_status = 0
    assert around(events) == 1.5e-3


def test_two_streams_are_no_time():
    streams = iter([STREAM, 2 * STREAM])
    events = DeviceEvents(None, "cpu", Driver(), lambda frame: next(streams))
    with pytest.raises(RuntimeError, match="different streams"):
        around(events)


def test_a_cpu_has_no_stream_and_says_so():
    """XLA's own answer, through the structures of its interface."""
    with pytest.raises(RuntimeError, match="XLA gave no stream"):
        around(DeviceEvents(None, "cpu", Driver()))


def test_the_sampler_stands_around_the_call_behind_the_flush(monkeypatch):
    stack, went = attention_task.stack_of("jax"), []

    class Events:
        def mark(self, which):
            went.append(which)
            return which

        def seconds(self, last):
            assert last == END
            return 2e-3

        def behind(self):
            return len(went) < 5

    monkeypatch.setattr(stack, "on_gpu", True)
    monkeypatch.setattr(type(stack), "_events", lambda self, device: Events())
    monkeypatch.setattr(type(stack), "_flush", lambda self: lambda: went.append("flush"))
    assert stack.sampler(lambda n: went.append("call"), True)(0) == 2e-3
    assert went == ["flush", BEGIN, "call", END, "flush", "flush", BEGIN, "call", END]  # the first came too late
    went[:] = [None] * 5
    stack.sampler(lambda n: went.append("call"), False)(0)
    assert went[5:] == ["flush", "call", BEGIN, "call", END]
    went[:] = [None] * 5
    stack.sampler(lambda n: went.append("call"), False, flushes=3)(0)
    assert went[5:] == [*["flush"] * 3, "call", BEGIN, "call", END]


@pytest.mark.parametrize("late", [0, 1])
def test_of_several_devices_the_slowest_counts_and_none_may_have_waited(late, monkeypatch):
    """One process serves all: only the first was watched, and what a host late at the second did was a call's time."""
    stack, went = attention_task.stack_of("jax"), []

    class Events:
        def __init__(self, number):
            self.number = number

        def mark(self, which):
            went.append((which, self.number))
            return self.number

        def seconds(self, last):
            assert last == self.number
            return 1e-3 * (1 + self.number)

        def behind(self):
            return self.number == late

    monkeypatch.setattr(type(stack), "_events", lambda self, device: Events(device))
    monkeypatch.setattr(type(stack), "_flush", lambda self: lambda: went.append("flush"))
    told = stack.between_events(lambda: went.append("call"), 1, lambda: went.append("meet"), (0, 1))
    assert told == (2e-3, True)
    assert went == ["flush", "meet", (BEGIN, 0), (BEGIN, 1), "call", (END, 0), (END, 1)]


def test_what_xla_tries_on_the_device_is_not_beside_a_timing(monkeypatch):
    """Builds beside timings made a tenth of the rows up to half as slow again."""
    stack = attention_task.stack_of("jax")
    assert not stack.disturbs(stack.kernel("flashmask"))  # a CPU
    monkeypatch.setattr(stack, "on_gpu", True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert stack.disturbs(stack.kernel("flashmask"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0")
    assert not stack.disturbs(stack.kernel("flashmask"))


@pytest.mark.parametrize("flag, target, on_gpu, flagged", [
    ("--xla_gpu_autotune_level=0", "__cublas$gemm", True, True), ("", "__cublas$gemm", True, False),
    ("--xla_gpu_autotune_level=0", "mosaic_gpu_v2", True, False),
    ("--xla_gpu_autotune_level=0", "__cublas$gemm", False, False),
])
def test_products_that_xla_could_not_tune_are_flagged(flag, target, on_gpu, flagged, monkeypatch):
    """Told to try nothing on the device, it took an algorithm that made sdpa 1.45 times slower, and no row said so."""
    stack = attention_task.stack_of("jax")
    monkeypatch.setattr(stack, "on_gpu", on_gpu)
    monkeypatch.setenv("XLA_FLAGS", flag)
    text = f'%c = bf16[8,8] custom-call(%a, %b), custom_call_target="{target}"'
    assert bool(stack.handicaps(types.SimpleNamespace(as_text=lambda: text))) == flagged
    assert attention_task.stack_of("torch").handicaps(None) == []
