"""vsa and flashinfer on the Hopper kernels: what the conformance suite does not ask of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.kernels import hopper_lists, hopper_sparse, hopper_sparse_backward
from jax_impl.kernels.block_lists import TileLists, within
from jax_impl.kernels.hopper_sparse_roles import RoleTiles
from jax_impl.kernels.stack import stack_operands
from tests.conformance import inputs, relative_error
from tests.jax_impl.interpret_patch import interpreted
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem
from workload.selection import uniform_bounds

RESULTS = ("out", "lse", "dq", "dk", "dv")


def run(kernel, scale, operands, q, k, v, dout, **options):
    """The five results by name."""
    out, lse = kernel.forward(q, k, v, operands, scale)
    grads = kernel.backward(q, k, v, out, lse, dout, operands, scale, **options)
    return dict(zip(RESULTS, (out, lse, *grads), strict=True))


def judged(name, problem, budget=8e-3, races=False, **options):
    """Runs a kernel in the interpreter and holds each result against the oracle; options are those of `prepare`."""
    arrays = [jnp.asarray(x, problem.dtype) for x in inputs(problem)]
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    want = attention_oracle(q, k, v, problem.mask, problem.scale, dout)
    kernel = kernels.get(name)
    with interpreted(detect_races=races):
        got = run(kernel, problem.scale, kernel.prepare(problem, **options), *arrays)
        got = jax.tree.map(np.asarray, got)
    for label, value in got.items():
        assert relative_error(np.asarray(value, np.float64), getattr(want, label)) < budget, label


def test_tiles_of_128_share_a_list():
    """Causal blocks of 128, grouped heads, ragged both ways: two warpgroups on one list, dq by the key-major kernel."""
    mask = uniform_block(150, 270, 1, 128, 0.7, causal=True, seed=1)
    judged("flashinfer", AttentionProblem(mask, 1, 2, 1, 64))


@pytest.mark.slow
def test_lists_per_query_head():
    """Every query head of a group has a list of its own; odd lists, an empty row, a negative scale."""
    picks = np.random.default_rng(3).random((2, 2, 3)) < 0.6
    picks[1, 1] = False
    bounds = [np.repeat(uniform_bounds(n, 64)[None], 2, 0) for n in (100, 150)]
    mask = from_bitmap(picks, *bounds, block=64, name="uniform_block")
    judged("vsa", AttentionProblem(mask, 1, 2, 1, 64, scale=-0.2))


def test_blocks_of_one_token_up():
    """Variable blocks from one token on, boundaries per kv head."""
    judged("flashinfer", AttentionProblem(variable_block(70, 90, 2, 20, 1, 0.5, causal=True, seed=2), 1, 2, 2, 64))


@pytest.mark.parametrize("mask, heads, head_dim", [
    (uniform_block(100, 130, 1, 64, 1.0, causal=True, seed=2), (2, 1), 64),
    (uniform_block(200, 260, 1, 64, 0.6, causal=True, seed=2), (2, 1), 128),
    (uniform_block(70, 250, 1, 64, 0.8, seed=2), (1, 1), 128),  # each warpgroup's ring goes round
])
def test_no_races(mask, heads, head_dim):
    """Under the interpreter's race detector: shared and separate rings, masked steps, dq by additions."""
    judged("vsa", AttentionProblem(mask, 1, *heads, head_dim), races=True)


def test_no_races_where_a_ring_goes_round():
    """A key tile that is no half of a pair walks a longer list than its ring of queries and douts is: slots are free
    before they are filled anew."""
    schedules = hopper_sparse.default_schedules(64, False)
    backward = dataclasses.replace(schedules.backward, roles=RoleTiles(2))
    problem = AttentionProblem(uniform_block(130, 60, 1, 64, 1.0), 1, 1, 1, 64)
    judged("vsa", problem, races=True, schedules=dataclasses.replace(schedules, backward=backward))


def in_ranges_of(tokens, head_dim, wide=False):
    """Schedules under which the backward walks no more than so many tokens of queries together."""
    measured = hopper_sparse.default_schedules(head_dim, wide)
    held = 8 * head_dim * tokens
    backward = dataclasses.replace(measured.backward, l2_bytes=held, whole_bytes=held)
    return dataclasses.replace(measured, backward=backward)


