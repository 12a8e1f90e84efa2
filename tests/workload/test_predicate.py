"""Predicates: what their arrays must be, in both stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.kernels
import torch_impl.kernels
from workload import masks
from workload.block_masks import uniform_block
from workload.predicate import Predicate, given, heads_of
from workload.problem import AttentionProblem

FULL = AttentionProblem(masks.full(60, 70), 1, 2, 1, 64, "bfloat16")
BLOCKS = AttentionProblem(uniform_block(60, 70, 1, 128, 1.0), 1, 2, 1, 64, "bfloat16")
KERNELS = [(jax_impl.kernels, "flex", FULL), (jax_impl.kernels, "flex_sparse", BLOCKS),
           (torch_impl.kernels, "flex", FULL)]


@pytest.mark.parametrize("arrays, said", [
    ({"q_arrays": (np.arange(59),)}, r"q_arrays: int64 \(59,\) among them, not 60 integers"),
    ({"kv_arrays": (np.arange(70), np.zeros(70))}, "kv_arrays: float64"),
    ({"q_arrays": (np.arange(60) + (1 << 32),)}, "q_arrays: 4294967296 to 4294967355 among them, kernels read 32 bits"),
    ({"kv_arrays": (np.full(70, 1 << 31, np.uint32),)}, "kv_arrays: 2147483648 to"),
])
def test_arrays_that_do_not_fit_are_named(arrays, said):
    """A shorter one would be read past its end; of a wider one the low bits, so that two documents became one."""
    with pytest.raises(ValueError, match="a mask_mod reads them, and there is none"):
        Predicate(None, None, **arrays)
    predicate = Predicate(lambda b, h, i, j, *_: j >= i, None, **arrays)
    for table, name, problem in KERNELS:
        with pytest.raises(ValueError, match=said):
            table.get(name).prepare(problem, predicate=predicate)


@pytest.mark.parametrize("mods, said", [
    ({"mask_mod": 3}, "mask_mod: 3 is no function of"),
    ({"score_mod": lambda score: score}, "score_mod: .* is no function"),
    ({"mask_mod": lambda b, h, i, j: j <= i}, r"mask_mod: .* \(batch, q_head, i, j, q_values, kv_values\)")])
def test_functions_that_cannot_be_called_so_are_named(mods, said):
    """Four arguments are FlexAttention's own form."""
    with pytest.raises(TypeError, match=said):
        Predicate(**mods)


@pytest.mark.parametrize("gives, said", [(lambda i, j: i - j, "int"), (lambda i, j: None, "NoneType")])
def test_a_mask_mod_gives_booleans(gives, said):
    """The bits of a number were read as one: half of the cells were hidden, without a word."""
    predicate = Predicate(lambda b, h, i, j, *_: gives(i, j))
    for table in (jax_impl.kernels, torch_impl.kernels):
        with pytest.raises(TypeError, match=f"mask_mod: gives {said}.*, not bool"):
            table.get("flex").prepare(FULL, predicate=predicate)


@pytest.mark.parametrize("reads", [
    lambda b, h, i, j: j < 30 + 16 * h, lambda b, h, i, j: (j <= i) & (i % (b + 2) == 0),
    lambda b, h, i, j: (j <= i) | (h >= 1), lambda b, h, i, j: j < 30 + h.real, lambda b, h, i, j: i == h])
def test_a_mask_mod_that_reads_its_head_says_so(reads):
    """Else the tiles that head 0 of batch entry 0 sees were those of all heads, without a word."""
    predicate = Predicate(lambda b, h, i, j, *_: reads(b, h, i, j))
    for table in (jax_impl.kernels, torch_impl.kernels):
        kernel = table.get("flex")
        with pytest.raises(ValueError, match="^per_head: False, and the mask_mod reads batch or q_head"):
            kernel.prepare(FULL, predicate=predicate)
        kernel.prepare(FULL, predicate=predicate, per_head=True)
    assert heads_of(FULL, True) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("reads", [
    lambda b, h, i, j: j < (10, 20)[h], lambda b, h, i, j: j <= i if b else j < i,
    lambda b, h, i, j: j < np.arange(2)[h]])
