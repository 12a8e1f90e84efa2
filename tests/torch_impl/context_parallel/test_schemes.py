"""Faults that broke others, pinned on every scheme. Toy set-up: q = 0, so an out row is the mean of its visible V."""

import dataclasses
import functools
import math
import threading
import weakref

import numpy as np
import pytest
import torch

from parity.compare import relative_error
from tests import conformance
from tests.schemes import GROUPED, UNGROUPED, Case
from tests.torch_impl.context_parallel import cases
from tests.torch_impl.context_parallel.threads import ThreadCommunicator, ThreadRanks
from torch_impl import context_parallel
from torch_impl.context_parallel import local, ring
from workload import masks
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem
from workload.sharding import Sharding
from workload.topology import make_topology

SCHEMES = (("ulysses", {}), ("ring", {}), ("all_gather", {}), ("usp", {"ulysses": 2}), ("loongtrain", {"ulysses": 2}))
every_scheme = pytest.mark.parametrize("scheme,grid", SCHEMES, ids=[s for s, _ in SCHEMES])


def on_ranks(scheme, world, grid, problem, work, sharding="zigzag", **plan):
    """work(plan) on each rank; the results by rank."""
    ranks, topology = ThreadRanks(world, timeout_s=30), make_topology(scheme, world, **grid)

    def rank_work(rank):
        mesh = context_parallel.make_mesh(topology, ranks, rank)
        return work(context_parallel.make_plan(problem, scheme=scheme, mesh=mesh, sharding=sharding, **plan))

    return ranks.run(rank_work)


def whole(scheme, world, grid, mask, q, k, v, dout=None, scale=1.0, sharding="zigzag"):
    """out, lse, dq, dk, dv in token order, from whole operands; gradients of out . dout."""
    dtype = str(q.dtype).removeprefix("torch.")
    problem = AttentionProblem(mask, q.shape[0], q.shape[2], k.shape[2], q.shape[3], dtype, scale)

    def work(plan):
        x = [context_parallel.shard(a, plan, s).requires_grad_() for a, s in ((q, "q"), (k, "kv"), (v, "kv"))]
        out, lse = context_parallel.attend(*x, plan)
        out.backward(context_parallel.shard(torch.ones_like(q) if dout is None else dout, plan))
        grads = [context_parallel.unshard(a.grad, plan, s) for a, s in zip(x, ("q", "kv", "kv"))]
        lse = context_parallel.unshard(lse.transpose(1, 2), plan).transpose(1, 2)
        return context_parallel.unshard(out.detach(), plan), lse, *grads

    return on_ranks(scheme, world, grid, problem, work, sharding, with_lse=True)[0]


def toy(mask, scheme, grid, world=4, heads=4, **kw):
    q = torch.zeros(1, mask.q_len, heads, 1)
    v = torch.arange(float(mask.kv_len))[None, :, None, None].expand(1, -1, heads, 1).contiguous()
    return whole(scheme, world, grid, mask, q, torch.zeros_like(v), v, **kw)


@every_scheme
def test_one_document_over_three_ranks_with_neighbours_of_one_token(scheme, grid):
    """H10."""
    lengths = [1, 13, 1, 1]
    out, lse, *_ = toy(masks.full_document(16, 16, lengths), scheme, grid)
    at = np.repeat([0, 7, 14, 15], lengths)
    assert torch.allclose(out[0, :, 0, 0], torch.tensor(at, dtype=torch.float32))
    assert torch.allclose(lse[0, 0].exp(), torch.tensor(np.repeat(lengths, lengths), dtype=torch.float32))


@every_scheme
def test_window_is_honoured(scheme, grid):
    """I5, I11: S = 16, W = 4, one key to the left: row 15 sees 14 and 15."""
    out, *_ = toy(masks.causal_sliding_window(16, 16, 1), scheme, grid)
    assert out[0, 15, 0, 0] == 14.5 and out[0, 0, 0, 0] == 0


