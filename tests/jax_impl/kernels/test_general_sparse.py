"""Block lists, triton_vsa and fa2_sparse in JAX: what the conformance suite does not ask of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.kernels.block_lists import key_walk, query_walk, tile_lists, transposed
from jax_impl.kernels.pallas_triton import Schedule, Tile
from tests.jax_impl.kernels.test_general_dense import error, lowered, run, tensors
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds

SPARSE = ["triton_vsa", "fa2_sparse"]
SMALL = Schedule(Tile(32, 16), Tile(16, 32), Tile(32, 32))


def entries(walk, last) -> list:
    """[heads][row tiles] sets of the first `last[h, n]` entries of each list."""
    rows, last = np.asarray(walk.indices), np.asarray(last)
    return [[set(rows[h, n, : last[h, n]].tolist()) for n in range(rows.shape[1])] for h in range(len(rows))]


def tiles_of(mask, rows, columns):
    """By brute force on the dense picture: [heads][row tile] sets of tiles with some cell visible, and with all."""
    some, every = [], []
    for head in range(mask.heads):
        seen = mask.dense(head)
        cut = lambda i, j, seen=seen: seen[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]  # noqa: E731
        across, down = range(-(-mask.kv_len // columns)), range(-(-mask.q_len // rows))
        some.append([{j for j in across if cut(i, j).any()} for i in down])
        every.append([{j for j in across if cut(i, j).all() and cut(i, j).shape[1] == columns} for i in down])
    return some, every


def flipped(heads, columns) -> list:
    """The same pairs by column: [heads][columns] sets of rows."""
    return [[{i for i, row in enumerate(rows) if j in row} for j in range(columns)] for rows in heads]


MASKS = [
    uniform_block(150, 210, 2, 32, 0.4, seed=3),
    uniform_block(210, 150, 3, 64, 0.6, causal=True, seed=4),
    uniform_block(200, 300, 2, 48, top_p=0.7, selection="importance", causal=True, seed=5),
    uniform_block(150, 210, 2, 40, 0.5, causal=True, seed=7),
    variable_block(210, 170, 2, 20, 1, 0.5, seed=8),
]
CORNERS = [uniform_block(96, 96 + n, 1, 32, 0.8, causal=True, seed=9) for n in (-1, 0, 1)]  # D12: about a tile's corner


@pytest.mark.parametrize("mask", MASKS + CORNERS,
                         ids=["plain", "causal_tall", "causal_48", "causal_40", "variable", "before", "at", "after"])
def test_lists_are_the_tiles_with_visible_cells(mask):
    """Both ways round: the listed tiles are those with a visible cell, the leading ones those with all visible."""
    some, every = tiles_of(mask, 16, 16)
    by_query, by_key = query_walk(mask, 6, 16, 16), key_walk(mask, 6, 16, 16)
    assert entries(by_query, by_query.counts) == some
    assert entries(by_query, by_query.full) == every
    assert entries(by_key, by_key.counts) == flipped(some, by_key.counts.shape[1])
    assert entries(by_key, by_key.full) == flipped(every, by_key.counts.shape[1])


def test_transposed_is_the_masks_own_transpose():
    """Where nothing is partial the lists by key are `BlockMask.by_key`, in its order, and longest is only a pad."""
    mask = uniform_block(256, 384, 2, 32, 0.3, seed=6)
    lists = tile_lists(mask.counts, mask.indices, mask.limits, block=32, rows=32, columns=32)
    counts, indices = mask.by_key()
    got = transposed(lists, column_tiles=12, longest=indices.shape[2])
    assert np.array_equal(got.counts, counts) and np.array_equal(got.indices, indices)
    longer = transposed(lists, column_tiles=12)
    assert longer.indices.shape[2] == 8 and np.array_equal(longer.indices[:, :, : indices.shape[2]], indices)


@pytest.mark.parametrize("name, heads", [("triton_vsa", 1), ("fa2_sparse", 2), ("triton_vsa", 4)])
def test_masks_per_kv_head_and_per_query_head(name, heads):
    """One mask, one a kv head, one a query head; ragged, causal, rows before the first key; every result."""
    mask = uniform_block(150, 130, heads, 32, 0.5, causal=True, seed=heads)
    problem = AttentionProblem(mask, 2, 4, 2, 24, "float32", 0.3)
    kernel = kernels.get(name)
    q, k, v, dout = tensors(problem, heads)
    want = attention_oracle(q, k, v, mask, 0.3, dout)
    got = jax.jit(functools.partial(run, kernel, 0.3))(kernel.prepare(problem, schedule=SMALL), q, k, v, dout)
    assert np.isneginf(want.lse).any()
    for label, value in got.items():
        assert error(value, getattr(want, label)) < 2e-6, label


def test_one_key_block_for_all_and_none_for_some():
    """Every query block of head 0 picks key block 0, whose dv sums them all; head 1 picks nothing at all."""
    picks = np.zeros((2, 4, 3), bool)
    picks[0, :, 0] = True
    bounds = [np.repeat(uniform_bounds(n, 16)[None], 2, 0) for n in (60, 40)]
    mask = from_bitmap(picks, *bounds, block=16, name="uniform_block")
    problem = AttentionProblem(mask, 1, 2, 2, 16, "float32")
    kernel = kernels.get("fa2_sparse")
    q, k, v, _ = tensors(problem)
    got = jax.jit(functools.partial(run, kernel, 0.0))(kernel.prepare(problem), q, k, v, jnp.ones_like(q))
    np.testing.assert_allclose(got["dv"][0, :16, 0], 60 / 16, rtol=1e-6)
    assert not np.asarray(got["dv"][0, 16:, 0]).any() and not np.asarray(got["dv"][0, :, 1]).any()
    assert not np.asarray(got["out"][0, :, 1]).any() and np.isneginf(got["lse"][0, 1]).all()


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("rows, keys", [(0, 70), (50, 0), (0, 0)])
def test_a_shard_of_no_keys_or_no_queries(name, rows, keys):
    """Out is 0 and lse -inf, no key gets a gradient; no list has a tile to name."""
    mask = uniform_block(50, 70, 1, 32, 0.6, seed=3).restrict(np.arange(rows), np.arange(keys))
    problem, kernel = AttentionProblem(mask, 1, 2, 1, 16, "float32"), kernels.get(name)
    got = run(kernel, 0.25, kernel.prepare(problem), *tensors(problem))
    assert np.isneginf(got.pop("lse")).all() and not any(np.asarray(x).any() for x in got.values())


def test_zero_padded_lists_mean_the_same():
    """Lists of a rank that has fewer entries, padded with zeros, give the same bits."""
    mask = uniform_block(80, 112, 2, 16, 0.4, causal=True, seed=9)
    problem = AttentionProblem(mask, 1, 2, 2, 16, "float32")
    kernel = kernels.get("triton_vsa")
    operands = kernel.prepare(problem, schedule=SMALL)
    wider = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 5)]) if x.ndim == 3 else x, operands)
    arrays = tensors(problem)
    passes = jax.jit(functools.partial(run, kernel, problem.scale))
    for label, value in passes(operands, *arrays).items():
        assert np.array_equal(value, passes(wider, *arrays)[label]), label


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("block, head_dim, dtype", [(64, 64, "bfloat16"), (128, 128, "bfloat16"), (16, 128, "float16"),
                                                    (40, 128, "float32")])
def test_lowers_to_an_h200(name, block, head_dim, dtype):
    """Both passes at the default tiles, cut to the block, lower to Triton modules for Hopper."""
    problem = AttentionProblem(uniform_block(400, 500, 2, block, 0.5, causal=True), 1, 8, 2, head_dim, dtype)
    assert lowered(kernels.get(name), problem) == (1, 2)
