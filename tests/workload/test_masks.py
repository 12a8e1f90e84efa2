"""The interval masks: every derived form against the definitions, cell by cell."""

import copy
import pickle
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.workload import predicates
from tests.workload.strategies import pattern, static_mask, subset
from workload import masks, tiles
from workload.errors import Unsupported
from workload.suite import static_arguments
from workload.tiles import EMPTY, FULL, PARTIAL

few = settings(max_examples=150, deadline=None)


@pytest.mark.parametrize("name", masks.STATIC_MASKS)
def test_dense_is_the_definition(name):
    """I8, I9: one definition, the same cells everywhere, rectangles and rows before the first key included."""

    @given(pattern(name))
    @few
    def holds(case):
        _, q_len, kv_len, parameters = case
        mask = masks.STATIC_MASKS[name](q_len, kv_len, **parameters)
        want = np.array(predicates.picture(name, q_len, kv_len, parameters), bool).reshape(q_len, kv_len)
        np.testing.assert_array_equal(mask.dense(), want)
        assert mask.area == want.sum() and mask.name == name
        assert mask.intervals <= 2

    holds()


@given(static_mask())
@few
def test_intervals_are_normal(mask):
    starts, ends, present = mask.starts, mask.ends, mask.ends > mask.starts
    assert starts.dtype == ends.dtype == np.int32
    assert ((starts[~present] == mask.kv_len) & (ends[~present] == mask.kv_len)).all()
    assert (ends[:-1] < starts[1:])[present[1:]].all(), "disjoint, ascending, not touching"
    assert (present[:-1] >= present[1:]).all(), "absent intervals stand last"
    assert present[-1].any() or mask.intervals == 1, "no slot that no row uses"


