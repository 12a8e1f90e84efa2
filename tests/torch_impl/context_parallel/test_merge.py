"""The merge of partial results: identity, overflow, order. A2, A7, A9."""

import dataclasses
import doctest

import numpy as np
import pytest
import torch

from parity.compare import relative_error
from torch_impl import kernels
from torch_impl.context_parallel import merge as module
from torch_impl.context_parallel.local import running
from torch_impl.context_parallel.merge import empty, merge
from torch_impl.kernels import triton_support
from workload.masks import causal_document
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

INF = torch.inf


def part(value, lse):
    return torch.full((1, 1, 1, 1), float(value)), torch.full((1, 1, 1), float(lse))


def drawn(seed, b=2, s=5, h=3, d=4):
    g = torch.Generator().manual_seed(seed)
    lse = 30 * torch.randn(b, h, s, generator=g)
    hidden = torch.rand(b, h, s, generator=g) < 0.4
    out = torch.randn(b, s, h, d, generator=g).masked_fill(hidden.transpose(1, 2)[..., None], 0)
    return out, lse.masked_fill(hidden, -INF)


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("a,b,out,lse", [
    pytest.param((0, -INF), (7, 0), 7, 0, id="A2 empty first"),
    pytest.param((7, 0), (0, -INF), 7, 0, id="A2 empty second"),
    pytest.param((3, 0), (5, 100), 5, 100, id="A7 no overflow"),
    pytest.param((3, -100), (5, 0), 5, 0, id="A7 other way"),
    pytest.param((0, -INF), (0, -INF), 0, -INF, id="A9 both empty"),
    pytest.param((3, 0), (5, 0), 4, 0.6931471805599453, id="equal"),
    pytest.param((3, 1e30), (5, 1e30), 4, 1e30, id="huge"),
])
def test_values(a, b, out, lse, in_place):
    got = merge(part(*a), part(*b), in_place=in_place)
    assert got[0].item() == pytest.approx(out) and got[1].item() == pytest.approx(lse)


def test_identity_is_exact_from_either_side():
    x = drawn(0)
    nothing = empty(x[0])
    for got in (merge(x, nothing), merge(nothing, x)):
        assert all(torch.equal(a, b) for a, b in zip(got, x))


def test_commutes_and_associates():
    a, b, c = (drawn(seed) for seed in (1, 2, 3))
    torch.testing.assert_close(merge(a, b), merge(b, a), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(merge(merge(a, b), c), merge(a, merge(b, c)), rtol=2e-6, atol=2e-6)


def test_in_place_is_the_same_and_takes_the_place_of_the_first():
    a, b = drawn(4), drawn(5)
    want = merge(a, b)
    got = merge(a, b, in_place=True)
    assert got[0].data_ptr() == a[0].data_ptr()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


def test_half_precision_parts_merge_in_float32():
    a, b = drawn(6), drawn(7)
    out, lse = merge((a[0].bfloat16(), a[1]), (b[0].bfloat16(), b[1]))
    assert out.dtype == lse.dtype == torch.float32


def test_many_parts_lose_no_more_than_the_whole():
    """C3: eight parts of the keys, with float32 outs: the merged out is at most twice as far off as the whole."""
    mask, kernel = causal_document(60, 96, (50, 46)), kernels.get("naive")
    problem = AttentionProblem(mask, 2, 4, 2, 32, "bfloat16")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g).bfloat16() for s in (problem.q_shape, *[problem.kv_shape] * 2))
    want = attention_oracle(*(x.double().numpy() for x in (q, k, v)), mask, problem.scale).out
    whole, _ = kernel.forward(q, k, v, kernel.prepare(problem), problem.scale)
    got = empty(q.float())
    for begin in range(0, 96, 12):
        keys = np.arange(begin, begin + 12)
        part = dataclasses.replace(problem, mask=mask.restrict(np.arange(60), keys))
        got = merge(got, kernel.forward(q, k[:, keys], v[:, keys], kernel.prepare(part), problem.scale,
                                        out_dtype=torch.float32))
    error, unsplit = (relative_error(x.double().numpy(), want) for x in (got[0].bfloat16(), whole))
    assert 0 < error <= 2 * unsplit < 0.02


@pytest.mark.skipif(triton_support.available() is not None, reason=str(triton_support.available()))
def test_fused_pass_is_the_merge():
    from torch_impl.context_parallel.merge_triton import merge_into

    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (tuple(x.to(device) for x in drawn(seed, b=2, s=37, h=3, d=20)) for seed in (8, 9))
    want, operand = merge(a, b), a[1].clone()
    lse = merge_into(*a, *b)
    torch.testing.assert_close((a[0], lse), want, rtol=2e-6, atol=1e-6)
    assert torch.equal(a[1], operand)  # written in place, a warp would read what another one has merged already


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: an interpreter's threads run in step")
def test_fused_pass_of_many_rows_again_and_again():
    from torch_impl.context_parallel.merge_triton import merge_into

    a, b = (tuple(x.cuda() for x in drawn(seed, b=1, s=1536, h=64, d=128)) for seed in (8, 9))
    want = merge(a, b)
    for _ in range(20):
        out = a[0].clone()
        torch.testing.assert_close((out, merge_into(out, a[1], *b)), want, rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(triton_support.available() is not None, reason=str(triton_support.available()))
def test_fused_pass_refuses_what_it_would_read_wrongly():
    from torch_impl.context_parallel.merge_triton import merge_into

    a, b = drawn(10), drawn(11)
    with pytest.raises(ValueError, match="contiguous"):
        merge_into(*a, b[0].transpose(1, 2).contiguous().transpose(1, 2), b[1])


@pytest.mark.parametrize("name", ["naive", "sdpa"])
def test_what_a_step_makes_is_what_the_fused_pass_reads(name):
    """On two GPUs rings over sdpa, whose results lie head by head, ended in an error under masks of uneven blocks."""
    kernel, problem = kernels.get(name), AttentionProblem(causal_document(16, 24, (9, 15)), 1, 2, 1, 8, "float32")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g) for s in (problem.q_shape, *[problem.kv_shape] * 2))
    part = running(kernel).forward(None, q, k, v, kernel.prepare(problem), problem.scale)
    assert [x.is_contiguous() for x in part] == [True, True]


def test_what_a_step_makes_of_half_precision_operands_is_float32():
    """C1: neither out, dq, dk nor dv of some keys is rounded before those of the others are added."""
    kernel, problem = kernels.get("naive"), AttentionProblem(causal_document(16, 24, (9, 15)), 1, 2, 1, 8, "bfloat16")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g).bfloat16() for s in (problem.q_shape, *[problem.kv_shape] * 2))
    operands, walk = kernel.prepare(problem), running(kernel)
    out, lse = walk.result(walk.forward(None, q, k, v, operands, problem.scale), q)
    delta = torch.zeros(lse.shape)
    grads = walk.backward(None, q, k, v, out.bfloat16(), lse, q, operands, problem.scale, delta=delta)
    for x in (out, *grads):
        assert x.dtype == torch.float32 and (x != x.bfloat16()).any()