def test_a_mask_mod_that_reads_its_head_in_python_says_so(reads):
    """A program that is traced has no number there."""
    predicate = Predicate(lambda b, h, i, j, *_: reads(b, h, i, j))
    with pytest.raises(ValueError, match="^per_head: False, and the mask_mod reads batch or q_head"):
        torch_impl.kernels.get("flex").prepare(FULL, predicate=predicate)
    for per_head in (False, True):
        with pytest.raises(TypeError, match="^mask_mod: "):
            jax_impl.kernels.get("flex").prepare(FULL, predicate=predicate, per_head=per_head)


@pytest.mark.parametrize("table, reads", [
    (torch_impl.kernels, lambda h, j: j < torch.where(h == 0, 10, 20)),
    (jax_impl.kernels, lambda h, j: j < 10 + h.astype(jnp.int32))])
def test_a_mask_mod_is_asked_under_heads_as_kernels_give_them(table, reads):
    """Numbers of Python are no tensors."""
    predicate = Predicate(lambda b, h, i, j, *_: reads(h, j) & (b >= 0))
    table.get("flex").prepare(FULL, predicate=predicate, per_head=True)


@pytest.mark.parametrize("name, problem", [("flex", FULL), ("flex_sparse", BLOCKS)])
def test_arrays_that_a_function_holds_are_refused_before_a_kernel_is_traced(name, problem):
    kernel, window, bias = jax_impl.kernels.get(name), jnp.arange(70), np.ones(70, np.float32)
    number, said = jnp.float32(0.5), "kernels read q_arrays, kv_arrays and numbers of Python or NumPy"
    with pytest.raises(ValueError, match=rf"^mask_mod: holds an array, int32 \(70,\); {said}"):
        kernel.prepare(problem, predicate=Predicate(lambda b, h, i, j, *_: j <= i + window[i]))
    with pytest.raises(ValueError, match=r"^score_mod: holds an array, float32 \(70,\)"):
        kernel.prepare(problem, predicate=Predicate(None, lambda s, b, h, i, j: s + jnp.asarray(bias)[j]))
    with pytest.raises(ValueError, match=rf"^score_mod: holds an array, float32 \(\); {said}"):
        kernel.prepare(problem, predicate=Predicate(None, lambda s, *_: s * number))
    with pytest.raises(TypeError, match="^mask_mod: gives int32, not bool"):
        kernel.prepare(problem, predicate=Predicate(lambda b, h, i, j, *_: j - i))
    kernel.prepare(problem, predicate=Predicate(None, lambda s, *_: s * jnp.float32(0.5) + bias[2]))


@pytest.mark.parametrize("name, problem", [("flex", FULL), ("flex_sparse", BLOCKS)])
def test_what_logits_would_lose_the_gradient_of_is_refused(name, problem):
    """A bias that is learnt: it got none, without a word."""
    def sharpened(by):
        jax_impl.kernels.get(name).prepare(problem, predicate=Predicate(None, lambda s, *_: s * by))
        return by

    for transformed in (jax.jit(sharpened), jax.grad(sharpened)):
        with pytest.raises(ValueError, match=r"^score_mod: holds a value that is traced, float32 \(\)"):
            transformed(0.5)


def test_a_bias_that_would_get_no_gradient_of_torch_is_refused():
    kernel, bias = torch_impl.kernels.get("flex"), torch.zeros(70, requires_grad=True)
    with pytest.raises(ValueError, match="^score_mod: reads a tensor that requires a gradient"):
        kernel.prepare(FULL, predicate=Predicate(None, lambda s, b, h, i, j: s + bias[j]))
    kernel.prepare(FULL, predicate=Predicate(None, lambda s, b, h, i, j: s + bias.detach()[j]))


def test_what_is_no_predicate_is_named():
    for table, name, problem in KERNELS:
        with pytest.raises(TypeError, match=r"predicate: builtins.function is no workload.predicate.Predicate"):
            table.get(name).prepare(problem, predicate=lambda b, h, i, j: j <= i)
    assert given(None, FULL) == Predicate()
