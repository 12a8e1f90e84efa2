"""Block selection on the device: both stacks keep the blocks that the workload's own selection keeps."""

import jax
import numpy as np
import pytest
import torch

from jax_impl import selection as in_jax
from torch_impl import selection as in_torch
from workload import block_masks
from workload import selection as workload

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scores(ties: bool, seed: int = 0) -> np.ndarray:
    """float32 [3, 10, 13]; with ties, of five values only."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 5, (3, 10, 13)) if ties else rng.standard_normal((3, 10, 13)) * 2).astype(np.float32)


ALLOWED = np.tril(np.ones((10, 13), bool), 1) & (np.arange(13) != 4)
ALLOWED[0] = False  # a query block that may see nothing


def by_both(name, x, *args):
    """counts and indices of both stacks, which must agree to the bit."""
    ours = [np.asarray(y) for y in jax.jit(getattr(in_jax, name), static_argnums=(1,))(x, *args)]
    given = (torch.tensor(a, device=DEVICE) if isinstance(a, np.ndarray) else a for a in (x, *args))
    theirs = [y.cpu().numpy() for y in getattr(in_torch, name)(*given)]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype == np.int32 and np.array_equal(a, b)
    return ours


def picture(counts, indices, blocks):
    """bool [heads, q_blocks, blocks] of lists, which must ascend and be zero after their counts."""
    out = np.zeros((*counts.shape, blocks), bool)
    for at in np.ndindex(counts.shape):
        row = indices[at]
        assert (np.diff(row[: counts[at]]) > 0).all() and not row[counts[at] :].any()
        out[at][row[: counts[at]]] = True
    return out


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["all", "some"])
def test_top_k(ties, allowed):
    x = scores(ties)
    got = picture(*by_both("top_k", x, 4, *([] if allowed is None else [allowed])), 13)
    where = np.ones((10, 13), bool) if allowed is None else allowed
    assert np.array_equal(got, np.stack([workload.top_k(s, 4, where) for s in x]))


@pytest.mark.parametrize("p", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("allowed", [None, ALLOWED], ids=["all", "some"])
def test_top_p(p, ties, allowed):
    """Fixed point keeps the set that float64 keeps, but for masses as near to p as its resolution."""
    x = scores(ties, seed=1)
    got = picture(*by_both("top_p", x, p, *([] if allowed is None else [allowed])), 13)
    where = np.ones((10, 13), bool) if allowed is None else allowed
    assert np.array_equal(got, np.stack([workload.top_p(s, p, where) for s in x]))


def test_weights_are_exp():
    """The fixed-point weights are exp to a quarter of a per cent, and their sum over 2 ** 13 blocks fits int32."""
    steps, table, limit = workload.fixed_point_weights()
    d = np.linspace(0, 4, 100)
    n = np.rint(d * steps).astype(int)
    weight = table[n % len(table)] >> (n // len(table))
    np.testing.assert_allclose(weight / table[0], np.exp(-d), rtol=2.5e-3)
    assert int(table[0]) << 13 < 2**31 and table[0] >> (limit // len(table)) == 0


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_pooled_scores(heads):
    """Variable blocks, grouped heads, two batch entries: the workload's own scores, in both stacks."""
    mask = block_masks.variable_block(70, 90, heads, 12, 1, 0.5, seed=heads)
    rng = np.random.default_rng(heads)
    q, k = (rng.standard_normal((2, n, h, 16)).astype(np.float32) for n, h in ((70, 4), (90, 2)))
    want = workload.importance(q, k, mask.q_bounds, mask.kv_bounds)
    tensors = (torch.tensor(x, device=DEVICE) for x in (q, k))
    for got in (in_jax.pooled_scores(q, k, mask.q_bounds, mask.kv_bounds),
                in_torch.pooled_scores(*tensors, mask.q_bounds, mask.kv_bounds).cpu()):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stack", [in_jax, in_torch])
def test_what_cannot_be_selected_is_named(stack):
    """-1 once stood for all blocks but one."""
    x = scores(False) if stack is in_jax else torch.tensor(scores(False))
    for k, said in ((-1, "k: -1 is not an integer >= 1"), (0, "k: 0"), (1.5, "k: 1.5"), (14, "k: 14 of 13 key blocks")):
        with pytest.raises(ValueError, match=said):
            stack.top_k(x, k)
    for p in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"p: {p} is not within \(0, 1\]"):
            stack.top_p(x, p)
    bounds = np.array([[0, 4, 10]])
    for q, k, said in (((2, 9, 4, 8), (2, 10, 2, 8), r"q: shape .* is not \[batch, 10"),
                       ((2, 10, 4, 8), (1, 10, 2, 8), "k: shape .* does not go with"),
                       ((2, 10, 4, 8), (2, 10, 3, 8), "k: shape .* does not go with")):
        q, k = (np.zeros(s, np.float32) if stack is in_jax else torch.zeros(s) for s in (q, k))
        with pytest.raises(ValueError, match=said):
            stack.pooled_scores(q, k, bounds, bounds)
