"""lse and delta as the backward kernels on Hopper take them: added to logits and their gradients by the tensor cores.

A product of depth 16 with them adds a vector to every row of a tile, where loading it would cost as many cycles of
shared memory as the queries' tile does.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_add import PART, ROWS, register_shape
from jax_impl.kernels.hopper_forward import COMPILER, LOG2E, round_up, shared_tile, split_number
from jax_impl.kernels.hopper_masks import ROW, TILE

TERMS = 16  # of a row, the least depth of a product: three for each vector
HUGE = 1e30  # stands in for infinity where zero times it has to be zero


def base2(lse):
    """lse in base 2; +inf for -inf, so that probabilities are zeros where nothing is seen."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)


def statistics(*vectors):
    """Float32 vectors [..., n], or None for zeros, as sums of three bfloat16 terms each: [..., n, TERMS]."""
    shape = next(x.shape for x in vectors if x is not None)
    terms = []
    for x in vectors:
        whole = jnp.zeros(shape, jnp.float32) if x is None else jnp.clip(x, -HUGE, HUGE)
        # XLA would leave out a cast there and back.
        parts = _terms(whole, functools.partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=7))
        terms += [part.astype(jnp.bfloat16) for part in parts]
    terms += [jnp.zeros(shape, jnp.bfloat16)] * (TERMS - len(terms))
    return jnp.stack(terms, axis=-1)


def _terms(x, rounded):
    """Three float32 terms, each of bfloat16's precision as `rounded` makes it, whose sum is x."""
    for _ in range(3):
        term = rounded(x)
        yield term
        x = x - term


def ones(vector, rows: int = 64):
    """Left operand [rows, TERMS] of a product with statistics that adds their vector of this number to every row."""
    term = plgpu.broadcasted_iota(jnp.int32, (rows, TERMS), 1, layout=TILE)
    return ((term >= 3 * vector) & (term < 3 * vector + 3)).astype(jnp.bfloat16)


def begin(out, dout, lse, scale: float | None, columns: int):
    """What a backward pass starts from, in one reading of out and dout.

    Args:
      out, dout: [batch, q_len, heads, head_dim], 16-bit or float32.
      lse: float32 [batch, heads, at least q_len padded to whole `columns`], -inf where empty or padded.
      scale: > 0, or None for no terms of lse.

    Returns: `statistics` of -lse / scale and -delta, [batch, heads, q_len so padded, TERMS]; zeros for dq, float32
      [batch, heads * tiles of 64 rows, *register_shape(head_dim)].
    """
    batch, q_len, heads, dim = dout.shape
    rows, (height, _) = round_up(q_len, columns), register_shape(PART)
    tiles = rows // ROWS

    def body(out_g, dout_g, lse_g, terms_g, dq_g, out_s, dout_s, terms_s, zeros_s, ready):
        entry, (tile, head) = lax.axis_index("batch"), split_number(lax.axis_index("block"), heads)
        here = pl.ds(tile * ROWS, ROWS)
        for gmem, smem in ((out_g, out_s), (dout_g, dout_s)):
            plgpu.copy_gmem_to_smem(gmem.at[entry, here, head], smem, ready)
        layout = plgpu.Layout.WG_STRIDED(zeros_s.shape, 4)
        zeros_s[...] = plgpu.layout_cast(jnp.zeros(zeros_s.shape, jnp.float32), layout)
        plgpu.commit_smem()
        for part in range(dim // PART):
            plgpu.copy_smem_to_gmem(zeros_s, dq_g.at[entry, head * tiles + tile, pl.ds(part * height, height)])
        vectors = []
        if scale is not None:
            lse = plgpu.load(lse_g.at[entry, head, here], layout=ROW, optimized=False)
            vectors.append((0, jnp.where(lse == -jnp.inf, -HUGE, lse * (-1.0 / scale))))
        plgpu.barrier_wait(ready)
        x, y = (plgpu.load(smem, layout=TILE).astype(jnp.float32) for smem in (out_s, dout_s))
        vectors.append((3, -jnp.sum(x * y, axis=1)))
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, TERMS), 1, layout=TILE)
        terms = plgpu.layout_cast(jnp.zeros((ROWS, TERMS), jnp.float32), TILE)
        for first, x in vectors:
            for n, term in enumerate(_terms(x, lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)), first):
                terms = jnp.where(column == n, lax.broadcast_in_dim(term, terms.shape, [0]), terms)
        terms_s[...] = terms.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(terms_s, terms_g.at[entry, head, here])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch, heads, rows, TERMS), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads * tiles, *register_shape(dim)), jnp.float32),
        ],
        scratch_types={
            "out_s": shared_tile((ROWS, dim), out.dtype),
            "dout_s": shared_tile((ROWS, dim), dout.dtype),
            "terms_s": shared_tile((ROWS, TERMS), jnp.bfloat16),
            "zeros_s": plgpu.SMEM(register_shape(PART), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2),
        },
        grid=(batch, tiles * heads),
        grid_names=("batch", "block"),
        compiler_params=COMPILER,
        kernel_name="hopper_begin",
    )(out, dout, lse)
