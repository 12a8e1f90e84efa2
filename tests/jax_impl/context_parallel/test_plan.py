"""Plans on the host: plans of several masks made equal in shape."""

import jax
import numpy as np
import pytest

from jax_impl import context_parallel as cp
from jax_impl.context_parallel.plan import alike
from jax_impl.kernels import hopper_kernel
from workload.problem import AttentionProblem
from workload.schedule import make_schedule
from workload.sharding import shardings
from workload.suite import mask_suite
from workload.topology import make_topology


@pytest.fixture
def plan(monkeypatch):
    """name of a mask -> its plan on the host, one rank, with the Hopper kernels' operands."""
    monkeypatch.setattr(hopper_kernel, "missing_hardware", lambda: None)
    topology = make_topology("ulysses", 1)

    def make(name):
        mask = mask_suite(name, 640, documents=(100, 300, 40, 200))
        problem = AttentionProblem(mask, 1, 4, 2, 64, "bfloat16")
        schedule = make_schedule("ulysses", problem, topology, *shardings("zigzag", mask, topology))
        return cp.plan_of(schedule, cp.make_mesh(topology), "flashmask", on_host=True)

    return make


def shapes(plan):
    return [x.shape for x in jax.tree.leaves(plan)]


def test_plans_alike_are_equal_in_shape_and_hold_what_they_held(plan):
    plans = [plan(name) for name in ("causal", "causal_document", "full_document", "shared_question")]
    found = alike(plans)
    assert shapes(plans[0]) != shapes(plans[1])
    assert shapes(found[0]) == shapes(found[1]) == shapes(found[2]) != shapes(found[3])  # two intervals a row
    for before, after in zip(plans, found, strict=True):
        assert before.program == after.program
        for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert np.array_equal(x, y[..., : x.shape[-1]]) and not y[..., x.shape[-1] :].any()


def test_a_plan_may_ask_for_the_best_sharding():
    problem = AttentionProblem(mask_suite("causal_document", 256, documents=(100, 156)), 1, 2, 2, 8)
    mesh = cp.make_mesh(make_topology("ring", 1))
    found = cp.make_plan(problem, scheme="ring", mesh=mesh, sharding="best", on_host=True)
    assert found.data.q_positions.tolist() == list(range(256))
