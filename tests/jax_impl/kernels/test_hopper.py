"""What the conformance suite does not ask of the Hopper kernels: partials, determinism, predicates, walks, lowering."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl import kernels
from jax_impl.kernels import flex, hopper_add, hopper_masks, hopper_order
from jax_impl.kernels.hopper_backward import BackwardTiles
from jax_impl.kernels.hopper_forward import COMPILER, ForwardTiles
from jax_impl.kernels.hopper_kernel import Tiles, default_tiles
from jax_impl.kernels.hopper_key_walk import KeyWalk
from jax_impl.kernels.hopper_masks import Walk
from jax_impl.kernels.hopper_statistics import TERMS, begin, ones, statistics
from tests import conformance
from tests.jax_impl import interpret_patch
from tests.jax_impl.interpret_patch import interpreted
from workload import masks
from workload.oracle import attention_oracle
from workload.predicate import Predicate
from workload.problem import AttentionProblem

DTYPE = "bfloat16"
BUDGET = 6e-3  # bfloat16 rounds a result to 2e-3; three times that


def arrays(problem, seed=3):
    """q, k, v, dout in the problem's dtype."""
    return [jnp.asarray(x, problem.dtype) for x in conformance.inputs(problem, seed)]


def passes(name, problem, inputs, operands, **options):
    """out, lse, dq, dk, dv of a kernel in the interpreter."""
    kernel, (q, k, v, dout) = kernels.get(name), inputs
    forward = {"out_dtype": options["grad_dtype"]} if "grad_dtype" in options else {}
    with interpreted():
        out, lse = kernel.forward(q, k, v, operands, problem.scale, **forward)
        grads = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale, **options)
    return out, lse, *grads


def close(got, want, budget=BUDGET):
    """Asserts the relative L2 error of each result."""
    for label, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        error = conformance.relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64))
        assert error <= budget, f"{label}: {error:.2e}"


@pytest.mark.slow
def test_partials_of_two_key_halves_add_up_in_float32():
    mask = masks.causal(140, 200)
    problem = AttentionProblem(mask, 1, 2, 1, 64, DTYPE)
    inputs = q, k, v, dout = arrays(problem)
    wide = [np.asarray(x, np.float64) for x in inputs]
    want = attention_oracle(*wide[:3], mask, problem.scale, wide[3])
    delta = jnp.einsum("bshd,bshd->bhs", jnp.asarray(want.out, jnp.float32), dout.astype(jnp.float32))
    dq, sides = 0.0, []
    for keys in (np.arange(72), np.arange(72, 200)):
        part = AttentionProblem(mask.restrict(np.arange(140), keys), 1, 2, 1, 64, DTYPE)
        kernel = kernels.get("flashmask")
        with interpreted():
            grads = kernel.backward(
                q, k[:, keys], v[:, keys], None, jnp.asarray(want.lse, jnp.float32), dout,
                kernel.prepare(part), problem.scale, grad_dtype=jnp.float32, delta=delta,
            )
        assert {g.dtype for g in grads} == {jnp.dtype("float32")}
        dq, sides = dq + grads[0], [*sides, grads[1:]]
    dk, dv = (jnp.concatenate(x, axis=1) for x in zip(*sides, strict=True))
    for got, expected in ((dq, want.dq), (dk, want.dk), (dv, want.dv)):
        assert conformance.relative_error(got, expected) < BUDGET


def test_deterministic_backward_is_bit_equal_twice():
    problem = AttentionProblem(masks.causal(70, 130), 1, 1, 1, 64, DTYPE)
    inputs = arrays(problem)
    operands = kernels.get("fa3").prepare(problem, deterministic=True)
    first, second = (passes("fa3", problem, inputs, operands) for _ in range(2))
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    want = attention_oracle(*(np.asarray(x, np.float64) for x in inputs[:3]), problem.mask, problem.scale,
                            np.asarray(inputs[3], np.float64))
    close(first, (want.out, want.lse, want.dq, want.dk, want.dv))


