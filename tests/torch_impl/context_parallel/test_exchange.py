"""What a head exchange hands to whom: tokens for heads, and back; ids are those of faults seen in public."""

import pytest
import torch

from tests.torch_impl.context_parallel.test_schemes import on_ranks
from torch_impl import context_parallel
from torch_impl.context_parallel import local
from torch_impl.context_parallel.ulysses import to_heads, to_tokens
from workload import masks
from workload.problem import AttentionProblem


def exchange(q_heads, kv_heads, world, tensor, x, batch):
    """x [batch, S, heads, d] through to_heads and back: by rank, (what it holds, what came back)."""
    problem = AttentionProblem(masks.full(x.shape[1], x.shape[1]), batch, q_heads, kv_heads, x.shape[3], "float32")

    def work(plan):
        mine = context_parallel.shard(x, plan, "q" if tensor == "q" else "kv")
        held = to_heads(plan.local, mine, tensor, plan.data)()
        back = to_tokens(plan.local, held, "out" if tensor == "q" else "dk", plan.data)()
        return held, mine, back

    return on_ranks("ulysses", world, {}, problem, work, "contiguous")


def test_exchange_holds_every_token_of_its_heads():
    """E5, E6, E14: all axes of distinct sizes; rank u holds all tokens of its heads exactly, round trip is identity."""
    batch, s, heads, d = 2, 6, 4, 8
    value = 1000 * torch.arange(batch)[:, None, None] + 100 * torch.arange(s)[:, None] + torch.arange(heads)
    x = value[..., None].expand(batch, s, heads, d).float().contiguous()
    for u, (held, mine, back) in enumerate(exchange(heads, heads, 2, "q", x, batch)):
        assert torch.equal(held, x[:, :, 2 * u : 2 * u + 2]) and torch.equal(back, mine)


def test_degree_above_kv_heads():
    """E9: Hq = 8, Hk = 2 on four ranks: kv heads [0, 0, 1, 1], and the way back sums the two slots of each head."""
    x = torch.arange(2.0)[None, None, :, None].expand(1, 8, 2, 3).contiguous() + 1
    for u, (held, mine, back) in enumerate(exchange(8, 2, 4, "k", x, 1)):
        assert held.shape[2] == 1 and (held == 1 + (u >= 2)).all()
        assert torch.equal(back, 2 * mine)


def test_two_layers_of_different_kv_heads_in_one_process():
    """E7: Hk 8 and 12 on four ranks: [2] * 4 and [3] * 4, in either order."""
    for kv_heads, each in ((8, 2), (12, 3), (8, 2)):
        x = torch.zeros(1, 4, kv_heads, 2)
        assert [held.shape[2] for held, _, _ in exchange(kv_heads, kv_heads, 4, "k", x, 1)] == [each] * 4


def test_ring_of_exchanged_groups_holds_zigzag_chunks():
    """J4: W = 8, U = 4, R = 2, S = 32: after the exchange ring place 0 holds tokens 0-7 and 24-31."""
    problem = AttentionProblem(masks.causal(32, 32), 1, 4, 4, 1, "float32")
    x = torch.arange(32.0)[None, :, None, None].expand(1, 32, 4, 1).contiguous()

    def work(plan):
        held = to_heads(plan.local, context_parallel.shard(x, plan), "q", plan.data)()
        return plan.local.mesh.ring_index, held[0, :, 0, 0].tolist()

    for place, tokens in on_ranks("usp", 8, {"ulysses": 4}, problem, work):
        assert tokens == ([*range(8), *range(24, 32)] if place == 0 else [*range(8, 24)])


@pytest.mark.parametrize("dtype,dim,whole", [
    (torch.bfloat16, 16, True), (torch.float32, 4, True), (torch.bfloat16, 12, False), (torch.float32, 1, False)])
def test_words_keep_every_bit(dtype, dim, whole):
    """Of any bits, NaN among them, also of a strided view; rows that are no whole words stay as they are."""
    bits = torch.randint(0, 256, (2, 3, 6, dim * dtype.itemsize), dtype=torch.uint8)
    x = bits.view(dtype)[:, :, ::2]
    moved = local.words(x).permute(2, 0, 1, 3).contiguous().view(dtype)
    assert (local.words(x).dtype == torch.complex128) == whole
    assert torch.equal(moved.view(torch.uint8), x.permute(2, 0, 1, 3).contiguous().view(torch.uint8))
