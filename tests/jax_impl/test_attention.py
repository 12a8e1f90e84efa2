"""The public call of the JAX stack: gradients, refusals, trace counts; twin of tests/torch_impl/test_attention.py."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import kernels
from jax_impl.attention import attend, attention
from jax_impl.kernels import base, hopper_kernel, naive
from tests.conformance import check_refuses_no_problem, relative_error
from workload import masks
from workload.block_masks import uniform_block, variable_block
from workload.capability import Capability
from workload.documents import pack
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.predicate import Predicate
from workload.problem import AttentionProblem

MASKS = [masks.prefix_lm_document(11, 14, [5, 0, 9], [2, 0, 4]), variable_block(11, 14, 3, 3, 1, 0.5, causal=True)]


def operands(mask, heads=(6, 3), dim=5, seed=0):
    """q, k, v, dout in float32, two batches."""
    rng = np.random.default_rng(seed)
    lengths, counts = (mask.q_len, mask.kv_len, mask.kv_len, mask.q_len), (heads[0], heads[1], heads[1], heads[0])
    shapes = [(2, n, h, dim) for n, h in zip(lengths, counts)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.name)
def test_gradients_flow_through_out(mask):
    q, k, v, dout = operands(mask)
    want = attention_oracle(q, k, v, mask, 0.3, dout)
    (out, lse), pull = jax.vjp(lambda *x: attention(*x, mask, scale=0.3), q, k, v)
    got = (out, lse, *pull((dout, jnp.ones_like(lse))))
    for name, value in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        assert relative_error(value, getattr(want, name)) < 2e-6, name


@pytest.mark.parametrize("kernel", ["naive", "sdpa", "fa2_sparse"])
def test_promotion_that_a_caller_forbids(kernel):
    """Block masks' kernels promote ranks and dtypes inside; a caller who forbids it in his code could not use them."""
    q, k, v, dout = operands(MASKS[1], dim=16)
    want = attention_oracle(q, k, v, MASKS[1], 0.25, dout)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        (out, lse), pull = jax.vjp(lambda *x: attention(*x, MASKS[1], kernel=kernel), q, k, v)
        grads = pull((dout, jnp.zeros_like(lse)))
    for name, value in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True):
        assert relative_error(value, getattr(want, name)) < 2e-6, name


def test_lse_is_a_constant_to_differentiation():
    q, k, v, _ = operands(MASKS[0])
    gradient = jax.grad(lambda q: attention(q, k, v, MASKS[0])[1].sum())(q)
    assert not gradient.any()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("kernel", ["naive", "sdpa", "fa1"])
def test_gradients_are_not_differentiated_again(kernel, power):
    """Second derivatives came out wrong by 40 %, without a word: lse is a constant to them."""
    q, k, v, dout = operands(MASKS[0], dim=8)

    def slope(q):
        return (jax.grad(lambda x: (attention(x, k, v, MASKS[0], kernel=kernel)[0] ** power).sum())(q) * dout).sum()

    with pytest.raises(Unsupported, match="attention: its gradients are not differentiated again"):
        jax.grad(slope)(q)


@pytest.mark.parametrize("kernel", [name for name in kernels.NAMES if name != "cudnn"])
def test_inside_a_program_that_is_traced(kernel, monkeypatch):
    """Lists of blocks, and the tiles of a mask_mod, were made by operations that were traced as well: no such call
    could be jitted."""
    monkeypatch.setattr(hopper_kernel, "missing_hardware", lambda: None)  # nothing runs
    sparse = "uniform_block" in kernels.get(kernel).capability.masks
    mask = uniform_block(150, 200, 1, 128 if kernel == "fa2_sparse" else 64, 0.5) if sparse else masks.causal(150, 200)
    options = {"predicate": Predicate(lambda b, h, i, j, *_: j <= i)} if kernel.startswith("flex") else {}

    def loss(q, k, v):
        return attention(q, k, v, mask, kernel=kernel, **options)[0].astype("float32").sum()

    q, k = jnp.zeros((2, 150, 4, 64), "bfloat16"), jnp.zeros((2, 200, 2, 64), "bfloat16")
    for transform in (jax.jit, jax.checkpoint):
        got = jax.eval_shape(jax.grad(transform(loss), argnums=(0, 1, 2)), q, k, k)
        assert [x.shape for x in got] == [q.shape, k.shape, k.shape]


