"""Ring all-gather: every ring index gathers all keys and computes its rows in one local call; twin in torch_impl.

The context parallelism of Llama 3 (Grattafiori et al., 2024, section 3.3.2). Keys are put in ascending order, so one
kernel call takes the mask as it is and nothing is merged; keys that no row of a rank sees are left out of its call.
Backward: keys are gathered again; dk, dv of all keys are summed over the ring by a float32 reduce-scatter, or travel in
the problem's dtype by an all-to-all of pieces that are summed in float32 at home, each contribution rounded once.
"""

import jax
import jax.numpy as jnp

from jax_impl.context_parallel.local import Data, Local, if_seen, inverse, row_sums, take_tokens
from jax_impl.context_parallel.merge import empty


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    return attend(local, q, *gather(local, (k, v), data), data)


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32; dk, dv [batch, kv_block, kv heads, d] summed over the ring."""
    q, k, v, out, lse = saved
    k, v = gather(local, (k, v), data)
    dq, *sums = gradients(local, (q, k, v, out, lse), dout, data)
    return dq, *scatter_sum(local, sums, data)


def attend(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse of gathered keys."""
    def nothing(k, v, _):
        out, lse = empty(q)
        return out.astype(q.dtype), lse

    def compute(k, v, operands):
        return local.forward(q, k, v, operands, out_dtype=q.dtype)

    return if_seen(data.seen[0], compute, nothing, k, v, data.masks[0])


def gradients(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32, of this rank's rows, for gathered keys."""
    q, k, v, out, _ = saved

    def nothing(_):
        return tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

    def compute(operands):
        return tuple(local.backward(saved, dout, row_sums(out, dout), operands))

    return if_seen(data.seen[0], compute, nothing, data.masks[0])


def gather(local: Local, tensors, data: Data):
    """Gathers blocks of k, v: the keys that this rank's kernel is handed, ascending, without padding."""
    return [_gather(local.signature, x, data) for x in tensors]


def scatter_sum(local: Local, tensors, data: Data):
    """[batch, gathered_rows, ..] of every ring index to this one's block, summed over the ring."""
    return [_scatter_sum(local.signature, x, data) for x in tensors]


def _gather(signature, x, data: Data):
    """The keys that this rank's kernel is handed."""
    if signature.topology.ring > 1:
        x = jax.lax.all_gather(x, "ring", axis=1, tiled=True)
    if data.gathered_order is None:
        return x[:, : signature.kv_total]
    return take_tokens(x, data.gathered_order)


def _scatter_sum(signature, x, data: Data):
    """[batch, gathered_rows, ..] of every ring index to this one's block, summed over the ring."""
    ring, block = signature.topology.ring, signature.kv_block
    if data.gathered_order is None:
        x = jnp.pad(x, ((0, 0), (0, ring * block - x.shape[1]), (0, 0), (0, 0)))
    else:
        x = take_tokens(x, inverse(data.gathered_order, ring * block), fill=signature.gathered_rows)
    if ring == 1:
        return x
    if signature.travel == "float32":
        return jax.lax.psum_scatter(x, "ring", scatter_dimension=1, tiled=True)
    x = x.astype(signature.travel).reshape(x.shape[0], ring, block, *x.shape[2:])
    pieces = jax.lax.all_to_all(x, "ring", split_axis=1, concat_axis=1, tiled=True)
    return pieces.astype(jnp.float32).sum(axis=1)
