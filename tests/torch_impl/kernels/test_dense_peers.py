"""Borders of the third-party dense kernels: what they are handed, what they refuse, where they run."""

import functools
import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests import conformance
from torch_impl import kernels
from torch_impl.kernels import cudnn_flex, fa2, fa3, fa3_mask, flex, packages, walks
from torch_impl.kernels.fakes import compile_on_fakes
from workload import masks
from workload.block_masks import uniform_block
from workload.errors import Unsupported
from workload.problem import AttentionProblem
from workload.tiles import FULL, PARTIAL

LENGTHS = (61, 0, 1, 90, 51)
PEERS = ("cudnn", "cudnn_flex", "fa2", "fa3", "fa3_mask", "flex")
STATIC = {
    "full": (),
    "causal": (),
    "full_document": (LENGTHS,),
    "causal_document": (LENGTHS,),
    "full_sliding_window": (37,),
    "causal_sliding_window": (37,),
    "shared_question": ([(40, 31, 23), (50, 0, 59)],),
    "global_sliding_window": (70, 19),
    "causal_blockwise": (LENGTHS,),
    "prefix_lm_causal": (93,),
    "prefix_lm_document": (LENGTHS, (20, 0, 1, 90, 7)),
    "block_causal_document": (LENGTHS, 24),
}
SHAPES = ((147, 203), (210, 203))  # fewer queries than keys, and more: rows before the first key


def mask_of(name, q_len=147, kv_len=203):
    return masks.STATIC_MASKS[name](q_len, kv_len, *STATIC[name])


@pytest.mark.parametrize("name", PEERS)
def test_availability_is_a_reason_and_imports_no_package(name):
    reason = kernels.get(name).available()
    assert reason is None or (isinstance(reason, str) and reason)
    for package in ("flash_attn.cute", "cudnn.flex_attention"):
        assert packages.installed(package) is None or importlib.util.find_spec(package.split(".")[0]) is None


def test_a_missing_package_is_named():
    assert packages.installed("surely_no_such_package.part") == "surely_no_such_package.part is not installed"
    assert packages.installed("torch.no_such_part") == "torch.no_such_part is not installed"
    assert packages.installed("torch.nn") is None


@pytest.mark.parametrize("name", ["cudnn_flex", "fa3", "fa3_mask"])
def test_a_broken_package_is_a_refusal_that_names_both(name, tmp_path, monkeypatch):
    """On a card a library of the packages was missing: rows were errors, and each took a second to find out."""
    for module in ("cudnn/flex_attention/execution", "flash_attn/cute/interface"):
        folder = tmp_path / module.rpartition("/")[0]
        folder.mkdir(parents=True)
        for part in (folder, folder.parent):
            (part / "__init__.py").touch()
        (tmp_path / f"{module}.py").write_text("raise ImportError('libpart.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "_loaded", functools.cache(packages._loaded.__wrapped__))
    monkeypatch.setattr(packages, "installed", functools.cache(packages.installed.__wrapped__))
    monkeypatch.setattr(fa3, "installed", packages.installed)
    for held in [x for x in sys.modules if x.split(".")[0] in ("cudnn", "flash_attn")]:
        monkeypatch.delitem(sys.modules, held)
    kernel, q = kernels.get(name), torch.zeros(1, 4, 1, 64, dtype=torch.float16)
    operands = types.SimpleNamespace(plan=None, bounds=(q, q), key_blocks=None, query_blocks=None, causal=False,
                                     window=(None, None), cu_q=None, cu_kv=None, max_q=4, max_kv=4)
    for _ in range(2):
        with pytest.raises(Unsupported, match=f"{name}: .* does not load: libpart.so: cannot open"):
            kernel.forward(q, q, q, operands, 1.0)
    for held in [x for x in sys.modules if x.split(".")[0] in ("cudnn", "flash_attn")]:
        monkeypatch.delitem(sys.modules, held)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STATIC)
