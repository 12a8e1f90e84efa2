"""The oracle against closed forms and finite differences, and the comparison that judges by it."""

import dataclasses

import numpy as np
import pytest

from tests.conformance import relative_error, scattered
from workload import masks, oracle
from workload.block_masks import uniform_block
from workload.oracle import attention_oracle


def toy(mask, heads=1, logits=0.0):
    """All logits equal and V[j] = j: out is the mean of the visible keys, lse = logit + ln(their count)."""
    q = np.full((1, mask.q_len, heads, 1), logits)
    k = np.ones((1, mask.kv_len, heads, 1))
    v = np.broadcast_to(np.arange(mask.kv_len, dtype=float)[None, :, None, None], k.shape)
    return attention_oracle(q, k, v, mask, 1.0, np.ones_like(q))


def test_lse_is_the_natural_logarithm():
    """B1, B3, B4: four equal logits of 0 give ln 4, of 3 give 3 + ln 4."""
    assert toy(masks.full(2, 4)).lse[0, 0] == pytest.approx([1.3863] * 2, abs=1e-4)
    assert toy(masks.full(2, 4), logits=3.0).lse[0, 0] == pytest.approx([4.3863] * 2, abs=1e-4)


def test_rows_without_keys():
    """A1: out 0, lse -inf, no gradient, no NaN anywhere; q_len > kv_len puts two rows before the first key."""
    got = toy(masks.causal(5, 3))
    assert not np.isnan(np.concatenate([x.reshape(-1) for x in dataclasses.astuple(got)])).any()
    assert (got.out[0, :2] == 0).all() and (got.lse[0, 0, :2] == -np.inf).all() and (got.dq[0, :2] == 0).all()
    assert got.lse[0, 0, 2:] == pytest.approx(np.log([1, 2, 3]))
    rows, key = np.ones((1, 2, 1, 2)), np.ones((1, 1, 1, 2))
    alone = attention_oracle(rows, key, key, masks.causal(2, 1), 1.0, rows)
    assert (alone.dv == 1).all(), "the one row that sees the key, and no other"


def test_no_keys_at_all():
    got = toy(masks.full(3, 0))
    assert (got.out == 0).all() and (got.lse == -np.inf).all() and got.dk.shape == (1, 0, 1, 1)


def test_means_of_the_visible_keys():
    """D18, I1, H9: causal row 3 -> 1.5; two tokens with self, row 3 -> 2.5; documents keep to themselves."""
    assert toy(masks.causal(8, 8)).out[0, 3, 0, 0] == 1.5
    assert toy(masks.causal_sliding_window(4, 4, 1)).out[0, 3, 0, 0] == 2.5
    assert toy(masks.full_document(6, 6, [2, 4])).out[0, :, 0, 0].tolist() == [0.5] * 2 + [3.5] * 4


def test_scale():
    """B6: scale 0.5, logits 0 and 2 ln 3 before it, V = [0, 1] -> 0.75."""
    q, k = np.ones((1, 1, 1, 1)), np.array([0.0, 2 * np.log(3)]).reshape(1, 2, 1, 1)
    v = np.array([0.0, 1.0]).reshape(1, 2, 1, 1)
    assert attention_oracle(q, k, v, masks.full(1, 2), 0.5).out.item() == pytest.approx(0.75)


def test_large_logits_do_not_overflow():
    """A7's kind: logits of 1000."""
    got = toy(masks.full(2, 3), logits=1000.0)
    assert got.lse[0, 0] == pytest.approx([1000 + np.log(3)] * 2) and got.out[0, :, 0, 0] == pytest.approx([1, 1])


@pytest.mark.parametrize(
    "mask", [masks.causal(5, 7), scattered(6, 5), uniform_block(7, 9, 2, 3, 0.4, causal=True)], ids=lambda m: m.name
)
def test_gradients_by_finite_differences(mask):
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, mask.q_len, 4, 3))
    k, v = rng.standard_normal((2, 2, mask.kv_len, 2, 3))
    got = attention_oracle(q, k, v, mask, 0.7, dout)
    for name, at in (("dq", 0), ("dk", 1), ("dv", 2)):
        for _ in range(6):
            operands = [q, k, v]
            index = tuple(rng.integers(0, n) for n in operands[at].shape)
            values = []
            for step in (1e-5, -1e-5):
                moved = [x.copy() for x in operands]
                moved[at][index] += step
                values.append((attention_oracle(*moved, mask, 0.7).out * dout).sum())
            assert getattr(got, name)[index] == pytest.approx((values[0] - values[1]) / 2e-5, abs=1e-8)


def test_chunks_of_rows_change_nothing(monkeypatch):
    rng = np.random.default_rng(1)
    q, dout = rng.standard_normal((2, 2, 11, 4, 3))
    k, v = rng.standard_normal((2, 2, 13, 2, 3))
    whole = attention_oracle(q, k, v, masks.causal(11, 13), 0.5, dout)
    monkeypatch.setattr(oracle, "CHUNK_CELLS", 40)
    parts = attention_oracle(q, k, v, masks.causal(11, 13), 0.5, dout)
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-14)


def test_dynamic_heads_are_those_of_the_kv_head():
    """A mask per kv head serves the query heads of its group; one per query head serves that head."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 12, 6, 3))
    k, v = rng.standard_normal((2, 1, 10, 2, 3))
    mask = uniform_block(12, 10, 2, 4, 0.5, seed=9)
    got = attention_oracle(q, k, v, mask, 0.5).out
    for h in range(6):
        seen = mask.dense(h // 3)
        weight = np.where(seen, np.exp(0.5 * q[0, :, h] @ k[0, :, h // 3].T), 0)
        np.testing.assert_allclose(got[0, :, h], weight @ v[0, :, h // 3] / weight.sum(1, keepdims=True))


def test_comparison_fails_on_nan():
    """A5: a NaN on either side is infinitely wrong, and so is an infinity in another place."""
    good = np.array([1.0, 2.0, -np.inf])
    assert relative_error(good, good) == 0
    assert relative_error([1.0, np.nan, -np.inf], good) == np.inf
    assert relative_error([1.0, np.nan, -np.inf], [1.0, np.nan, -np.inf]) == np.inf
    assert relative_error([1.0, -np.inf, 2.0], good) == np.inf
    assert relative_error([1.0, 2.0, 0.0], good) == np.inf
    with pytest.raises(ValueError, match="shape"):
        relative_error([1.0], good)
