"""What a mask of 96K tokens costs on the host before a kernel runs; twin in tests/jax_impl."""

import dataclasses
import tracemalloc

import pytest
import torch

from torch_impl import kernels
from workload.problem import AttentionProblem
from workload.suite import mask_suite

TOKENS, TILE = 98_304, 128
BYTES = 64  # of a tile of the mask


def held(x) -> int:
    """Bytes of all tensors in operands."""
    if isinstance(x, torch.Tensor):
        return x.nbytes
    if dataclasses.is_dataclass(x):
        return sum(held(getattr(x, field.name)) for field in dataclasses.fields(x))
    return sum(map(held, x)) if isinstance(x, tuple | list) else 0


@pytest.mark.parametrize("mask", ["causal_document", "global_sliding_window"])
@pytest.mark.parametrize("name", ["fa1", "flashmask", "flex"])
def test_operands_of_a_long_mask_stay_below_a_table_of_its_tiles(name, mask):
    """L1: a mask of 96K tokens was evaluated cell by cell, and memory ran out."""
    problem = AttentionProblem(mask_suite(mask, TOKENS), 1, 8, 2)
    kernel = kernels.get(name)
    kernel.prepare(problem, torch.device("cpu"))  # imports
    tracemalloc.start()
    operands = kernel.prepare(problem, torch.device("cpu"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held(operands) > 0 and peak + held(operands) < BYTES * (TOKENS // TILE) ** 2
