"""Every kernel of the JAX stack against the oracle; see tests/conformance.py."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from tests import conformance
from tests.jax_impl.interpret_patch import interpreted
from workload import masks
from workload.problem import AttentionProblem

NATIVE = ("naive", "sdpa", "cudnn")  # not in an interpreter on a CPU
ENOUGH = {  # of flashmask's body under another mask policy, the quick cases that the policy shows in
    "fa3": ("small_documents",), "flex": ("small_empty_rows", "small_two_intervals")}


def run(name, problem, arrays):
    """The kernel's results, and the inputs as it saw them."""
    kernel = kernels.get(name)
    q, k, v, dout = (jnp.asarray(x, problem.dtype) for x in arrays)
    operands = kernel.prepare(problem)
    out, lse = jax.jit(kernel.forward, static_argnums=4)(q, k, v, operands, problem.scale)
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    got = {"out": out, "lse": lse}
    if kernel.backward is not None and "backward" in kernel.capability.passes:
        backward = jax.jit(kernel.backward, static_argnums=7)
        got |= zip(("dq", "dk", "dv"), backward(q, k, v, out, lse, dout, operands, problem.scale))
    rounded = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    return rounded, {label: np.asarray(x, np.float64) for label, x in got.items()}


@contextlib.contextmanager
def runnable(name):
    """The kernel, in the Mosaic GPU interpreter where this machine cannot run it otherwise."""
    kernel = kernels.get(name)
    with interpreted() if kernel.available() else contextlib.nullcontext():
        yield kernel


def cases():
    """(kernel, case) pairs; in an interpreter all but the quick ones are slow."""
    on_gpu = jax.default_backend() == "gpu"
    for name in kernels.NAMES:
        with runnable(name) as kernel:
            reason = kernel.available()
        if reason:
            yield pytest.param(name, None, id=f"{name}-unavailable", marks=pytest.mark.skip(f"{name} {reason}"))
            continue
        for case in conformance.CASES:
            quick = case.quick and case.name in ENOUGH.get(name, (case.name,))
            slow = not (on_gpu or name in NATIVE or quick)
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name,case", list(cases()))
def test_kernel(name, case):
    with runnable(name) as kernel:
        case = case.within(kernel.capability).widened(kernel.capability)
        reason = kernel.refuse(case.problem, conformance.passes_of(kernel.capability))
        if reason:
            pytest.skip(f"{name} {reason}")
        conformance.check(run, case, name)


def test_sizes_of_the_suite_hide_nothing():
    """I7, E6: named masks are not square, batch is above one, and no two sizes are the same number."""
    case = conformance.Case("sizes", None)
    sizes = (case.q_len, case.kv_len, case.batch, case.q_heads, case.kv_heads, case.head_dim)
    assert len(set(sizes)) == len(sizes) and case.batch > 1
    named = [c for c in conformance.CASES if c.name in masks.STATIC_MASKS]
    assert len(named) == 12 and all(c.q_len != c.kv_len and c.batch > 1 for c in named)


@pytest.mark.parametrize("toy", conformance.TOYS, ids=lambda t: t.case.name)
@pytest.mark.parametrize("name", [n for n in kernels.NAMES if n in NATIVE or jax.default_backend() == "gpu"])
def test_right_values(name, toy):
    kernel = kernels.get(name)
    toy = toy.within(kernel.capability)
    if reason := kernel.refuse(toy.case.problem, conformance.passes_of(kernel.capability)):
        pytest.skip(f"{name} {reason}")
    toy.check(run, name)


@pytest.mark.parametrize("name", ["naive", "sdpa"])
def test_rows_without_keys_leave_others_alone(name):
    conformance.check_rows_without_keys(run, name, kernels.get(name).capability)


LENGTH, HEADS, DIM = (262_144, 64, 128) if jax.default_backend() == "gpu" else (70, 3, 64)
DENSE = ("naive", "sdpa", "cudnn")  # they make, or may make, length x length cells


@pytest.mark.parametrize("name", [n for n in kernels.NAMES if (n in DENSE) == (LENGTH == 70)])
def test_offsets_beyond_32_bits(name):
    """F1, F3: 2^31 elements; each row sees itself alone, so out is v, dv is dout, and dq, dk are 0."""
    kernel = kernels.get(name)
    dtype = "bfloat16" if "bfloat16" in kernel.capability.dtypes else kernel.capability.dtypes[0]
    problem = AttentionProblem(masks.causal_sliding_window(LENGTH, LENGTH, 0), 1, HEADS, HEADS, DIM, dtype)
    if reason := kernel.refuse(problem, conformance.passes_of(kernel.capability)):
        pytest.skip(f"{name} {reason}")
    keys = jax.random.split(jax.random.key(0), 3)
    q, v, dout = (jax.random.normal(key, problem.q_shape, dtype) for key in keys)
    operands = kernel.prepare(problem)
    out, lse = jax.jit(kernel.forward, static_argnums=4)(q, q, v, operands, problem.scale)
    dq, dk, dv = jax.jit(kernel.backward, static_argnums=7)(q, q, v, out, lse, dout, operands, problem.scale)
    assert bool((out == v).all()) and bool((dv == dout).all())
    assert max(float(jnp.abs(g).max()) for g in (dq, dk)) < 0.05