def test_default_scale():
    """B7, B8: head_dim ** -0.5 of the head as the caller has it."""
    q, k, v, _ = operands(MASKS[0], dim=80)
    np.testing.assert_array_equal(attention(q, k, v, MASKS[0])[0], attention(q, k, v, MASKS[0], scale=80**-0.5)[0])


@pytest.mark.parametrize("kernel", ["naive", "sdpa", "fa1", "fa2"])
def test_ramps_of_logits(kernel):
    """D6: the running maximum grows with every tile, or stands in the first; geometric sums give the right values."""
    for ramp in (np.arange(200.0, dtype=np.float32), np.arange(199.0, -1, -1, dtype=np.float32)):
        q, k = np.zeros((2, 3, 2, 16), np.float32), np.zeros((2, 200, 1, 16), np.float32)
        q[..., 0], k[..., 0] = 1, ramp[:, None]
        v = np.broadcast_to(ramp[:, None, None], k.shape).copy()
        out, lse = attention(q, k, v, masks.full(3, 200), kernel=kernel, scale=0.25)
        np.testing.assert_allclose(out, np.full(q.shape, 199 - 1 / np.expm1(0.25)), 2e-5)
        np.testing.assert_allclose(lse, np.full((2, 2, 3), 49.75 - np.log(-np.expm1(-0.25))), 2e-5)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda q, k, v: (q, k, v[:, :, :2]), r"v: shape \(2, 14, 2, 5\), the problem's is \(2, 14, 3, 5\)"),  # M16
        (lambda q, k, v: (q, k[:, :-1], v), "k: shape"),  # L6
        (lambda q, k, v: (q[:, :-1], k, v), "q: shape"),  # L6
        (lambda q, k, v: (q, k, v.astype(jnp.bfloat16)), "v: dtype bfloat16, q has float32"),
        (lambda q, k, v: (q[0], k, v), "q: shape .* is not"),
        (lambda q, k, v: (q, k[0], v), r"k: shape \(14, 3, 5\) is not \[batch, seq, heads, head_dim\]"),
        (lambda q, k, v: (q, k[:, :, :2], v), "v: shape"),
        (lambda q, k, v: (q[:, :, :4], k, v), "kv_heads: 3 does not divide q_heads 4"),
    ],
)
def test_operands_that_disagree_are_refused_by_name(change, message):
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(ValueError, match=message):
        attention(*change(q, k, v), MASKS[0])


@pytest.mark.parametrize("place, name", list(enumerate(("q", "k", "v"))))
def test_operands_of_another_kind_are_refused_by_name(place, name):
    """G2's kind: lists and numbers are no arrays; NumPy's are, as everywhere in JAX."""
    good = operands(MASKS[0])[:3]
    for other, said in (([[1.0]], "builtins.list"), (2.5, "builtins.float")):
        given = [*good[:place], other, *good[place + 1 :]]
        with pytest.raises(TypeError, match=rf"^{name}: {said} is no .*Array.* or numpy.ndarray$"):
            attention(*given, MASKS[0])


@pytest.mark.parametrize("name", kernels.NAMES)
def test_what_is_no_problem_is_refused_by_name(name):
    check_refuses_no_problem(kernels.get(name))


@pytest.mark.parametrize("kernel", kernels.NAMES)
def test_a_misspelt_option_is_named(kernel):
    """G4's kind: no option is dropped, and the message says whose it is not."""
    with pytest.raises(TypeError, match=f"^jax kernel {kernel}: no option 'lanch'; it has "):
        kernels.get(kernel).require_options({"lanch": 1})
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(TypeError, match="^jax kernel naive: no option 'lanch'; it has none$"):
        attention(q, k, v, MASKS[0], lanch=1)


