"""sdpa, cudnn, fa1 and fa2 in JAX: what the conformance suite does not ask of them."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractMesh, use_abstract_mesh
from jax.sharding import AbstractDevice

from jax_impl import kernels
from jax_impl.kernels import fa1, fa2, naive
from jax_impl.kernels.pallas_triton import Schedule, Tile
from workload import masks
from workload.block_masks import uniform_block
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

Q_LEN, KV_LEN = 75, 91
TILES = {
    "fa1": {"tiles": (Tile(16, 32), Tile(32, 16))},
    "fa2": {"schedule": Schedule(Tile(32, 16), Tile(16, 32), Tile(16, 64))},
    "sdpa": {},
    "naive": {},
}
TWELVE = [
    masks.full(Q_LEN, KV_LEN),
    masks.causal(Q_LEN, KV_LEN),
    masks.full_document(Q_LEN, KV_LEN, [40, 0, 51]),
    masks.causal_document(Q_LEN, KV_LEN, [7, 64, 20]),
    masks.full_sliding_window(Q_LEN, KV_LEN, 9),
    masks.causal_sliding_window(Q_LEN, KV_LEN, 17),
    masks.shared_question(Q_LEN, KV_LEN, [[20, 10, 15], [16, 30]]),
    masks.global_sliding_window(Q_LEN, KV_LEN, 7, 5),
    masks.causal_blockwise(Q_LEN, KV_LEN, [30, 33, 28]),
    masks.prefix_lm_causal(Q_LEN, KV_LEN, 35),
    masks.prefix_lm_document(Q_LEN, KV_LEN, [40, 51], [10, 20]),
    masks.block_causal_document(Q_LEN, KV_LEN, [50, 41], 12),
]


def tensors(problem, seed=0):
    """q, k, v, dout of a problem, standard normal, rounded to its dtype."""
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
    return [jnp.asarray(rng.standard_normal(s), problem.dtype) for s in shapes]


def exact(*arrays):
    """The arrays in float64."""
    return [np.asarray(x, np.float64) for x in arrays]


def error(got, want) -> float:
    """Relative L2 error over the finite entries of `want`; the infinite ones must agree."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    assert not np.isnan(got).any() and (got[~finite] == want[~finite]).all()
    return float(np.linalg.norm(got[finite] - want[finite]) / max(np.linalg.norm(want[finite]), 1e-30))


