"""flex_sparse in JAX: lists with a predicate and logits of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks

from jax_impl import kernels
from jax_impl.kernels.flex_sparse import prepare
from tests.conformance import inputs, relative_error
from tests.jax_impl.interpret_patch import interpreted
from tests.jax_impl.kernels.test_hopper_sparse import judged, run
from workload.block_masks import from_bitmap, uniform_block
from workload.predicate import Predicate
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds

KERNEL = kernels.get("flex_sparse")


def even(b, h, i, j, q_values, kv_values):
    """Keys of an even number, by an array of the caller's."""
    return kv_values[0] == 0


def tilted(score, b, h, i, j):
    return score * 0.5 + (j - i).astype(jnp.float32) / 128


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_lists_per_query_head(head_dim):
    """Two query heads on one kv head, and no key block that both of them see; the first sees none in its last rows."""
    picks = np.array([[[1, 0, 0], [0, 0, 0]], [[0, 1, 1], [1, 1, 0]]], bool)
    bounds = [np.repeat(uniform_bounds(n, 128)[None], 2, 0) for n in (140, 270)]
    mask = from_bitmap(picks, *bounds, block=128, name="uniform_block")
    judged("flex_sparse", AttentionProblem(mask, 1, 2, 1, head_dim))


@pytest.mark.slow
@pytest.mark.parametrize("block, heads, head_dim", [
    (128, (2, 2, 2), 64), (64, (2, 4, 2), 64), (16, (1, 2, 2), 128), (20, (2, 2, 2), 64), (64, (4, 4, 2), 128)])
def test_lists_alone(block, heads, head_dim):
    """Causal blocks, ragged both ways; sizes that tiles divide, that divide tiles, and neither.

    heads: of the mask, queries, keys: lists for all, per kv head and per query head.
    """
    mask = uniform_block(150, 270, heads[0], block, 0.7, causal=True, seed=1)
    judged("flex_sparse", AttentionProblem(mask, 1, *heads[1:], head_dim))


@pytest.mark.parametrize("block", [128, 48])
def test_a_predicate_and_logits_of_ones_own(block):
    """Every result against dense jnp under the blocks, the predicate and the changed logits together.

    Blocks of 48 stand on tiles of their own; predicate and logits are of tokens all the same. No races are found.
    """
    problem = AttentionProblem(uniform_block(140, 200, 1, block, 0.6, causal=True, seed=2), 1, 2, 1, 64)
    odd = np.arange(200, dtype=np.int32) % 2
    q, k, v, dout = (jnp.asarray(x, "bfloat16") for x in inputs(problem))
    with interpreted(detect_races=True):
        operands = prepare(problem, predicate=Predicate(even, tilted, (), (odd,)))
        got = run(KERNEL, problem.scale, operands, q, k, v, dout)
        assert not callbacks.get_races().races_found
    seen = jnp.asarray(problem.mask.dense() & (odd == 0))
    i, j = jnp.arange(140)[:, None], jnp.arange(200)[None, :]

    def dense(q, k, v):
        s = tilted(problem.scale * jnp.einsum("bihd,bjkd->bhij", q, k), 0, 0, i, j)
        some = seen.any(axis=1)
        s = jnp.where(seen, s, -jnp.inf)
        p = jnp.where(some[:, None], jax.nn.softmax(jnp.where(some[:, None], s, 0.0), axis=-1), 0.0)
        return jnp.einsum("bhij,bjkd->bihd", p, v)

    wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    out, pull = jax.vjp(dense, *wide[:3])
    for label, want in zip(("out", "dq", "dk", "dv"), (out, *pull(wide[3])), strict=True):
        assert relative_error(np.asarray(got[label], np.float64), np.asarray(want)) < 8e-3, label


@pytest.mark.parametrize("predicate, seen", [
    (Predicate(even, None, (), (np.arange(320) % 2,)), np.arange(320) % 2 == 0),
    (Predicate(None, lambda score, b, h, i, j: jnp.where(j >= 290, score, -jnp.inf)), np.arange(320) >= 290),
], ids=["mask_mod", "score_mod"])
def test_blocks_that_are_listed_whole_are_asked_too(predicate, seen):
    """Logits of -inf hide whole steps of keys. One row tile: the thread block's other warpgroup has an empty one."""
    problem = AttentionProblem(uniform_block(60, 320, 1, 64, 1.0), 1, 1, 1, 64)
    q, k, v, _ = (jnp.asarray(x, "bfloat16") for x in inputs(problem))
    with interpreted():
        out, lse = jax.block_until_ready(KERNEL.forward(q, k, v, prepare(problem, predicate=predicate), problem.scale))
    q, k, v = (x[0, :, 0].astype(jnp.float32) for x in (q, k, v))
    s = jnp.where(seen, problem.scale * q @ k.T, -jnp.inf)
    assert relative_error(np.asarray(out[0, :, 0], np.float64), np.asarray(jax.nn.softmax(s) @ v)) < 8e-3
    assert relative_error(np.asarray(lse[0, 0], np.float64), np.asarray(jax.nn.logsumexp(s, axis=1))) < 1e-4


@pytest.mark.parametrize("block", [128, 48])
@pytest.mark.parametrize("rows, keys", [(0, 200), (140, 0), (0, 0)])
def test_a_shard_of_no_keys_or_no_queries(block, rows, keys):
    """Out is 0 and lse -inf, no key gets a gradient; no kernel runs."""
    mask = uniform_block(140, 200, 1, block, 0.6, seed=2).restrict(np.arange(rows), np.arange(keys))
    problem = AttentionProblem(mask, 1, 2, 1, 64)
    got = run(KERNEL, problem.scale, prepare(problem), *(jnp.asarray(x, jnp.bfloat16) for x in inputs(problem)))
    assert np.isneginf(got.pop("lse")).all() and not any(np.asarray(x).any() for x in got.values())
    assert [x.shape[1] for x in got.values()] == [rows, rows, keys, keys]


OWN = Predicate(even, tilted, (), (np.zeros(1100, np.int32),))


@pytest.mark.parametrize("head_dim, block, predicate", [
    (64, 256, OWN), (128, 256, OWN), (128, 192, None), (128, 192, OWN)], ids=lambda x: "own" if x is OWN else str(x))
def test_lowers_to_an_h200(head_dim, block, predicate):
    problem = AttentionProblem(uniform_block(1000, 1100, 2, block, 0.5, causal=True), 2, 4, 2, head_dim)
    shape = lambda s, d=jnp.bfloat16: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    operands = jax.tree.map(lambda x: shape(x.shape, x.dtype), prepare(problem, predicate=predicate))
    args = (operands, shape(problem.q_shape), shape(problem.kv_shape), shape(problem.kv_shape), shape(problem.q_shape))
    passes = functools.partial(run, KERNEL, problem.scale)
    text = jax.jit(passes).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 4  # both passes, what the backward starts from, and dq brought into rows
