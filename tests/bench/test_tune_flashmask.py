"""The parts whose launches are swept are those of flashmask's passes."""

import types

import pytest
import torch

from bench import tune_flashmask
from torch_impl.kernels import flashmask
from torch_impl.kernels import triton_support as support
from workload import masks
from workload.problem import AttentionProblem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.skipif(support.available() is not None, reason=f"Triton {support.available()}")
@pytest.mark.parametrize("part, results", [("forward", slice(1)), ("query", slice(1, 2)), ("key", slice(2, 4))])
def test_a_part_makes_what_its_pass_makes(part, results):
    problem = AttentionProblem(masks.causal(70, 90), 1, 2, 1, 16, "float32")
    make = torch.Generator().manual_seed(0)
    shapes = problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape
    q, k, v, dout = (torch.randn(shape, generator=make).to(DEVICE) for shape in shapes)
    launches = flashmask.launches_for(problem.head_dim, q.dtype, support.arch(DEVICE))
    operands = flashmask.prepare(problem, DEVICE, launches=launches)
    out, lse = flashmask.forward(q, k, v, operands, problem.scale)
    want = out, *flashmask.backward(q, k, v, out, lse, dout, operands, problem.scale)
    tensors = q, k, v, dout, lse, support.row_delta(out, dout)
    got = tune_flashmask.part_of(part, problem, DEVICE, tensors, launches)()
    assert tune_flashmask.difference(got, want[results]) == 0.0 and len(got) == len(want[results])


@pytest.mark.skipif(support.available() is not None, reason=f"Triton {support.available()}")
def test_orders_of_the_key_pass_race(monkeypatch):
    """Each is a row with its own samples, one of them the default; orders that disagree are not timed."""
    for name, value in {"Q_HEADS": 2, "KV_HEADS": 2, "HEAD_DIM": 16, "DTYPE": "float32"}.items():
        monkeypatch.setattr(tune_flashmask, name, types.SimpleNamespace(value=value))
    monkeypatch.setattr(tune_flashmask, "ROUNDS", 2)
    monkeypatch.setattr(tune_flashmask, "ROUND_SECONDS", 0.0)
    at = tune_flashmask.setting("full", 128)
    rows = list(tune_flashmask.orders(at))
    assert [row["heavy"] for row in rows] == [0, at.operands.key_heavy] and rows[1]["default"]
    assert all(row["status"] == "ok" and len(row["samples"]) == 2 for row in rows)
    assert {tune_flashmask.kind(row) for row in rows} == {("full", 128, "order")}

    parts, offsets = flashmask.gradient_parts, iter((0.0, 1.0))

    def apart(*arguments, **options):
        keys, offset = parts(*arguments, **options)[1], next(offsets)
        return None, lambda: tuple(x + offset for x in keys())

    monkeypatch.setattr(flashmask, "gradient_parts", apart)
    assert [row["status"] for row in tune_flashmask.orders(at)] == ["mismatch", "mismatch"]