@pytest.mark.parametrize("tokens, head_dim, ranges", [
    (1 << 16, 128, 1), ((1 << 16) + 64, 128, 3), (1 << 17, 128, 4), (1 << 17, 64, 1), (1 << 20, 128, 32)])
def test_how_many_ranges(tokens, head_dim, ranges):
    """Heads of up to 64 MiB of queries, douts and dq are walked whole, longer ones 32 MiB at a time."""
    tiles = hopper_sparse.default_schedules(head_dim, False).backward
    assert hopper_sparse_backward.ranges_in_cache(tokens, head_dim, tiles) == ranges


@pytest.mark.parametrize("ends, full, rest", [((0, 6), [1, 4], [0, 2, 5]), ((1, 3), [1], [2]), ((4, 6), [4], [5]),
                                              ((2, 5), [4], [2]), ((3, 4), [], []), ((5, 6), [], [5])])
def test_a_range_of_a_list_has_its_full_and_its_other_pieces(ends, full, rest):
    lists = TileLists(*(jnp.array(x, jnp.int32) for x in ([[2]], [[5]], [[[1, 4, 0, 2, 5, 0]]])))
    got = within(lists, *ends)
    assert (int(got.full[0, 0]), int(got.counts[0, 0])) == (len(full), len(full) + len(rest))
    assert got.indices[0, 0].tolist() == [*full, *rest, *[0] * (6 - len(full) - len(rest))]


def test_ranks_of_different_blocks_have_equally_many_ranges():
    """They stand on more tiles or fewer, and run one program."""
    ranks = [kernels.get("flashinfer").prepare(
        AttentionProblem(variable_block(500, 300, 1, mean, 1, 0.5), 1, 2, 1, 64),
        schedules=in_ranges_of(130, 64)) for mean in (20, 150)]
    assert len({rank.shared[0].starts.shape[1] for rank in ranks}) > 1
    stacked = stack_operands(ranks)
    assert len(stacked.shared) == len(stacked.apart) == 4


@pytest.mark.parametrize("name, mask, heads, tokens", [
    ("flashinfer", uniform_block(150, 120, 1, 128, 1.0, causal=True), (2, 1), 128),
    pytest.param("vsa", uniform_block(100, 110, 1, 64, 1.0, causal=True), (2, 1), 64, marks=pytest.mark.slow),
    pytest.param("vsa", uniform_block(200, 260, 2, 64, 0.6, seed=2), (2, 2), 128, marks=pytest.mark.slow),
    pytest.param("flashinfer", variable_block(70, 90, 2, 20, 1, 0.5, causal=True, seed=2), (2, 2), 192,
                 marks=pytest.mark.slow),
])
def test_a_long_head_is_walked_in_ranges(name, mask, heads, tokens):
    """The backward a range of queries at a time, ragged: grouped and separate heads, parts added; no races."""
    schedules = in_ranges_of(tokens, 64, name == "flashinfer" and mask.block == 128)
    problem = AttentionProblem(mask, 1, *heads, 64)
    assert len(kernels.get(name).prepare(problem, schedules=schedules).shared) > 1
    judged(name, problem, races=True, schedules=schedules)


@pytest.mark.slow
def test_ranges_of_lists_per_query_head():
    """Lists of a query head each, and a range that no query head of one sees anything in."""
    picks = np.random.default_rng(3).random((2, 4, 3)) < 0.6
    picks[1, 2:] = False
    picks[:, :, 2] = False
    bounds = [np.repeat(uniform_bounds(n, 64)[None], 2, 0) for n in (230, 150)]
    mask = from_bitmap(picks, *bounds, block=64, name="uniform_block")
    judged("vsa", AttentionProblem(mask, 1, 2, 1, 64), schedules=in_ranges_of(128, 64))


@pytest.mark.parametrize("kv_heads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_query_block_selects_key_block_0(kv_heads):
    """dv of key block 0 sums the whole group and all query blocks; the others get nothing."""
    picks = np.zeros((1, 3, 2), bool)
    picks[0, :, 0] = True
    mask = from_bitmap(picks, uniform_bounds(192, 64)[None], uniform_bounds(128, 64)[None], block=64,
                       name="uniform_block")
    problem = AttentionProblem(mask, 1, 2, kv_heads, 64, "bfloat16", 0.0)
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in inputs(problem))
    kernel = kernels.get("vsa")
    with interpreted():
        got = run(kernel, 0.0, kernel.prepare(problem), q, k, v, jnp.ones_like(q))
    np.testing.assert_allclose(np.asarray(got["dv"], np.float32)[0, :64], 192 / 64 * 2 / kv_heads, rtol=1e-2)
    assert not np.asarray(got["dv"][0, 64:]).any()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the interpreter runs thread blocks one by one")
