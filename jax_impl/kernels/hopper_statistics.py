"""lse and delta as the backward kernels on Hopper take them: added to logits and their gradients by the tensor cores.

A product of depth 16 with them adds a vector to every row of a tile, where loading it would cost as many cycles of
shared memory as the queries' tile does.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_masks import TILE

TERMS = 16  # of a row, the least depth of a product: three for each vector
HUGE = 1e30  # stands in for infinity where zero times it has to be zero


def statistics(*vectors):
    """Float32 vectors [..., n], or None for zeros, as sums of three bfloat16 terms each: [..., n, TERMS]."""
    shape = next(x.shape for x in vectors if x is not None)
    terms = []
    for x in vectors:
        rest = jnp.zeros(shape, jnp.float32) if x is None else jnp.clip(x, -HUGE, HUGE)
        for _ in range(3):
            term = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
            terms.append(term.astype(jnp.bfloat16))
            rest = rest - term
    terms += [jnp.zeros(shape, jnp.bfloat16)] * (TERMS - len(terms))
    return jnp.stack(terms, axis=-1)


def ones(vector, rows: int = 64):
    """Left operand [rows, TERMS] of a product with statistics that adds their vector of this number to every row."""
    term = plgpu.broadcasted_iota(jnp.int32, (rows, TERMS), 1, layout=TILE)
    return ((term >= 3 * vector) & (term < 3 * vector + 3)).astype(jnp.bfloat16)
