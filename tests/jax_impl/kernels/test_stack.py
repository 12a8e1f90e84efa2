"""Operands of several ranks as one: a pad of zeros changes no result; what no single program serves is refused."""

import dataclasses
import doctest

import jax
import numpy as np
import pytest

from jax_impl import hlo
from jax_impl.kernels import hopper_sparse, naive
from jax_impl.kernels.stack import stack_operands
from workload import masks
from workload.block_masks import uniform_block, variable_block
from workload.errors import Unsupported
from workload.problem import AttentionProblem

STATIC = (masks.causal(9, 13), masks.global_sliding_window(9, 13, 2, 1), masks.causal_document(9, 13, [3, 10]))
DYNAMIC = tuple(variable_block(9, 13, 2, mean, 1, 0.5, seed=mean) for mean in (2, 4, 9))


@pytest.mark.parametrize("local", [STATIC, DYNAMIC], ids=["intervals", "blocks"])
def test_each_rank_gets_its_own_mask_back(local):
    operands = [naive.prepare(AttentionProblem(m, q_heads=2, kv_heads=2)) for m in local]
    shapes = {tuple(x.shape for x in jax.tree.leaves(o)) for o in operands}
    assert len(shapes) > 1  # there is something to pad
    stacked = stack_operands(operands)
    for rank, mask in enumerate(local):
        mine = jax.tree.map(lambda x, rank=rank: x[rank], stacked)
        seen = np.asarray(naive.dense_mask(mine, 13))
        for head in range(mask.heads):
            np.testing.assert_array_equal(seen[head], mask.dense_rows(0, 9, head))


def test_static_parts_that_differ_are_refused():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Operands:
        x: np.ndarray
        tile: int = dataclasses.field(metadata={"static": True})

    with pytest.raises(Unsupported, match="static parts"):
        stack_operands([Operands(np.ones(2), 64), Operands(np.ones(2), 128)])


def test_doctests_of_hlo():
    assert doctest.testmod(hlo).failed == 0


def test_asynchronous_collectives_count_once():
    text = """
  %p = bf16[4,8]{1,0} parameter(0)
  %s = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  %d = bf16[8,8]{1,0} all-gather-done(%s)
  %r = f32[2]{0} all-reduce(%q, %q2), to_apply=%add
  %q = f32[2]{0} constant({1, 2})
  %q2 = f32[3]{0} constant({1, 2, 3})
"""
    assert hlo.collective_bytes(text) == {"all_gather": 64, "all_reduce": 20}


def test_schedules_of_ones_own_are_the_ones_used():
    problem = AttentionProblem(uniform_block(128, 128, 1, 64, 0.5), 1, 1, 1, 64, "bfloat16")
    measured = hopper_sparse.default_schedules(64, False)
    other = dataclasses.replace(measured, forward=hopper_sparse.default_schedules(128, True).forward)
    assert hopper_sparse.prepare(problem).schedules == measured
    assert hopper_sparse.prepare(problem, schedules=other).schedules == other != measured