@pytest.mark.parametrize("name, block, unordered", [
    ("vsa", 64, ("dq",)), ("flashinfer", 128, ("dq",)), ("vsa in ranges", 64, ("dq",)),
    ("flex_sparse", 128, ("dq", "dk", "dv")), ("triton_vsa", 64, ()), ("fa2_sparse", 128, ())])
def test_the_same_bits_every_time(name, block, unordered):
    """D11: a hundred calls right behind a long one that writes dout. What is added in memory is off by roundings."""
    name, _, ranges = name.partition(" in ")
    options = {"schedules": in_ranges_of(320, 128)} if ranges else {}
    problem = AttentionProblem(uniform_block(1000, 1100, 2, block, 0.4, causal=True, seed=3), 2, 8, 2, 128)
    kernel = kernels.get(name)
    operands = kernel.prepare(problem, **options)
    q, k, v, dout = (jnp.asarray(x, jnp.bfloat16) for x in inputs(problem))
    long, noise = jax.jit(lambda x, noise: x * ((noise @ noise).sum() * 0 + 1).astype(x.dtype)), jnp.ones((4096, 4096))
    passes = jax.jit(lambda *arrays: run(kernel, problem.scale, operands, *arrays))
    first = passes(q, k, v, dout)
    for _ in range(100):
        for label, value in passes(q, k, v, long(dout, noise)).items():
            if label in unordered:
                assert relative_error(np.asarray(value, np.float64), np.asarray(first[label], np.float64)) < 2e-3, label
            else:
                assert bool((value == first[label]).all()), label


MASKS = [uniform_block(300, 430, 2, 64, 0.5, causal=True, seed=3), variable_block(300, 430, 2, 50, 1, 0.4, seed=4)]

CORNERS = [uniform_block(128, 128 + n, 1, 64, 1.0, causal=True) for n in (-1, 0, 1)]  # D12: about a tile's corner


@pytest.mark.parametrize("mask", MASKS + CORNERS, ids=["uniform", "variable", "before", "at", "after"])
def test_lists_hold_the_cells_of_the_mask(mask):
    """Element by element: listed pieces and bounds, both ways, give the dense picture, and full pieces need no test."""
    cut = hopper_lists.pieces(mask, 64, 64, True)
    listed = hopper_lists.listed(cut)
    for lists in hopper_lists.by_query(cut, listed), hopper_lists.by_key(cut, listed):
        lengths = (mask.kv_len, mask.q_len) if lists.by_key else (mask.q_len, mask.kv_len)
        for head in range(mask.heads):
            want = mask.dense(head).T if lists.by_key else mask.dense(head)
            tokens = cut.kv_layout if lists.by_key else cut.q_layout
            token = np.asarray(tokens.token[head]) - 1 if tokens else np.arange(lists.tiles * 64)
            got = np.zeros(lengths, bool)
            for tile in range(lists.tiles):
                for n in range(int(lists.counts[head, tile])):
                    piece = int(lists.indices[head, tile, n])
                    span = np.arange(int(lists.starts[head, piece]), int(lists.ends[head, piece]))
                    for row, bound in zip(token[tile * 64 :][:64], lists.bound[head, tile * 64 :][:64], strict=True):
                        seen = span >= int(bound) if lists.by_key else span < int(bound)
                        if 0 <= row < lengths[0]:
                            got[row, span] = seen
                        # Rows past the last query are thrown away, but a key past the last one would reach dq.
                        if n < int(lists.full[head, tile]) and (lists.by_key or 0 <= row < lengths[0]):
                            assert seen.all() and 0 <= row < lengths[0]
            assert np.array_equal(got, want)


