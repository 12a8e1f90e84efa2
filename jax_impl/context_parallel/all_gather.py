"""Ring all-gather: every ring index gathers all keys and computes its rows in one local call; twin in torch_impl.

The context parallelism of Llama 3 (Grattafiori et al., 2024, section 3.3.2). Keys are put in ascending order, so one
kernel call takes the mask as it is and nothing is merged. Backward: keys are gathered again; dk, dv of all keys are
summed over the ring by a float32 reduce-scatter, or travel in the problem's dtype by an all-to-all of pieces that are
summed in float32 at home, each contribution rounded once.
"""

import jax
import jax.numpy as jnp

from jax_impl.context_parallel.local import Data, Local, inverse, row_sums, take_tokens


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    k, v = (_gather(local.signature, x, data) for x in (k, v))
    return local.forward(q, k, v, data.masks[0], out_dtype=q.dtype)


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32; dk, dv [batch, kv_block, kv heads, d] summed over the ring."""
    q, k, v, out, lse = saved
    k, v = (_gather(local.signature, x, data) for x in (k, v))
    dq, dk, dv = local.backward((q, k, v, out, lse), dout, row_sums(out, dout), data.masks[0])
    return dq, *(_scatter_sum(local.signature, x, data) for x in (dk, dv))


def _gather(signature, x, data: Data):
    """All keys in ascending order, without padding."""
    if signature.topology.ring > 1:
        x = jax.lax.all_gather(x, "ring", axis=1, tiled=True)
    if data.gathered_order is None:
        return x[:, : signature.kv_total]
    return take_tokens(x, data.gathered_order)


def _scatter_sum(signature, x, data: Data):
    """[batch, kv_total, ..] of every ring index to this one's block, summed over the ring."""
    ring, block = signature.topology.ring, signature.kv_block
    if data.gathered_order is None:
        x = jnp.pad(x, ((0, 0), (0, ring * block - x.shape[1]), (0, 0), (0, 0)))
    else:
        x = take_tokens(x, inverse(data.gathered_order, ring * block), fill=signature.kv_total)
    if ring == 1:
        return x
    if signature.travel == "float32":
        return jax.lax.psum_scatter(x, "ring", scatter_dimension=1, tiled=True)
    x = x.astype(signature.travel).reshape(x.shape[0], ring, block, *x.shape[2:])
    pieces = jax.lax.all_to_all(x, "ring", split_axis=1, concat_axis=1, tiled=True)
    return pieces.astype(jnp.float32).sum(axis=1)
