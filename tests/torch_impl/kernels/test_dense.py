"""Our dense Triton kernels and sdpa beyond the conformance suite: parts of a problem, options, edges."""

import dataclasses
import types

import numpy as np
import pytest
import torch

from tests.conformance import relative_error, scattered
from tests.torch_impl.test_conformance import poisoned
from torch_impl import kernels
from torch_impl.attention import attention
from torch_impl.context_parallel.local import running
from torch_impl.kernels import flashmask
from torch_impl.kernels import triton_support as support
from torch_impl.kernels.flashmask import Launches
from torch_impl.kernels.walks import Launch, head_by_head, longest_load, ragged_runs
from workload import masks
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Launch(16, 32, 4, 1)  # several tiles at test sizes, and rows and columns that differ
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")


def problem_of(mask, dtype="float32", batch=2, q_heads=2, kv_heads=1, head_dim=16, scale=None):
    return AttentionProblem(mask, batch, q_heads, kv_heads, head_dim, dtype, scale)


def tensors(problem, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
    dtype = getattr(torch, problem.dtype)
    return [torch.randn(shape, generator=make).to(dtype).to(DEVICE) for shape in shapes]


def options(name, **others):
    """Small tiles for the Triton kernels."""
    if name == "flashmask":
        return {"launches": Launches(SMALL, SMALL, SMALL, **others)}
    return {"launch": SMALL} if name == "fa1" else {}


def ready(name, problem):
    kernel = kernels.get(name)
    reason = kernel.refuse(problem)
    if reason:
        pytest.skip(f"{name} {reason}")
    return kernel


def oracle(problem, q, k, v, dout):
    return attention_oracle(*(x.double().cpu().numpy() for x in (q, k, v)), problem.mask, problem.scale,
                            dout.double().cpu().numpy())


def close(got, want, budget):
    error = relative_error(got.double().cpu().numpy(), want)
    assert error <= budget, f"relative error {error:.3g} > {budget:.3g}"


def judge(problem, got, want, budget=2e-6):
    for result, name in zip(got, ("out", "lse", "dq", "dk", "dv"), strict=True):
        close(result, getattr(want, name), budget)


def run(kernel, problem, args, **prepare_options):
    q, k, v, dout = args
    operands = kernel.prepare(problem, q.device, **prepare_options)
    with poisoned():
        out, lse = kernel.forward(q, k, v, operands, problem.scale)
        return out, lse, *kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)


@pytest.mark.parametrize("name", ["flashmask", "fa1", "sdpa"])
def test_backward_of_a_part_takes_the_whole_problems_lse_and_delta(name):
    mask = masks.causal_document(45, 70, (21, 0, 49))
    whole = problem_of(mask)
    kernel = ready(name, whole)
    q, k, v, dout = tensors(whole)
    want = oracle(whole, q, k, v, dout)
    lse, out = (torch.as_tensor(x, dtype=torch.float32, device=DEVICE) for x in (want.lse, want.out))
    delta = (out * dout.float()).sum(-1).transpose(1, 2).contiguous()
    dq, parts = torch.zeros_like(q), []
    for begin, end in ((0, 33), (33, 70)):
        part = dataclasses.replace(whole, mask=mask.restrict(np.arange(45), np.arange(begin, end)))
        operands = kernel.prepare(part, q.device, **options(name))
        grads = kernel.backward(q, k[:, begin:end], v[:, begin:end], out, lse, dout, operands, whole.scale,
                                grad_dtype=torch.float32, delta=delta)
        dq += grads[0]
        parts.append(grads[1:])
    close(dq, want.dq, 2e-6)
    for n, gradient in enumerate((want.dk, want.dv)):
        close(torch.cat([p[n] for p in parts], dim=1), gradient, 2e-6)


