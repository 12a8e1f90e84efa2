"""flex_sparse in JAX: lists with a predicate and logits of one's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.kernels import hopper_sparse
from jax_impl.kernels.flex_sparse import prepare
from jax_impl.kernels.hopper_sparse_pairs import PairTiles
from jax_impl.kernels.hopper_sparse_roles import RoleTiles
from tests.conformance import inputs, relative_error
from tests.jax_impl.interpret_patch import interpreted
from tests.jax_impl.kernels.test_hopper_sparse import in_ranges_of, judged, run
from workload.block_masks import from_bitmap, uniform_block
from workload.predicate import Predicate
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds

KERNEL = kernels.get("flex_sparse")


def even(b, h, i, j, q_values, kv_values):
    """Keys of an even number, by an array of the caller's."""
    return kv_values[0] == 0


def later(b, h, i, j, q_values, kv_values):
    """By arrays of both sides and the head."""
    return q_values[0] + h >= kv_values[0]


def tilted(score, b, h, i, j):
    """Past the tests' last key logits are huge."""
    return score * 0.5 + jnp.where(j < 200, (h + 1) * (j - i).astype(jnp.float32) / 128, 1e30)


def capped(score, b, h, i, j):
    return 2 * jnp.tanh(score / 2)


def by_arrays(problem, score_mod):
    """`later` and a score_mod."""
    q_array, kv_array = np.arange(problem.q_len) % 3, np.arange(problem.kv_len) % 4
    return Predicate(later, score_mod, (q_array.astype(np.int32),), (kv_array.astype(np.int32),))


def held_to_dense(problem, predicate, operands, races=False):
    """All five results against jnp over a dense mask, under the blocks and the predicate together; one batch entry."""
    mask, heads, group = problem.mask, range(problem.q_heads), problem.q_heads // problem.kv_heads
    arrays = [jnp.asarray(x, "bfloat16") for x in inputs(problem)]
    with interpreted(detect_races=races):
        got = jax.block_until_ready(run(KERNEL, problem.scale, operands, *arrays))
    i, j = jnp.arange(problem.q_len)[:, None], jnp.arange(problem.kv_len)[None, :]
    rows, columns = (tuple(jnp.asarray(x) for x in of) for of in (predicate.q_arrays, predicate.kv_arrays))
    mask_mod = predicate.mask_mod or (lambda *_: True)
    score_mod = predicate.score_mod or (lambda score, *_: score)
    seen = jnp.stack([
        mask.dense(h * mask.heads // problem.q_heads)
        & mask_mod(0, h, i, j, tuple(x[:, None] for x in rows), tuple(x[None] for x in columns)) for h in heads])

    def dense(q, k, v):
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        s = problem.scale * jnp.einsum("ihd,jhd->hij", q[0], k[0])
        s = jnp.stack([score_mod(s[h], 0, h, i, j) for h in heads])
        s = jnp.where(seen, s, -jnp.inf)
        some = jnp.isfinite(s).any(axis=2, keepdims=True)
        p = jnp.where(some, jax.nn.softmax(jnp.where(some, s, 0.0), axis=2), 0.0)
        lse = jnp.where(some[..., 0], jax.nn.logsumexp(jnp.where(some, s, 0.0), axis=2), -jnp.inf)
        return jnp.einsum("hij,jhd->ihd", p, v[0])[None], lse[None]

    wide = [x.astype(jnp.float32) for x in arrays]
    out, pull, lse = jax.vjp(dense, *wide[:3], has_aux=True)
    for label, want in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *pull(wide[3])), strict=True):
        assert relative_error(np.asarray(got[label], np.float64), np.asarray(want)) < 8e-3, label


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


@pytest.mark.parametrize("block, masks", [(128, 1), (48, 1), pytest.param(64, 2, marks=pytest.mark.slow)])
def test_a_predicate_and_logits_of_ones_own(block, masks):
    """Causal blocks, ragged both ways, under a list for both query heads and one for each; no races are found.

    Blocks of 48 stand on tiles of their own; predicate and logits are of tokens all the same.
    """
    problem = AttentionProblem(uniform_block(140, 200, masks, block, 0.6, causal=True, seed=2), 1, 2, 1, 64)
    predicate = by_arrays(problem, tilted)
    held_to_dense(problem, predicate, prepare(problem, predicate=predicate), races=True)


