"""vsa, flashinfer, cudnn_sparse and flex_sparse: what they say of themselves, and what their packages are handed."""

import types

import numpy as np
import pytest
import torch

from tests.conformance import inputs
from torch_impl import kernels
from torch_impl.kernels import cudnn_sparse, flashinfer, flex_sparse, vsa
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.errors import Unsupported
from workload.oracle import attention_oracle
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
        rows = mask.dense(head // 2)[32 * n : 32 * (n + 1)]
        full[head, n, : 210 // 32] = rows[:, : 210 // 32 * 32].reshape(len(rows), -1, 32).all(axis=(0, 2))
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


@pytest.mark.parametrize("mask, heads, reason", [
    (CAUSAL, (2, 2), "causal"), (HOLE, (2, 2), "see no key block"), (uniform_block(256, 256, 1, 32, 0.5), (2, 2), "32"),
    (uniform_block(256, 256, 1, 64, 0.5), (4, 2), "backward of q_heads 4 with kv_heads 2"),
])
def test_cudnn_sparse_names_its_limits(mask, heads, reason):
    refuse = cudnn_sparse.KERNEL.capability.refuse
    assert reason in refuse(AttentionProblem(mask, 1, *heads))
    grouped = AttentionProblem(uniform_block(200, 256, 2, 128, 0.5), 1, 4, 2)
    assert refuse(grouped, ("forward",)) is None


class DenseBlockSparse:
    """Stands in for cuDNN's package: dense attention over the lists as documented, on BHSD tensors."""

    @staticmethod
    def block_sparse_attention_forward(q, k, v, q2k_block_index, q2k_block_nums, block_sizes, sparse_block_size,
                                       softmax_scale):
        listed = torch.arange(q2k_block_index.shape[3]) < q2k_block_nums[..., None]
        blocks = k.shape[2] // sparse_block_size
        picture = torch.zeros(*q2k_block_nums.shape, blocks + 1, dtype=torch.bool)
        picture.scatter_(3, torch.where(listed, q2k_block_index, blocks).long(), True)
        seen = picture[..., :-1].repeat_interleave(sparse_block_size, 2).repeat_interleave(sparse_block_size, 3)
        if block_sizes is not None:
            place = torch.arange(k.shape[2])
            seen &= place % sparse_block_size < block_sizes[place // sparse_block_size]
        logits = (q @ k.transpose(2, 3) * softmax_scale).masked_fill(~seen, -torch.inf)
        return {"o_tensor": logits.softmax(3) @ v, "lse_tensor": logits.logsumexp(3)}

    @classmethod
    def block_sparse_attention_backward(cls, dout, q, k, v, out, lse, **lists):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found = cls.block_sparse_attention_forward(*leaves, **lists)
        torch.testing.assert_close(found["o_tensor"].detach()[:, :, :100], out[:, :, :100])
        torch.testing.assert_close(found["lse_tensor"].detach()[:, :, :100], lse[:, :, :100])
        grads = torch.autograd.grad(found["o_tensor"], leaves, dout)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads, strict=True))


def agrees(kernel, problem):
    """Holds both passes of a package's kernel, with its stand-in, to the oracle."""
    q, k, v, dout = (torch.as_tensor(x, dtype=torch.float32) for x in inputs(problem))
    exact = [x.double().numpy() for x in (q, k, v, dout)]
    want = attention_oracle(*exact[:3], problem.mask, problem.scale, exact[3])
    operands = kernel.prepare(problem)
    out, lse = kernel.forward(q, k, v, operands, problem.scale)
    grads = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)
    for name, got in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True):
        np.testing.assert_allclose(got.numpy(), getattr(want, name), rtol=1e-4, atol=1e-5, err_msg=name)


def test_cudnn_sparse_hands_over_the_mask(monkeypatch):
    """Ragged both ways, two batch entries, a list per head: the oracle's results with a dense stand-in."""
    problem = AttentionProblem(uniform_block(100, 150, 2, 64, 0.5, seed=2), 2, 2, 2, 16, "float32")
    monkeypatch.setattr(cudnn_sparse, "package", lambda kernel, module: DenseBlockSparse)
    agrees(cudnn_sparse, problem)


