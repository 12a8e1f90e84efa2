"""vsa, flashinfer and flex_sparse: what they say of themselves, and the lists that FlexAttention is handed."""

import numpy as np
import pytest
import torch

from torch_impl import kernels
from torch_impl.kernels import flashinfer, flex_sparse, vsa
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.errors import Unsupported
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds


def lists_of(counts, indices):
    """[heads][rows] sets of a FlexAttention list."""
    return [[set(row[:n].tolist()) for row, n in zip(rows, of, strict=True)]
            for rows, of in zip(indices[0].numpy(), counts[0].numpy(), strict=True)]


def test_flex_lists_are_the_masks_blocks():
    """Full and partial key blocks by query block and the other way round, repeated for every query head."""
    mask = uniform_block(150, 210, 2, 32, 0.5, causal=True, seed=3)
    operands = flex_sparse.prepare(AttentionProblem(mask, 1, 4, 2, 16, "float32"))
    bitmap = mask.block_bitmap().repeat(2, axis=0)
    full = np.zeros_like(bitmap)
    for head, n in np.ndindex(bitmap.shape[:2]):
        full[head, n, mask.indices[head // 2, n, : mask.full_counts[head // 2, n]]] = True
    full[:, :, 210 // 32] = False  # the last key block is short
    by_query, by_key = (operands.lists[at : at + 4] for at in (0, 4))
    for counts, indices, want in ((*by_query[:2], bitmap & ~full), (*by_query[2:], full),
                                  (*by_key[:2], (bitmap & ~full).swapaxes(1, 2)), (*by_key[2:], full.swapaxes(1, 2))):
        assert lists_of(counts, indices) == [[set(np.flatnonzero(row)) for row in head] for head in want]


def test_flex_lists_have_the_strides_that_the_operator_assumes():
    """It addresses full lists by the strides of partial ones: with unequal widths an H200 read other blocks."""
    operands = flex_sparse.prepare(AttentionProblem(uniform_block(300, 400, 1, 128, 0.5, seed=1), 1, 4, 2, 64))
    for at in (0, 4):
        assert operands.lists[at + 1].stride() == operands.lists[at + 3].stride()


def test_one_mask_for_all_heads_is_stored_once():
    """The operands of a mask that all heads share do not grow with the heads."""
    mask = uniform_block(300, 400, 1, 64, 0.5, seed=1)
    sizes = {heads: sum(x.nbytes for x in (*flex_sparse.prepare(AttentionProblem(mask, 1, heads, 2)).lists,))
             for heads in (2, 32)}
    assert sizes[2] == sizes[32]


def test_flex_backward_wants_blocks_of_128():
    refuse = kernels.get("flex_sparse").capability.refuse
    narrow, wide = (AttentionProblem(uniform_block(256, 256, 1, b, 0.5)) for b in (64, 256))
    assert refuse(narrow, ("forward",)) is None
    if torch.cuda.is_available():
        assert "backward at block size 64" in refuse(narrow) and refuse(wide) is None


CAUSAL = uniform_block(256, 256, 1, 64, 0.5, causal=True)
HOLE = from_bitmap([[[1, 0], [0, 0]]], *(uniform_bounds(128, 64)[None],) * 2, block=64, name="uniform_block")


@pytest.mark.parametrize("mask, heads, scale, reason", [
    (CAUSAL, (2, 2), None, "causal"), (HOLE, (2, 2), None, "see no key block"),
    (uniform_block(256, 256, 1, 128, 0.5), (2, 2), None, "block size 128"),
    (uniform_block(256, 256, 1, 64, 0.5), (4, 2), None, "kv_heads 2"),
    (uniform_block(256, 256, 1, 64, 0.5), (2, 2), 0.3, "scale 0.3"),
])
def test_vsa_names_its_limits(mask, heads, scale, reason):
    assert reason in vsa.KERNEL.capability.refuse(AttentionProblem(mask, 1, *heads, 128, "bfloat16", scale))
    assert vsa.KERNEL.capability.refuse(AttentionProblem(uniform_block(200, 256, 2, 64, 0.5), 1, 2, 2)) is None


@pytest.mark.parametrize("mask, heads, reason", [
    (CAUSAL, (2, 2), "causal"), (HOLE, (2, 2), "see no key block"),
    (variable_block(90, 90, 4, 20, 5, 0.5), (4, 2), "mask of 4 heads"),
])
def test_flashinfer_names_its_limits(mask, heads, reason):
    refuse = flashinfer.KERNEL.capability.refuse
    assert reason in refuse(AttentionProblem(mask, 1, *heads), ("forward",))
    good = AttentionProblem(variable_block(90, 80, 2, 20, 5, 0.5), 1, 4, 2)
    assert refuse(good, ("forward",)) is None and "backward" in refuse(good)


@pytest.mark.parametrize("name", ["vsa", "flashinfer"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run here")
def test_without_the_hardware_they_say_so(name):
    problem = AttentionProblem(uniform_block(256, 256, 1, 64, 0.5), 1, 2, 2)
    with pytest.raises(Unsupported, match="compute capability 9.0"):
        kernels.get(name).require(problem, ("forward",))


def test_arguments_that_vsa_cannot_honour():
    """The scale is compiled in and results have the operands' dtype: refused before anything is launched."""
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="scale 0.5"):
        vsa.forward(q, q, q, None, 0.5)
    with pytest.raises(Unsupported, match="grad_dtype"):
        vsa.backward(q, q, q, q, q, q, None, 0.125, grad_dtype=torch.float32)
