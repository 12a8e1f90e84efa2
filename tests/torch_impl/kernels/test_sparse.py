"""triton_vsa and fa2_sparse in PyTorch: what the conformance suite does not ask of them."""

import numpy as np
import pytest
import torch

from tests.conformance import inputs, relative_error
from torch_impl import kernels
from torch_impl.kernels.block_sparse import Launches, heads_together
from torch_impl.kernels.walks import Launch
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPARSE = ["triton_vsa", "fa2_sparse"]
SMALL = Launches(Launch(32, 16, 4, 1), Launch(16, 32, 4, 1), Launch(32, 32, 4, 1), 64)
RESULTS = ("out", "lse", "dq", "dk", "dv")


def run(name, problem, scale, q, k, v, dout, launches=None, **options):
    """The five results of a kernel on these arrays, and its operands."""
    kernel = kernels.get(name)
    kernel.require(problem)
    operands = kernel.prepare(problem, DEVICE, launches=launches)
    q, k, v, dout = (torch.tensor(x, dtype=getattr(torch, problem.dtype), device=DEVICE) for x in (q, k, v, dout))
    out, lse = kernel.forward(q, k, v, operands, scale)
    return dict(zip(RESULTS, (out, lse, *kernel.backward(q, k, v, out, lse, dout, operands, scale, **options)),
                    strict=True))


def checked(got, want, budget=2e-6):
    """Asserts every result against the oracle's."""
    for label, value in got.items():
        assert relative_error(value.double().cpu(), getattr(want, label)) < budget, label


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_masks_per_kv_head_and_per_query_head(name, heads):
    """One mask, one a kv head, one a query head; ragged, causal, rows before the first key; every result."""
    mask = uniform_block(140, 130, heads, 32, 0.5, causal=True, seed=heads)
    problem = AttentionProblem(mask, 2, 4, 2, 24, "float32", 0.3)
    arrays = inputs(problem, heads)
    want = attention_oracle(*arrays[:3], mask, 0.3, arrays[3])
    assert np.isneginf(want.lse).any()
    checked(run(name, problem, 0.3, *arrays, SMALL), want)
    assert heads_together(problem, 32, 64) == (1 if heads == 4 else 2)


@pytest.mark.parametrize("block, dtype, budget", [(16, "float32", 2e-6), (48, "float16", 3e-3)])
def test_small_and_odd_blocks(block, dtype, budget):
    """Any block from 16 on; a negative scale, unequal counts."""
    mask = uniform_block(70, 110, 1, block, top_p=0.6, selection="importance", seed=7)
    problem = AttentionProblem(mask, 2, 3, 1, 32, dtype, -0.4)
    arrays = [np.asarray(x, dtype).astype(np.float32) for x in inputs(problem)]
    checked(run("triton_vsa", problem, -0.4, *arrays), attention_oracle(*arrays[:3], mask, -0.4, arrays[3]), budget)


@pytest.mark.parametrize("name", SPARSE)
def test_one_key_block_for_all_and_none_for_some(name):
    """Every query block of head 0 picks key block 0, whose dv sums them all; head 1 picks nothing at all."""
    picks = np.zeros((2, 4, 3), bool)
    picks[0, :, 0] = True
    bounds = [np.repeat(uniform_bounds(n, 16)[None], 2, 0) for n in (60, 40)]
    mask = from_bitmap(picks, *bounds, block=16, name="uniform_block")
    problem = AttentionProblem(mask, 1, 2, 2, 16, "float32")
    q, k, v, dout = inputs(problem)
    got = run(name, problem, 0.0, q, k, v, np.ones_like(dout))
    got = {label: x.cpu().numpy() for label, x in got.items()}
    np.testing.assert_allclose(got["dv"][0, :16, 0], 60 / 16, rtol=1e-6)
    assert not got["dv"][0, 16:, 0].any() and not got["dv"][0, :, 1].any()
    assert not got["out"][0, :, 1].any() and np.isneginf(got["lse"][0, 1]).all()


