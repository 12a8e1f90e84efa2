"""flex under a predicate and a score_mod of one's own; twin of those tests of tests/jax_impl/kernels/test_hopper.py."""

import functools

import numpy as np
import pytest
import torch

from tests.conformance import relative_error
from torch_impl import kernels
from torch_impl.attention import attention
from torch_impl.kernels import flex
from workload import masks
from workload.oracle import attention_oracle
from workload.predicate import Predicate
from workload.problem import AttentionProblem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET = 1e-5 if DEVICE == "cpu" else 2e-3  # products of float32 on a GPU are TF32
GROUP = np.arange(270) // 30
OWN = Predicate(
    mask_mod=lambda b, h, i, j, q_values, kv_values: (q_values[0] == kv_values[0]) | (j % 3 == i % 3),
    score_mod=lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0) - 0.01 * (h + 1) * (i - j).abs(),
    q_arrays=(GROUP[:160],),
    kv_arrays=(GROUP,),
)


def tensors(problem):
    generator = torch.Generator().manual_seed(5)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
    return [torch.randn(s, generator=generator).to(DEVICE) for s in shapes]


def backward(problem, q, k, v, out, lse, dout, operands):
    """The kernel's on a GPU; on a CPU what it compiles there, run eagerly."""
    if DEVICE == "cuda":
        return flex.backward(q, k, v, out, lse, dout, operands, problem.scale)
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v, out, dout)]
    with torch.no_grad():
        found = flex._traced_backward(problem.scale, operands.form, *heads_first[:4], lse / np.log(2), heads_first[4],
                                      *operands.bounds, *operands.lists)
    return [x.transpose(1, 2) for x in found]


def test_a_predicate_and_a_score_mod_of_ones_own_with_their_gradient():
    problem = AttentionProblem(masks.full(160, 270), 2, 4, 2, 64, "float32")
    q, k, v, dout = tensors(problem)
    out, lse = attention(q, k, v, problem.mask, kernel="flex", predicate=OWN)
    got = backward(problem, q, k, v, out, lse, dout, flex.prepare(problem, q.device, predicate=OWN))
    i, j = (torch.arange(n, device=DEVICE) for n in (160, 270))
    group = torch.as_tensor(GROUP, device=DEVICE)
    seen = (group[:160, None] == group) | (j % 3 == i[:, None] % 3)

    def dense(q, k, v):
        k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
        s = torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale
        heads = torch.arange(4, device=DEVICE)[:, None, None]
        s = OWN.score_mod(s, 0, heads, i[:, None], j).masked_fill(~seen, -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", s.softmax(dim=-1), v), s.logsumexp(dim=-1)

    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = dense(*wide)
    grads = torch.autograd.grad(want, wide, dout.double())
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *got), (want, want_lse, *grads), strict=True):
        assert relative_error(x.detach().cpu(), y.detach().cpu()) < BUDGET, name


def test_a_predicate_that_differs_by_batch_entry_and_head():
    """Head 0 of batch entry 0 sees the first block of keys alone: without `per_head` no head would visit another."""
    problem = AttentionProblem(masks.full(140, 300), 2, 2, 1, 64, "float32")
    predicate = Predicate(mask_mod=lambda b, h, i, j, *_: j < 30 + 160 * h + 50 * b)
    q, k, v, dout = tensors(problem)
    operands = flex.prepare(problem, q.device, predicate=predicate, per_head=True)
    out, lse = flex.forward(q, k, v, operands, problem.scale)
    for b in range(2):
        for h in range(2):
            one = [x[b : b + 1, :, h % x.shape[2], None].cpu().double().numpy() for x in (q, k, v, dout)]
            bound = np.full(140, 30 + 160 * h + 50 * b)
            want = attention_oracle(*one[:3], masks.from_intervals([0 * bound], [bound], 300), problem.scale, one[3])
            for x, y in ((out[b : b + 1, :, h, None], want.out), (lse[b : b + 1, h, None], want.lse)):
                assert relative_error(x.cpu(), y) < BUDGET, (b, h)


@pytest.mark.parametrize("mask", [masks.global_sliding_window(300, 420, 70, 19), masks.causal(256, 384)],
                         ids=lambda m: m.name)
def test_blocks_of_a_predicate_are_those_of_the_mask_that_it_says(mask):
    problem = AttentionProblem(mask, 1, 2, 1, 64, "float32")

    def seen(b, h, i, j, q_values, kv_values):
        inside = [(start <= j) & (j < end) for start, end in zip(q_values[0::2], q_values[1::2], strict=True)]
        return functools.reduce(torch.logical_or, inside)

    own = Predicate(seen, None, tuple(x for pair in zip(mask.starts, mask.ends, strict=True) for x in pair))
    want, got = flex.prepare(problem), kernels.get("flex").prepare(problem, predicate=own)
    for n in range(0, 8, 2):
        counts, listed = want.lists[n], torch.arange(want.lists[n + 1].shape[-1]) < want.lists[n][..., None]
        assert torch.equal(counts, got.lists[n]) and torch.equal(want.lists[n + 1][listed], got.lists[n + 1][listed])