def run(kernel, scale, operands, q, k, v, dout, **options):
    """Both passes of a kernel, by the names of what they give."""
    out, lse = kernel.forward(q, k, v, operands, scale)
    dq, dk, dv = kernel.backward(q, k, v, out, lse, dout, operands, scale, **options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def padded_alike(trees):
    """Operand pytrees zero-padded at the end to common shapes, as ranks stack them."""
    columns = zip(*(jax.tree.leaves(t) for t in trees), strict=True)
    shapes = [np.max([x.shape for x in leaves], axis=0) for leaves in columns]
    pad = lambda x, shape: jnp.pad(x, [(0, n - m) for m, n in zip(x.shape, shape, strict=True)])  # noqa: E731
    return [jax.tree.map(pad, t, jax.tree.unflatten(jax.tree.structure(t), shapes)) for t in trees]


@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_twelve_masks_by_one_compilation(name):
    """Zero-padded operands mean the same mask, so masks are data: twelve of them, one trace of each pass."""
    kernel = kernels.get(name)
    problems = [AttentionProblem(m, 2, 6, 2, 24, "float32", 0.3) for m in TWELVE]
    operands = padded_alike([kernel.prepare(p, **TILES[name]) for p in problems])
    traces = []

    @jax.jit
    def passes(*args):
        traces.append(None)
        return run(kernel, 0.3, *args)

    passes(operands[0], *tensors(problems[0]))  # the interpreter's first use imports modules, which traces once more
    traces.clear()
    for seed, (problem, ops) in enumerate(zip(problems, operands, strict=True)):
        q, k, v, dout = tensors(problem, seed)
        want = attention_oracle(q, k, v, problem.mask, 0.3, dout)
        for label, got in passes(ops, q, k, v, dout).items():
            assert error(got, getattr(want, label)) < 2e-6, (problem.mask.name, label)
    assert len(traces) <= 1


@pytest.mark.parametrize("name", ["fa1", "fa2", "sdpa"])
def test_part_of_a_larger_problem(name):
    """Backward of each half of the keys, handed the whole problem's lse and delta, adds up to the whole's gradients."""
    kernel, whole = kernels.get(name), masks.prefix_lm_causal(45, 70, 30)
    problem = AttentionProblem(whole, 2, 4, 2, 16, "bfloat16", 0.4)
    q, k, v, dout = tensors(problem)
    want = attention_oracle(*exact(q, k, v), whole, 0.4, *exact(dout))
    out, lse = jnp.asarray(want.out, jnp.float32), jnp.asarray(want.lse, jnp.float32)
    delta = jnp.einsum("bshd,bshd->bhs", out, dout.astype(jnp.float32))
    parts = []
    for keys in (np.arange(29), np.arange(29, 70)):
        local = AttentionProblem(whole.restrict(np.arange(45), keys), 2, 4, 2, 16, "bfloat16", 0.4)
        operands = kernel.prepare(local, **TILES[name])
        backward = functools.partial(kernel.backward, scale=0.4, grad_dtype=jnp.float32)
        grads = jax.jit(backward)(q, k[:, keys], v[:, keys], out, lse, dout, operands=operands, delta=delta)
        assert all(g.dtype == jnp.float32 for g in grads)
        parts.append(grads)
    sums = (parts[0][0] + parts[1][0], *(jnp.concatenate(x, axis=1) for x in zip(parts[0][1:], parts[1][1:])))
    for label, got in zip(("dq", "dk", "dv"), sums, strict=True):
        assert error(got, getattr(want, label)) < 4e-3, label


@pytest.mark.parametrize("name", ["fa1", "fa2", "sdpa"])
def test_float32_out_of_half_inputs(name):
    """A float32 out keeps what the half one rounds away."""
    kernel = kernels.get(name)
    problem = AttentionProblem(masks.causal(33, 41), 1, 2, 1, 16, "bfloat16" if name == "sdpa" else "float16")
    q, k, v, _ = tensors(problem)
    operands = kernel.prepare(problem, **TILES[name])
    forward = functools.partial(kernel.forward, scale=problem.scale)
    wide, _ = jax.jit(functools.partial(forward, out_dtype=jnp.float32))(q, k, v, operands)
    half, _ = jax.jit(forward)(q, k, v, operands)
    assert wide.dtype == jnp.float32 and half.dtype == q.dtype
    assert error(half, wide) < 1e-2 and (np.asarray(wide) != np.asarray(half, np.float32)).any()


@pytest.mark.parametrize("name", ["naive", "fa1", "fa2", "sdpa"])
def test_no_keys_and_no_rows(name):
    """Without keys out is 0 and lse -inf; without rows there is nothing, and no key gets a gradient."""
    kernel = kernels.get(name)
    for q_len, kv_len in ((5, 0), (0, 5)):
        problem = AttentionProblem(masks.full(q_len, kv_len), 2, 2, 1, 16, "float32")
        q, k, v, dout = tensors(problem)
        operands = kernel.prepare(problem, **TILES[name])
        got = jax.jit(functools.partial(run, kernel, 1.0))(operands, q, k, v, dout)
        assert np.isneginf(got["lse"]).all()
        for label, x in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
            assert got[label].shape == x.shape and not np.asarray(got[label]).any(), label


@pytest.mark.parametrize("name", ["fa1", "fa2"])
@pytest.mark.parametrize("head_dim, dtype", [(64, "bfloat16"), (128, "bfloat16"), (128, "float32"), (80, "float16"),
                                             (256, "bfloat16")])
def test_lowers_to_an_h200(name, head_dim, dtype):
    """Both passes at the default tiles lower to Triton modules for Hopper."""
    kernel = kernels.get(name)
    problem = AttentionProblem(masks.global_sliding_window(300, 400, 30, 50), 2, 8, 2, head_dim, dtype)
    assert lowered(kernel, problem) == {"fa1": (1, 1), "fa2": (1, 2)}[name]


def products(jaxpr):
    """Every matrix product of a program, those inside its kernels and loops included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("name", ["naive", "sdpa", "fa1", "fa2", "triton_vsa", "fa2_sparse"])
def test_float32_products_are_not_rounded_to_tf32(name):
    """On an H200 float32 operands lost 13 bits (relative error 4e-4): a product's default precision there is TF32."""
    kernel, block = kernels.get(name), 128 if name == "fa2_sparse" else 64
    sparse = name in ("triton_vsa", "fa2_sparse")
    mask = uniform_block(256, 256, 1, block, 0.5) if sparse else masks.causal_document(100, 100, [60, 40])
    problem = AttentionProblem(mask, 1, 2, 1, 64, "float32")
    q, k, v, dout = tensors(problem)
    program = jax.make_jaxpr(functools.partial(run, kernel, 0.2))(kernel.prepare(problem), q, k, v, dout)
    found = list(products(program.jaxpr))
    assert len(found) >= 5
    for equation in found:
        assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2, equation


def lowered(kernel, problem) -> tuple[int, int]:
    """How many Triton modules forward and backward lower to for an H200."""
    like = functools.partial(jax.ShapeDtypeStruct, dtype=problem.dtype)
    q, k = like(problem.q_shape), like(problem.kv_shape)
    lse = jax.ShapeDtypeStruct((problem.batch, problem.q_heads, problem.q_len), jnp.float32)
    operands = kernel.prepare(problem)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)), pytest.warns(DeprecationWarning):
        passes = (
            jax.jit(kernel.forward, static_argnums=4).trace(q, k, k, operands, problem.scale),
            jax.jit(kernel.backward, static_argnums=7).trace(q, k, k, q, lse, q, operands, problem.scale),
        )
        texts = [p.lower(lowering_platforms=("cuda",)).as_text() for p in passes]
    return tuple(text.count("@__gpu$xla.gpu.triton") for text in texts)