@pytest.mark.parametrize("through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_masks_go_to_other_processes(through):
    mask = masks.causal_document(5, 7, [3, 4])
    got = through(mask)
    assert got.dense().tolist() == mask.dense().tolist() and (got.name, got.regular) == (mask.name, mask.regular)
    assert list(got.params) == ["lengths"] and got.params["lengths"].tolist() == [3, 4]
    with pytest.raises(TypeError):
        got.params["lengths"] = None


@given(static_mask())
@few
def test_areas(mask):
    dense = mask.dense()
    np.testing.assert_array_equal(mask.row_area, dense.sum(axis=1))
    assert mask.area == dense.sum() and type(mask.area) is int
    assert mask.density == dense.mean()


@given(static_mask(), st.integers(0, 40), st.integers(0, 40))
@few
def test_dense_rows_are_rows_of_dense(mask, a, b):
    begin, end = sorted(min(x, mask.q_len) for x in (a, b))
    np.testing.assert_array_equal(mask.dense_rows(begin, end), mask.dense()[begin:end])


@given(static_mask())
@few
def test_transpose(mask):
    turned = mask.transpose()
    np.testing.assert_array_equal(turned.dense(), mask.dense().T)
    np.testing.assert_array_equal(turned.transpose().dense(), mask.dense())
    if mask.name in masks.STATIC_MASKS:
        assert turned.intervals <= 2


@example(("causal_blockwise", 4, 5, {"blocks": [1, 2, 1, 1]}))  # a key hidden before and after its one interval
@given(pattern())
@few
def test_column_bounds_of_every_pattern(case):
    name, q_len, kv_len, parameters = case
    mask = masks.STATIC_MASKS[name](q_len, kv_len, **parameters)
    try:
        bounds = mask.column_bounds()
    except Unsupported:
        assert name == "global_sliding_window" and q_len > kv_len, "rows before the first key, a third hidden interval"
        return
    hidden = bounds.hidden(np.arange(q_len)[:, None], np.arange(kv_len)[None, :])
    np.testing.assert_array_equal(~hidden, mask.dense())


@pytest.mark.parametrize("q_len", [12, 10])
def test_column_bounds_that_need_the_causal_form(q_len):
    """Keys hidden before, between and after two intervals of rows: what stands before is left to `causal`."""
    row = np.arange(12)
    again = np.where((row == 9) | (row == 10), 6, 4)  # rows 9 and 10 see keys 4 and 5 once more
    starts, ends = np.stack([np.full(12, 4), row - row % 4]), np.stack([again, row + 1])
    mask = masks.from_intervals(starts[:, 12 - q_len :], ends[:, 12 - q_len :], 12)
    bounds = mask.column_bounds()
    assert bounds.causal
    hidden = bounds.hidden(np.arange(q_len)[:, None], np.arange(12)[None, :])
    np.testing.assert_array_equal(~hidden, mask.dense())


def test_column_bounds_refuse_a_third_hidden_interval():
    dense = np.array([0, 1, 0, 1, 0], bool)[:, None]
    mask = masks.from_intervals(np.zeros((1, 5)), dense.T.astype(int), 1)
    with pytest.raises(Unsupported, match="column_bounds: a key needs a third"):
        mask.column_bounds()


@given(static_mask(), st.integers(1, 9), st.integers(1, 9))
@few
def test_tile_runs(mask, tile_q, tile_k):
    """E17: tile classes come from the cells; the bitmap covers the mask and full tiles need no check. D12 as well."""
    runs, dense = mask.tile_runs(tile_q, tile_k), mask.dense()
    classes = runs.classes()
    for m in range(classes.shape[0]):
        for n in range(classes.shape[1]):
            tile = dense[m * tile_q : (m + 1) * tile_q, n * tile_k : (n + 1) * tile_k]
            whole = tile.all() and tile.shape[1] == tile_k
            want = FULL if whole else PARTIAL if tile.any() else EMPTY
            assert classes[m, n] == want, (m, n)
    assert runs.visited_area >= mask.area
    for begin, end in ((runs.full_begin, runs.full_end), (runs.partial_begin, runs.partial_end)):
        present = end > begin
        assert (present[:, :-1] >= present[:, 1:]).all() and not (begin[~present].any() or end[~present].any())
        assert (end[:, :-1] < begin[:, 1:])[present[:, 1:]].all()


@given(static_mask(), st.integers(1, 9))
@few
def test_chunks_of_rows_change_nothing(mask, tile_q):
    """Long masks are normalised and tiled in chunks of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "CHUNK_ROWS", 7)
        patch.setattr(tiles, "CHUNK_ROWS", 8)
        again = masks.from_intervals(mask.starts, mask.ends, mask.kv_len)
        in_chunks = mask.tile_runs(tile_q, 5)
    np.testing.assert_array_equal(again.starts, mask.starts)
    np.testing.assert_array_equal(again.ends, mask.ends)
    np.testing.assert_array_equal(in_chunks.classes(), mask.tile_runs(tile_q, 5).classes())


@given(static_mask(), st.data())
@few
def test_restrict_is_rows_and_columns_of_dense(mask, data):
    """The sharding law, for any ascending shards; the number of intervals never grows."""
    rows, keys = data.draw(subset(mask.q_len)), data.draw(subset(mask.kv_len))
    local = mask.restrict(rows, keys)
    np.testing.assert_array_equal(local.dense(), mask.dense()[rows][:, keys])
    assert local.intervals <= mask.intervals
    assert local.area == mask.dense()[rows][:, keys].sum()


@given(static_mask(), st.integers(0, 3))
@few
def test_padded_holds_the_same_cells(mask, extra):
    padded = mask.padded(mask.intervals + extra)
    np.testing.assert_array_equal(padded.dense(), mask.dense())
    assert padded.intervals == mask.intervals + extra


@given(pattern())
@few
def test_regular_hand_over_means_the_same_cells(case):
    """What a regular kernel is handed (causal, window, cu_seqlens) says the mask again, by another reading."""
    name, q_len, kv_len, parameters = case
    mask = masks.STATIC_MASKS[name](q_len, kv_len, **parameters)
    if name not in masks.REGULAR_MASKS:
        assert mask.regular is None
        return
    regular, want = mask.regular, np.zeros((q_len, kv_len), bool)
    cu_q, cu_kv = regular.cu_seqlens_q or (0, q_len), regular.cu_seqlens_kv or (0, kv_len)
    assert len(cu_q) == len(cu_kv) and (cu_q[0], cu_q[-1], cu_kv[0], cu_kv[-1]) == (0, q_len, 0, kv_len)
    left, right = regular.window or (None, None)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:]):
        for i in range(q0, q1):
            for j in range(k0, k1):
                p = (i - q0) + (k1 - k0) - (q1 - q0)
                d = p - (j - k0)
                rows = p >= 0 or name == "full"
                want[i, j] = (
                    rows and (not regular.causal or d >= 0) and (left is None or d <= left)
                    and (right is None or -d <= right)
                )
    np.testing.assert_array_equal(want, mask.dense())


RIGHT_VALUES = [
    ("full_document", {"lengths": [3, 5]}, 34),
    ("causal_document", {"lengths": [3, 5]}, 21),
    ("full_sliding_window", {"window": 2}, 34),
    ("causal_sliding_window", {"window": 2}, 21),
    ("prefix_lm_causal", {"prefix": 3}, 39),
    ("prefix_lm_document", {"lengths": [3, 5], "prefixes": [2, 0]}, 22),
    ("block_causal_document", {"lengths": [3, 5], "block": 2}, 24),
    ("global_sliding_window", {"global_tokens": 1, "window": 1}, 34),
    ("shared_question", {"groups": [(3, 2, 3)]}, 30),
    ("causal_blockwise", {"blocks": [3, 2, 3]}, 30),
    ("full", {}, 64),
    ("causal", {}, 36),
]


@pytest.mark.parametrize("name,parameters,area", RIGHT_VALUES)
def test_right_values_at_eight_tokens(name, parameters, area):
    """I2 among them: left 2, right 0 at 8 tokens is 21 cells."""
    assert masks.STATIC_MASKS[name](8, 8, **parameters).area == area


@given(st.integers(1, 5000), st.integers(0, 6000), st.lists(st.integers(0, 900), min_size=1, max_size=9))
@few
def test_areas_in_closed_form(total, window, lengths):
    w, t = min(window, total - 1), total
    assert masks.full(t, t).area == t * t
    assert masks.causal(t, t).area == t * (t + 1) // 2
    assert masks.full_sliding_window(t, t, w).area == t * (2 * w + 1) - w * (w + 1)
    assert masks.causal_sliding_window(t, t, w).area == t * (w + 1) - w * (w + 1) // 2
    p = min(window, t)
    assert masks.prefix_lm_causal(t, t, p).area == t * (t + 1) // 2 + p * (p - 1) // 2
    t = sum(lengths)
    assert masks.full_document(t, t, lengths).area == sum(n * n for n in lengths)
    assert masks.causal_document(t, t, lengths).area == sum(n * (n + 1) // 2 for n in lengths)
    prefixes = [n // 3 for n in lengths]
    wanted = sum(n * (n + 1) // 2 + p * (p - 1) // 2 for n, p in zip(lengths, prefixes))
    assert masks.prefix_lm_document(t, t, lengths, prefixes).area == wanted


def test_area_beyond_32_bits():
    """F5: areas are exact Python integers."""
    assert masks.causal(786_432, 786_432).area == 309_238_038_528


def test_window_conventions():
    """I1, I2, I4: inclusive windows; left = S - 1 is causal, bit for bit; a window is not no window."""
    two_tokens = masks.causal_sliding_window(4, 4, 1)
    assert np.flatnonzero(two_tokens.dense()[3]).mean() == 2.5
    assert np.flatnonzero(masks.causal_sliding_window(4, 4, 2).dense()[3]).mean() == 2.0
    wide, causal = masks.causal_sliding_window(8, 8, 7), masks.causal(8, 8)
    np.testing.assert_array_equal(wide.starts, causal.starts)
    np.testing.assert_array_equal(wide.ends, causal.ends)
    assert masks.full_sliding_window(8, 8, 1).area < masks.full(8, 8).area


def test_zero_length_documents_change_nothing():
    """H1: cu_seqlens [0, 3, 3, 8] equals [0, 3, 8]."""
    with_empty, without = (masks.causal_document(8, 8, lengths) for lengths in ([3, 0, 5], [3, 5]))
    np.testing.assert_array_equal(with_empty.starts, without.starts)
    np.testing.assert_array_equal(with_empty.ends, without.ends)
    assert with_empty.regular.cu_seqlens_q == (0, 3, 3, 8)


@pytest.mark.parametrize("kind", [np.int32, np.int64, list])
def test_lengths_of_any_integer_type(kind):
    """H5: the integer type of the lengths does not change the mask."""
    lengths = kind([3, 5]) if kind is list else np.array([3, 5], kind)
    assert masks.causal_document(8, 8, lengths).area == 21


@pytest.mark.parametrize(
    "name,parameters,message",
    [
        ("causal_document", {"lengths": [3, 4]}, "lengths: must be >= 0 and sum to kv_len 8"),
        ("causal_document", {"lengths": [9, -1]}, "lengths: must be >= 0"),
        ("causal_document", {"lengths": [3.0, 5.0]}, "lengths: must be a flat sequence of integers"),
        ("causal_document", {"lengths": [[3], [5]]}, "lengths: must be a flat sequence of integers"),
        ("full_document", {"lengths": []}, "lengths: must be >= 0 and sum to kv_len 8, sum is 0"),
        ("causal_sliding_window", {"window": -1}, "window: -1 is not an integer >= 0"),
        ("full_sliding_window", {"window": 1.5}, "window: 1.5 is not an integer >= 0"),
        ("full_sliding_window", {"window": None}, "window: None is not an integer >= 0"),
        ("prefix_lm_document", {"lengths": [3, 5], "prefixes": [1.5, 2]}, "prefixes: must be integers"),
        ("global_sliding_window", {"global_tokens": -2, "window": 1}, "global_tokens: -2"),
        ("prefix_lm_document", {"lengths": [3, 5], "prefixes": [4, 0]}, "prefixes: one per document"),
        ("prefix_lm_document", {"lengths": [3, 5], "prefixes": [1]}, "prefixes: one per document"),
        ("block_causal_document", {"lengths": [3, 5], "block": 0}, "block: 0 is not an integer >= 1"),
        ("shared_question", {"groups": [(3, 5), ()]}, "groups: each group needs at least a question"),
        ("shared_question", {"groups": [3, 5]}, "groups: .* is no sequence of groups"),
        ("shared_question", {"groups": None}, "groups: None is no sequence of groups"),
        ("causal_blockwise", {"blocks": [3, 6]}, "blocks: must be >= 0 and sum to kv_len 8"),
    ],
)
def test_wrong_parameters_are_refused_by_name(name, parameters, message):
    """H7, L6: a length that does not fit is an error that names the argument."""
    with pytest.raises(ValueError, match=message):
        masks.STATIC_MASKS[name](8, 8, **parameters)


@pytest.mark.parametrize("starts,ends,message", [
    ([[0.5] * 4], [[3] * 4], "starts: must be integers"), ([[0] * 4], [[3] * 5], "ends: shape"),
    ([[0] * 4], [[[3] * 4]], "ends: must be integers"), ([[0] * 4], None, "ends: must be integers")])
def test_intervals_that_are_none_are_refused_by_name(starts, ends, message):
    with pytest.raises(ValueError, match=message):
        masks.from_intervals(starts, ends, 8)


@pytest.mark.parametrize(
    "rows,keys,message",
    [
        ([0, 2, 1], [0], "q_positions: must be strictly ascending within 0..5"),
        ([0, 6], [0], "q_positions: must be strictly"),
        ([0], [3, 3], "kv_positions: must be strictly ascending within 0..8"),
        ([0], [-1, 3], "kv_positions"),
        ([0], [0.5, 3], "kv_positions"),
        (np.array([3, 1], np.uint8), [0], "q_positions"),  # their difference is 254
        ([True, False], [0], "q_positions"),
        ([[0], [1]], [0], "q_positions"),
    ],
)
def test_restrict_refuses_positions_out_of_order(rows, keys, message):
    with pytest.raises(ValueError, match=message):
        masks.causal(6, 9).restrict(np.array(rows), np.array(keys))


def test_padded_refuses_to_drop_an_interval():
    with pytest.raises(ValueError, match="intervals: 1 < 2 that the mask holds"):
        masks.global_sliding_window(9, 9, 2, 1).padded(1)


def test_one_mask_serves_all_heads():
    """E18: the bytes of a static mask do not depend on the number of heads; it holds one."""
    mask = masks.causal(50, 70)
    assert mask.heads == 1 and mask.starts.nbytes + mask.ends.nbytes == 2 * 4 * 50


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.uint64, np.float16])
def test_intervals_of_any_type_of_numbers(kind):
    """H5: a type too narrow for the keys, or without a sign, means the same cells."""
    mask = masks.from_intervals(np.array([[1, 9]], kind), np.array([[100, 3]], kind), 70000)
    assert mask.row_area.tolist() == [99, 0] and mask.starts.dtype == np.int32


@pytest.mark.parametrize("name,extra", [("full_sliding_window", {}), ("causal_sliding_window", {}),
                                        ("global_sliding_window", {"global_tokens": 0})])
@pytest.mark.parametrize("keys,window", [(1 << 30, 1 << 31), ((1 << 31) - 1, 1 << 30), ((1 << 31) - 1, 1 << 70)])
def test_windows_near_the_end_of_32_bits(name, extra, keys, window):
    """F3's kind: position + window wrapped round, and the last row of 2 ** 30 keys saw none."""
    mask = masks.STATIC_MASKS[name](1, keys, window=window, **extra)
    assert mask.row_area.tolist() == [min(keys, window + 1)]


@pytest.mark.parametrize("name,parameters", [
    ("full_sliding_window", ("window",)), ("causal_sliding_window", ("window",)), ("prefix_lm_causal", ("prefix",)),
    ("global_sliding_window", ("global_tokens", "window"))])
@pytest.mark.parametrize("huge", [(1 << 31) - 1, 1 << 70])
def test_parameters_beyond_the_lengths_are_cut(name, parameters, huge):
    """D18's kind: "unbounded" as a large number; a kernel that added a position to it saw no key, without a word."""
    mask, enough = (masks.STATIC_MASKS[name](5, 7, **dict.fromkeys(parameters, n)) for n in (huge, 12))
    assert all(mask.params[p] == enough.params[p] <= 12 for p in parameters)
    np.testing.assert_array_equal(mask.dense(), enough.dense())
    assert mask.regular == enough.regular


def test_lengths_beyond_32_bits_are_refused_by_name():
    for q_len, kv_len, label in ((1, 1 << 31, "kv_len"), (1 << 31, 1, "q_len")):
        with pytest.raises(ValueError, match=f"^{label}: 2147483648 is more than 2147483647 tokens"):
            masks.causal(q_len, kv_len)
    with pytest.raises(ValueError, match="^kv_len: 4294967296"):
        masks.from_intervals([[0]], [[5]], 1 << 32)


@pytest.mark.parametrize("name", masks.STATIC_MASKS)
def test_a_million_tokens(name):
    """L1: under 1 s and 100 MB, for every pattern."""
    length = 1 << 20
    arguments = static_arguments(name, length)
    tracemalloc.start()
    begin = time.process_time()
    mask = masks.STATIC_MASKS[name](length, length, **arguments)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 1 and peak < 100e6
    assert mask.area > length