class DenseVsa:
    """Stands in for FastVideo's module: as `DenseBlockSparse`, of one batch entry; it stores -sqrt(head_dim) * lse."""

    @staticmethod
    def _lists(q, indices, counts, sizes):
        if len(q) != 1:
            raise RuntimeError("Batch size dim will be removed in the future, please set batch to 1")
        return {"q2k_block_index": indices, "q2k_block_nums": counts, "block_sizes": sizes,
                "sparse_block_size": vsa.BLOCK, "softmax_scale": q.shape[3]**-0.5}

    @classmethod
    def block_sparse_attn_sm90(cls, q, k, v, *lists):
        found = DenseBlockSparse.block_sparse_attention_forward(q, k, v, **cls._lists(q, *lists))
        return found["o_tensor"], found["lse_tensor"][..., None] * -(q.shape[3]**0.5)

    @classmethod
    def block_sparse_attn_backward_sm90(cls, dout, q, k, v, out, stored, *lists):
        lse = stored[..., 0] * -(q.shape[3]**-0.5)
        grads = DenseBlockSparse.block_sparse_attention_backward(dout, q, k, v, out, lse, **cls._lists(q, *lists))
        return tuple(grads.values())


def test_vsa_hands_over_one_batch_entry_at_a_time(monkeypatch):
    """Ragged both ways, a list per head: the oracle's results with a dense stand-in that takes no more than one."""
    problem = AttentionProblem(uniform_block(100, 150, 2, 64, 0.5, seed=2), 2, 2, 2, 16, "float32")
    monkeypatch.setattr(vsa, "_module", lambda: DenseVsa)
    agrees(vsa, problem)


@pytest.mark.parametrize("name", ["vsa", "flashinfer", "cudnn_sparse"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run here")
def test_without_the_hardware_they_say_so(name):
    problem = AttentionProblem(uniform_block(256, 256, 1, 64, 0.5), 1, 2, 2)
    with pytest.raises(Unsupported, match="compute capability 9.0|CUDA GPU"):
        kernels.get(name).require(problem, ("forward",))


def test_flashinfer_compiles_ahead_what_its_wrapper_asks_for(monkeypatch):
    """The arguments of the package's module, as VariableBlockSparseAttentionWrapper.plan derives them for a problem."""
    asked = []
    stand_in = types.SimpleNamespace(get_batch_prefill_module=lambda *x: asked.append(x))
    monkeypatch.setattr(flashinfer, "package", lambda kernel, module: {"flashinfer.prefill": stand_in}[module])
    problem = AttentionProblem(uniform_block(256, 256, 1, 64, 0.5), 1, 2, 2, 128, "float16")
    kernels.get("flashinfer").compile_ahead(problem, torch.device("cpu"), ("forward",))
    half = torch.float16
    assert asked == [("fa3", half, half, half, torch.int32, 128, 128, 0, False, False, False)]


def test_backward_passes_that_a_capability_lacks_are_refused():
    """The public call asks for the forward pass alone: these passes refuse by themselves, before any launch."""
    q, k, lse = torch.zeros(1, 128, 2, 128), torch.zeros(1, 128, 1, 128), torch.zeros(1, 2, 128)
    narrow = AttentionProblem(uniform_block(128, 128, 1, 64, 0.5), 1, 2, 1)
    with pytest.raises(Unsupported, match="flex_sparse: does not take pass backward at block size 64"):
        kernels.get("flex_sparse").backward(q, k, k, q, lse, q, flex_sparse.prepare(narrow), 1.0)
    with pytest.raises(Unsupported, match="cudnn_sparse: does not take backward of q_heads 2 with kv_heads 1"):
        cudnn_sparse.backward(q, k, k, q, lse, q, cudnn_sparse.prepare(narrow), 1.0)


def test_arguments_that_vsa_cannot_honour():
    """The scale is compiled in and results have the operands' dtype: refused before anything is launched."""
    q = torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="scale 0.5"):
        vsa.forward(q, q, q, None, 0.5)
    with pytest.raises(Unsupported, match="grad_dtype"):
        vsa.backward(q, q, q, q, q, q, None, 0.125, grad_dtype=torch.float32)
