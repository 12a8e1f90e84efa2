"""The dynamic masks: every derived form against the lists, cell by cell, and the choice of blocks against its rule."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workload.strategies import block_mask, subset
from workload import selection
from workload.block_masks import BlockMask, from_bitmap, from_scores, uniform_block, variable_block
from workload.problem import AttentionProblem

few = settings(max_examples=120, deadline=None)


def picture(mask: BlockMask, head: int) -> np.ndarray:
    """The element mask from the lists and the positions, one cell at a time."""
    out = np.zeros((mask.q_len, mask.kv_len), bool)
    for n in range(mask.q_blocks):
        for key_block in mask.indices[head, n, : mask.counts[head, n]]:
            for i in range(mask.q_bounds[head, n], mask.q_bounds[head, n + 1]):
                for j in range(mask.kv_bounds[head, key_block], mask.kv_bounds[head, key_block + 1]):
                    out[i, j] = not mask.causal or mask.kv_positions[j] <= mask.q_positions[i]
    return out


def pictures(mask: BlockMask) -> np.ndarray:
    return np.stack([picture(mask, h) for h in range(mask.heads)])


@given(block_mask())
@few
def test_dense_and_areas(mask):
    want = pictures(mask)
    for h in range(mask.heads):
        np.testing.assert_array_equal(mask.dense(h), want[h])
        np.testing.assert_array_equal(mask.dense_rows(1, mask.q_len, h), want[h][1:])
    np.testing.assert_array_equal(mask.row_area, want.sum(axis=(0, 2)))
    assert mask.area == want.sum() and type(mask.area) is int
    assert mask.density == want.mean()


@given(block_mask())
@few
def test_lists_are_normal(mask):
    assert mask.indices.dtype == mask.counts.dtype == mask.q_bounds.dtype == mask.kv_bounds.dtype == np.int32
    for listed, count in zip(mask.indices.reshape(-1, mask.indices.shape[2]), mask.counts.reshape(-1)):
        assert (np.diff(listed[:count]) > 0).all() and not listed[count:].any()
    if mask.causal:
        assert (mask.limits == np.clip(np.arange(mask.q_len) + 1 + mask.kv_len - mask.q_len, 0, mask.kv_len)).all()


@given(block_mask())
@few
def test_bitmap_covers_the_mask(mask):
    """E17: the block bitmap is not the element mask; it covers it, and nothing is visible outside."""
    bitmap = mask.block_bitmap()
    for h in range(mask.heads):
        cells = bitmap[h][mask.q_block_ids()[h]][:, mask.kv_block_ids()[h]]
        assert (cells >= mask.dense(h)).all()


@given(block_mask())
@few
def test_by_key_is_the_transposed_bitmap(mask):
    counts, indices = mask.by_key()
    for h in range(mask.heads):
        for key_block, column in enumerate(mask.block_bitmap()[h].T):
            np.testing.assert_array_equal(indices[h, key_block, : counts[h, key_block]], np.flatnonzero(column))
            assert not indices[h, key_block, counts[h, key_block] :].any()


@given(block_mask(), st.integers(1, 7), st.integers(1, 7))
@few
def test_refine_keeps_the_cells(mask, q_block, kv_block):
    """I10: the conversion to smaller blocks, whatever the numbers of blocks on the two sides."""
    fine = mask.refine(q_block, kv_block)
    np.testing.assert_array_equal(pictures(fine), pictures(mask))
    assert np.diff(fine.q_bounds).max() <= q_block and np.diff(fine.kv_bounds).max() <= kv_block


def test_refine_of_a_map_of_five_by_three():
    """I10: 128 -> 64 of a 5 x 3 map."""
    mask = uniform_block(5 * 128 - 30, 3 * 128 - 100, 2, 128, 0.67, seed=4)
    fine = mask.refine(64)
    assert mask.block_bitmap().shape == (2, 5, 3) and fine.block_bitmap().shape == (2, 10, 5)
    assert (fine.block, fine.name) == (64, "uniform_block")
    for h in range(2):
        np.testing.assert_array_equal(fine.dense(h), mask.dense(h))


@given(block_mask(), st.data())
@few
def test_restrict_is_rows_and_columns_of_dense(mask, data):
    """The sharding law, for shards that keep no block whole too; global positions travel for the diagonal."""
    rows, keys = data.draw(subset(mask.q_len)), data.draw(subset(mask.kv_len))
    local = mask.restrict(rows, keys)
    for h in range(mask.heads):
        np.testing.assert_array_equal(local.dense(h), mask.dense(h)[rows][:, keys])
    np.testing.assert_array_equal(pictures(local), [local.dense(h) for h in range(mask.heads)])
    assert (local.q_positions == mask.q_positions[rows]).all() and (local.kv_positions == mask.kv_positions[keys]).all()
    assert local.q_blocks <= mask.q_blocks and local.kv_blocks <= mask.kv_blocks


def test_restrict_on_block_borders_stays_uniform():
    mask = uniform_block(300, 420, 2, 64, 0.5, causal=True)
    rows = np.concatenate([np.arange(64, 128), np.arange(256, 300)])
    assert mask.restrict(rows, np.arange(128, 420)).block == 64
    assert mask.restrict(rows, np.arange(100, 420)).block is None


@given(block_mask(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
@few
def test_padded_holds_the_same_cells(mask, a, b, c):
    padded = mask.padded(mask.q_blocks + a, mask.kv_blocks + b, mask.indices.shape[2] + c)
    assert padded.indices.shape == (mask.heads, mask.q_blocks + a, mask.indices.shape[2] + c)
    np.testing.assert_array_equal(pictures(padded), pictures(mask))
    assert padded.area == mask.area
    with pytest.raises(ValueError, match="kv_blocks: 0 < "):
        mask.padded(mask.q_blocks, 0, mask.indices.shape[2])


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.01, 1), st.booleans(), st.integers(0, 99))
@few
def test_top_k_by_its_rule(q_len, kv_len, density, causal, seed):
    """k = max(1, floor(density * key blocks)), capped by the allowed ones; the best; ties to the lower index."""
    q_bounds, kv_bounds = selection.uniform_bounds(q_len, 5)[None], selection.uniform_bounds(kv_len, 7)[None]
    scores = np.random.default_rng(seed).integers(0, 4, (1, len(q_bounds[0]) - 1, len(kv_bounds[0]) - 1)).astype(float)
    mask = from_scores(scores, q_bounds, kv_bounds, density=density, causal=causal)
    for n, row in enumerate(scores[0]):
        last = min(5 * n + 4, q_len - 1) + kv_len - q_len
        allowed = [m for m in range(len(row)) if not causal or 7 * m <= last]
        best = sorted(allowed, key=lambda m: (-row[m], m))
        k = max(1, int(density * len(row) + 1e-9))
        assert mask.indices[0, n, : mask.counts[0, n]].tolist() == sorted(best[:k])


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.05, 1), st.booleans(), st.integers(0, 99))
@few
def test_top_p_is_the_smallest_set_that_reaches_p(q_blocks, kv_blocks, p, causal, seed):
    scores = np.random.default_rng(seed).standard_normal((1, q_blocks, kv_blocks)) * 2
    q_bounds, kv_bounds = (np.arange(n + 1)[None] * 4 for n in (q_blocks, kv_blocks))
    mask = from_scores(scores, q_bounds, kv_bounds, top_p=p, causal=causal)
    for n, row in enumerate(scores[0]):
        last = 4 * n + 3 + 4 * (kv_blocks - q_blocks)
        allowed = [m for m in range(kv_blocks) if not causal or 4 * m <= last]
        chosen = mask.indices[0, n, : mask.counts[0, n]].tolist()
        assert set(chosen) <= set(allowed) and bool(chosen) == bool(allowed)
        if chosen:
            mass = np.exp(row[chosen]).sum() / np.exp(row[allowed]).sum()
            assert mass >= p - 1e-9
            least = min(chosen, key=lambda m: row[m])
            assert mass - np.exp(row[least]) / np.exp(row[allowed]).sum() < p + 1e-9, "one block fewer would do"
            assert min(row[chosen]) >= max((row[m] for m in allowed if m not in chosen), default=-np.inf)


def test_top_p_gives_unequal_counts():
    mask = uniform_block(64 * 40, 64 * 40, 1, 64, top_p=0.5, selection="importance", seed=0)
    assert mask.counts.min() < mask.counts.max()


def test_density_is_the_share_kept():
    """0.5 keeps half; 0.29 of 100 blocks is 29, not the 28 of a rounded product; the least is one block."""
    assert uniform_block(64, 128, 1, 16, 0.5).counts.tolist() == [[4] * 4]
    assert uniform_block(8, 800, 1, 8, 0.29).counts.tolist() == [[29]]
    assert uniform_block(8, 800, 1, 8, 0.001).counts.tolist() == [[1]]


def test_causal_rows_without_any_key_are_empty():
    mask = uniform_block(12, 4, 1, 4, 1.0, causal=True)
    assert mask.counts.tolist() == [[0, 0, 1]]
    assert mask.row_area.tolist() == [0] * 8 + [1, 2, 3, 4]


def test_full_density_is_full_or_causal():
    assert uniform_block(50, 70, 2, 16, 1.0).area == 2 * 50 * 70
    assert uniform_block(70, 70, 1, 16, 1.0, causal=True).area == 70 * 71 // 2


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 30), st.integers(0, 99))
@few
def test_drawn_bounds(length, minimum, above, seed):
    rng = np.random.default_rng(seed)
    if length < minimum:
        with pytest.raises(ValueError, match=f"minimum: {minimum} > length {length}"):
            selection.drawn_bounds(length, minimum + above, minimum, rng)
        return
    bounds = selection.drawn_bounds(length, minimum + above, minimum, rng)
    assert (bounds[0], bounds[-1]) == (0, length) and np.diff(bounds).min() >= minimum


def test_variable_blocks_differ_by_head_and_side():
    mask = variable_block(400, 400, 2, 40, 10, 0.5, seed=1)
    assert not np.array_equal(mask.q_bounds[0], mask.q_bounds[1])
    assert not np.array_equal(mask.q_bounds, mask.kv_bounds)
    assert np.diff(mask.q_bounds).mean() == 40


def test_importance_is_the_pooled_product():
    """The mean over tokens of q, times that of k, as a loop; query heads of a group are averaged."""
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 10, 4, 3)), rng.standard_normal((2, 13, 2, 3))
    q_bounds, kv_bounds = np.array([[0, 4, 10]] * 2), np.array([[0, 6, 13]] * 2)
    got = selection.importance(q, k, q_bounds, kv_bounds)
    for head in range(2):
        for n in range(2):
            for m in range(2):
                products = [
                    q[b, q_bounds[0, n] : q_bounds[0, n + 1], h].mean(0)
                    @ k[b, kv_bounds[0, m] : kv_bounds[0, m + 1], head].mean(0) / 3**0.5
                    for b in range(2) for h in (2 * head, 2 * head + 1)
                ]
                assert got[head, n, m] == pytest.approx(np.mean(products), rel=1e-5, abs=1e-6)
    mask = uniform_block(10, 13, 2, 6, 0.34, selection="importance", q=q, k=k)
    scores = selection.importance(q, k, np.array([[0, 6, 10]] * 2), np.array([[0, 6, 12, 13]] * 2))
    assert (mask.indices[:, :, 0] == scores.argmax(axis=2)).all()


def test_seeds():
    first, again, other = (uniform_block(300, 400, 2, 16, 0.3, seed=s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.indices, again.indices)
    assert not np.array_equal(first.indices, other.indices)


def test_an_area_counts_each_head_once():
    """M5: FLOPs sum over the query heads; a mask per kv head serves its whole group."""
    mask = variable_block(90, 70, 2, 20, 5, 0.5, causal=True, seed=3)
    want = sum(int(mask.dense(h * 2 // 6).sum()) for h in range(6)) * 3
    assert AttentionProblem(mask, 3, 6, 2, 8).cells == want


def test_area_beyond_32_bits():
    """F5, on the dynamic side: full density at 1M tokens, causal."""
    length = 1 << 20
    assert uniform_block(length, length, 1, 1 << 14, 1.0, causal=True).area == length * (length + 1) // 2


def test_one_list_serves_all_heads():
    """E18: a mask that is the same for all heads has one head, so its bytes do not grow with them."""
    mask = uniform_block(256, 256, 1, 64, 0.5)
    assert mask.indices.shape[0] == 1 and AttentionProblem(mask, q_heads=64).cells == 64 * mask.area


def changed(**lists):
    """Two query blocks that see both key blocks, with other lists."""
    return dataclasses.replace(uniform_block(8, 8, 1, 4, 1.0), **lists)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: uniform_block(8, 8, 1, 0, 0.5), "block: 0 is not an integer >= 1"),
        (lambda: uniform_block(0, 8, 1, 4, 0.5), "length: 0 is not an integer >= 1"),
        (lambda: uniform_block(8, 8, 1, 4, 0.0), r"density: 0.0 is not within \(0, 1\]"),
        (lambda: uniform_block(8, 8, 1, 4), "density, top_p: give exactly one"),
        (lambda: uniform_block(8, 8, 1, 4, 0.5, top_p=0.5), "density, top_p: give exactly one"),
        (lambda: uniform_block(8, 8, 1, 4, top_p=1.5), "top_p: 1.5"),
        (lambda: uniform_block(8, 8, 1, 4, 0.5, selection="best"), "selection: 'best' is none of"),
        (lambda: uniform_block(8, 8, 1, 4, 0.5, q=np.ones((1, 8, 1, 2))), "q, k: give both or neither"),
        (lambda: variable_block(8, 8, 1, 4, 5, 0.5), r"minimum: 5 is not within 1..mean \(4\)"),
        (lambda: from_bitmap(np.ones((1, 2, 2)), [[0, 4, 8]], [[0, 8]]), r"bitmap: shape \(1, 2, 2\)"),
        (lambda: from_bitmap(np.ones((1, 2, 1)), [[0, 9, 8]], [[0, 8]]), "q_bounds: rows must ascend from 0 to 8"),
        (lambda: from_scores(np.full((1, 1, 1), np.nan), [[0, 8]], [[0, 8]], density=0.5), "scores: NaN or infinity"),
        (lambda: from_scores(np.full((1, 1, 1), np.inf), [[0, 8]], [[0, 8]], top_p=0.5), "scores: NaN or infinity"),
        (lambda: from_bitmap(np.ones((1, 1, 1)), [0, 8], [[0, 8]]), r"q_bounds: shape \(2,\) is not \[heads"),
        (lambda: uniform_block(8, 9, 1, 4, 0.5).restrict([0, 8], [0]), "q_positions: must be strictly ascending"),
        (lambda: uniform_block(8, 9, 1, 4, 0.5).refine(0), "block: 0 is not an integer >= 1"),
        (lambda: uniform_block(8, 8, 0, 4, 0.5), "heads: 0 is not an integer >= 1"),
        (lambda: uniform_block(8, 8, 1, 4, 0.5, selection="importance", q=np.ones((1, 9, 1, 2)),
                               k=np.ones((1, 8, 1, 2))), r"q: shape \(1, 9, 1, 2\) is not \[batch, 8"),
        (lambda: uniform_block(8, 8, 1, 4, 0.5, selection="importance", q=np.ones((1, 8, 1, 2)),
                               k=np.ones((1, 8, 1, 3))), r"k: shape \(1, 8, 1, 3\) does not go with q's"),
        (lambda: variable_block(8, 8, 1, 4.5, 1, 0.5), "mean: 4.5 is not an integer"),
        (lambda: changed(counts=np.ones((2, 2), int)), "indices: shape"),
        (lambda: changed(q_positions=[0, 1, 2, 3, 4, 5, 7, 6]), "q_positions: must be strictly ascending"),
        (lambda: changed(kv_positions=[0, 1, 2, 3, 4, 5, 6, 6]), "kv_positions: must be strictly ascending"),
        (lambda: changed(block=None), "block: uniform_block needs the size of its blocks"),
        (lambda: changed(block=2), "block: q_bounds are not those of blocks of 2"),
        (lambda: changed(kv_bounds=[[0, 3, 8]]), "block: kv_bounds are not those of blocks of 4"),
        (lambda: from_bitmap(np.eye(2)[None], [[0, 10, 32]], [[0, 16, 32]], block=16), "block: q_bounds are not those"),
        (lambda: changed(counts=[[3, 1]]), "counts: 1 to 3, the lists have 2 slots"),
        (lambda: changed(counts=[[0.5, 1]]), "counts: float64, must be integers"),
        (lambda: changed(indices=[[[0, 2], [0, 1]]]), "indices: 0 to 2, of 2 key blocks"),
        (lambda: changed(indices=[[[-1, 0], [0, 1]]]), "indices: -1 to 1, of 2 key blocks"),
        (lambda: changed(indices=[[[1, 1], [0, 1]]]), "indices: the key blocks of a query block must ascend"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
