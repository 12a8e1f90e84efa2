"""Five schemes x fourteen masks x worlds on threads of one process; over gloo processes see test_processes.py."""

import dataclasses

import pytest
import torch

from tests import schemes
from tests.torch_impl.context_parallel import cases, test_schemes


@pytest.mark.parametrize("case", schemes.matrix()[::6], ids=lambda c: c.label)
def test_sampled(case):
    """D1, D2: each result and gradient on its own, under all masks."""
    for got in cases.run_threads(case):
        assert not cases.judge(case, got)


@pytest.mark.slow
@pytest.mark.parametrize("world", schemes.WORLDS)
def test_full(world):
    wrong = []
    for case in schemes.matrix((world,)):
        for got in cases.run_threads(case)[:1]:
            wrong += cases.judge(case, got)
    assert not wrong, "\n".join(wrong)


def test_shares_of_a_kv_head_are_summed_in_float32():
    """C1's kind: Ulysses beyond the kv heads; see `schemes.cancelling`."""
    problem, arrays = schemes.cancelling()
    q, k, v, dout = (torch.tensor(x, dtype=torch.bfloat16) for x in arrays)
    dv = test_schemes.whole("ulysses", 2, {}, problem.mask, q, k, v, dout)[-1]
    assert (dv == 2**-8).all()


@pytest.mark.parametrize("scheme,grid", [("ring", ()), ("all_gather", ()), ("usp", (("ulysses", 2),))])
def test_gradients_in_half_precision_in_flight(scheme, grid):
    """The option costs precision that its own budget shows: bf16 sums over four ranks, not more."""
    case = schemes.Case(scheme, "causal", 4, grid=grid, dtype="bfloat16")
    error = {travel: cases.errors(case, cases.run_threads(
        dataclasses.replace(case, plan=(("travel", travel),)))[0]) for travel in ("float32", "bfloat16")}
    for name in ("dk", "dv"):
        assert error["float32"][name] < error["bfloat16"][name] < 4 * error["float32"][name]
    assert error["float32"]["dq"] == error["bfloat16"]["dq"]
