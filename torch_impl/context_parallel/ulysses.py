"""Ulysses: all-to-all of heads against tokens, one local attention, all-to-all back; twin in jax_impl.

Jacobs et al., DeepSpeed Ulysses, 2023. A rank trades its tokens of all heads for all its group's tokens of its heads.
Exact: nothing is merged. kv heads with several slots (degree above kv_heads) travel once per slot, and their
gradients are summed in float32. The exchange here also serves usp and loongtrain, whose groups are smaller.
"""

from collections.abc import Callable, Sequence

import torch

from torch_impl.context_parallel import all_gather
from torch_impl.context_parallel.local import Data, Local, put_tokens, take_tokens, words


def forward(local: Local, q, k, v, data: Data):
    """out, lse on the exchanged tensors: the whole sequence is here."""
    return all_gather.forward(local, q, k, v, data)


def backward(local: Local, saved, dout, data: Data):
    """Yields dq, dk, dv on the exchanged tensors by name."""
    return all_gather.backward(local, saved, dout, data)


def to_heads(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts [batch, length, heads, d] of a rank's tokens to [batch, degree * length, local heads, d], ascending.

    Args:
      tensor: "q", "k", "v", "dout": the layout and order are the keys' for k and v. Padding heads are zero.

    Returns: a function that waits and returns the exchanged tensor, so that several can be in flight.
    """
    slots = in_slots(local, x, tensor)
    return exchange_tokens(local, slots.unflatten(2, (local.signature.topology.ulysses, -1)), tensor, data)


def to_tokens(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts the way back for out, dq, dk, dv (or lse as [.., 1]): padding heads go, slots of a kv head are summed.

    dk, dv travel in `signature.sums_dtype` and are summed in float32.
    """
    finish = exchange_heads(local, x, tensor, data)

    def result():
        got = finish()
        return from_slots(local, words(got).flatten(2, 3).view(got.dtype), tensor)

    return result


def in_slots(local: Local, x: torch.Tensor, tensor: str) -> torch.Tensor:
    """[.., heads, d] to [.., slots, d]: heads as they travel, padding zero, a kv head once for each of its slots."""
    layout = local.signature.heads
    slots, same = (
        (layout.kv_slots, layout.kv_identity) if tensor in ("k", "v") else (layout.q_slots, layout.q_identity)
    )
    return x if same else _take_heads(x, slots)


def from_slots(local: Local, x: torch.Tensor, tensor: str) -> torch.Tensor:
    """The inverse for out, dq (and lse), and for dk, dv the sum, in float32, over a kv head's slots."""
    layout = local.signature.heads
    if tensor in ("dk", "dv"):
        return x if layout.kv_identity else _sum_heads(x.float(), layout.kv_places)
    return x if layout.q_identity else x[:, :, list(layout.q_places)]


def exchange_tokens(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts [batch, length, degree, slots, d] of a rank's tokens to [batch, degree * length, slots, d], ascending."""
    if local.signature.topology.ulysses == 1:
        return lambda: x[:, :, 0]
    sent = words(x).permute(2, 0, 1, 3, 4).contiguous().view(x.dtype)
    coming = local.mesh.ulysses.all_to_all(sent, f"heads for tokens of {tensor}")
    order = data.kv_order if tensor in ("k", "v") else data.q_order
    return lambda: take_tokens(coming.wait().transpose(0, 1).flatten(1, 2), order)


def exchange_heads(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts the way back: [batch, degree * length, slots, d] to [batch, length, degree, slots, d]."""
    degree, keys = local.signature.topology.ulysses, tensor in ("dk", "dv")
    if degree == 1:
        return lambda: x[:, :, None]
    if keys:
        x = x.to(getattr(torch, local.signature.sums_dtype))
    x = put_tokens(x, data.kv_order if keys else data.q_order, x.shape[1])
    sent = x.unflatten(1, (degree, -1)).transpose(0, 1).contiguous()
    coming = local.mesh.ulysses.all_to_all(sent, f"tokens for heads of {tensor}")
    return lambda: coming.wait().permute(1, 2, 0, 3, 4)


def _take_heads(x: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
    """Heads of axis 2 in the order of their slots; slot -1 is a head of zeros."""
    index = torch.tensor(slots, device=x.device)
    got = x.index_select(2, index.clamp(min=0))
    return got.masked_fill_((index < 0)[:, None], 0)


def _sum_heads(x: torch.Tensor, places: Sequence[Sequence[int]]) -> torch.Tensor:
    """Per kv head the sum of its slots; places are padded with -1."""
    index = torch.tensor(places, device=x.device)
    got = x.index_select(2, index.clamp(min=0).flatten()).unflatten(2, tuple(index.shape))
    return got.masked_fill_((index < 0)[:, :, None], 0).sum(dim=3)
