"""What a warpgroup of the Hopper backward leaves out: queries that see none of its half of a tile of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.kernels import hopper_masks
from tests import conformance
from tests.jax_impl.interpret_patch import interpreted
from tests.jax_impl.kernels.test_hopper import BUDGET, DTYPE, arrays
from workload import masks
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem


def cut_halves(q_len=200, kv_len=300):
    """Edges within halves of 64 keys, halves that see one query of a tile and none, empty rows, ragged ends."""
    row = np.arange(q_len)
    starts = np.select([row < 70, row < 129, row < 140], [10, 64, 0], 250)
    ends = np.select([row < 1, row < 63, row < 70, row < 129, row < 140], [65, 64, 0, 191, 0], 300)
    late = np.where(row == 199, 129, 0)
    return masks.from_intervals([starts, late - (late > 0)], [np.maximum(starts, ends), late], kv_len)


def gradients_are_right(mask, changed):
    """Asserts those of two query heads, of thread blocks of their own, where nobody sees what is changed of v."""
    problem = AttentionProblem(mask, 1, 2, 2, 128, DTYPE)
    q, k, v, dout = arrays(problem)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = attention_oracle(*wide[:3], mask, problem.scale, wide[3])
    kernel, out, lse = kernels.get("flashmask"), jnp.asarray(want.out, DTYPE), jnp.asarray(want.lse, jnp.float32)
    operands = kernel.prepare(problem)
    with interpreted(detect_races=True):
        grads = kernel.backward(q, k, changed(v), out, lse, dout, operands, problem.scale)
        grads = jax.block_until_ready(grads)
    for got, expected in zip(grads, (want.dq, want.dk, want.dv), strict=True):
        assert conformance.relative_error(np.asarray(got, np.float64), expected) < BUDGET


@pytest.mark.parametrize("mask", [
    cut_halves(), masks.causal_document(250, 250, [65, 1, 62, 100, 22]), masks.causal(100, 180), masks.causal(250, 100),
    masks.shared_question(400, 400, [[150, 70, 80], [60, 40]]),
], ids=lambda mask: f"{mask.name}-{mask.q_len}-{mask.kv_len}")
def test_halves_of_a_tile_of_keys_see_something_at_the_first_and_last_steps_of_their_spans(mask):
    by_key = mask.transpose()
    policy = hopper_masks.intervals(by_key, 128, 64, halves=True)
    seen = by_key.tile_runs(64, 64).classes() > 0
    seen, left_out = np.pad(seen, ((0, 2 * len(policy.order) - len(seen)), (0, 0))), 0
    for tile in range(len(policy.order)):
        walk = policy.walk(policy.operands(), None, tile)
        columns = [int(walk.column(n)) for n in range(int(walk.total))]
        for half in range(2):
            steps = np.flatnonzero(seen[2 * tile + half, columns[: int(walk.partial)]])
            assert [int(n) for n in walk.span(half)] == ([steps[0], steps[-1] + 1] if len(steps) else [0, 0])
            assert seen[2 * tile + half, columns[int(walk.partial) :]].all()
            left_out += int(walk.partial) - (steps[-1] + 1 - steps[0] if len(steps) else 0)
    assert left_out


@pytest.mark.parametrize("mask", [cut_halves(), *(pytest.param(mask, marks=pytest.mark.slow) for mask in (
    masks.causal_sliding_window(320, 320, 192), masks.causal_document(250, 250, [65, 1, 62, 100, 22]),
    masks.shared_question(400, 400, [[150, 70, 80], [60, 40]])))])
def test_warpgroups_leave_out_what_their_keys_do_not_see(mask):
    gradients_are_right(mask, lambda v: v)


def test_values_of_a_half_that_nobody_sees_are_not_read():
    """Their product with dout would be no number, and so would dq."""
    mask = masks.from_intervals([np.zeros(70, int)], [np.full(70, 64)], 128)
    gradients_are_right(mask, lambda v: v.at[:, 64:].set(jnp.nan))