def test_tiles_are_checked():
    """A tile that Triton cannot hold is refused where it is written down."""
    with pytest.raises(ValueError, match="columns: 48"):
        Tile(64, 48)


def test_default_tiles_follow_dtype_and_head_dim():
    """float32 and wide heads get smaller tiles than half precision at 128."""
    small, wide, usual = (
        AttentionProblem(masks.full(8, 8), head_dim=d, dtype=t)
        for d, t in ((128, "float32"), (256, "bfloat16"), (128, "bfloat16"))
    )
    assert fa2.default_schedule(small).forward.rows < fa2.default_schedule(usual).forward.rows
    assert fa2.default_schedule(wide).forward.rows < fa2.default_schedule(usual).forward.rows
    assert fa1.default_tiles(wide)[0].rows < fa1.default_tiles(usual)[0].rows


def test_sdpa_refuses_float16_on_a_cpu():
    """XLA has no float16 product with float32 sums on a CPU; the refusal comes before the compiler's."""
    reason = kernels.get("sdpa").capability.refuse(AttentionProblem(masks.full(8, 8), dtype="float16"))
    assert (reason is None) == (jax.default_backend() != "cpu")


def test_sdpa_in_bfloat16_is_near_naive():
    """sdpa loses at most twice what naive loses in bfloat16 on the same data, on every output."""
    problem = AttentionProblem(masks.causal(91, 75), 2, 6, 2, 24, "bfloat16")
    q, k, v, dout = tensors(problem)
    want = attention_oracle(*exact(q, k, v), problem.mask, problem.scale, *exact(dout))
    losses = []
    for kernel in (kernels.get("sdpa"), naive.KERNEL):
        results = jax.jit(functools.partial(run, kernel, problem.scale))(kernel.prepare(problem), q, k, v, dout)
        losses.append([error(x, getattr(want, n)) for n, x in results.items()])
    ours, base = losses
    assert all(a <= 2 * b + 1e-6 for a, b in zip(ours, base, strict=True)), losses


