"""What a mask of 96K tokens costs on the host before a kernel runs; twin in tests/torch_impl."""

import tracemalloc

import jax
import pytest

from jax_impl import kernels
from workload.problem import AttentionProblem
from workload.suite import mask_suite

TOKENS, TILE = 98_304, 128
BYTES = 64  # of a tile of the mask


@pytest.mark.parametrize("mask", ["causal_document", "global_sliding_window"])
@pytest.mark.parametrize("name", ["fa1", "fa2", "flashmask", "flex"])
def test_operands_of_a_long_mask_stay_below_a_table_of_its_tiles(name, mask):
    """L1: a mask of 96K tokens was evaluated cell by cell, and memory ran out."""
    problem = AttentionProblem(mask_suite(mask, TOKENS), 1, 8, 2)
    tracemalloc.start()
    operands = kernels.get(name).prepare(problem)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = sum(x.nbytes for x in jax.tree.leaves(operands))
    assert 0 < peak + held < BYTES * (TOKENS // TILE) ** 2