@pytest.mark.parametrize("name", ["flashmask", "fa1"])
def test_keys_that_come_block_by_block_add_up(name):
    """A ring's steps: blocks that some rows, or whole row tiles, see nothing of; the same as all keys at once."""
    mask = masks.causal_document(45, 70, (21, 0, 49))
    whole = problem_of(mask)
    kernel = ready(name, whole)
    q, k, v, dout = tensors(whole)
    want, adding, part, total, sides = oracle(whole, q, k, v, dout), running(kernel), None, None, []
    blocks = [slice(47, 70), slice(0, 23), slice(23, 47)]
    parts = [dataclasses.replace(whole, mask=mask.restrict(np.arange(45), np.arange(70)[b])) for b in blocks]
    operands = [kernel.prepare(part, q.device, **options(name)) for part in parts]
    with poisoned():
        for block, made in zip(blocks[:2], operands[:2], strict=True):
            part = adding.forward(part, q, k[:, block], v[:, block], made, whole.scale)
        given = part[0].clone(), part[1]
        last = q, k[:, blocks[2]], v[:, blocks[2]], operands[2], whole.scale
        rounded, lse = adding.forward(given, *last, out_dtype=torch.float16)
        out, same = adding.result(adding.forward(part, *last), q)
        assert rounded.dtype == torch.float16 and torch.equal(lse, same)
        torch.testing.assert_close(rounded, out.half(), rtol=0, atol=2**-11)
        delta = (out * dout.float()).sum(-1).transpose(1, 2).contiguous()
        for n, (block, made) in enumerate(zip(blocks, operands, strict=True)):
            given = total, q, k[:, block], v[:, block], out, lse, dout, made, whole.scale
            if adding.parts is None or n == 0:
                total, *side = adding.backward(*given[:-1], scale=whole.scale, delta=delta)
            else:  # in either order
                query, keys = adding.parts(*given, delta=delta)
                side, total = (keys(), query()) if n == 1 else (query(), keys())[::-1]
            sides.append(side)
    dk, dv = (torch.cat([sides[n][x] for n in (1, 2, 0)], dim=1) for x in range(2))
    judge(whole, (out, lse, adding.gradient(total, q, whole.scale), dk, dv), want)


@pytest.mark.parametrize("name", ["flashmask", "fa1", "sdpa"])
def test_float32_results_of_half_inputs_are_not_rounded_to_half(name):
    problem = problem_of(masks.causal(27, 42), "float16", batch=1)
    kernel = ready(name, problem)
    q, k, v, dout = tensors(problem)
    operands = kernel.prepare(problem, q.device, **options(name))
    out, lse = kernel.forward(q, k, v, operands, problem.scale, out_dtype=torch.float32)
    grads = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale, grad_dtype=torch.float32)
    assert all(x.dtype == torch.float32 for x in (out, lse, *grads))
    assert not torch.equal(out, out.half().float())
    want = oracle(problem, q, k, v, dout)
    for got, expected in zip((out, *grads), (want.out, want.dq, want.dk, want.dv), strict=True):
        close(got, expected, 6e-4)


@pytest.mark.parametrize("name", ["flashmask", "fa1"])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scale_may_be_negative_or_zero(name, scale):
    problem = problem_of(masks.causal(23, 30), batch=1, scale=scale)
    kernel = ready(name, problem)
    args = tensors(problem)
    got = run(kernel, problem, args, **options(name))
    judge(problem, got, oracle(problem, *args))


def test_every_split_of_a_group_gives_the_same_gradients():
    problem = problem_of(masks.shared_question(27, 40, [[11, 3, 6], [13, 7]]), batch=1, q_heads=8, kv_heads=2)
    kernel = ready("flashmask", problem)
    args = tensors(problem)
    want = oracle(problem, *args)
    for splits in (2, 4):
        judge(problem, run(kernel, problem, args, **options("flashmask", key_splits=splits)), want)
    with pytest.raises(Unsupported, match="key_splits 3"):
        kernel.prepare(problem, DEVICE, **options("flashmask", key_splits=3))


