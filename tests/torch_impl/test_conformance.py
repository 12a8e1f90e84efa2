"""Every kernel of the PyTorch stack against the oracle; see tests/conformance.py."""

import pytest
import torch

from tests import conformance
from torch_impl import kernels
from workload import masks
from workload.problem import AttentionProblem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NATIVE = ("naive", "sdpa", "cudnn", "fa2", "fa3", "flex", "flex_sparse")  # not in an interpreter on a CPU

AVAILABLE = [n for n in kernels.NAMES if kernels.get(n).available() is None]


def run(name, problem, arrays):
    """The kernel's results, and the inputs as it saw them; fresh memory is poisoned with NaN."""
    kernel = kernels.get(name)
    q, k, v, dout = (torch.tensor(x, dtype=getattr(torch, problem.dtype), device=DEVICE) for x in arrays)
    operands = kernel.prepare(problem, q.device)
    with poisoned():
        out, lse = kernel.forward(q, k, v, operands, problem.scale)
        assert out.dtype == q.dtype and lse.dtype == torch.float32
        got = {"out": out, "lse": lse}
        if kernel.backward is not None and "backward" in kernel.capability.passes:
            grads = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)
            got |= zip(("dq", "dk", "dv"), grads)
    numpy = lambda x: x.detach().double().cpu().numpy()  # noqa: E731
    return [numpy(x) for x in (q, k, v, dout)], {label: numpy(x) for label, x in got.items()}


class poisoned:
    """Inside, torch.empty and its kin hand out NaN: whoever reads memory that nobody wrote shows it."""

    def __enter__(self):
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)


def cases():
    """(kernel, case) pairs; in an interpreter all but the quick ones are slow."""
    for name in kernels.NAMES:
        if reason := kernels.get(name).available():
            yield pytest.param(name, None, id=f"{name}-unavailable", marks=pytest.mark.skip(f"{name} {reason}"))
            continue
        for case in conformance.CASES:
            slow = not (DEVICE == "cuda" or name in NATIVE or case.quick)
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name,case", list(cases()))
def test_kernel(name, case):
    kernel = kernels.get(name)
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
@pytest.mark.parametrize("name", AVAILABLE)
def test_right_values(name, toy):
    kernel = kernels.get(name)
    toy = toy.within(kernel.capability)
    if reason := kernel.refuse(toy.case.problem, conformance.passes_of(kernel.capability)):
        pytest.skip(f"{name} {reason}")
    toy.check(run, name)


def test_fresh_memory_is_poisoned():
    """A13: what reads memory that nobody wrote shows it in every run, not in some."""
    with poisoned():
        assert torch.empty(7).isnan().all()


@pytest.mark.parametrize("name", ["naive", "sdpa"])
def test_rows_without_keys_leave_others_alone(name):
    conformance.check_rows_without_keys(run, name, kernels.get(name).capability)


LENGTH, HEADS, DIM = (262_144, 64, 128) if DEVICE == "cuda" else (70, 3, 64)
DENSE = ("naive", "sdpa", "cudnn")  # they make, or may make, length x length cells


@pytest.mark.parametrize("name", [n for n in AVAILABLE if (n in DENSE) == (LENGTH == 70)])
def test_offsets_beyond_32_bits(name):
    """F1, F3: 2^31 elements; each row sees itself alone, so out is v, dv is dout, and dq, dk are 0."""
    kernel = kernels.get(name)
    dtype = "bfloat16" if "bfloat16" in kernel.capability.dtypes else kernel.capability.dtypes[0]
    problem = AttentionProblem(masks.causal_sliding_window(LENGTH, LENGTH, 0), 1, HEADS, HEADS, DIM, dtype)
    if reason := kernel.refuse(problem, conformance.passes_of(kernel.capability)):
        pytest.skip(f"{name} {reason}")
    make = torch.Generator(DEVICE).manual_seed(0)
    q, v, dout = (
        torch.randn(problem.q_shape, dtype=getattr(torch, dtype), device=DEVICE, generator=make) for _ in range(3)
    )
    operands = kernel.prepare(problem, q.device)
    out, lse = kernel.forward(q, q, v, operands, problem.scale)
    dq, dk, dv = kernel.backward(q, q, v, out, lse, dout, operands, problem.scale)
    assert out.equal(v) and dv.equal(dout)
    assert max(float(g.abs().max()) for g in (dq, dk)) < 0.05
