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
    if signature.topology.ulysses == 1:
        return x
    layout = signature.heads
    slots, same, order = (
        (layout.q_slots, layout.q_identity, data.q_order) if tensor == "q" else
        (layout.kv_slots, layout.kv_identity, data.kv_order)
    )
    if not same:
        slots = np.where(np.array(slots) < 0, x.shape[2], slots)
        x = jnp.take(x, slots, axis=2, mode="fill", fill_value=0)
    return take_tokens(_exchange(x, split=2, concat=1), order)


def to_tokens(signature: Signature, x, tensor: str, data: Data):
    """The way back for out, dq ("q") and dk, dv ("kv"): padding heads are dropped, slots of a kv head summed.

    dk, dv travel in `signature.sums_dtype` and are summed in float32.
    """
    if signature.topology.ulysses == 1:
        return x
    order = data.q_order if tensor == "q" else data.kv_order
    x = take_tokens(x, None if order is None else inverse(order, order.shape[0]))
    layout = signature.heads
    if tensor == "q":
        x = _exchange(x, split=1, concat=2)
        return x if layout.q_identity else jnp.take(x, np.array(layout.q_places), axis=2)
    x = _exchange(x.astype(signature.sums_dtype), split=1, concat=2)
    if layout.kv_identity:
        return x
    places = np.array(layout.kv_places)
    places = np.where(places < 0, x.shape[2], places)
    return jnp.take(x.astype(jnp.float32), places, axis=2, mode="fill", fill_value=0).sum(axis=3)


def _exchange(x, split: int, concat: int):
    return jax.lax.all_to_all(x, "ulysses", split_axis=split, concat_axis=concat, tiled=True)