class TestCudnn:
    """What can be known of cudnn without a GPU."""

    kernel = kernels.get("cudnn")

    def test_says_why_it_cannot_run_here(self):
        if jax.default_backend() != "gpu":
            assert "GPU" in self.kernel.available()

    @pytest.mark.parametrize("mask, dtype, named", [
        (masks.full_sliding_window(64, 64, 5), "bfloat16", "mask full_sliding_window"),
        (masks.prefix_lm_causal(64, 64, 5), "bfloat16", "mask prefix_lm_causal"),
        (masks.causal(64, 80), "bfloat16", "q_len 64 with kv_len 80"),
        (masks.causal_document(64, 80, [30, 50]), "bfloat16", "q_len 64 with kv_len 80"),
        (masks.causal(1, 1), "bfloat16", "q_len 1 with kv_len 1"),
        (masks.causal(64, 64), "float32", "dtype float32"),
        (masks.causal(64, 64).restrict(np.arange(64), np.arange(64)), "bfloat16", "mask custom"),
    ])
    def test_refuses_by_name(self, mask, dtype, named):
        assert named in self.kernel.capability.refuse(AttentionProblem(mask, 1, 2, 2, 64, dtype))

    def test_refuses_a_scale_that_is_not_positive(self):
        problem = AttentionProblem(masks.causal(64, 64), 1, 2, 2, 64, scale=-0.5)
        assert self.kernel.capability.refuse(problem) == "does not take scale -0.5"

    def test_takes_what_is_native(self):
        for mask in (masks.full(64, 80), masks.causal(64, 64), masks.causal_sliding_window(64, 64, 9)):
            assert self.kernel.capability.refuse(AttentionProblem(mask, 2, 4, 2, 64)) is None
        for mask in (masks.full_document(64, 64, [14, 50]), masks.causal_document(64, 64, [14, 0, 50])):
            for problem in (AttentionProblem(mask, 2, 4, 4, 64), AttentionProblem(mask, 1, 4, 2, 64)):
                assert self.kernel.capability.refuse(problem, ("forward",)) is None
                assert f"pass backward under {mask.name}" in self.kernel.capability.refuse(problem)
        one = masks.causal_document(64, 64, [64])
        assert self.kernel.capability.refuse(AttentionProblem(one, 2, 4, 2, 64)) is None

    def test_int32_offsets_are_guarded(self):
        lengths = [1 << 17, 1 << 17]
        big = AttentionProblem(masks.causal_document(1 << 18, 1 << 18, lengths), 1, 64, 8, 128)
        assert "int32 offsets" in self.kernel.capability.refuse(big, ("forward",))

    def test_documents_become_offsets(self):
        problem = AttentionProblem(masks.causal_document(8, 8, [3, 0, 5]), 2, 2, 2, 64)
        operands = self.kernel.prepare(problem)
        assert operands.mask_type == "PADDING_CAUSAL"
        assert operands.offsets.tolist() == [0, 3, 8]
        assert operands.document.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
        assert operands.place.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]

    def test_one_document_and_windows_need_no_packing(self):
        one = self.kernel.prepare(AttentionProblem(masks.causal_document(8, 8, [8]), 1, 1, 1, 64))
        assert one.offsets is None and one.mask_type == "CAUSAL" and one.window is None
        window = self.kernel.prepare(AttentionProblem(masks.causal_sliding_window(8, 8, 2), 1, 1, 1, 64))
        assert window.window == 3  # cuDNN counts the row itself

    @pytest.mark.parametrize("mask", [
        masks.full(192, 320), masks.causal(257, 257), masks.causal_sliding_window(300, 300, 40),
        masks.full_document(256, 256, [56, 1, 199]), masks.causal_document(300, 300, [120, 0, 80, 100]),
    ], ids=lambda m: m.name)
    def test_every_native_mask_on_a_gpu(self, mask):
        """All results at batch 2 and grouped heads against the oracle; then a larger problem's lse."""
        reason = self.kernel.available()
        if reason:
            pytest.skip(reason)
        problem = AttentionProblem(mask, 2, 4, 2, 64, "bfloat16", 0.2)
        self.kernel.require(problem, ("forward",))
        q, k, v, dout = tensors(problem)
        want = attention_oracle(*exact(q, k, v), mask, 0.2, *exact(dout))
        operands = self.kernel.prepare(problem)
        if self.kernel.refuse(problem):
            out, lse = jax.jit(self.kernel.forward, static_argnums=4)(q, k, v, operands, 0.2)
            assert error(out, want.out) < 8e-3 and error(lse, want.lse) < 1e-5
            return
        got = jax.jit(functools.partial(run, self.kernel, 0.2))(operands, q, k, v, dout)
        for label, value in got.items():
            assert error(value, getattr(want, label)) < (1e-5 if label == "lse" else 8e-3), label
        # With a lse larger by ln 2 every probability is half of its own; dv shows it undiluted.
        halved = jax.jit(self.kernel.backward, static_argnums=7)
        dv = halved(q, k, v, got["out"], got["lse"] + np.log(2.0), dout, operands, 0.2)[2]
        assert error(2 * dv.astype(jnp.float32), want.dv) < 8e-3

    def test_other_result_dtypes_are_refused(self):
        q = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
        operands = self.kernel.prepare(AttentionProblem(masks.full(8, 8), head_dim=64))
        with pytest.raises(Unsupported, match="out_dtype float32"):
            self.kernel.forward(q, q, q, operands, 1.0, out_dtype=jnp.float32)
        with pytest.raises(Unsupported, match="grad_dtype float32"):
            lse = jnp.zeros((1, 1, 8))
            self.kernel.backward(q, q, q, q, lse, q, operands, 1.0, grad_dtype=jnp.float32)

    def test_differentiating_several_documents_is_refused(self):
        """The public call asks for the forward pass alone: the backward pass must not give a dk that is wrong."""
        q, lse = jnp.zeros((1, 8, 1, 64), jnp.bfloat16), jnp.zeros((1, 1, 8))
        operands = self.kernel.prepare(AttentionProblem(masks.causal_document(8, 8, [3, 5]), head_dim=64))
        with pytest.raises(Unsupported, match="pass backward under several documents"):
            self.kernel.backward(q, q, q, q, lse, q, operands, 1.0)