def test_a_predicate_and_a_score_mod_of_ones_own_with_their_gradient():
    problem = AttentionProblem(masks.full(60, 70), 1, 2, 1, 64, DTYPE)
    group = np.arange(70) // 30
    predicate = Predicate(
        mask_mod=lambda b, h, i, j, q_values, kv_values: (q_values[0] == kv_values[0]) | (j % 3 == i % 3),
        score_mod=lambda s, b, h, i, j: jnp.where(
            i == 5, -jnp.inf, 5.0 * jnp.tanh(s / 5.0) - 0.01 * (h + 1) * jnp.abs(i - j)),
        q_arrays=(group[:60],),
        kv_arrays=(group,),
    )
    inputs = arrays(problem)
    got = passes("flex", problem, inputs, flex.prepare(problem, predicate=predicate))
    i, j = np.arange(60)[:, None], np.arange(70)[None, :]
    seen = (group[:60][:, None] == group[None, :]) | (j % 3 == i % 3)

    def dense(q, k, v):
        s = jnp.einsum("bihd,bjd->bhij", q, k[:, :, 0]) * problem.scale
        heads = jnp.arange(2)[None, :, None, None]
        some = i != 5  # a row whose logits are all -inf sees nothing
        s = jnp.where(some, jnp.where(seen, predicate.score_mod(s, 0, heads, i, j), -jnp.inf), 0.0)
        p = jnp.where(some, jax.nn.softmax(s), 0.0)
        lse = jnp.where(some[:, 0], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
        return jnp.einsum("bhij,bjd->bihd", p, v[:, :, 0]), lse

    wide = [x.astype(jnp.float32) for x in inputs]
    (out, lse), pull = jax.vjp(dense, *wide[:3])
    close(got, (out, lse, *pull((wide[3], jnp.zeros_like(lse)))), 2 * BUDGET)


def test_a_predicate_that_differs_by_batch_entry_and_head():
    """Head 0 of batch entry 0 sees the first tile of keys alone: without `per_head` no head would visit another."""
    problem = AttentionProblem(masks.full(40, 150), 2, 2, 1, 64, DTYPE)
    predicate = Predicate(mask_mod=lambda b, h, i, j, *_: j < 30 + 60 * h + 50 * b)
    inputs = arrays(problem)
    got = passes("flex", problem, inputs, flex.prepare(problem, predicate=predicate, per_head=True))
    wide = [np.asarray(x, np.float64) for x in inputs]
    for b in range(2):
        for h in range(2):
            q, k, v, dout = (x[b : b + 1, :, h % x.shape[2], None] for x in wide)
            bound = np.full(40, 30 + 60 * h + 50 * b)
            want = attention_oracle(q, k, v, masks.from_intervals([0 * bound], [bound], 150), problem.scale, dout)
            mine = got[0][b : b + 1, :, h, None], got[1][b : b + 1, h, None], got[2][b : b + 1, :, h, None]
            for x, y in zip(mine, (want.out, want.lse, want.dq), strict=True):
                assert conformance.relative_error(x, y) < BUDGET, (b, h)


@pytest.mark.parametrize("scale", [pytest.param(-0.2, marks=pytest.mark.slow), 0.0])
def test_a_scale_that_is_not_positive(scale):
    problem = AttentionProblem(masks.causal(61, 70), 1, 2, 2, 64, DTYPE, scale)
    inputs = arrays(problem)
    got = passes("flashmask", problem, inputs, kernels.get("flashmask").prepare(problem))
    wide = [np.asarray(x, np.float64) for x in inputs]
    want = attention_oracle(*wide[:3], problem.mask, scale, wide[3])
    close(got, (want.out, want.lse, want.dq, want.dk, want.dv))


@pytest.mark.parametrize("name,arguments", [
    ("full", ()), ("causal", ()), ("full_sliding_window", (50,)), ("causal_sliding_window", (37,)),
    ("global_sliding_window", (70, 19)), ("prefix_lm_causal", (93,)),
])
@pytest.mark.parametrize("lengths", [(300, 300), (290, 411), (333, 201)])
def test_walks_visit_every_tile_with_a_visible_cell_and_test_every_partial_one(name, arguments, lengths):
    mask = masks.STATIC_MASKS[name](*lengths, *arguments)
    want, policy = mask.tile_runs(128, 64).classes(), hopper_masks.intervals(mask, 128, 64)
    for tile in range(len(want)):
        walk = policy.walk(policy.operands(), None, jnp.int32(tile))
        columns = [int(walk.column(jnp.int32(n))) for n in range(int(walk.total))]
        partial, full = columns[: int(walk.partial)], columns[int(walk.partial) :]
        assert len(set(columns)) == len(columns)
        assert set(full) == set(np.flatnonzero(want[tile] == 2))
        assert set(partial) >= set(np.flatnonzero(want[tile] == 1))


@pytest.mark.parametrize("lengths", [(290, 411), (333, 201)])
@pytest.mark.parametrize("name", [name for name in masks.STATIC_MASKS if name != "full"])
def test_a_masks_predicate_is_the_mask(name, lengths):
    documents = (61, 0, 1, 90, lengths[1] - 152)
    arguments = {
        "full_sliding_window": (37,), "causal_sliding_window": (37,), "global_sliding_window": (70, 19),
        "prefix_lm_causal": (93,), "shared_question": ([documents[:2], documents[2:]],), "causal": (),
        "prefix_lm_document": (documents, (20, 0, 1, 90, 7)), "block_causal_document": (documents, 24),
    }.get(name, (documents,))
    mask = masks.STATIC_MASKS[name](*lengths, *arguments)
    predicate = flex.predicate_of(mask)
    values = [x[:, None] for x in predicate.q_arrays], [x[None, :] for x in predicate.kv_arrays]
    i, j = np.arange(lengths[0])[:, None], np.arange(lengths[1])[None, :]
    np.testing.assert_array_equal(np.broadcast_to(predicate.mask_mod(0, 0, i, j, *values), lengths), mask.dense())
    assert predicate.mask_mod == flex.predicate_of(mask).mask_mod, "a mask prepared twice would compile twice"
    found = flex._classes(predicate.mask_mod, predicate.q_arrays, predicate.kv_arrays, lengths, (128, 64), [(0, 0)])
    np.testing.assert_array_equal(found, mask.tile_runs(128, 64).classes())


@pytest.mark.parametrize("q_heads,kv_heads,tokens,want", [
    (64, 8, 8192, (2, 4)), (64, 8, 32768, (2, 4)), (64, 64, 8192, (2, 1)),  # as measured
    (64, 8, 1024, (8, 2)),  # all kv heads side by side, and two parts for a block a processor
    (8, 1, 1024, (1, 8)), (6, 2, 65536, (2, 3)), (4, 4, 128, (4, 1)),
])
def test_heads_in_work_fit_the_cache_and_keep_the_processors_busy(q_heads, kv_heads, tokens, want):
    problem = AttentionProblem(masks.causal(tokens, tokens), 1, q_heads, kv_heads, 128)
    tiles = kernels.get("flashmask").prepare(problem).tiles.key_major
    assert (tiles.side, tiles.split) == want
    shard = AttentionProblem(problem.mask.restrict(np.arange(tokens), np.arange(tokens)), 1, q_heads, kv_heads, 128)
    assert kernels.get("flashmask").prepare(shard).tiles.key_major == tiles, "ranks share one program"


@pytest.mark.parametrize("queries,keys,split", [
    (8192, 32768, 1), (8192, 524288, 1), (8192, 16384, 4), (16384, 131072, 4),  # a rank's queries, gathered keys
])
def test_heads_stay_together_where_keys_are_many_and_the_queries_fit_the_cache(queries, keys, split):
    problem = AttentionProblem(masks.causal(queries, keys), 1, 64, 8, 128)
    assert default_tiles(problem).key_major.split == split


@pytest.mark.parametrize("name", ["causal_document", "full_document", "causal", "causal_sliding_window"])
def test_thread_blocks_come_once_a_document_after_another_the_heaviest_first(name):
    lengths, tokens, heads, parts = (300, 1100, 700, 12), 2112, 4, 2
    arguments = {"causal": (), "causal_sliding_window": (300,)}.get(name, (lengths,))
    by_key = masks.STATIC_MASKS[name](tokens, tokens, *arguments).transpose()
    weight = by_key.tile_runs(128, 64).classes().sum(axis=1)
    order = hopper_order.block_order(by_key, 128, heads, parts, weight) - 1
    np.testing.assert_array_equal(np.sort(order), np.arange(len(weight) * heads * parts))
    tile, part, head = order // (heads * parts), order // heads % parts, order % heads
    document = np.zeros(len(weight), int)
    if name.endswith("document"):
        document = np.searchsorted(np.cumsum(lengths), np.arange(len(weight)) * 128 + 64, side="right")
        document = np.unique(document, return_inverse=True)[1]
    np.testing.assert_array_equal(hopper_order.components(by_key, 128, len(weight)), document)
    came = list(dict.fromkeys(document[tile]))
    assert came == sorted(came, key=lambda d: -weight[document == d].max())
    side = 4  # so few tiles keep no GPU busy unless all heads run side by side
    for key in ("document", "part"):
        runs = np.stack([document[tile], head // side, part][: 1 if key == "document" else 3])
        changes = 1 + (np.diff(runs, axis=1) != 0).any(axis=0).sum()
        assert changes == len(np.unique(runs, axis=1).T), f"a {key} comes in pieces"
    same = (np.diff(document[tile]) == 0) & (np.diff(part) == 0)
    assert (np.diff(weight[tile])[same] <= 0).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_nobody_sees_is_no_block_where_parts_are_added(parts):
    """Elsewhere it has zeros to write."""
    heads, weight = 4, np.arange(12, 3, -1) * (np.arange(9) < 3)
    order = hopper_order.block_order(masks.full(1100, 1100), 128, heads, parts, weight)
    every = np.arange(9 * parts * heads)
    want = every[(weight[every // (parts * heads)] > 0) | (parts == 1)]
    np.testing.assert_array_equal(np.sort(order[: len(want)]) - 1, want)
    assert len(order) == len(every) and not order[len(want) :].any(), "the same size for every mask"


@pytest.mark.parametrize("q_heads,kv_heads,tokens,want", [
    (64, 8, 1024, 64), (64, 8, 2048, 32), (64, 8, 8192, 8), (64, 64, 8192, 4), (8, 8, 1024, 8), (1, 1, 200, 1)])
def test_the_forward_has_few_heads_in_work_that_fill_the_card_and_fit_the_cache(q_heads, kv_heads, tokens, want):
    problem = AttentionProblem(masks.full(tokens, tokens), 1, q_heads, kv_heads, 128, DTYPE)
    first = np.asarray(kernels.get("flashmask").prepare(problem).forward.order)[:132, 1]
    assert set(first % q_heads) == set(range(want))


@pytest.mark.parametrize("q_heads,kv_heads,tiles,want", [
    (64, 8, 63, 8), (64, 8, 62, 16), (64, 64, 63, 8), (64, 64, 62, 16), (6, 6, 130, 6), (12, 6, 130, 4), (8, 2, 7, 8)])
def test_heads_that_have_four_items_a_processor_are_those_of_whole_kv_heads(q_heads, kv_heads, tiles, want):
    assert hopper_order.heads_with_work(q_heads, kv_heads, tiles) == want


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("batch,heads,side,tiles,waves", [
    (1, 8, 8, 5, 1), (2, 6, 3, 41, 2), (1, 64, 32, 64, 4), (1, 1, 1, 1, 1)])
def test_every_item_is_dealt_once_and_each_wave_evenly(batch, heads, side, tiles, waves, greedy, monkeypatch):
    weight = np.random.default_rng(0).integers(0, 40, tiles)
    if not greedy:
        monkeypatch.setattr(hopper_order, "GREEDY", 0)
    table = hopper_order.shares(batch, heads, side, 132, waves, weight)
    dealt = [row[1 : 1 + row[0]] for row in table]
    items = np.concatenate(dealt)
    np.testing.assert_array_equal(np.sort(items), np.arange(batch * heads * tiles))
    loads = np.array([(weight[x // (batch * heads)] + hopper_order.STARTS).sum() for x in dealt]).reshape(waves, -1)
    assert loads.shape[1] == min(132, batch * heads * tiles)
    if greedy:
        assert (np.ptp(loads, axis=1) <= weight.max() + hopper_order.STARTS).all()
    halves = loads.sum(axis=1) / loads.sum()
    want = [2.0**-n for n in range(1, waves)] + [2.0 ** -(waves - 1)]
    np.testing.assert_allclose(halves, want, atol=0.02)
    uneven = np.where(np.arange(tiles) == 0, 10_000, 0)  # one tile holds nearly all the work
    other = hopper_order.shares(batch, heads, side, 132, waves, uneven)
    assert other.shape == table.shape, "another mask would compile anew"
    np.testing.assert_array_equal(np.sort(np.concatenate([row[1 : 1 + row[0]] for row in other])), np.sort(items))


def test_three_bfloat16_terms_are_a_float32():
    drawn = np.random.default_rng(0).normal(size=1000) * 10.0 ** np.arange(-5, 5).repeat(100)
    x = np.concatenate([drawn, [0.0, -np.inf]])
    terms = jax.jit(statistics)(jnp.asarray(x, jnp.float32), None)  # compiled, so that no rounding may be left out
    assert terms.dtype == jnp.bfloat16 and terms.shape == (1002, 16)
    assert np.isfinite(np.asarray(terms, np.float64)).all()
    total = np.asarray(terms[:, :3], np.float64).sum(axis=1)
    np.testing.assert_allclose(total[:-1], x[:-1].astype(np.float32), rtol=2**-23)
    assert total[-1] < -1e29 and not np.asarray(terms[:, 3:], np.float64).any()


def test_a_product_with_ones_adds_all_terms_of_its_vector():
    shape = (2, 64, TERMS)

    def body(out_g, out_s):
        for vector in range(2):
            out_s[vector] = ones(vector)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    with interpreted():
        out = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(shape, DTYPE), compiler_params=COMPILER,
                           scratch_types={"out_s": plgpu.SMEM(shape, DTYPE)})()
    vectors = np.random.default_rng(0).normal(size=(2, 40)).astype(np.float32)
    terms = np.asarray(jax.jit(statistics)(*vectors), np.float64)
    got = np.asarray(out, np.float64) @ terms.T
    np.testing.assert_allclose(got, np.broadcast_to(vectors[:, None], got.shape), rtol=2**-23)


@pytest.mark.parametrize("tile", [0, 1, 5, 19])
@pytest.mark.parametrize("full", [1, 7, 40])
def test_full_steps_of_neighbouring_walks_begin_apart_and_come_once(tile, full):
    walk = KeyWalk(None, [], None, 1, jnp.int32(tile))
    came = [int(walk._apart(Walk(3, 3 + full, None), jnp.int32(n))) for n in range(3, 3 + full)]
    assert sorted(came) == list(range(3, 3 + full)) and came[0] == 3 + min(tile % 16, full) % full


@pytest.mark.slow
def test_split_heads_add_up():
    problem = AttentionProblem(masks.causal(61, 70), 1, 4, 2, 64, DTYPE)
    inputs = arrays(problem)
    operands = kernels.get("flashmask").prepare(problem, tiles=Tiles(key_major=BackwardTiles(columns=128, split=2)))
    wide = [np.asarray(x, np.float64) for x in inputs]
    want = attention_oracle(*wide[:3], problem.mask, problem.scale, wide[3])
    close(passes("flashmask", problem, inputs, operands), (want.out, want.lse, want.dq, want.dk, want.dv))


def test_a_tile_of_keys_that_nobody_sees_costs_nothing_where_heads_are_split(monkeypatch):
    """Its gradients are zeros, and its thread blocks add nothing: there are the other tile's additions alone."""
    added = []
    monkeypatch.setattr(interpret_patch._AddTask, "lock", _Counting(added))
    mask = masks.from_intervals([np.zeros(60, int)], [np.full(60, 100)], 300)
    problem = AttentionProblem(mask, 1, 2, 1, 64, DTYPE)
    q, k, v, dout = arrays(problem)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = attention_oracle(*wide[:3], mask, problem.scale, wide[3])
    kernel, out, lse = kernels.get("flashmask"), jnp.asarray(want.out, DTYPE), jnp.asarray(want.lse, jnp.float32)
    operands = kernel.prepare(problem, tiles=Tiles(key_major=BackwardTiles(columns=128, split=2)))
    with interpreted():
        grads = kernel.backward(q, k, v, out, lse, dout, operands, problem.scale)
    for got, expected in zip(grads, (want.dq, want.dk, want.dv), strict=True):
        assert conformance.relative_error(np.asarray(got, np.float64), expected) < BUDGET
    assert not np.asarray(grads[1][:, 100:]).any() and not np.asarray(grads[2][:, 100:]).any()
    # Of two heads' blocks, of two warpgroups: dq of the one step and of nothing before it, dk and dv.
    assert len(added) == 2 * 2 * (2 + 2)


class _Counting:
    """A lock that notes each time it is taken."""

    def __init__(self, taken: list):
        self._lock, self._taken = threading.Lock(), taken

    def __enter__(self):
        self._lock.acquire()
        self._taken.append(1)

    def __exit__(self, *_):
        self._lock.release()


def lowered(name, problem, **options):
    """Lowers both passes for a GPU; layouts, shared memory and TMA shapes are checked on the way."""
    kernel, passes_options = kernels.get(name), {k: options.pop(k) for k in ("grad_dtype",) if k in options}
    operands = kernel.prepare(problem, **options)

    def struct(shape, dtype=problem.dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k, lse = struct(problem.q_shape), struct(problem.kv_shape), struct(
        (problem.batch, problem.q_heads, problem.q_len), "float32"
    )
    forward = {"out_dtype": passes_options["grad_dtype"]} if passes_options else {}
    for f, args in (
        (lambda q, k, v, o: kernel.forward(q, k, v, o, problem.scale, **forward), (q, k, k, operands)),
        (
            lambda q, k, v, out, lse, dout, o: kernel.backward(
                q, k, v, out, lse, dout, o, problem.scale, **passes_options
            ),
            (q, k, k, q, lse, q, operands),
        ),
    ):
        assert "mosaic_gpu" in jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


TWO_ANSWERS = masks.shared_question(1003, 2001, [[500, 700, 801]])
NARROW = Tiles(forward=ForwardTiles(columns=64, q_registers=False))
SPLIT = Tiles(key_major=BackwardTiles(split=2))


@pytest.mark.parametrize("kernel,mask,head_dim,options", [
    ("fa3", masks.causal(1003, 2001), 128, {}),
    ("fa3", masks.full_sliding_window(1003, 2001, 300), 64, {"deterministic": True}),
    ("flashmask", TWO_ANSWERS, 128, {"grad_dtype": jnp.float32}),
    ("flex", masks.causal_document(1003, 2001, [500, 700, 801]), 128, {"deterministic": True}),
    pytest.param("fa3", masks.full(1024, 1024), 128, {"tiles": NARROW}, marks=pytest.mark.slow),
    pytest.param("flashmask", TWO_ANSWERS, 64, {"deterministic": True}, marks=pytest.mark.slow),
    pytest.param("flashmask", masks.causal(1003, 2001), 128, {"tiles": SPLIT}, marks=pytest.mark.slow),
])
def test_lowers_for_a_gpu(kernel, mask, head_dim, options):
    lowered(kernel, AttentionProblem(mask, 2, 4, 2, head_dim, "float16"), **options)


@pytest.mark.parametrize("head_dim,stages", [(64, 2), (128, 2), pytest.param(128, 3, marks=pytest.mark.slow)])
def test_the_race_detector_finds_none(head_dim, stages):
    """Of one thread block for all row tiles, whose rings of keys, queries and douts go round more than once."""
    problem = AttentionProblem(masks.causal(70, 130), 1, 3, 1, head_dim, DTYPE)
    q, k, v, dout = arrays(problem)
    kernel = kernels.get("flashmask")
    backward = BackwardTiles(columns=8192 // head_dim, stages=stages)
    tiles = Tiles(forward=ForwardTiles(columns=64, processors=1), key_major=backward)
    operands = kernel.prepare(problem, tiles=tiles)
    with interpreted(detect_races=True):
        out, lse = kernel.forward(q, k, v, operands, problem.scale)
        grads = jax.block_until_ready(kernel.backward(q, k, v, out, lse, dout, operands, problem.scale))
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = attention_oracle(*wide[:3], problem.mask, problem.scale, wide[3])
    close((out, lse, *grads), (want.out, want.lse, want.dq, want.dk, want.dv))


def test_the_race_detector_finds_one_that_another_kernel_comes_behind(monkeypatch):
    """Of an addition to dq that overwrites what the one before has yet to read."""
    monkeypatch.setattr(hopper_add, "wait", lambda pending=0: None)
    problem = AttentionProblem(masks.full(128, 128), 1, 1, 1, 64, DTYPE)
    q, k, v, dout = arrays(problem)
    kernel, lse = kernels.get("flashmask"), jnp.zeros((1, 1, 128), jnp.float32)
    with pytest.raises(AssertionError), interpreted(detect_races=True):
        jax.block_until_ready(kernel.backward(q, k, v, q, lse, dout, kernel.prepare(problem), problem.scale))


def test_walks_of_no_step_and_of_one_beside_longer_ones():
    """What a step does for the next one, where there is none: of heads that are apart."""
    late = np.where(np.arange(200) >= 195, 400, 0)
    mask = masks.from_intervals([np.zeros(200, int), late * 380 // 400], [np.full(200, 100), late], 400)
    steps = masks.from_intervals(mask.starts, mask.ends, 400).transpose().tile_runs(128, 64).classes()
    assert (steps > 0).sum(axis=1).tolist() == [4, 0, 1, 1]
    problem = AttentionProblem(mask, 1, 2, 2, 128, DTYPE)
    q, k, v, dout = arrays(problem)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = attention_oracle(*wide[:3], mask, problem.scale, wide[3])
    kernel, out, lse = kernels.get("flashmask"), jnp.asarray(want.out, DTYPE), jnp.asarray(want.lse, jnp.float32)
    with interpreted(detect_races=True):
        grads = kernel.backward(q, k, v, out, lse, dout, kernel.prepare(problem), problem.scale)
        grads = jax.block_until_ready(grads)
    for got, expected in zip(grads, (want.dq, want.dk, want.dv), strict=True):
        assert conformance.relative_error(np.asarray(got, np.float64), expected) < BUDGET
    assert not np.asarray(grads[1][:, 128:256]).any() and not np.asarray(grads[2][:, 128:256]).any()


@pytest.mark.parametrize("head_dim,out_dtype", [(64, DTYPE), (128, "float32")])
def test_a_backward_begins_with_terms_of_lse_and_delta_and_with_zeros(head_dim, out_dtype):
    rng, (batch, tokens, heads), columns, scale = np.random.default_rng(0), (2, 72, 3), 8192 // head_dim, 0.3
    out, dout = (jnp.asarray(rng.normal(size=(batch, tokens, heads, head_dim)), x) for x in (out_dtype, DTYPE))
    lse = np.pad(rng.normal(size=(batch, heads, tokens)), ((0, 0), (0, 0), (0, 56)), constant_values=-np.inf)
    lse[0, 1, 5] = -np.inf
    lse = jnp.asarray(lse, jnp.float32)
    with interpreted():
        terms, zeros = begin(out, dout, lse, scale, columns)
        without, _ = begin(out, dout, lse, None, columns)
    assert terms.shape == (batch, heads, 128, 16) and zeros.shape == (batch, heads * 2, head_dim // 2, 128)
    assert not np.asarray(zeros).any()
    lse, terms = np.asarray(lse, np.float64), np.asarray(terms, np.float64)
    of_lse, of_delta = terms[..., :3].sum(axis=-1), terms[..., 3:6].sum(axis=-1)
    assert (of_lse[lse == -np.inf] < -1e29).all() and not terms[..., 6:].any()
    np.testing.assert_allclose(of_lse[lse > -np.inf], -lse[lse > -np.inf] / scale, rtol=1e-6)
    delta = np.einsum("bshd,bshd->bhs", np.asarray(out, np.float64), np.asarray(dout, np.float64))
    np.testing.assert_allclose(of_delta[..., :tokens], -delta, rtol=1e-5, atol=1e-5)
    assert not of_delta[..., tokens:].any()
    assert not np.asarray(without[..., :3], np.float64).any()
    np.testing.assert_array_equal(np.asarray(without[..., 3:], np.float64), terms[..., 3:])


@pytest.mark.parametrize("lengths", [(150, 170), pytest.param((260, 300), marks=pytest.mark.slow)])
def test_keys_that_come_block_by_block_add_up(lengths):
    """A ring's steps: blocks that some rows, or whole row tiles, see nothing of; the same as all keys at once."""
    rows, total = lengths
    mask = masks.causal_document(rows, total, [30, total - 90, 60])
    problem = AttentionProblem(mask, 1, 2, 1, 64, DTYPE)
    q, k, v, dout = arrays(problem)
    kernel, part, sums, sides = kernels.get("flashmask"), None, None, []
    blocks = np.array_split(np.arange(total), 3)[::-1]
    operands = [kernel.prepare(AttentionProblem(mask.restrict(np.arange(rows), b), 1, 2, 1, 64, DTYPE)) for b in blocks]
    with interpreted():
        for block, made in zip(blocks, operands, strict=True):
            before, part = part, kernel.running.forward(part, q, k[:, block], v[:, block], made, problem.scale)
        out, lse = kernel.running.result(part, q)
        part = kernel.running.forward(before, q, k[:, block], v[:, block], made, problem.scale, out_dtype=DTYPE)
        last, last_lse = kernel.running.result(part, q)
        delta = jnp.einsum("bshd,bshd->bhs", out, dout.astype(jnp.float32))
        for block, made in zip(blocks, operands, strict=True):
            sums, *side = kernel.running.backward(sums, q, k[:, block], v[:, block], out, lse, dout, made,
                                                  problem.scale, delta=delta)
            sides.append(side)
        dq = kernel.running.gradient(sums, q, problem.scale)
    dk, dv = (jnp.concatenate(x[::-1], axis=1) for x in zip(*sides, strict=True))
    assert {x.dtype for x in (out, dq, dk, dv)} == {jnp.dtype("float32")}
    assert last.dtype == q.dtype and np.array_equal(last, out.astype(q.dtype)) and np.array_equal(last_lse, lse)
    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = attention_oracle(*wide[:3], mask, problem.scale, wide[3])
    close((out, lse, dq, dk, dv), (want.out, want.lse, want.dq, want.dk, want.dv))
