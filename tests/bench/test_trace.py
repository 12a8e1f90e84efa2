"""What a Chrome trace shows of links and kernels, from the forms that the two stacks' profilers write."""

import gzip
import json

import pytest

from bench import trace


def event(name, begin, duration, **more):
    return {"ph": "X", "name": name, "ts": begin, "dur": duration, "pid": 1, "tid": 2, **more}


def of_torch(*kernels):
    host = event("aten::matmul", 0, 5000, cat="cpu_op")
    return {"traceEvents": [host, *(event(*k, cat="kernel") for k in kernels)]}


def of_jax(*kernels):
    names = [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
             {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "Stream #15(Compute)"}},
             {"ph": "M", "name": "thread_name", "pid": 1, "tid": 3, "args": {"name": "XLA Ops"}},
             {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "/host:CPU"}}]
    others = [event("op again", 0, 9000, tid=3), event("dispatch", 0, 9000, pid=9)]
    return {"traceEvents": [*names, *others, *(event(*k) for k in kernels)]}


CALL = (("attention", 100, 40), ("ncclDevKernel_SendRecv", 110, 20), ("merge", 145, 5),
        ("ncclDevKernel_SendRecv", 148, 10))


@pytest.mark.parametrize("form", [of_torch, of_jax])
def test_links_and_what_hides_them(form):
    found = trace.overlap(form(*CALL))
    assert found["link_seconds"] == pytest.approx(30e-6) and found["work_seconds"] == pytest.approx(45e-6)
    assert found["hidden_seconds"] == pytest.approx(22e-6)  # 20 under the kernel, 2 under the end of the merge
    assert found["work"][0] == pytest.approx((0.0, 40e-6)) and found["links"][1] == pytest.approx((48e-6, 58e-6))


def test_a_trace_without_a_device_shows_nothing():
    found = trace.overlap(of_torch())
    assert found["link_seconds"] == found["work_seconds"] == 0 and found["links"] == []


def test_the_last_of_equal_calls():
    early = [(name, begin - 90, length) for name, begin, length in CALL]
    both = trace.last_call(of_torch(*early, *CALL), 2)
    assert trace.overlap(both) == trace.overlap(of_torch(*CALL))
    stray = trace.last_call(of_torch(("memset", 0, 1), ("merge", 2, 1), *early, *CALL), 2)
    assert trace.overlap(stray) == trace.overlap(of_torch(*CALL))
    with pytest.raises(ValueError, match="no device event occurs in all of 3 equal calls"):
        trace.last_call(of_torch(*CALL), 3)


def test_written_traces_open_as_json(tmp_path):
    path = trace.path_of(tmp_path, "torch/ring/a b/rank0")
    trace.write(of_torch(*CALL), path)
    assert path.name == "torch_ring_a_b_rank0.trace.json.gz"
    assert json.loads(gzip.open(path).read()) == of_torch(*CALL)
