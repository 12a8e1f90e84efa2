"""Ulysses: all-to-all of heads against tokens, one local attention, all-to-all back; twin in torch_impl.

Jacobs et al., DeepSpeed Ulysses, 2023. A rank trades its tokens of all heads for all its group's tokens of its heads.
Exact: nothing is merged. kv heads with several slots (degree above kv_heads) travel once per slot, and their
gradients are summed in float32. The exchange here also serves usp and loongtrain, whose groups are smaller.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.context_parallel import all_gather
from jax_impl.context_parallel.local import Data, Local, inverse, take_tokens
from workload.signature import Signature


def forward(local: Local, q, k, v, data: Data):
    """out, lse on the exchanged tensors: the whole sequence is here."""
    return all_gather.forward(local, q, k, v, data)


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv on the exchanged tensors."""
    return all_gather.backward(local, saved, dout, data)


def to_heads(signature: Signature, x, tensor: str, data: Data):
    """[batch, length, heads, d] of a rank's tokens to [batch, degree * length, local heads, d], ascending.

    Args:
      tensor: "q" or "kv": whose layout and order x has. Padding heads are zero.
    """
    return exchange_tokens(signature, in_slots(signature, x, tensor), tensor, data)


def to_tokens(signature: Signature, x, tensor: str, data: Data):
    """The way back for out, dq ("q") and dk, dv ("kv"): padding heads are dropped, slots of a kv head summed.

    dk, dv travel in `signature.sums_dtype` and are summed in float32.
    """
    return from_slots(signature, exchange_heads(signature, x, tensor, data), tensor)


def in_slots(signature: Signature, x, tensor: str):
    """[.., heads, d] to [.., slots, d]: heads as they travel, padding zero, a kv head once for each of its slots."""
    layout = signature.heads
    slots, same = (
        (layout.q_slots, layout.q_identity) if tensor == "q" else (layout.kv_slots, layout.kv_identity)
    )
    if same:
        return x
    slots = np.where(np.array(slots) < 0, x.shape[2], slots)
    return jnp.take(x, slots, axis=2, mode="fill", fill_value=0)


def from_slots(signature: Signature, x, tensor: str):
    """The inverse for out, dq (and lse), and for dk, dv the sum, in float32, over a kv head's slots."""
    layout = signature.heads
    if tensor == "q":
        return x if layout.q_identity else jnp.take(x, np.array(layout.q_places), axis=2)
    if layout.kv_identity:
        return x
    places = np.array(layout.kv_places)
    places = np.where(places < 0, x.shape[2], places)
    return jnp.take(x.astype(jnp.float32), places, axis=2, mode="fill", fill_value=0).sum(axis=3)


def exchange_tokens(signature: Signature, x, tensor: str, data: Data):
    """[batch, length, slots, d] of a rank's tokens to [batch, degree * length, slots / degree, d], ascending."""
    degree, (batch, length, slots, dim) = signature.topology.ulysses, x.shape
    if degree == 1:
        return x
    x = _exchange(jnp.moveaxis(x.reshape(batch, length, degree, slots // degree, dim), 2, 0))
    x = jnp.moveaxis(x, 0, 1).reshape(batch, degree * length, slots // degree, dim)
    return take_tokens(x, data.q_order if tensor == "q" else data.kv_order)


def exchange_heads(signature: Signature, x, tensor: str, data: Data):
    """The way back: [batch, degree * length, slots / degree, d] to [batch, length, slots, d]."""
    degree = signature.topology.ulysses
    if degree == 1:
        return x
    order = data.q_order if tensor == "q" else data.kv_order
    x = take_tokens(x, None if order is None else inverse(order, order.shape[0]))
    x = x if tensor == "q" else x.astype(signature.sums_dtype)
    batch, length, slots, dim = x.shape[0], x.shape[1] // degree, x.shape[2] * degree, x.shape[3]
    x = _exchange(jnp.moveaxis(x.reshape(batch, degree, length, slots // degree, dim), 1, 0))
    return jnp.moveaxis(x, 0, 2).reshape(batch, length, slots, dim)


def _exchange(x):
    """[degree, ...]: piece j goes to rank j, and is what came from it. In this form the compiler copies on one side."""
    return jax.lax.all_to_all(x, "ulysses", split_axis=0, concat_axis=0, tiled=True)
