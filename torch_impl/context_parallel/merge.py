"""Merging partial attention results over disjoint sets of keys; twin of jax_impl/context_parallel/merge.py.

Parts (out_1, lse_1), (out_2, lse_2) of the same rows make

    lse = log(exp(lse_1) + exp(lse_2)),    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2,

associative and commutative, with (0, -inf) as identity from either side. The maximum is subtracted before any
exponential and replaced by 0 where both sides are -inf, so nothing overflows and -inf - -inf never occurs
(the sigmoid form of the same merge is NaN there).
"""

import torch

from torch_impl.kernels.naive import unseen

Partial = tuple[torch.Tensor, torch.Tensor]


def empty(q: torch.Tensor) -> Partial:
    """The identity: out zeros float32 as q [B, S, H, D], lse -inf float32 [B, H, S]."""
    return unseen(q, torch.float32)


def merge(a: Partial, b: Partial, *, in_place: bool = False) -> Partial:
    """The result over the union of two disjoint sets of keys.

    Args:
      a, b: out [B, S, H, D] and lse [B, H, S], natural log, -inf for a row that sees no key; read as float32.
      in_place: out takes the place of `a`'s, which must be float32.

    Returns: out and lse, float32; (0, -inf) where neither side saw a key.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> out, lse = merge((0 * one, torch.full((1, 1, 1), -torch.inf)), (7 * one, torch.zeros(1, 1, 1)))
    >>> out.item(), lse.item()
    (7.0, 0.0)
    """
    (out_a, lse_a), (out_b, lse_b) = ((out.float(), lse.float()) for out, lse in (a, b))
    if in_place and out_a.is_cuda:
        from torch_impl.context_parallel.merge_triton import merge_into  # needs triton

        return out_a, merge_into(out_a, lse_a, out_b, lse_b)
    top = torch.maximum(lse_a, lse_b)
    guard = top.masked_fill(top == -torch.inf, 0.0)
    weight_a, weight_b = torch.exp(lse_a - guard), torch.exp(lse_b - guard)
    total = weight_a + weight_b
    some = total > 0
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, guard + torch.log(safe), -torch.inf)
    if in_place:
        out_a.mul_(_rows(weight_a / safe)).addcmul_(out_b, _rows(weight_b / safe))
        return out_a, lse
    return _rows(weight_a / safe) * out_a + _rows(weight_b / safe) * out_b, lse


def _rows(weight_BHS: torch.Tensor) -> torch.Tensor:
    """[B, H, S] to [B, S, H, 1], to weigh rows of an out tensor."""
    return weight_BHS.transpose(1, 2)[..., None]
