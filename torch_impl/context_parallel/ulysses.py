"""Ulysses: all-to-all of heads against tokens, one local attention, all-to-all back; twin in jax_impl.

Jacobs et al., DeepSpeed Ulysses, 2023. A rank trades its tokens of all heads for all its group's tokens of its heads.
Exact: nothing is merged. kv heads with several slots (degree above kv_heads) travel once per slot, and their
gradients are summed in float32. The exchange here also serves usp and loongtrain, whose groups are smaller.
"""

from collections.abc import Callable, Sequence

import torch

from torch_impl.context_parallel import all_gather
from torch_impl.context_parallel.local import Data, Local, put_tokens, take_tokens


def forward(local: Local, q, k, v, data: Data):
    """out, lse on the exchanged tensors: the whole sequence is here."""
    return all_gather.forward(local, q, k, v, data)


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv on the exchanged tensors."""
    return all_gather.backward(local, saved, dout, data)


def to_heads(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts [batch, length, heads, d] of a rank's tokens to [batch, degree * length, local heads, d], ascending.

    Args:
      tensor: "q", "k", "v", "dout": the layout and order are the keys' for k and v. Padding heads are zero.

    Returns: a function that waits and returns the exchanged tensor, so that several can be in flight.
    """
    signature = local.signature
    degree, layout, keys = signature.topology.ulysses, signature.heads, tensor in ("k", "v")
    if degree == 1:
        return lambda: x
    same = layout.kv_identity if keys else layout.q_identity
    slots = layout.kv_slots if keys else layout.q_slots
    sent = (x if same else _take_heads(x, slots)).unflatten(2, (degree, -1))
    coming = local.mesh.ulysses.all_to_all(sent.permute(2, 0, 1, 3, 4).contiguous(), f"heads for tokens of {tensor}")
    order = data.kv_order if keys else data.q_order
    return lambda: take_tokens(coming.wait().transpose(0, 1).flatten(1, 2), order)


def to_tokens(local: Local, x: torch.Tensor, tensor: str, data: Data) -> Callable[[], torch.Tensor]:
    """Starts the way back for out, dq, dk, dv (or lse as [.., 1]): padding heads go, slots of a kv head are summed.

    dk, dv travel in `signature.sums_dtype` and are summed in float32.
    """
    signature = local.signature
    degree, layout, keys = signature.topology.ulysses, signature.heads, tensor in ("dk", "dv")
    if degree == 1:
        return lambda: x
    order = data.kv_order if keys else data.q_order
    if keys:
        x = x.to(getattr(torch, signature.sums_dtype))
    sent = put_tokens(x, order, x.shape[1]).unflatten(1, (degree, -1)).transpose(0, 1).contiguous()
    coming = local.mesh.ulysses.all_to_all(sent, f"tokens for heads of {tensor}")

    def finish():
        got = coming.wait().permute(1, 2, 0, 3, 4).flatten(2, 3)
        if keys:
            return got if layout.kv_identity else _sum_heads(got.float(), layout.kv_places)
        return got if layout.q_identity else got[:, :, list(layout.q_places)]

    return finish


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
