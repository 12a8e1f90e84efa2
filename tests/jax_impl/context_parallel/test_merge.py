"""The merge of partial results: identity, overflow, order. A2, A7, A9."""

import dataclasses
import doctest

import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.context_parallel import merge as module
from jax_impl.context_parallel.local import running
from jax_impl.context_parallel.merge import empty, merge
from parity.compare import relative_error
from workload.masks import causal_document
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

INF = np.inf


def part(value, lse):
    return jnp.full((1, 1, 1, 1), float(value)), jnp.full((1, 1, 1), float(lse))


def drawn(seed, b=2, s=5, h=3, d=4):
    rng = np.random.default_rng(seed)
    lse = 30 * rng.standard_normal((b, h, s), np.float32)
    hidden = rng.random((b, h, s)) < 0.4
    out = rng.standard_normal((b, s, h, d), np.float32)
    out[hidden.transpose(0, 2, 1)] = 0
    return jnp.asarray(out), jnp.asarray(np.where(hidden, -np.float32(INF), lse))


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("a,b,out,lse", [
    pytest.param((0, -INF), (7, 0), 7, 0, id="A2 empty first"),
    pytest.param((7, 0), (0, -INF), 7, 0, id="A2 empty second"),
    pytest.param((3, 0), (5, 100), 5, 100, id="A7 no overflow"),
    pytest.param((3, -100), (5, 0), 5, 0, id="A7 other way"),
    pytest.param((0, -INF), (0, -INF), 0, -INF, id="A9 both empty"),
    pytest.param((3, 0), (5, 0), 4, 0.6931471805599453, id="equal"),
    pytest.param((3, 1e30), (5, 1e30), 4, 1e30, id="huge"),
])
def test_values(a, b, out, lse):
    got = merge(part(*a), part(*b))
    assert got[0].item() == pytest.approx(out) and got[1].item() == pytest.approx(lse)


def test_identity_is_exact_from_either_side():
    x = drawn(0)
    nothing = empty(x[0])
    for got in (merge(x, nothing), merge(nothing, x)):
        assert all(jnp.array_equal(a, b) for a, b in zip(got, x, strict=True))


def test_commutes_and_associates():
    a, b, c = (drawn(seed) for seed in (1, 2, 3))
    for got, want in ((merge(a, b), merge(b, a)), (merge(merge(a, b), c), merge(a, merge(b, c)))):
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


def test_many_parts_lose_no_more_than_the_whole():
    """C3: eight parts of the keys, with float32 outs: the merged out is at most twice as far off as the whole."""
    mask, kernel = causal_document(60, 96, (50, 46)), kernels.get("naive")
    problem = AttentionProblem(mask, 2, 4, 2, 32, "bfloat16")
    rng = np.random.default_rng(0)
    shapes = (problem.q_shape, *[problem.kv_shape] * 2)
    q, k, v = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    want = attention_oracle(*(np.asarray(x, np.float64) for x in (q, k, v)), mask, problem.scale).out
    whole, _ = kernel.forward(q, k, v, kernel.prepare(problem), problem.scale)
    got = empty(q.astype(jnp.float32))
    for begin in range(0, 96, 12):
        keys = np.arange(begin, begin + 12)
        part = dataclasses.replace(problem, mask=mask.restrict(np.arange(60), keys))
        got = merge(got, kernel.forward(q, k[:, keys], v[:, keys], kernel.prepare(part), problem.scale,
                                        out_dtype=jnp.float32))
    error, unsplit = (relative_error(x, want) for x in (got[0].astype(jnp.bfloat16), whole))
    assert 0 < error <= 2 * unsplit < 0.02


def test_what_a_step_makes_of_half_precision_operands_is_float32():
    """C1: neither out, dq, dk nor dv of some keys is rounded before those of the others are added."""
    kernel, problem = kernels.get("naive"), AttentionProblem(causal_document(16, 24, (9, 15)), 1, 2, 1, 8, "bfloat16")
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal(s), "bfloat16") for s in (problem.q_shape, *[problem.kv_shape] * 2))
    operands, walk = kernel.prepare(problem), running(kernel)
    out, lse = walk.result(walk.forward(None, q, k, v, operands, problem.scale), q)
    delta = jnp.zeros(lse.shape, jnp.float32)
    grads = walk.backward(None, q, k, v, out.astype(q.dtype), lse, q, operands, problem.scale, delta=delta)
    for x in (out, *grads):
        assert x.dtype == jnp.float32 and (x != x.astype(jnp.bfloat16)).any()