def test_interval_endpoints_describe_the_mask(name, shape):
    mask = mask_of(name, *shape)
    ends = cudnn_flex.endpoints(mask)
    keys = np.arange(mask.kv_len)
    seen = keys < ends[0][:, None]
    for low, high in zip(ends[1::2], ends[2::2], strict=True):
        seen |= (low[:, None] <= keys) & (keys < high[:, None])
    assert len(ends) % 2 == 1 and (np.diff(ends, axis=0) >= 0).all()
    assert np.array_equal(seen, mask.dense())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STATIC)
def test_block_lists_cover_the_mask(name, shape):
    mask = mask_of(name, *shape)
    for side, dense in ((mask, mask.dense()), (mask.transpose(), mask.dense().T)):
        counts, partial, full_counts, full = (x[0, 0].numpy() for x in flex.lists_of(side, "cpu"))
        for row in range(len(counts)):
            rows = dense[row * flex.BLOCK : (row + 1) * flex.BLOCK]
            for column in range(partial.shape[1]):
                block = rows[:, column * flex.BLOCK : (column + 1) * flex.BLOCK]
                whole = block.shape == (flex.BLOCK, flex.BLOCK) and block.all()
                assert (column in full[row, : full_counts[row]]) == whole
                assert (column in partial[row, : counts[row]]) == (block.any() and not whole)


def test_a_tile_past_the_last_row_is_partial():
    mask = masks.full(70, 64)
    classes = walks.ragged_runs(mask, 64, 64).classes()
    assert classes.tolist() == [[FULL], [PARTIAL]] and mask.tile_runs(64, 64).classes().tolist() == [[FULL], [FULL]]


def test_documents_of_every_batch_entry_follow_one_another():
    problem = AttentionProblem(masks.causal_document(5, 9, (3, 0, 6)), batch=2)
    operands = fa2.prepare(problem)
    assert operands.cu_q.tolist() == [0, 0, 0, 5, 5, 5, 10] and operands.cu_kv.tolist() == [0, 3, 3, 9, 12, 12, 18]
    assert (operands.max_q, operands.max_kv, operands.causal, operands.window) == (5, 6, True, (None, None))
    assert operands.cu_q.dtype == torch.int32


def test_the_longest_document_is_derived():
    """H3: a caller's promise of it lost the tail of the sequence."""
    operands = fa2.regular_operands(AttentionProblem(masks.full_document(13, 13, (4, 6, 3)), 2, 1, 1, 64), None)
    assert operands.max_q == operands.max_kv == 6
    assert operands.cu_q.tolist() == [0, 4, 10, 13, 17, 23, 26] == operands.cu_kv.tolist()


def test_offsets_and_lengths_are_one_fact():
    """D8: offsets of padded tokens were mixed with those of the documents. Padding is in no document of ours."""
    mask = masks.causal_document(8, 8, (3, 0, 5))
    assert mask.regular.cu_seqlens_q == (0, 3, 3, 8) and np.diff(mask.regular.cu_seqlens_q).tolist() == [3, 0, 5]
    padded = conformance.tail(12, 12, (3, 0, 5))
    assert padded.regular is None and padded.area == mask.area and not padded.dense()[8:].any()
    for name in ("fa2", "fa3"):
        assert "does not take mask" in kernels.get(name).capability.refuse(AttentionProblem(padded, 1, 1, 1, 64))


@pytest.mark.parametrize("mask, flash2, cute", [
    (masks.full(6, 9), (-1, -1), (False, None, None)), (masks.causal(6, 9), (-1, 0), (True, None, None)),
    (masks.full_sliding_window(6, 9, 3), (3, 3), (False, 3, 3)),
    (masks.causal_sliding_window(6, 9, 2), (2, 0), (False, 2, 0))], ids=["full", "causal", "window", "causal_window"])
def test_an_open_side_of_a_window_is_told_in_each_package_s_word(mask, flash2, cute):
    """D18: -1 given to a kernel that wants None hid all keys."""
    operands = fa2.regular_operands(AttentionProblem(mask))
    assert fa2._window(operands) == flash2 == tuple(fa3._interface_window(operands).values())
    told = fa3._cute_options(operands, 1.0)
    assert (told["causal"], told["window_size_left"], told["window_size_right"]) == cute