@pytest.mark.parametrize("mask", MASKS, ids=["uniform", "variable"])
def test_pairs_and_what_is_left_are_the_lists(mask):
    """A tile's pieces are those of its pair and its own, none twice; a full piece of a pair is full for both."""
    cut = hopper_lists.pieces(mask, 64, 64, True)
    by_key = hopper_lists.by_key(cut, hopper_lists.listed(cut))

    def entries(lists, head, tile):
        count, full = int(lists.counts[head, tile]), int(lists.full[head, tile])
        listed = [int(x) for x in lists.indices[head, tile, :count]]
        return set(listed[:full]), set(listed[full:])

    shared, apart = hopper_lists.by_pairs(by_key)
    assert (shared.rows, apart.rows) == (128, 64) and int(shared.counts.sum()) > 0
    for head in range(mask.heads):
        for tile in range(by_key.tiles):
            full, part = entries(by_key, head, tile)
            pair, own = entries(shared, head, tile // 2), entries(apart, head, tile)
            assert not (pair[0] | pair[1]) & (own[0] | own[1])
            assert pair[0] | pair[1] | own[0] | own[1] == full | part
            assert pair[0] <= full and own[0] <= full and own[1] <= part
            other = entries(by_key, head, tile ^ 1)
            assert pair[0] | pair[1] == (full | part) & (other[0] | other[1])


@pytest.mark.parametrize("mask", MASKS, ids=["uniform", "variable"])
@pytest.mark.parametrize("ranges", [1, 3, 8])
def test_ranges_are_the_lists(mask, ranges):
    """Every piece of a list is in the range that it lies in, full ones first, all ascending; none twice; lists of one
    shape. Of more ranges than pieces some are empty."""
    cut = hopper_lists.pieces(mask, 64, 64, True)
    listed = hopper_lists.listed(cut)
    for lists in hopper_lists.by_pairs(hopper_lists.by_key(cut, listed)):
        parts = hopper_lists.in_ranges(lists, ranges)
        assert len(parts) == ranges and len({part.indices.shape for part in parts}) == 1
        for head, tile in np.ndindex(lists.counts.shape):
            full, total = int(lists.full[head, tile]), int(lists.counts[head, tile])
            found = [[], []]
            for n, part in enumerate(parts):
                pieces = lists.starts.shape[1]
                first, last = n * pieces // ranges, (n + 1) * pieces // ranges
                leading, count = int(part.full[head, tile]), int(part.counts[head, tile])
                here = np.asarray(part.indices[head, tile])
                assert ((here[:count] >= first) & (here[:count] < last)).all() and not here[count:].any()
                found[0] += here[:leading].tolist()
                found[1] += here[leading:count].tolist()
            want = np.asarray(lists.indices[head, tile])
            assert found == [want[:full].tolist(), want[full:total].tolist()]
        for part in parts:
            assert (np.diff(np.take_along_axis(part.counts, part.order - 1, axis=1)) <= 0).all()


@pytest.mark.parametrize("which, mask, head_dim, q_heads, kv_heads", [
    ("vsa", uniform_block(1000, 1100, 2, 64, 0.5, causal=True), 128, 4, 2),
    ("vsa", uniform_block(1000, 1100, 1, 64, 0.5), 64, 3, 3),
    ("flashinfer", uniform_block(1000, 1100, 2, 128, 0.5), 128, 4, 2),
    ("flashinfer", uniform_block(1000, 1100, 2, 256, 0.5), 64, 4, 2),
    ("flashinfer", variable_block(1000, 1100, 2, 100, 1, 0.5), 128, 4, 2),
])
def test_lowers_to_an_h200(which, mask, head_dim, q_heads, kv_heads):
    """Both passes lower to Mosaic GPU modules for Hopper, shared memory checked."""
    problem = AttentionProblem(mask, 2, q_heads, kv_heads, head_dim)
    operands = hopper_sparse.prepare(problem, wide=which != "vsa")
    shape = lambda s, d=jnp.bfloat16: jax.ShapeDtypeStruct(s, d)  # noqa: E731
    passes = functools.partial(run, kernels.get(which), problem.scale)
    operands = jax.tree.map(lambda x: shape(x.shape, x.dtype), operands)
    args = (operands, shape(problem.q_shape), shape(problem.kv_shape), shape(problem.kv_shape), shape(problem.q_shape))
    text = jax.jit(passes).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    walks = 1 if operands.apart is None else 2  # pairs of key tiles, and what each sees alone
    assert text.count("@mosaic_gpu_v2") == 1 + walks + 1  # dq is brought into rows
