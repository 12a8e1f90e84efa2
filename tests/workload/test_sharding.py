"""Shardings: every token held once, in order, for any length and world; what each kind balances."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workload import masks
from workload.errors import Unsupported
from workload.problem import AttentionProblem
from workload.schedule import make_schedule
from workload.sharding import KINDS, Sharding, make_sharding, shardings
from workload.topology import Topology, make_topology


def build(kind, total, topology, **options):
    return make_sharding(kind, total, topology, mask=masks.causal(total, total), **options)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 67), st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3), (8, 8)]),
       st.integers(1, 5), st.booleans())
def test_every_token_is_held_once_and_comes_back(kind, total, grid, granule, head_first):
    """J3, E4: unshard(shard(x)) = x, nothing dropped, whatever the remainder."""
    sharding = build(kind, total, Topology(*grid, head_first=head_first), granule=granule)
    x = np.arange(3 * total * 2).reshape(3, total, 2) + 1
    placed = sharding.shard(x)
    assert placed.shape == (3, grid[0] * sharding.length, 2)
    np.testing.assert_array_equal(sharding.unshard(placed), x)
    assert (placed[:, sharding.table.reshape(-1) < 0] == 0).all()
    assert sharding.lengths.sum() == total


def test_a_sequence_shorter_than_the_chunks_is_served():
    """E1: 6 tokens in 8 zigzag chunks; E4: 10 tokens on 4 ranks."""
    short = build("zigzag", 6, Topology(4))
    assert sorted(short.lengths.tolist()) == [1, 1, 2, 2] and short.length == 2
    assert build("contiguous", 10, Topology(4)).lengths.sum() == 10


def test_usp_zigzag_is_by_ring_index_over_the_exchanged_sequence():
    """J4: world 8, ulysses 4: after the exchange ring index 0 holds tokens 0-7 and 24-31."""
    topology = make_topology("usp", 8, ulysses=4)
    sharding = build("zigzag", 32, topology)
    schedule = make_schedule("usp", AttentionProblem(masks.causal(32, 32)), topology, sharding)
    assert schedule.q_groups[0].tolist() == [*range(8), *range(24, 32)]
    assert not schedule.signature.sorts_q
    assert sharding.positions[topology.rank(0, 1)].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind,low", [("contiguous", 0.5), ("zigzag", 1.0), ("striped", 0.99), ("balanced", 1.0)])
def test_total_balance_of_causal(kind, low):
    topology = make_topology("ring", 8)
    mask = masks.causal(4096, 4096)
    schedule = make_schedule("ring", AttentionProblem(mask), topology, *shardings(kind, mask, topology))
    assert schedule.total_balance >= low
    if kind == "contiguous":
        assert schedule.total_balance < 0.54
    if kind == "zigzag":
        assert schedule.step_balance == 1.0


def test_balanced_exceeds_the_mean_by_a_chunk_at_most():
    lengths = [700, 3, 1, 290, 0, 512, 542]
    mask = masks.causal_document(2048, 2048, lengths)
    topology = make_topology("ring", 4)
    sharding = make_sharding("balanced", 2048, topology, mask=mask, chunks=8)
    loads = np.array([mask.row_area[p].sum() for p in sharding.positions])
    largest = np.add.reduceat(mask.row_area, np.arange(0, 2048, 64)).max()
    assert loads.max() <= loads.mean() + largest
    assert set(sharding.lengths.tolist()) == {512}


def test_granules_stay_together():
    for kind in KINDS:
        for tokens in build(kind, 96, Topology(3), granule=8).positions:
            assert (np.diff(tokens.reshape(-1, 8), axis=1) == 1).all() and (tokens[::8] % 8 == 0).all()


def test_a_rectangular_mask_has_two_shardings_and_a_square_one_one():
    topology = make_topology("ring", 3)
    rows, keys = shardings("balanced", masks.causal(5, 11), topology)
    assert (rows.total, keys.total) == (5, 11)
    rows, keys = shardings("striped", masks.causal(7, 7), topology)
    assert rows is keys


@pytest.mark.parametrize("positions,total,word", [
    (([0, 1], [1, 2]), 3, "token 1 is held 2"), (([0], [2]), 3, "token 1 is held 0"), (([1, 0], [2]), 3, "ascend"),
    (([0.5], [1]), 2, "strictly ascending within 0..1"), (([[0], [1]],), 2, "ascending"), (([0],), 1.5, "total: 1.5"),
    (([0], [3]), 3, "within 0..2"),
])
def test_custom_positions_are_checked(positions, total, word):
    with pytest.raises(ValueError, match=word):
        Sharding(tuple(np.array(p) for p in positions), total)


@pytest.mark.parametrize("call,word", [
    (lambda: make_sharding("spiral", 8, Topology(2)), "sharding"),
    (lambda: make_sharding("balanced", 8, Topology(2)), "mask"),
    (lambda: make_sharding("balanced", 8, Topology(2), mask=masks.full(7, 8)), "rows"),
    (lambda: make_sharding("zigzag", 8, Topology(2), granule=0), "granule"),
    (lambda: make_sharding("zigzag", 8, Topology(2)).shard(np.zeros((1, 7))), "tokens"),
])
def test_bad_arguments_are_named(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize("call", [
    lambda: make_topology("usp", 8, ulysses=3), lambda: make_topology("loongtrain", 8, ulysses=2, window=3),
    lambda: make_topology("ring", 8, ulysses=2), lambda: make_topology("usp", 8, window=2),
    lambda: make_topology("ulysses", 8, ulysses=4),
])
def test_a_grid_that_does_not_fit_is_refused(call):
    with pytest.raises(Unsupported):
        call()