def test_rows_before_the_first_key_are_a_document_without_keys():
    operands = fa2.prepare(AttentionProblem(masks.full_document(9, 5, (3, 2)), batch=1))
    assert operands.cu_q.tolist() == [0, 4, 7, 9] and operands.cu_kv.tolist() == [0, 0, 3, 5]


def test_lse_comes_back_as_it_went():
    """B5: [B, H, S] against the packed [H, B * S], +inf in a kernel's empty row against our -inf."""
    for name in ("causal", "causal_document"):
        operands = fa2.prepare(AttentionProblem(mask_of(name), 2, 3, 1))
        lse = torch.randn(2, 3, 147)
        lse[1, 2, 5] = -torch.inf
        packed = fa2.fold_lse(lse, operands)
        assert packed.shape == ((2, 3, 147) if name == "causal" else (3, 294)) and (packed == torch.inf).sum() == 1
        assert torch.equal(fa2.unfold_lse(packed, 2, operands), lse)


@pytest.mark.parametrize("name", ("cudnn", "cudnn_flex", "fa2", "fa3", "fa3_mask"))
def test_a_scale_that_is_not_positive_is_refused(name):
    """They hide keys by -inf, and take a row's maximum, before they scale: -inf times -1 would show them all."""
    refuse = kernels.get(name).capability.refuse
    assert refuse(AttentionProblem(masks.causal(9, 9), 1, 1, 1, 64, scale=-0.5)) == "does not take scale -0.5"
    assert refuse(AttentionProblem(masks.causal(9, 9), 1, 1, 1, 64)) is None


@pytest.mark.parametrize("name", ("fa2", "fa3"))
def test_a_heterogeneous_mask_is_refused_by_name(name):
    problem = AttentionProblem(mask_of("prefix_lm_causal"), dtype="bfloat16")
    assert kernels.get(name).capability.refuse(problem) == "does not take mask prefix_lm_causal"
    with pytest.raises(Unsupported, match=f"{name}.*prefix_lm_causal"):
        kernels.get(name).prepare(problem)


def test_cudnn_refuses_what_torch_cannot_tell_it():
    kernel = kernels.get("cudnn")
    for mask, reason in ((masks.causal(4, 6), "causal with q_len 4"), (masks.full(1, 1), "q_len 1"),
                         (masks.causal_sliding_window(6, 6, 2), "mask causal_sliding_window")):
        problem = AttentionProblem(mask, head_dim=64)
        assert reason in kernel.capability.refuse(problem)
        with pytest.raises(Unsupported, match=reason):
            kernel.prepare(problem)
    assert kernel.prepare(AttentionProblem(masks.causal(6, 6), head_dim=64)).causal


@pytest.mark.parametrize("name", PEERS)
def test_a_dtype_of_results_it_cannot_give_is_refused_before_any_launch(name):
    kernel = kernels.get(name)
    q = torch.zeros(1, 4, 1, 64, dtype=torch.bfloat16)
    operands = flex.prepare(AttentionProblem(masks.full(4, 4))) if name == "flex" else None
    with pytest.raises(Unsupported, match=f"{name}.*out_dtype torch.float32"):
        kernel.forward(q, q, q, operands, 1.0, out_dtype=torch.float32)
    with pytest.raises(Unsupported, match=f"{name}.*grad_dtype torch.float32"):
        kernel.backward(q, q, q, q, None, q, operands, 1.0, grad_dtype=torch.float32)


