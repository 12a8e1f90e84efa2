"""The public call of the PyTorch stack: gradients, refusals, strides; twin of tests/jax_impl/test_attention.py."""

import numpy as np
import pytest
import torch

from tests.conformance import check_refuses_no_problem, relative_error
from torch_impl import kernels
from torch_impl.attention import attention
from torch_impl.kernels import base, naive
from workload import masks
from workload.block_masks import variable_block
from workload.capability import Capability
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

MASKS = [masks.prefix_lm_document(11, 14, [5, 0, 9], [2, 0, 4]), variable_block(11, 14, 3, 3, 1, 0.5, causal=True)]


def operands(mask, heads=(6, 3), dim=5, seed=0):
    """q, k, v, dout in float32, two batches."""
    rng = np.random.default_rng(seed)
    lengths, counts = (mask.q_len, mask.kv_len, mask.kv_len, mask.q_len), (heads[0], heads[1], heads[1], heads[0])
    shapes = [(2, n, h, dim) for n, h in zip(lengths, counts)]
    return [torch.tensor(rng.standard_normal(shape).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_a_compiled_program_calls_it_as_it_is(mask):
    """What is prepared on the host, in NumPy, is none of the compiler's."""
    q, k, v, _ = operands(mask)
    out = torch.compile(lambda q, k, v: attention(2 * q, k, v, mask)[0] + 1, backend="eager")(q, k, v)
    assert out.equal(attention(2 * q, k, v, mask)[0] + 1)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_gradients_flow_through_out(mask):
    q, k, v, dout = operands(mask)
    want = attention_oracle(q, k, v, mask, 0.3, dout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, mask, scale=0.3)
    out.backward(dout)
    got = (out.detach(), lse, *(x.grad for x in leaves))
    for name, value in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        assert relative_error(value, getattr(want, name)) < 2e-6, name


def test_lse_is_a_constant_to_differentiation():
    q, k, v, _ = operands(MASKS[0])
    _, lse = attention(q.requires_grad_(), k, v, MASKS[0])
    assert not lse.requires_grad


@pytest.mark.parametrize("kernel", ["naive", "flex"])
def test_autocast_changes_nothing(kernel):
    """It once rounded lse, and flex's out, to bfloat16."""
    found = []
    for enabled in (False, True):
        q, k, v, dout = operands(MASKS[0])
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, lse = attention(q.requires_grad_(), k, v, MASKS[0], kernel=kernel)
            if kernel != "flex":  # no backward on a CPU
                out.backward(dout)
        found.append((out, lse, q.grad))
    for a, b in zip(*found, strict=True):
        assert a is b is None or a.dtype == b.dtype == torch.float32 and a.equal(b)


@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_lse_without_a_key_is_float32_whatever_the_default(kernel):
    torch.set_default_dtype(torch.float64)
    try:
        q, k, v, _ = operands(masks.full(11, 0))
        out, lse = attention(q, k, v, masks.full(11, 0), kernel=kernel)
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == lse.dtype == torch.float32 and lse.shape == (2, 6, 11) and lse.isneginf().all()


@pytest.mark.parametrize("power", [1, 2])
def test_gradients_are_not_differentiated_again(power):
    """Under a sum of out, whose gradient is a constant, dq was one as well, without a word."""
    q, k, v, dout = operands(MASKS[0])
    q.requires_grad_()
    [dq] = torch.autograd.grad((attention(q, k, v, MASKS[0])[0] ** power).sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="attention: its gradients are not differentiated again"):
        ((dq * dout).sum() + q.sum()).backward(retain_graph=True)
    with pytest.raises(Unsupported, match="attention: its gradients are not differentiated again"):
        torch.autograd.grad((dq * dout).sum(), q, allow_unused=True)


@pytest.mark.parametrize("kernel", ["naive", "sdpa"])
def test_strided_operands(kernel):
    """G2's kind: views of a packed projection, and a transposed layout, give what contiguous copies give."""
    mask = masks.causal_document(13, 13, [4, 9])
    packed = torch.randn(2, 13, 6, 3 * 8, generator=torch.Generator().manual_seed(1))
    q, k, v = packed.split(8, dim=-1)
    got = attention(q, k, v, mask, kernel=kernel)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    want = attention(*(x.contiguous() for x in (q, k, v)), mask, kernel=kernel)
    for views in (got, attention(*swapped, mask, kernel=kernel)):
        for a, b in zip(views, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_default_scale():
    """B7, B8: head_dim ** -0.5 of the head as the caller has it."""
    q, k, v, _ = operands(MASKS[0], dim=80)
    assert attention(q, k, v, MASKS[0])[0].equal(attention(q, k, v, MASKS[0], scale=80**-0.5)[0])


@pytest.mark.parametrize("kernel", ["naive", "sdpa", "fa1", "flashmask"])
def test_ramps_of_logits(kernel):
    """D6: the running maximum grows with every tile, or stands in the first; geometric sums give the right values."""
    for ramp in (np.arange(200.0, dtype=np.float32), np.arange(199.0, -1, -1, dtype=np.float32)):
        q, k = np.zeros((2, 3, 2, 16), np.float32), np.zeros((2, 200, 1, 16), np.float32)
        q[..., 0], k[..., 0] = 1, ramp[:, None]
        v = np.broadcast_to(ramp[:, None, None], k.shape).copy()
        tensors = (torch.tensor(x, device="cuda" if torch.cuda.is_available() else "cpu") for x in (q, k, v))
        out, lse = (x.cpu() for x in attention(*tensors, masks.full(3, 200), kernel=kernel, scale=0.25))
        np.testing.assert_allclose(out, np.full(q.shape, 199 - 1 / np.expm1(0.25)), 2e-5)
        np.testing.assert_allclose(lse, np.full((2, 2, 3), 49.75 - np.log(-np.expm1(-0.25))), 2e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda q, k, v: (q, k, v[:, :, :2]), r"v: shape \(2, 14, 2, 5\), the problem's is \(2, 14, 3, 5\)"),  # M16
        (lambda q, k, v: (q, k[:, :-1], v), "k: shape"),  # L6
        (lambda q, k, v: (q[:, :-1], k, v), "q: shape"),  # L6
        (lambda q, k, v: (q, k, v.bfloat16()), "v: torch.bfloat16 on cpu, q has torch.float32"),
        (lambda q, k, v: (q, k.to("meta"), v), "k: torch.float32 on meta, q has torch.float32 on cpu"),  # H6
        (lambda q, k, v: (q[0], k, v), "q: shape .* is not"),
        (lambda q, k, v: (q, k[0], v), r"k: shape \(14, 3, 5\) is not \[batch, seq, heads, head_dim\]"),
        (lambda q, k, v: (q, k[:, :, :2], v), "v: shape"),
        (lambda q, k, v: (q[:, :, :4], k, v), "kv_heads: 3 does not divide q_heads 4"),
    ],
)
def test_operands_that_disagree_are_refused_by_name(change, message):
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(ValueError, match=message):
        attention(*change(q, k, v), MASKS[0])


@pytest.mark.parametrize("place, name", list(enumerate(("q", "k", "v"))))
def test_operands_of_another_kind_are_refused_by_name(place, name):
    """G2's kind: NumPy arrays, lists and numbers are no tensors of this stack."""
    good = operands(MASKS[0])[:3]
    for other, said in ((np.asarray(good[place]), "numpy.ndarray"), ([1.0], "builtins.list"), (2.5, "builtins.float")):
        given = [*good[:place], other, *good[place + 1 :]]
        with pytest.raises(TypeError, match=rf"^{name}: {said} is no .*Tensor$"):
            attention(*given, MASKS[0])


@pytest.mark.parametrize("name", kernels.NAMES)
def test_what_is_no_problem_is_refused_by_name(name):
    check_refuses_no_problem(kernels.get(name))


@pytest.mark.parametrize("kernel", kernels.NAMES)
def test_a_misspelt_option_is_named(kernel):
    """G4's kind: no option is dropped, and the message says whose it is not."""
    with pytest.raises(TypeError, match=f"^torch kernel {kernel}: no option 'lanch'; it has "):
        kernels.get(kernel).require_options({"lanch": 1})
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(TypeError, match="^torch kernel naive: no option 'lanch'; it has none$"):
        attention(q, k, v, MASKS[0], lanch=1)


def test_a_shard_without_its_positions_is_an_error():
    """D7: a shard's mask is made of positions; the whole problem's is never read as if the shard began at 0."""
    mask = masks.causal(16, 16)
    problem = AttentionProblem(mask, 1, 2, 1, 8, "float32")
    q, k, v, _ = operands(mask)
    with pytest.raises(ValueError, match="q: shape"):
        attention(q[:, 8:], k, v, mask)
    with pytest.raises(TypeError, match="kv_positions"):
        mask.restrict(np.arange(8, 16))
    rows, keys = np.arange(8, 16), np.arange(4, 12)
    out, lse = attention(q[:, 8:], k[:, 4:12], v[:, 4:12], mask.restrict(rows, keys))
    seen = mask.dense()[np.ix_(rows, keys)]
    assert lse.shape == (q.shape[0], q.shape[2], 8) and problem.mask.restrict(rows, keys).area == int(seen.sum())
    np.testing.assert_allclose(np.exp(np.asarray(attention(q[:, 8:] * 0, k[:, 4:12], v[:, 4:12],
                                                           mask.restrict(rows, keys))[1])[0, 0]), seen.sum(1), 1e-5)


def test_other_kernels_are_refused_by_name():
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(ValueError, match="kernel: 'fastest' is none of naive"):
        attention(q, k, v, MASKS[0], kernel="fastest")


def test_refusal_names_kernel_and_argument():
    """E16: before any launch."""
    kernel = base.Kernel("narrow", Capability(("full",), head_dims=(64,)), naive.prepare, naive.forward)
    with pytest.raises(Unsupported, match="torch kernel narrow: does not take mask causal"):
        kernel.require(AttentionProblem(masks.causal(4, 5)))
    away = base.Kernel("away", Capability(("causal",)), naive.prepare, naive.forward, available=lambda: "needs a moon")
    with pytest.raises(Unsupported, match="torch kernel away: needs a moon"):
        away.require(AttentionProblem(masks.causal(4, 5)))


def test_a_kernel_without_backward_says_so(monkeypatch):
    forward_only = base.Kernel("half", Capability(("full",), passes=("forward",)), naive.prepare, naive.forward)
    monkeypatch.setattr("torch_impl.kernels.get", lambda name: forward_only)
    q, k, v, _ = operands(masks.full(3, 4))
    out, _ = attention(q.requires_grad_(), k, v, masks.full(3, 4), kernel="half")
    with pytest.raises(Unsupported, match="torch kernel half: has no backward pass"):
        out.sum().backward()