def test_the_order_of_key_tiles_changes_no_bit():
    """All heads side by side, head after head, and the heaviest of them so: every tile of every head is there once."""
    problem = problem_of(masks.causal(90, 90), batch=2, q_heads=4, kv_heads=2, head_dim=16)
    kernel = ready("flashmask", problem)
    args = tensors(problem)
    operands = kernel.prepare(problem, DEVICE, **options("flashmask"))
    tiles = len(operands.key.loads)
    assert tiles > 2 and operands.key.loads.tolist() == sorted(operands.key.loads, reverse=True)
    q, k, v, dout = args
    out, lse = kernel.forward(q, k, v, operands, problem.scale)
    first, *others = (
        kernel.backward(
            q, k, v, out, lse, dout, kernel.prepare(problem, DEVICE, **options("flashmask", key_heavy=heavy)),
            problem.scale)
        for heavy in (0, 1, tiles - 1, tiles))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    judge(problem, (out, lse, *first), oracle(problem, *args))
    with pytest.raises(Unsupported, match=f"key_heavy {tiles + 1}"):
        kernel.prepare(problem, DEVICE, **options("flashmask", key_heavy=tiles + 1))


def test_heavy_tiles_go_head_after_head_where_what_follows_hides_their_end():
    """A list schedule of 264 programs ends as early as with all heads side by side, heaviest first."""
    def loads_of(mask):
        runs = ragged_runs(mask.transpose(), 64, 64)
        return -np.sort(-(runs.full_count + runs.partial_count))

    loads = loads_of(masks.full_sliding_window(8192, 8192, 1024))
    heavy = head_by_head(loads, 8, 264)
    assert len(loads) // 2 < heavy < len(loads)
    one_by_one, phases, side_by_side = (
        longest_load(np.concatenate([np.tile(loads[:n], 8), np.repeat(loads[n:], 8)]), 264)
        for n in (len(loads), heavy, 0))
    assert phases <= 1.01 * side_by_side < one_by_one
    assert head_by_head(loads_of(masks.shared_question(4096, 4096, [[512] + [128] * 28])), 8, 264) == 0


def test_a_kv_head_is_shared_where_one_list_outlasts_the_rest(monkeypatch):
    """A question that every answer sees, on a card of 132 processors; not where all lists are short or many."""
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    launch = Launch(64, 64, 4, 2)

    def splits(mask, **sizes):
        problem = problem_of(mask, "bfloat16", 1, head_dim=128, **sizes)
        return flashmask._key_splits(problem, mask.transpose(), launch, "cuda")

    question = masks.shared_question(4096, 4096, [[512] + [128] * 28])
    assert splits(question, q_heads=64, kv_heads=8) > 1
    assert splits(question, q_heads=8, kv_heads=8) == 1
    assert splits(masks.causal(8192, 8192), q_heads=64, kv_heads=8) == 1
    assert splits(masks.full(32768, 32768), q_heads=64, kv_heads=32) == 1


@pytest.mark.parametrize("name", ["flashmask", "fa1"])
def test_masks_of_many_intervals(name):
    problem = problem_of(scattered(37, 53, 4), batch=1)
    kernel = ready(name, problem)
    args = tensors(problem)
    judge(problem, run(kernel, problem, args, **options(name)), oracle(problem, *args))


@pytest.mark.parametrize("name", ["flashmask", "fa1", "sdpa", "naive"])
def test_no_keys_or_no_queries_give_empty_results(name):
    for q_len, kv_len in ((5, 0), (0, 6)):
        problem = problem_of(masks.full(q_len, kv_len))
        kernel = ready(name, problem)
        out, lse, *grads = run(kernel, problem, tensors(problem))
        assert not out.any() and (lse == -torch.inf).all() and not any(x.any() for x in grads)


def test_other_rows_do_not_feel_padding_rows():
    """A6: rows that see nothing leave every other row bit-identical."""
    mask = masks.causal(40, 40)
    hidden = masks.from_intervals(mask.starts, np.where(np.arange(40) % 3 == 0, 0, mask.ends), 40)
    problem, padded = problem_of(mask, batch=1), problem_of(hidden, batch=1)
    kernel = ready("flashmask", problem)
    args = tensors(problem)
    rows = np.arange(40) % 3 != 0
    one, other = (run(kernel, p, args, **options("flashmask")) for p in (problem, padded))
    assert torch.equal(one[0][:, rows], other[0][:, rows]) and torch.equal(one[1][:, :, rows], other[1][:, :, rows])
    assert not other[0][:, ~rows].any() and not other[2][:, ~rows].any()