def test_flexattention_has_no_backward_on_a_cpu():
    problem = AttentionProblem(masks.causal(5, 7), head_dim=16, dtype="float32")
    q, k = torch.zeros(problem.q_shape), torch.zeros(problem.kv_shape)
    kernel = kernels.get("flex")
    with pytest.raises(Unsupported, match="backward on a CPU"):
        kernel.backward(q, k, k, q, None, q, kernel.prepare(problem), 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_flex_compiles_once_for_each_shape_and_pass():
    """L3: another mask of the same signature compiles nothing anew."""
    kernel = kernels.get("flex")
    before = flex._compiled.cache_info().misses
    for lengths in ((100, 156), (31, 225)):
        problem = AttentionProblem(masks.causal_document(256, 256, lengths), 1, 2, 1, 64, "bfloat16")
        q = torch.randn(problem.q_shape, dtype=torch.bfloat16, device="cuda")
        k, v = (torch.randn(problem.kv_shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        operands = kernel.prepare(problem, q.device)
        out, lse = kernel.forward(q, k, v, operands, 0.1)
        kernel.backward(q, k, v, out, lse, q, operands, 0.1)
    assert flex._compiled.cache_info().misses == before + 2


@pytest.mark.parametrize("name, mask", [
    ("flex", masks.global_sliding_window(200, 300, 40, 20)), ("flex", masks.causal(128, 128)),
    ("flex_sparse", uniform_block(256, 384, 2, 128, 0.5, causal=True, seed=1))], ids=lambda x: getattr(x, "name", x))
def test_what_is_compiled_ahead_is_what_runs(name, mask, monkeypatch):
    """On tensors of a pretended GPU: both passes ask for no program that was not compiled before."""
    asked = []

    def compiled(run, scale, form, signature):
        asked.append((run, scale, form, signature))
        results = {flex._traced_forward: (0, 4), flex._traced_backward: (0, 1, 2)}[run]
        return lambda *tensors: [torch.empty_like(tensors[n] if n < 3 else tensors[0][..., 0]) for n in results]

    monkeypatch.setattr(flex, "_compiled", compiled)
    problem, kernel = AttentionProblem(mask, 2, 4, 2, 64, "bfloat16", 0.3), kernels.get(name)
    kernel.compile_ahead(problem, torch.device("cuda", 0))
    ahead, asked[:] = list(asked), []
    operands = kernel.prepare(problem)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v, dout = (torch.empty(s, dtype=torch.bfloat16, device="cuda:0") for s in (
            problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape))
        out, lse = kernel.forward(q, k, v, operands, problem.scale)
        kernel.backward(q, k, v, out, lse.float(), dout, operands, problem.scale)
    assert [x[3][:6] for x in asked] == [x[3][:6] for x in ahead] and asked == ahead


@pytest.mark.parametrize("passes", [("forward",), ("forward", "backward")])
def test_a_package_that_compiles_on_fakes_is_handed_nothing_else(passes):
    seen = []

    def prepare(problem, device):
        seen.append("prepare")
        return torch.as_tensor(problem.mask.starts, device=device)

    def forward(q, k, v, operands, scale):
        seen.append(("forward", q, k, v, operands))
        return torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)

    def backward(q, k, v, out, lse, dout, operands, scale):
        seen.append(("backward", q, k, v, out, lse, dout, operands))

    problem = AttentionProblem(masks.causal(24, 40), 2, 4, 2, 64, "bfloat16")
    compile_on_fakes(prepare, forward, backward)(problem, torch.device("cuda", 0), passes)
    calls = {name: tensors for name, *tensors in seen[1:]}
    assert tuple(calls) == passes and seen[0] == "prepare"
    assert all(isinstance(x, FakeTensor) and x.device == torch.device("cuda", 0) for x in sum(calls.values(), []))
    assert calls["forward"][0].shape == problem.q_shape and calls["forward"][2].shape == problem.kv_shape


def test_a_mask_mod_is_named_alike_whenever_it_is_made(monkeypatch):
    """The package's disk cache goes by that name; one interval a row is another program than two."""
    made = {name: types.ModuleType(name) for name in (
        "cutlass", "cutlass.cute", "flash_attn", "flash_attn.cute", "flash_attn.cute.utils")}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(made["cutlass"]).update(cute=made["cutlass.cute"], Int32=int)
    vars(made["cutlass.cute"]).update(jit=lambda function: function)
    names = []
    for intervals in (1, 1, 2):  # what it closes over is elsewhere each time, as in another process
        vars(made["flash_attn.cute.utils"]).update(scalar_to_ssa=lambda *x: x, ssa_to_scalar=lambda *x: x)
        names.append(fa3_mask._mask_mod.__wrapped__(intervals).__cute_hash__)
    assert names[0] == names[1] != names[2]