@every_scheme
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("tokens", [17, 1])
def test_full_mask_under_every_sharding(scheme, grid, sharding, tokens):
    """E15: balance must not assume causality; E1's kind: one token for four ranks. Rows are the mean of all keys."""
    out, lse, dq, dk, dv = toy(masks.full(tokens, tokens), scheme, grid, sharding=sharding)
    assert torch.allclose(out, torch.full_like(out, (tokens - 1) / 2))
    assert torch.allclose(lse, torch.full_like(lse, math.log(tokens)))
    assert torch.allclose(dv, torch.ones_like(dv))


@every_scheme
@pytest.mark.parametrize("reverse", [False, True])
def test_maximum_that_grows_or_falls_at_each_step(scheme, grid, reverse):
    """D6: logits ramp along the keys, so that every merge meets a new maximum, or never one."""
    s = 19
    mask = masks.full(s, s)
    ramp = torch.arange(float(s))
    ramp = ramp.flip(0) if reverse else ramp
    k = ramp[None, :, None, None].expand(1, s, 4, 1).contiguous()
    v, q = torch.randn(1, s, 4, 1, generator=torch.Generator().manual_seed(0)), torch.ones(1, s, 4, 1)
    out, lse, *_ = whole(scheme, 4, grid, mask, q, k, v)
    weight = torch.softmax(ramp.double(), 0)
    want = torch.einsum("j,bjhd->bhd", weight, v.double())[:, None].expand(1, s, 4, 1)
    assert torch.allclose(out.double(), want, atol=1e-6)
    assert torch.allclose(lse.double(), torch.logsumexp(ramp.double(), 0).expand(1, 4, s))