@pytest.mark.parametrize("name", ["naive", "sdpa", "fa1", "flashmask"])
def test_strided_inputs_are_read_right(name):
    """G2's kind: every second number, or heads before components: torch's CPU operator read q as if it were whole."""
    problem = problem_of(masks.causal(23, 30), head_dim=24)
    kernel = ready(name, problem)
    args = tensors(problem)
    plain = run(kernel, problem, args, **options(name))
    for strided in ([torch.stack([x, x + 1], dim=-1)[..., 0] for x in args],
                    [x.transpose(1, 3).contiguous().transpose(1, 3) for x in args]):
        assert all(x.stride(-1) > 1 for x in strided)
        for got, want in zip(run(kernel, problem, strided, **options(name)), plain, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_gradients_flow_through_the_public_call():
    q, k, v, dout = tensors(problem_of(masks.causal(17, 20)))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if support.available():
        pytest.skip(support.available())
    out, lse = attention(*inputs, masks.causal(17, 20), kernel="flashmask", **options("flashmask"))
    grads = torch.autograd.grad(out, inputs, dout)
    want = oracle(problem_of(masks.causal(17, 20)), *(x.detach() for x in inputs), dout)
    assert not lse.requires_grad
    judge(None, (out.detach(), lse, *grads), want)


def test_head_dim_off_16_bytes_is_refused_by_name():
    with pytest.raises(Unsupported, match="head_dim 20"):
        kernels.get("flashmask").prepare(problem_of(masks.full(3, 4), "bfloat16", head_dim=20))


@ON_GPU
@pytest.mark.parametrize("name", ["flashmask", "flex"])
def test_offsets_past_31_bits(name):
    """F1: S * H * D = 2^31; rows that see only themselves return their own value."""
    length = 1 << 18
    problem = problem_of(masks.causal_sliding_window(length, length, 0), "bfloat16", 1, 64, 64, 128)
    kernel = ready(name, problem)
    q = torch.ones(problem.q_shape, dtype=torch.bfloat16, device=DEVICE)
    v = torch.randn(problem.kv_shape, dtype=torch.bfloat16, device=DEVICE)
    out, lse = kernel.forward(q, q, v, kernel.prepare(problem, q.device), problem.scale)
    assert torch.equal(out[:, -1], v[:, -1]) and torch.equal(out[:, 0], v[:, 0])
    close(lse[0, -1, -3:], np.full(3, 128**0.5), 1e-6)


@ON_GPU
def test_repeated_backward_is_bit_equal():
    """D11, D13: gradients are summed in one order, whatever the schedule."""
    problem = problem_of(masks.prefix_lm_causal(1000, 1100, 300), "bfloat16", 2, 8, 2, 128)
    kernel = ready("flashmask", problem)
    args = tensors(problem)
    first = run(kernel, problem, args)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(kernel, problem, args), strict=True))


@pytest.mark.parametrize("name", ["sdpa", "fa1", "flashmask"])
def test_backward_reads_out_in_any_layout(name):
    """G2's kind: an out stored head-major gives the gradients of a contiguous one, at a length that needs no padding.

    torch's memory-efficient backward reads out as [B, S, H, D] rows whatever its strides are: dq and dk were wrong on
    an H200 (relative error 1.3 at 1,024 tokens) while dv was right.
    """
    problem = problem_of(masks.causal(64, 80), q_heads=4)
    kernel = ready(name, problem)
    q, k, v, dout = tensors(problem)
    operands = kernel.prepare(problem, torch.device(DEVICE), **options(name))
    out, lse = kernel.forward(q, k, v, operands, problem.scale)
    want = oracle(problem, q, k, v, dout)
    other = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (out, dout))
    out, dout = other
    got = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)
    for mine, true in zip(got, (want.dq, want.dk, want.dv), strict=True):
        close(mine, true, 1e-5)