def test_a_part_of_a_larger_problem():
    """Gradients of two halves of the keys, with the whole's out, lse and delta, in float32, sum to the whole's."""
    mask = uniform_block(64, 96, 1, 16, 0.6, causal=True, seed=9)
    problem = AttentionProblem(mask, 1, 2, 1, 16, "float32")
    arrays = inputs(problem)
    want = attention_oracle(*arrays[:3], mask, problem.scale, arrays[3])
    q, k, v, dout = (torch.tensor(x, device=DEVICE) for x in arrays)
    out, lse = (torch.tensor(x, dtype=torch.float32, device=DEVICE) for x in (want.out, want.lse))
    kernel, dq = kernels.get("triton_vsa"), 0
    delta = (out * dout).sum(-1).transpose(1, 2)
    for part in (slice(0, 48), slice(48, 96)):
        local = mask.restrict(np.arange(64), np.arange(96)[part])
        operands = kernel.prepare(AttentionProblem(local, 1, 2, 1, 16, "float32"), DEVICE)
        grads = kernel.backward(q, k[:, part], v[:, part], out, lse, dout, operands, problem.scale,
                                grad_dtype=torch.float32, delta=delta)
        dq = dq + grads[0]
        assert relative_error(grads[1].cpu(), want.dk[:, part]) < 2e-6
        assert relative_error(grads[2].cpu(), want.dv[:, part]) < 2e-6
    assert relative_error(dq.cpu(), want.dq) < 2e-6


def test_float32_results_of_half_precision_operands():
    """out_dtype and grad_dtype widen what is stored, not what is computed."""
    mask = uniform_block(48, 80, 1, 16, 0.5, seed=2)
    problem = AttentionProblem(mask, 1, 2, 1, 16, "float16")
    kernel, operands = kernels.get("fa2_sparse"), kernels.get("fa2_sparse").prepare(problem, DEVICE)
    q, k, v, dout = (torch.tensor(x, dtype=torch.float16, device=DEVICE) for x in inputs(problem))
    wide, lse = kernel.forward(q, k, v, operands, problem.scale, out_dtype=torch.float32)
    narrow = kernel.forward(q, k, v, operands, problem.scale)[0]
    assert wide.dtype == torch.float32 and torch.equal(wide.half(), narrow)
    grads = kernel.backward(q, k, v, wide, lse, dout, operands, problem.scale, grad_dtype=torch.float32)
    assert {x.dtype for x in grads} == {torch.float32}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("rows, keys", [(0, 70), (50, 0), (0, 0)])
def test_a_shard_of_no_keys_or_no_queries(name, rows, keys):
    """Out is 0 and lse -inf, no key gets a gradient; no list has a tile to name."""
    mask = uniform_block(50, 70, 1, 32, 0.6, seed=3).restrict(np.arange(rows), np.arange(keys))
    problem = AttentionProblem(mask, 1, 2, 1, 16, "float32")
    got = run(name, problem, 0.25, *inputs(problem))
    assert (got.pop("lse") == -torch.inf).all() and not any(x.any() for x in got.values())


@pytest.mark.parametrize("name", SPARSE)
def test_refusals_name_the_block(name):
    """Blocks that no tile divides, variable ones and odd head dims are refused before anything is built."""
    refuse = kernels.get(name).capability.refuse
    assert "block size 40" in refuse(AttentionProblem(uniform_block(80, 80, 1, 40, 0.5)))
    assert "variable_block" in refuse(AttentionProblem(variable_block(80, 80, 1, 20, 8, 0.5)))
    assert refuse(AttentionProblem(uniform_block(80, 80, 1, 48, 0.5))) is None
    with pytest.raises(Unsupported, match="head_dim 20"):
        kernels.get(name).prepare(AttentionProblem(uniform_block(80, 80, 1, 16, 0.5), head_dim=20))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs programs one by one: no race can show")
@pytest.mark.parametrize("name", SPARSE)
def test_the_same_bits_every_time(name):
    """D11: a hundred backward passes right behind a long kernel that writes dout give the same bits."""
    problem = AttentionProblem(uniform_block(1000, 1100, 2, 64, 0.4, causal=True, seed=3), 2, 8, 2, 128)
    kernel, operands = kernels.get(name), kernels.get(name).prepare(problem, DEVICE)
    q, k, v, dout = (torch.tensor(x, dtype=torch.bfloat16, device=DEVICE) for x in inputs(problem))
    out, lse = kernel.forward(q, k, v, operands, problem.scale)
    first, noise = None, torch.randn(4096, 4096, device=DEVICE)
    for _ in range(100):
        late = dout * ((noise @ noise).sum() * 0 + 1).to(dout.dtype)
        grads = kernel.backward(q, k, v, out, lse, late, operands, problem.scale)
        first = first or grads
        assert all(torch.equal(a, b) for a, b in zip(first, grads, strict=True))