@every_scheme
def test_tail_that_no_document_owns(scheme, grid):
    """D4: one document of 698 in 704 tokens, four ranks: the tail's results are zero, twice bit-identical."""
    s, used = 704, 698
    start = np.where(np.arange(s) < used, 0, s)[None]
    mask = masks.from_intervals(start, np.minimum(np.arange(s) + 1, used)[None], s)
    g = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, s, 4, 2, generator=g) for _ in range(4))
    first, second = (whole(scheme, 4, grid, mask, q, k, v, dout) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    out, lse, *grads = first
    assert all((x[:, used:] == 0).all() for x in (out, *grads)) and torch.isneginf(lse[:, :, used:]).all()
    assert all(x[:, :used].abs().sum() > 0 for x in (out, *grads))


@every_scheme
def test_scale_is_honoured(scheme, grid):
    """B6: scale 0.5, logits before it [0, 2 ln 3], V = [0, 1]: 3 / 4."""
    k = torch.tensor([0.0, 2 * math.log(3)])[None, :, None, None].expand(1, 2, 4, 1).contiguous()
    v = torch.tensor([0.0, 1.0])[None, :, None, None].expand(1, 2, 4, 1).contiguous()
    out, *_ = whole(scheme, 4, grid, masks.full(2, 2), torch.ones(1, 2, 4, 1), k, v, scale=0.5)
    assert torch.allclose(out, torch.full_like(out, 0.75))


@every_scheme
def test_strided_operands(scheme, grid):
    """G2: views of a packed tensor, and a strided cotangent, give what their copies give."""
    s = 18
    packed = torch.randn(2, s, 3, 4, 2, generator=torch.Generator().manual_seed(2))
    problem = AttentionProblem(masks.causal(s, s), 2, 4, 4, 2, "float32")

    def work(plan):
        def run(copy):
            local = context_parallel.shard(packed, plan)
            q, k, v = (x.contiguous() if copy else x for x in local.unbind(2))
            x = [a.detach().requires_grad_() for a in (q, k, v)]
            out = context_parallel.attend(*x, plan)
            weight = torch.arange(4.0)[:, None].expand(4, 2)
            (out * (weight.contiguous() if copy else weight)).sum().backward()
            return out.detach(), *(a.grad for a in x)
        return run(True), run(False)

    for copied, viewed in on_ranks(scheme, 4, grid, problem, work):
        assert all(torch.equal(a, b) for a, b in zip(copied, viewed))


@every_scheme
def test_error_does_not_grow_with_the_world(scheme, grid):
    """C1: bf16 operands, error of dk and dv to the oracle at W = 8 is at most 1.5 times that at W = 1."""
    def error(world):
        here = {} if world == 1 else grid
        case = Case(scheme, "causal", world, 64, 64, (8, 8), tuple(here.items()), dtype="bfloat16", head_dim=16)
        return cases.errors(case, cases.run_threads(case)[0])
    one = error(1)
    for world in (2, 4, 8):
        got = error(world)
        for name in ("out", "dq", "dk", "dv"):
            assert got[name] <= 1.5 * one[name], (name, world)


def test_windows_of_any_size_lose_the_same():
    """C6: eight places as 1x8, 2x4, 4x2, 8x1: equal error within 5 %, and the two extremes are the flat ring itself."""
    base = Case("ring", "causal_document", 8, 61, 61, dtype="bfloat16", head_dim=16)
    flat = cases.run_threads(base)
    want = cases.errors(base, flat[0])
    for window in (1, 2, 4, 8):
        case = dataclasses.replace(base, scheme="loongtrain", grid=(("ulysses", 1), ("window", window)))
        got = cases.run_threads(case)
        if window in (1, 8):
            assert all(np.array_equal(a[n], b[n]) for a, b in zip(flat, got) for n in a)
        for name, error in cases.errors(case, got[0]).items():
            assert error == pytest.approx(want[name], rel=0.05)


def test_window_is_a_parameter_of_the_plan():
    """The mesh is a grid; the plan cuts its rings into windows."""
    problem = AttentionProblem(masks.full(16, 16), 1, 4, 4, 2, "float32")
    got = on_ranks("loongtrain", 4, {"ulysses": 1, "window": 4}, problem, lambda p: p.local.mesh.topology.window,
                   window=2)
    assert got == [2] * 4
    with pytest.raises(RuntimeError, match="window 3 does not divide ring 4"):
        on_ranks("loongtrain", 4, {"ulysses": 1}, problem, lambda p: None, window=3)


def test_loss_is_a_mean_over_tokens():
    """J2: token counts [3, 1], losses [1, 5]: 2, not 3; summed over the ranks the gradient is one quarter a token."""
    problem = AttentionProblem(masks.full(4, 4), 1, 1, 1, 1, "float32")
    uneven = Sharding((np.arange(3), np.arange(3, 4)), 4)

    def work(plan):
        values = torch.full((1, 3), [1.0, 5.0][plan.local.mesh.rank]).requires_grad_()
        loss = context_parallel.token_mean(values, plan)
        loss.backward()
        return loss.item(), values.grad[0].tolist()

    got = on_ranks("ring", 2, {}, problem, work, (uneven, uneven))
    assert [loss for loss, _ in got] == [2.0, 2.0]
    assert [grad for _, grad in got] == [[0.25, 0.25, 0.25], [0.25, 0, 0]]


def test_positions_and_shards_of_each_sharding():
    """J3: unshard(shard(x)) = x; positions say where a rank's tokens stand, -1 for padding."""
    problem = AttentionProblem(masks.causal(21, 21), 1, 2, 2, 1, "float32")
    x = torch.arange(21.0)[None, :, None]

    def work(plan):
        mine, at = context_parallel.shard(x, plan), context_parallel.positions(plan)
        assert torch.equal(mine[0, :, 0], at.clamp(min=0).float())
        assert torch.equal(context_parallel.unshard(mine, plan), x)
        return at[at >= 0].tolist()

    for sharding in ("contiguous", "zigzag", "striped", "balanced"):
        held = on_ranks("ring", 4, {}, problem, work, sharding)
        assert sorted(sum(held, [])) == list(range(21)) and all(h == sorted(h) for h in held)


def test_shards_of_no_tokens():
    def work(plan):
        x = torch.zeros(2, 0, 3)
        return context_parallel.unshard(context_parallel.shard(x, plan), plan).shape

    problem = AttentionProblem(masks.full(0, 3), 2, 2, 2, 1, "float32")
    assert on_ranks("ring", 2, {}, problem, work) == [(2, 0, 3)] * 2


@pytest.mark.parametrize("change,message", [
    ({"q": (1, 5, 4, 2)}, "q: shape"), ({"k": (1, 4, 3, 2)}, "k: shape"), ({"dtype": torch.float64}, "q: dtype"),
])
def test_operands_that_do_not_fit_the_plan(change, message):
    problem = AttentionProblem(masks.full(4, 4), 1, 4, 4, 2, "float32")
    x = [torch.zeros(change.get(n, (1, 4, 4, 2)), dtype=change.get("dtype", torch.float32)) for n in "qkv"]
    with pytest.raises(RuntimeError, match=message):
        on_ranks("ring", 1, {}, problem, lambda plan: context_parallel.attend(*x, plan))


@pytest.mark.parametrize("call,message", [
    (lambda x, plan: context_parallel.shard(x, plan), "x: 5 tokens"),
    (lambda x, plan: context_parallel.unshard(x, plan), "x: 5 tokens"),
    (lambda x, plan: context_parallel.shard(x[0, :, 0, 0], plan), "x: shape"),
    (lambda x, plan: context_parallel.shard(x.numpy(), plan), "x: numpy.ndarray is no torch.Tensor"),
    (lambda x, plan: context_parallel.attend(x.numpy(), x, x, plan), "q: numpy.ndarray is no torch.Tensor"),
    (lambda x, plan: context_parallel.positions(plan, "k"), "side: 'k'"),
    (lambda x, plan: context_parallel.make_plan(
        AttentionProblem(masks.full(4, 4)), scheme="ring", mesh=plan.local.mesh, sharding=None), "sharding: None"),
    (lambda x, plan: context_parallel.make_plan(plan, scheme="ring", mesh=None), "mesh: builtins.NoneType"),
    (lambda x, plan: context_parallel.make_plan(None, scheme="ring", mesh=plan.local.mesh), "problem: .*NoneType"),
    (lambda x, plan: context_parallel.plan_of(plan, plan.local.mesh, "naive"), "schedule: .*Plan is no .*Schedule"),
    (lambda x, plan: context_parallel.attend(x, x, x, None), "plan: builtins.NoneType is no .*Plan"),
    (lambda x, plan: context_parallel.shard(x, None), "plan: builtins.NoneType is no .*Plan"),
    (lambda x, plan: context_parallel.unshard(x, None), "plan: builtins.NoneType is no .*Plan"),
    (lambda x, plan: context_parallel.token_mean(x, plan.data), "plan: .*Data is no .*Plan"),
    (lambda x, plan: context_parallel.token_mean([1.0], plan), "values: builtins.list"),
    *((lambda x, plan, n=n: context_parallel.make_plan(
        AttentionProblem(masks.full(4, 4)), scheme="ring", mesh=plan.local.mesh, head_groups=n),
       f"head_groups: {n!r} is not an integer >= 1") for n in (0, "2", 1.5, None)),
])
def test_bad_arguments_beside_the_operands_are_named(call, message):
    problem = AttentionProblem(masks.full(4, 4), 1, 4, 4, 2, "float32")
    with pytest.raises(RuntimeError, match=message):
        on_ranks("ring", 1, {}, problem, lambda plan: call(torch.zeros(1, 5, 4, 2), plan))


def test_a_mesh_of_more_ranks_than_the_job_has():
    with pytest.raises(ValueError, match="ranks: 2 for 1 groups of world 4"):
        context_parallel.make_mesh(make_topology("ring", 4), ThreadRanks(2), 0)
    with pytest.raises(TypeError, match="topology: builtins.NoneType is no .*Topology"):
        context_parallel.make_mesh(None, ThreadRanks(2), 0)


def test_meshes_side_by_side_split_the_batch():
    """Data parallelism beside context parallelism: two groups of three ranks, each with a batch of its own."""
    problem = AttentionProblem(masks.causal_document(29, 29, [9, 20]), 1, 4, 2, 8, "float32")
    topology, ranks = make_topology("loongtrain", 4, ulysses=2, window=2), ThreadRanks(9, timeout_s=30)
    drawn = [torch.from_numpy(np.concatenate([x, 2 * x])) for x in conformance.inputs(problem)[:3]]
    want = [attention_oracle(*(x[n : n + 1].numpy() for x in drawn), problem.mask, problem.scale).out for n in range(2)]

    def work(rank):
        mesh = context_parallel.make_mesh(topology, ranks, rank, groups=2)
        if rank == 8:
            return mesh
        batch = slice(rank // 4, rank // 4 + 1)
        plan = context_parallel.make_plan(problem, scheme="loongtrain", mesh=mesh, sharding="zigzag", window=1)
        split = (context_parallel.shard(x[batch], plan, side) for x, side in zip(drawn, ("q", "kv", "kv"), strict=True))
        out = context_parallel.unshard(context_parallel.attend(*split, plan), plan)
        return relative_error(out.numpy(), want[mesh.group])

    *errors, beyond = ranks.run(work)
    assert beyond is None and max(errors) < 1e-6
    for groups, message in ((3, "ranks: 9 for 3 groups of world 4"), (0, "groups: 0 is not an integer >= 1")):
        with pytest.raises(ValueError, match=message):
            context_parallel.make_mesh(topology, ranks, 0, groups=groups)


def test_what_a_kernel_cannot_take_is_refused_before_anything_travels():
    """E11: a kernel that takes static masks only, on a dynamic one; the mesh has handed over nothing."""
    case = Case("ring", "uniform_block", 2)
    ranks = ThreadRanks(2, timeout_s=5)

    def work(rank):
        mesh = context_parallel.make_mesh(case.topology, ranks, rank)
        with pytest.raises(Unsupported, match="flashmask"):
            context_parallel.make_plan(case.problem, scheme="ring", mesh=mesh, kernel="flashmask")
        return mesh.bytes

    assert ranks.run(work) == [{}, {}]


def test_autocast_changes_nothing():
    case = Case("usp", "causal_document", 4, grid=(("ulysses", 2),))
    ranks, (*x, dout) = ThreadRanks(4, timeout_s=30), cases.arrays(case)

    def work(rank):
        mesh, found = context_parallel.make_mesh(case.topology, ranks, rank), []
        plan = context_parallel.make_plan(case.problem, scheme="usp", mesh=mesh, with_lse=True)
        for enabled in (False, True):
            q, k, v = (context_parallel.shard(a, plan).requires_grad_() for a in x)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                out, lse = context_parallel.attend(q, k, v, plan)
                out.backward(context_parallel.shard(dout, plan))
            found.append((out, lse, q.grad, k.grad, v.grad))
        return all(a.dtype == b.dtype and a.equal(b) for a, b in zip(*found, strict=True))

    assert all(ranks.run(work))


def test_a_compiled_program_calls_it_as_it_is():
    case = Case("ring", "causal_document", 1)
    mesh, mask = context_parallel.make_mesh(case.topology, ThreadRanks(1), 0), case.problem.mask
    x = cases.arrays(case)[:3]

    def step(q, k, v):
        return context_parallel.attention(2 * q, k, v, mask, scheme="ring", mesh=mesh) + 1

    assert torch.compile(step, backend="eager")(*x).equal(step(*x))


def test_gradients_are_not_differentiated_again():
    case = Case("ring", "causal_document", 1)
    mesh = context_parallel.make_mesh(case.topology, ThreadRanks(1), 0)
    q, k, v = cases.arrays(case)[:3]
    out = context_parallel.attention(q.requires_grad_(), k, v, case.problem.mask, scheme="ring", mesh=mesh)
    [dq] = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="attention: its gradients are not differentiated again"):
        (dq.square().sum() + q.sum()).backward()


def test_sharding_of_the_attention_call_and_of_a_plan_agree():
    """The one-call form is the plan's."""
    case = Case("usp", "prefix_lm_document", 4, grid=(("ulysses", 2),))
    ranks, (*x, _) = ThreadRanks(4, timeout_s=30), cases.arrays(case)

    def work(rank):
        mesh = context_parallel.make_mesh(case.topology, ranks, rank)
        plan = context_parallel.make_plan(case.problem, scheme="usp", mesh=mesh, sharding="zigzag")
        q, k, v = (context_parallel.shard(a, plan) for a in x)
        return torch.equal(
            context_parallel.attend(q, k, v, plan),
            context_parallel.attention(q, k, v, case.problem.mask, scheme="usp", mesh=mesh, sharding="zigzag"))

    assert all(ranks.run(work))


@pytest.mark.parametrize("scheme,grid,world,heads,plan", GROUPED)
@pytest.mark.parametrize("mask", ["causal_document", "global_sliding_window"])
def test_head_groups_give_the_same_for_the_same_bytes(scheme, grid, world, heads, plan, mask):
    """Some heads at a time: the results and (checked inside) the bytes are those of all heads at once."""
    dtype = plan.get("travel", "float32")
    case = Case(scheme, mask, world, 37, 50, heads, grid, "zigzag", tuple(plan.items()), dtype)
    grouped = dataclasses.replace(case, plan=tuple(({"head_groups": 2} | plan).items()))
    for got in cases.run_threads(grouped):
        assert dtype != "float32" or not cases.judge(grouped, got)
    whole = cases.run_threads(dataclasses.replace(case, plan=tuple((plan | {"head_groups": 1}).items())))[0]
    for name in got:
        np.testing.assert_allclose(got[name], whole[name], rtol=2e-5, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("scheme,mask,groups,why", UNGROUPED)
def test_head_groups_that_cannot_be(scheme, mask, groups, why):
    problem = Case(scheme, mask, 2).problem
    with pytest.raises(RuntimeError, match=f"head_groups {groups}: {why}"):
        on_ranks(scheme, 2, {}, problem, lambda plan: None, head_groups=groups)


@every_scheme
def test_training_step(scheme, grid):
    """A layer with rotary embeddings, a projection of q, k, v and of out, and a mean loss: sharded as whole.

    Rotary embeddings take the global positions of `positions`, the loss is `token_mean`, and the parameters' gradients,
    summed over the ranks, are those of one device.
    """
    s, heads, d, width = 21, 4, 8, 12
    g = torch.Generator().manual_seed(3)
    x, target = torch.randn(1, s, width, generator=g), torch.randn(1, s, width, generator=g)
    weights = [torch.randn(width, 3 * heads * d, generator=g) / 4, torch.randn(heads * d, width, generator=g) / 4]
    mask = masks.causal_document(s, s, [5, 0, 16])
    problem = AttentionProblem(mask, 1, heads, heads, d, "float32")

    def rotated(y, at):
        angle = at.clamp(min=0)[:, None, None] * 10.0 ** -torch.arange(d // 2)
        a, b = y.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def losses(x, target, at, attend, w_in, w_out):
        q, k, v = (x @ w_in).unflatten(-1, (3, heads, d)).unbind(2)
        out = attend(rotated(q, at), rotated(k, at), v).flatten(2)
        return ((out @ w_out - target) ** 2).mean(dim=-1)

    def work(plan):
        mine = [w.clone().requires_grad_() for w in weights]
        at = context_parallel.positions(plan)
        part = losses(context_parallel.shard(x, plan), context_parallel.shard(target, plan), at,
                      lambda q, k, v: context_parallel.attend(q, k, v, plan), *mine)
        loss = context_parallel.token_mean(part, plan)
        loss.backward()
        return loss.item(), [w.grad for w in mine]

    def dense(q, k, v):
        seen = torch.from_numpy(mask.dense())
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * d**-0.5
        return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)

    whole = [w.clone().requires_grad_() for w in weights]
    loss = losses(x, target, torch.arange(s), dense, *whole).mean()
    loss.backward()
    got = on_ranks(scheme, 4, grid, problem, work)
    assert [n for n, _ in got] == pytest.approx([loss.item()] * 4, rel=1e-5)
    for n, w in enumerate(whole):
        torch.testing.assert_close(sum(grads[n] for _, grads in got), w.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scheme,order", [
    ("all_gather", ["keys", "all_gather backward: dk", "all_gather backward: dv", "query"]),
    ("ulysses", ["query", "tokens for heads of dq", "keys", "tokens for heads of dk", "tokens for heads of dv"]),
    ("ring", ["query", "keys", "keys", "ring backward step 2: sums of dk, dv", "query"]),
])
def test_what_is_made_first_travels_while_the_rest_is_made(scheme, order, monkeypatch):
    """A kernel that makes dq and dk, dv apart: the larger part that goes home leaves before the other is made."""
    told, plain = [], local.running
    launch = ThreadCommunicator._launch

    def running(kernel):
        def parts(*arguments, delta):
            made = functools.cache(lambda: plain(kernel).backward(*arguments, delta=delta))
            return lambda: tell("query") or made()[0], lambda: tell("keys") or made()[1:]
        return dataclasses.replace(plain(kernel), parts=parts)

    def tell(word, rank=None):
        if rank == 0 or threading.current_thread().name == "rank 0":
            told.append(word)

    def launched(self, kind, step, *rest):
        tell(step, self.rank)
        return launch(self, kind, step, *rest)

    monkeypatch.setattr(local, "running", running)
    monkeypatch.setattr(ThreadCommunicator, "_launch", launched)
    out = whole(scheme, 2, {}, masks.full(16, 16), *torch.randn(3, 1, 16, 2, 4), sharding="contiguous")
    assert all(torch.isfinite(x).all() for x in out)
    assert [word for word in told if word in order] == order


@pytest.mark.parametrize("scheme,grid", [("ring", {}), ("loongtrain", {"ulysses": 1, "window": 2})])
def test_key_buffers_do_not_grow_with_the_ring(scheme, grid, monkeypatch):
    """A rank holds the block it computes against and those under way: on eight ranks as many as on four."""
    enter, held, most = ring._Walk.enter, {}, {}

    def watched(self, t):
        block = enter(self, t)
        arrived = held.setdefault(threading.current_thread().name, [])
        arrived += [weakref.ref(x) for x in block]
        alive = sum(x() is not None for x in arrived)
        most[len(self.steps)] = max(most.get(len(self.steps), 0), alive)
        return block

    monkeypatch.setattr(ring._Walk, "enter", watched)
    for world in (4, 8):
        held.clear()
        whole(scheme, world, grid, masks.full(32, 32), *torch.randn(3, 1, 32, 2, 4), sharding="contiguous")
        assert all(len(arrived) == 2 * 2 * world for arrived in held.values())  # k and v, both passes
    assert most[8] == most[4] < 2 * 8, most  # fewer than the k and v of eight ranks


def test_a_plan_takes_the_sharding_whose_steps_are_most_even():
    problem = AttentionProblem(masks.causal_document(2048, 2048, [1300, 148, 600]), 1, 2, 2, 8)
    found, striped = (on_ranks("ring", 4, {}, problem, context_parallel.positions, kind, granule=size)
                      for kind, size in (("best", 1), ("striped", 128)))
    assert [x.tolist() for x in found] == [x.tolist() for x in striped]