def test_a_shard_without_its_positions_is_an_error():
    """D7: a shard's mask is made of positions; the whole problem's is never read as if the shard began at 0."""
    mask = masks.causal(16, 16)
    problem = AttentionProblem(mask, 1, 2, 1, 8, "float32")
    q, k, v, _ = operands(mask)
    with pytest.raises(ValueError, match="q: shape"):
        attention(q[:, 8:], k, v, mask)
    with pytest.raises(TypeError, match="kv_positions"):
        mask.restrict(np.arange(8, 16))
    rows, keys = np.arange(8, 16), np.arange(4, 12)
    out, lse = attention(q[:, 8:], k[:, 4:12], v[:, 4:12], mask.restrict(rows, keys))
    seen = mask.dense()[np.ix_(rows, keys)]
    assert lse.shape == (q.shape[0], q.shape[2], 8) and problem.mask.restrict(rows, keys).area == int(seen.sum())
    np.testing.assert_allclose(np.exp(np.asarray(attention(q[:, 8:] * 0, k[:, 4:12], v[:, 4:12],
                                                           mask.restrict(rows, keys))[1])[0, 0]), seen.sum(1), 1e-5)


def test_other_kernels_are_refused_by_name():
    q, k, v, _ = operands(MASKS[0])
    with pytest.raises(ValueError, match="kernel: 'fastest' is none of naive"):
        attention(q, k, v, MASKS[0], kernel="fastest")


def test_refusal_names_kernel_and_argument():
    """E16: before any launch."""
    kernel = base.Kernel("narrow", Capability(("full",), head_dims=(64,)), naive.prepare, naive.forward)
    with pytest.raises(Unsupported, match="jax kernel narrow: does not take mask causal"):
        kernel.require(AttentionProblem(masks.causal(4, 5)))
    away = base.Kernel("away", Capability(("causal",)), naive.prepare, naive.forward, available=lambda: "needs a moon")
    with pytest.raises(Unsupported, match="jax kernel away: needs a moon"):
        away.require(AttentionProblem(masks.causal(4, 5)))


def test_a_kernel_without_backward_says_so(monkeypatch):
    forward_only = base.Kernel("half", Capability(("full",), passes=("forward",)), naive.prepare, naive.forward)
    monkeypatch.setattr("jax_impl.kernels.get", lambda name: forward_only)
    q, k, v, _ = operands(masks.full(3, 4))
    with pytest.raises(Unsupported, match="jax kernel half: has no backward pass"):
        jax.grad(lambda q: attention(q, k, v, masks.full(3, 4), kernel="half")[0].sum())(q)


@pytest.mark.parametrize("kernel", ["naive", "sdpa"])
def test_new_documents_compile_nothing(kernel):
    """Documents, windows and blocks are data: one trace serves every pack of a shape, forward and backward."""
    packs = [masks.causal_document(120, 120, pack(120, "pile", seed=s)) for s in range(4)]
    others = [masks.causal_sliding_window(120, 120, 9), masks.prefix_lm_causal(120, 120, 31)]
    count(kernel, packs + others)
    count(kernel, [uniform_block(60, 90, 1, 16, 0.4, seed=s, causal=bool(s % 2)) for s in range(3)])


def count(kernel, some_masks):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(q, k, v, prepared):
        return jax.grad(lambda *x: attend(kernel, 0.5, *x, prepared)[0].sum(), argnums=(0, 1, 2))(q, k, v)

    from jax_impl import kernels

    for seed, mask in enumerate(some_masks):
        q, k, v, _ = operands(mask, seed=seed)
        step(q, k, v, kernels.get(kernel).prepare(AttentionProblem(mask, 2, 6, 3, 5, "float32")))