@pytest.mark.slow
@pytest.mark.parametrize("masks", [1, 2])
def test_a_predicate_in_ranges(masks, monkeypatch):
    """The backward a range of queries at a time: pieces are asked as the tokens that they are."""
    schedules = in_ranges_of(64, 64)
    monkeypatch.setattr(hopper_sparse, "default_schedules", lambda *_: schedules)
    problem = AttentionProblem(uniform_block(150, 140, masks, 64, 0.8, causal=True, seed=2), 1, 2, 1, 64)
    predicate = by_arrays(problem, tilted)
    operands = prepare(problem, predicate=predicate)
    assert len(operands.narrow.shared) > 1
    held_to_dense(problem, predicate, operands)


def test_no_races_where_rings_go_round():
    """Lists longer than the rings of queries and of what is loaded beside them, for a pair of key tiles and for one."""
    problem = AttentionProblem(uniform_block(190, 180, 1, 64, 1.0), 1, 1, 1, 64)
    predicate = by_arrays(problem, capped)
    operands = prepare(problem, predicate=predicate)
    schedules = operands.narrow.schedules
    short = dataclasses.replace(schedules.backward, pairs=PairTiles(2), roles=RoleTiles(2))
    narrow = dataclasses.replace(operands.narrow, schedules=dataclasses.replace(schedules, backward=short))
    held_to_dense(problem, predicate, dataclasses.replace(operands, narrow=narrow), races=True)


@pytest.mark.parametrize("predicate", [
    Predicate(even, None, (), (np.arange(320) % 2,)),
    Predicate(None, lambda score, b, h, i, j: jnp.where((j >= 290) & (i >= 3), score, -jnp.inf)),
], ids=["mask_mod", "score_mod"])
def test_blocks_that_are_listed_whole_are_asked_too(predicate):
    """Logits of -inf hide whole steps of keys, and rows. One row tile: the thread block's other warpgroup has none."""
    problem = AttentionProblem(uniform_block(60, 320, 1, 64, 1.0), 1, 1, 1, 64)
    held_to_dense(problem, predicate, prepare(problem, predicate=predicate))


def test_without_a_predicate_blocks_of_64_are_those_of_vsa():
    """Nothing is asked twice, nor slower: both passes are the same programs."""
    problem = AttentionProblem(uniform_block(200, 300, 2, 64, 0.5, causal=True), 1, 4, 2, 64)
    q, kv = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (problem.q_shape, problem.kv_shape))

    def program(kernel):
        return str(jax.make_jaxpr(functools.partial(run, kernel, problem.scale))(kernel.prepare(problem), q, kv, kv, q))

    assert program(KERNEL) == program(kernels.get("vsa"))


@pytest.mark.parametrize("block", [128, 48])
@pytest.mark.parametrize("rows, keys", [(0, 200), (140, 0), (0, 0)])
def test_a_shard_of_no_keys_or_no_queries(block, rows, keys):
    """Out is 0 and lse -inf, no key gets a gradient; no kernel runs."""
    mask = uniform_block(140, 200, 1, block, 0.6, seed=2).restrict(np.arange(rows), np.arange(keys))
    problem = AttentionProblem(mask, 1, 2, 1, 64)
    got = run(KERNEL, problem.scale, prepare(problem), *(jnp.asarray(x, jnp.bfloat16) for x in inputs(problem)))
    assert np.isneginf(got.pop("lse")).all() and not any(np.asarray(x).any() for x in got.values())
    assert [x.shape[1] for x in got.values()] == [rows, rows, keys, keys]


OWN = Predicate(later, tilted, (np.zeros(1000, np.int32),), (np.zeros(1100, np.int32),))


@pytest.mark.parametrize("head_dim, block, predicate", [
    (64, 256, OWN), (128, 256, OWN), (128, 192, None), (128, 192, OWN), (64, 48, OWN)],
    ids=lambda x: "own" if x is OWN else str(x))
def test_lowers_to_an_h200(head_dim, block, predicate):
    problem = AttentionProblem(uniform_block(1000, 1100, 2, block, 0.5, causal=True), 2, 4, 2, head_dim)
    shape = lambda s, d=jnp.bfloat16: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    operands = jax.tree.map(lambda x: shape(x.shape, x.dtype), prepare(problem, predicate=predicate))
    args = (operands, shape(problem.q_shape), shape(problem.kv_shape), shape(problem.kv_shape), shape(problem.q_shape))
    passes = functools.partial(run, KERNEL, problem.scale)
    text = jax.jit(passes).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 4  # both passes, what the backward starts from, and dq brought into rows
