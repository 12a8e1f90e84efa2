"""Schedules as values: areas, walks, hops, bytes, heads, against brute force and the formulas of the literature."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workload.strategies import pattern
from workload import masks
from workload.areas import area_matrix, keys_needed
from workload.block_masks import uniform_block, variable_block
from workload.local_masks import pad_mask, select_heads
from workload.problem import ITEM_BYTES, AttentionProblem
from workload.schedule import EMPTY, FULL, PARTIAL, make_schedule, schedule_under
from workload.sharding import KINDS, make_sharding, shardings
from workload.topology import SCHEMES, head_layout, make_topology

GRIDS = (
    ("ulysses", 3, {}), ("ring", 4, {}), ("all_gather", 3, {}), ("usp", 6, {"ulysses": 2}),
    ("usp", 6, {"ulysses": 3, "head_first": False}), ("loongtrain", 6, {"ulysses": 1, "window": 2}),
    ("loongtrain", 12, {"ulysses": 2, "window": 3}), ("all_gather", 4, {"ulysses": 2}),
)
DYNAMIC = (
    uniform_block(41, 53, 2, 4, 0.4, causal=True), variable_block(41, 53, 6, 5, 2, 0.4),
    variable_block(53, 53, 1, 5, 2, 0.5, causal=True), uniform_block(53, 41, 2, 7, 0.3, causal=True),
)


def make(scheme, problem, world, kind="zigzag", granule=1, **options):
    names = ("ulysses", "window", "head_first", "ranks_per_node")
    topology = make_topology(scheme, world, **{n: options.pop(n) for n in names if n in options})
    shards = shardings(kind, problem.mask, topology, granule=granule)
    return make_schedule(scheme, problem, topology, *shards, **options)


def problem_of(mask, **options):
    return AttentionProblem(mask, **({"batch": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 8} | options))


@settings(max_examples=40, deadline=None)
@given(pattern(), st.sampled_from(KINDS), st.integers(1, 3), st.integers(1, 4))
def test_areas_equal_those_of_the_local_masks(drawn, kind, ring, granule):
    name, q_len, kv_len, parameters = drawn
    _compare_areas(masks.STATIC_MASKS[name](q_len, kv_len, **parameters), kind, ring, granule)


@pytest.mark.parametrize("mask", DYNAMIC, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_areas_of_block_masks(mask, kind):
    _compare_areas(mask, kind, 3, 2)


def _compare_areas(mask, kind, ring, granule):
    rows, keys = (s.positions for s in shardings(kind, mask, make_topology("ring", ring), granule=granule))
    want = [[mask.restrict(r, k).area for k in keys] for r in rows]
    np.testing.assert_array_equal(area_matrix(mask, rows, keys), want)
    assert np.sum(want) == mask.area  # the pairs are disjoint and together everything
    for r, own in zip(rows, keys, strict=True):
        seen = np.zeros(mask.kv_len, bool)
        for h in range(mask.heads):
            seen |= mask.dense_rows(0, mask.q_len, h)[r].any(axis=0)
        seen[own] = False
        assert keys_needed(mask, r, own, range(mask.heads)) == seen.sum()


@pytest.mark.parametrize("scheme,world,grid", GRIDS)
def test_local_masks_tile_the_global_one(scheme, world, grid):
    """Every visible cell of every query head is computed exactly once; classes and cells are those of the masks."""
    for mask in (masks.global_sliding_window(41, 53, 3, 6), masks.causal_document(53, 53, [9, 0, 1, 40, 3]), *DYNAMIC):
        for kind in ("zigzag", "striped", "balanced"):
            schedule = make(scheme, problem_of(mask), world, kind, granule=2, **grid)
            heads, signature = schedule.signature.heads, schedule.signature
            done = np.zeros((6, mask.q_len, mask.kv_len), int)
            for t in range(len(signature.steps)):
                for rank in range(world):
                    ring_index, u = schedule.topology.place(rank)
                    local = schedule.local_problem(t, rank)
                    assert local.cells == schedule.cells[t, rank]
                    assert (local.q_len, local.kv_len) == (signature.q_rows, signature.kv_rows)
                    rows = schedule.q_groups[ring_index]
                    keys = schedule.keys(t, ring_index)
                    for n, h in enumerate(heads.q_slots[u * heads.q_local : (u + 1) * heads.q_local]):
                        dense = local.mask.dense_rows(0, local.q_len, n * local.mask.heads // heads.q_local)
                        assert not dense[len(rows) :].any() and not dense[:, len(keys) :].any()
                        if h >= 0:
                            done[h][np.ix_(rows, keys)] += dense[: len(rows), : len(keys)]
            for h in range(6):
                np.testing.assert_array_equal(done[h], mask.dense_rows(0, mask.q_len, h * mask.heads // 6))


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "balanced"])  # stripes see more than half here
def test_gathered_keys_hold_all_that_is_seen_and_are_as_many_on_every_rank(kind):
    """Documents: what no row of a rank sees is left out in whole tiles, but for what makes ranks' shapes equal."""
    mask = masks.causal_document(8192, 8192, [300, 700, 1500, 600, 2000, 92, 1000, 2000])
    schedule = make("all_gather", problem_of(mask), 16, kind, granule=128)
    rows, places = schedule.signature.gathered_rows, schedule.gathered_places
    assert rows == schedule.signature.kv_rows and rows in (1024, 2048, 4096)
    assert schedule.signature.sorts_gathered
    most = 0
    for r in range(16):
        keys, seen = schedule.keys(0, r), mask.restrict(schedule.q_groups[r], np.arange(8192))
        needed = np.flatnonzero(np.any([seen.dense_rows(n, n + 1)[0] for n in range(seen.q_len)], axis=0))
        assert len(keys) == rows and (np.diff(keys) > 0).all() and not np.setdiff1d(needed, keys).size
        np.testing.assert_array_equal(schedule.gathered_order(r), places[keys])
        most = max(most, 128 * len(np.unique(needed // 128)))
    assert most <= rows < 2 * most


@pytest.mark.parametrize("mask,options", [
    (masks.causal(96, 96), {}), (masks.full_document(96, 96, [6] * 16), {"skip": False}),
    (variable_block(96, 96, 6, 16, 2, 0.4), {}),
], ids=["all are seen", "one program for every mask", "dynamic"])
def test_where_all_gathered_keys_are_handed_on(mask, options):
    schedule = make("all_gather", problem_of(mask), 4, "contiguous", **options)
    assert schedule.signature.kv_rows == 96 and not schedule.signature.sorts_gathered
    assert schedule.keys(0, 3).tolist() == list(range(96))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens,granule", [(1, 1), (2, 3), (5, 1), (61, 64), (100, 32)])
def test_gathered_keys_that_are_taken_as_they_come_are_the_keys(kind, tokens, granule):
    """E1's kind: where the first ranks hold nothing, the first places are padding, which was read for keys."""
    for skip in (True, False):
        schedule = make("all_gather", problem_of(masks.causal(tokens, tokens)), 3, kind, granule, skip=skip)
        places = np.concatenate([np.pad(keys, (0, schedule.signature.kv_block - len(keys)), constant_values=-1)
                                 for keys in schedule.kv_groups])
        for r in range(3):
            rows = schedule.gathered_order(r) if schedule.signature.sorts_gathered else np.arange(tokens)
            np.testing.assert_array_equal(places[rows], schedule.keys(0, r))


def test_padding_keeps_the_normal_form():
    """An absent interval of a padded mask is (keys, keys), as of every other mask."""
    mask = masks.causal(3, 5).restrict([0, 1], [0, 4])
    padded = pad_mask(masks.global_sliding_window(4, 6, 1, 1), 6, 9)
    for x in (pad_mask(mask, 4, 7), padded):
        absent = x.ends <= x.starts
        assert absent.any() and (x.starts[absent] == x.kv_len).all() and (x.ends[absent] == x.kv_len).all()


def test_mask_classes():
    schedule = make("ring", problem_of(masks.causal(12, 12)), 3, "contiguous", skip=False)
    found = {schedule.mask_class(t, r) for t in range(3) for r in range(3)}
    assert found == {EMPTY, PARTIAL, FULL}
    assert [schedule.mask_class(0, r) for r in range(3)] == [PARTIAL] * 3


@pytest.mark.parametrize("windows,window", [(1, 6), (6, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_hops_bring_what_steps_name_and_sums_come_home(windows, window, seed):
    """Plays the walk with labelled blocks, forward and backward, under random needs."""
    ring = windows * window
    seen = np.random.default_rng(seed).random((ring, ring)) < (0.1, 0.3, 1.0, 0.05)[seed]
    mask = masks.from_intervals(*_rows_of(seen), ring)
    schedule = make("loongtrain", problem_of(mask, q_heads=2), ring, "contiguous", ulysses=1, window=window)
    topology, steps = schedule.topology, schedule.signature.steps

    def moved(blocks, hop):
        out = [None] * ring
        for a, b in topology.pairs(hop):
            out[b] = blocks[a]
        assert None not in out
        return out

    current = entry = list(range(ring))
    moving = carried = None
    owed = [set() for _ in range(ring)]
    for t, step in enumerate(steps):
        if step.hop is not None:
            current = moved(entry if step.hop.from_entry else current, step.hop)
        if t == 0 or step.enters:
            entry = current
        assert current == [int(schedule.source(t, r)) for r in range(ring)]
        if step.at_home:
            for r in range(ring):
                owed[r].add(r)
            continue
        if step.grad_hop is None:
            carried, moving = moving, [(b, set()) for b in current]
            last = next((s.carried_hop for s in steps[t:] if s.carried_hop is not None), None)
            carried = None if carried is None else moved(carried, last)
        else:
            moving = moved(moving, step.grad_hop)
        moving = [(b, parts | {r}) for r, (b, parts) in enumerate(moving)]
        assert [b for b, _ in moving] == current
        if step.carried_hop is not None:
            assert [b for b, _ in carried] == current
            moving = [(b, p | q) for (b, p), (_, q) in zip(moving, carried, strict=True)]
    if schedule.signature.home is not None:
        for r, (block, parts) in enumerate(moved(moving, schedule.signature.home)):
            assert block == r
            owed[r] |= parts
    visited = {(r, int(schedule.source(t, r))) for t in range(len(steps)) for r in range(ring)}
    assert all((r, s) in visited for r, s in zip(*np.nonzero(seen), strict=True))
    assert owed == [{r for r, s in visited if s == block} for block in range(ring)]


def _rows_of(seen):
    """Interval arrays of a dense picture, one interval a key."""
    n = seen.shape[1]
    starts = np.broadcast_to(np.arange(n)[:, None], (n, len(seen)))
    return starts, np.where(seen.T, starts + 1, starts)


def test_window_one_and_window_ring_walk_like_the_flat_ring():
    problem = problem_of(masks.causal_document(64, 64, [20, 30, 14]))
    flat = make("ring", problem, 8)
    for window in (1, 8):
        other = make("loongtrain", problem, 8, ulysses=1, window=window)
        shifts = [s.outer * window + s.inner for s in other.signature.steps]
        assert shifts == [s.inner for s in flat.signature.steps]
        for which in ("forward", "backward"):
            assert other.signature.operand_bytes(which) == flat.signature.operand_bytes(which)


def test_hops_nobody_needs_are_left_out_for_all():
    mask = masks.full_document(1024, 1024, [64] * 16)
    schedule = make("ring", problem_of(mask), 8, "contiguous")
    assert len(schedule.signature.steps) == 1 and schedule.rotations_left_out == 7
    assert schedule.signature.wire_bytes("forward") == 0 and schedule.redundancy() == 1.0
    kept = make("ring", problem_of(mask), 8, "contiguous", skip=False)
    assert len(kept.signature.steps) == 8 and kept.idle_deliveries == 1.0
    window = make("ring", problem_of(masks.causal_sliding_window(1024, 1024, 128)), 8, "contiguous")
    assert [s.inner for s in window.signature.steps] == [0, 1]


@pytest.mark.parametrize("q_heads,kv_heads,degree,kv_slots,padding", [
    (8, 2, 4, (0, 0, 1, 1), 0), (8, 8, 4, tuple(range(8)), 0), (12, 12, 4, tuple(range(12)), 0),
    (6, 3, 2, (0, 0, 1, 1, 2, 2), 0), (3, 1, 2, (0, 0), 1), (5, 5, 3, (0, 1, 2, 3, 4, -1), 1),
])
def test_head_layouts(q_heads, kv_heads, degree, kv_slots, padding):
    """E9, E7: rank to kv head; heads that do not divide are padded and counted."""
    layout = head_layout(q_heads, kv_heads, degree)
    assert layout.kv_slots == kv_slots and layout.padding == padding
    assert sorted(h for h in layout.q_slots if h >= 0) == list(range(q_heads))
    for n, h in enumerate(layout.q_slots):
        if h >= 0:
            assert layout.kv_slots[n // layout.group] == h // (q_heads // kv_heads)
    for h, place in enumerate(layout.q_places):
        assert layout.q_slots[place] == h


@pytest.mark.parametrize("q_heads,kv_heads,ulysses,window", [(16, 8, 4, 2), (16, 2, 4, 1), (16, 16, 2, 4)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_wire_bytes_equal_the_formulas(scheme, q_heads, kv_heads, ulysses, window):
    """The formulas of each scheme's paper for full masks, rho = kv copies, gradients of summed copies in float32."""
    world, tokens, item, d, batch = 8, 256, 2, 16, 2
    degree = {"ulysses": 8, "ring": 1, "all_gather": 1}.get(scheme, ulysses)
    ring = world // degree
    problem = problem_of(masks.full(tokens, tokens), q_heads=q_heads, kv_heads=kv_heads, head_dim=d, batch=batch)
    options = {"ulysses": degree} if scheme in ("usp", "loongtrain") else {}
    if scheme == "loongtrain":
        options["window"] = window if ring % window == 0 else ring
    signature = make(scheme, problem, world, "contiguous", **options).signature
    n, rho = tokens // world, max(1, degree // kv_heads)
    tq, tkv = batch * n * q_heads * d * item, 2 * batch * n * kv_heads * d * item
    exchange = (degree - 1) / degree
    assert signature.wire_bytes("forward") == exchange * (2 * tq + rho * tkv) + (ring - 1) * rho * tkv
    back = tkv * (ITEM_BYTES["float32"] // item if rho > 1 else 1)
    want = exchange * (2 * tq + rho * back) + (ring - 1) * rho * tkv + (ring - 1) * rho * 2 * tkv
    assert signature.wire_bytes("backward") == want


def test_half_precision_travel_halves_the_gradients():
    problem = problem_of(masks.full(64, 64))
    full, half = (make("ring", problem, 4, travel=t).signature for t in ("float32", "bfloat16"))
    sums = [sum(c.operand_bytes for c in s.collectives("backward") if c.tensor == "dk") for s in (full, half)]
    assert sums[0] == 2 * sums[1] > 0
    kinds = {c.kind for c in make("all_gather", problem, 4, travel="bfloat16").signature.collectives("backward")}
    assert kinds == {"all_gather", "all_to_all"}


def test_redundancy_of_causal_sharding():
    """Zigzag delivers a quarter of its half-chunks in vain, contiguous half: redundancy 4/3 and 2."""
    problem = problem_of(masks.causal(4096, 4096))
    assert make("ring", problem, 8, "zigzag").redundancy() == pytest.approx(4 / 3, rel=1e-3)
    assert make("ring", problem, 8, "contiguous").redundancy() == pytest.approx(2, rel=1e-3)


def test_balance_of_documents_by_step_is_below_that_of_totals():
    mask = masks.causal_document(8192, 8192, [3000, 500, 92, 4000, 600])
    schedule = make("ring", problem_of(mask), 16, "balanced")
    assert 0 < schedule.step_balance < schedule.total_balance <= 1
    assert schedule.efficiency_bound == pytest.approx(schedule.step_balance)
    assert (schedule.step_imbalance >= 1).all()


def test_the_best_sharding_depends_on_what_is_to_be_balanced():
    """A pack of documents: stripes balance the steps of a ring, chunks the totals; zigzag neither."""
    mask = masks.causal_document(16384, 16384, [9000, 184, 700, 3000, 500, 3000])
    problem, topology = problem_of(mask), make_topology("ring", 8)
    steps, totals = (schedule_under("ring", problem, topology, kind, granule=g)
                     for kind, g in (("best", 1), ("balanced", 128)))
    zigzag = make("ring", problem, 8, "zigzag")
    assert (steps.q_sharding.kind, totals.q_sharding.kind) == ("striped", "balanced")
    assert steps.step_balance > 0.9 > zigzag.step_balance and totals.total_balance > 0.98 > zigzag.total_balance
    causal = schedule_under("ring", problem_of(masks.causal(4096, 4096)), topology, "best")
    assert causal.q_sharding.kind == "zigzag"
    gathered = schedule_under("all_gather", problem, make_topology("all_gather", 8), "best")
    assert gathered.q_sharding.kind == "balanced"  # one step: the total
    with pytest.raises(ValueError, match="sharding: 'luck' is none of contiguous, .*best"):
        schedule_under("ring", problem, topology, "luck")


def test_padding_heads_lower_the_bound():
    schedule = make("ulysses", problem_of(masks.full(64, 64), q_heads=3, kv_heads=1), 2)
    assert schedule.efficiency_bound == pytest.approx(0.75)


def test_ranks_stand_where_the_topology_says():
    topology = make_topology("usp", 12, ulysses=3, head_first=False)
    assert [topology.place(r) for r in (0, 1, 4, 11)] == [(0, 0), (1, 0), (0, 1), (3, 2)]
    assert topology.group("ulysses", 1) == (1, 5, 9) and topology.group("ring", 5) == (4, 5, 6, 7)
    assert all(topology.rank(*topology.place(r)) == r for r in range(12))


def test_equal_signatures_for_other_documents():
    """What is static does not depend on the documents once no rotation is left out."""
    signatures = {
        make("usp", problem_of(masks.causal_document(96, 96, lengths)), 4, ulysses=2, skip=False).signature
        for lengths in ([96], [1, 30, 65], [50, 46])
    }
    assert len(signatures) == 1


def test_masks_fit_a_rank():
    mask = variable_block(10, 12, 4, 3, 1, 0.5, causal=True)
    chosen = select_heads(mask, np.array([2, 2, 0]))
    assert chosen.heads == 3 and np.array_equal(chosen.dense(1), mask.dense(2))
    padded = pad_mask(chosen, 13, 17)
    np.testing.assert_array_equal(padded.dense(0)[:10, :12], mask.dense(2))
    assert not padded.dense(0)[10:].any() and not padded.dense(0)[:, 12:].any()
    with pytest.raises(ValueError, match="less than"):
        pad_mask(mask, 9, 12)


@pytest.mark.parametrize("options,word", [({"travel": "float16"}, "travel"), ({"world": 5}, "sharding")])
def test_arguments_that_disagree_are_named(options, word):
    problem, topology = problem_of(masks.full(16, 16)), make_topology("ring", options.pop("world", 4))
    sharding = make_sharding("zigzag", 16, make_topology("ring", 4))
    with pytest.raises(ValueError, match=word):
        make_schedule("ring", problem, topology, sharding, **options)


@pytest.mark.parametrize("scheme,grid,said", [
    ("rings", "ring", "scheme: 'rings' is none of"),
    ("ring", "ulysses", "ring: ulysses 4: the scheme has 1 at world 4"),
    ("ulysses", "ring", "ulysses: ulysses 1: the scheme has 4 at world 4")])
def test_a_scheme_on_anothers_grid_is_refused(scheme, grid, said):
    """It was that other scheme, under this one's name."""
    topology, problem = make_topology(grid, 4), problem_of(masks.full(16, 16))
    with pytest.raises(ValueError, match=said):
        schedule_under(scheme, problem, topology, "zigzag")


def test_a_thousand_ranks_in_seconds():
    tokens, world = 1 << 20, 1024
    mask = masks.causal_document(tokens, tokens, [tokens // 4, tokens // 2, tokens // 8, tokens // 8])
    begin = time.perf_counter()
    for scheme, grid in (("ring", {}), ("loongtrain", {"ulysses": 8, "window": 8})):
        schedule = make(scheme, problem_of(mask, q_heads=64, kv_heads=8), world, "zigzag", **grid)
        assert 0 < schedule.step_balance <= schedule.total_balance <= 1
        assert schedule.redundancy() > (1 if scheme == "ring" else 0)  # an exchange of heads can be below V*
    mask = uniform_block(tokens // 8, tokens // 8, 2, 128, 0.02)
    for scheme in ("ring", "ulysses"):
        assert make(scheme, problem_of(mask), world, granule=128).total_balance > 0.99
    assert time.perf_counter() - begin < 30
