"""Which blocks a dynamic mask keeps, chosen on the device; its twin is jax_impl/selection.py.

Both stacks keep the same blocks on equal scores, ties to the lower index: top-k sorts, and top-p sums softmax weights
in fixed point, where no rounding depends on a library's exp or on the order of a sum.
"""

import numpy as np
import torch

from workload.selection import check_mass, check_pooled, check_slots, fixed_point_weights


def pooled_scores(q, k, q_bounds: np.ndarray, kv_bounds: np.ndarray) -> torch.Tensor:
    """Mean-pooled q . mean-pooled k, scaled as logits, averaged over the batch and the query heads of a mask.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k: [batch, kv_len, kv_heads, head_dim].
      q_bounds, kv_bounds: int32 [heads, blocks + 1]; heads is 1, kv_heads or q_heads.

    Returns: float32 [heads, q_blocks, kv_blocks].
    """
    check_pooled(q, k, q_bounds, kv_bounds)
    heads, (batch, _, q_heads, dim), kv_heads = len(q_bounds), q.shape, k.shape[2]
    if heads > kv_heads:
        k = k.repeat_interleave(heads // kv_heads, dim=2)
    q, k = _pooled(q, q_bounds), _pooled(k, kv_bounds)
    k = k.repeat_interleave(q_heads // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->hqk", q, k)
    return scores.unflatten(0, (heads, q_heads // heads)).mean(dim=1) * (dim**-0.5 / batch)


def _pooled(x, bounds: np.ndarray) -> torch.Tensor:
    """Mean over the tokens of each block: [batch, seq, n, d] to float32 [batch, blocks, n, d]; 0 for an empty block."""
    sizes = torch.as_tensor(np.diff(bounds).astype(np.int64), device=x.device)
    mine = x.unflatten(2, (len(bounds), -1)).unbind(2)
    out = [torch.segment_reduce(some.float(), "mean", lengths=size.expand(len(x), -1), axis=1, initial=0)
           for some, size in zip(mine, sizes, strict=True)]
    return torch.stack(out, dim=2).flatten(2, 3)


def top_k(scores, k: int, allowed=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best allowed key blocks of each query block, ties to the lower index.

    Args:
      scores: float32 [heads, q_blocks, kv_blocks].
      allowed: bool, broadcast to scores; all by default.

    Returns: counts int32 [heads, q_blocks] and ascending indices int32 [heads, q_blocks, k], zero after counts.
    ValueError where k is not within 1..kv_blocks.
    """
    scores, allowed = _open(scores, allowed)
    k, order = check_slots(k, scores.shape[2]), _order(scores, allowed)
    chosen = torch.zeros_like(allowed).scatter_(2, order[:, :, :k], True)
    return lists(chosen & allowed, k)


def top_p(scores, p: float, allowed=None) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest set of allowed key blocks of each query block whose softmax mass reaches p, ties to the lower index.

    Masses are in units of 2 ** -17 of the row's largest. Arguments and results as of `top_k`, with kv_blocks slots.
    """
    check_mass("p", p)
    scores, allowed = _open(scores, allowed)
    steps, table, limit = fixed_point_weights()
    top = scores.masked_fill(~allowed, -torch.inf).amax(dim=2, keepdim=True)
    below = ((top - scores) * steps).round().clamp(0, limit).to(torch.int32)
    weight = torch.as_tensor(table, device=scores.device)[below % len(table)] >> (below // len(table))
    weight = weight.masked_fill(~allowed, 0)
    order = _order(scores, allowed)
    sorted_weight = weight.gather(2, order)
    before = sorted_weight.cumsum(dim=2, dtype=torch.int32) - sorted_weight
    total = weight.sum(dim=2, keepdim=True, dtype=torch.int32)
    kept = before.float() < total.float() * np.float32(p).item()
    return lists(torch.zeros_like(allowed).scatter_(2, order, kept) & allowed, scores.shape[2])


def lists(chosen, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """counts and ascending, zero-padded indices of a bool [heads, q_blocks, kv_blocks] picture."""
    counts = chosen.sum(dim=2, dtype=torch.int32)
    order = (~chosen).to(torch.int8).argsort(dim=2, stable=True)[:, :, :slots].to(torch.int32)
    return counts, order.masked_fill(torch.arange(slots, device=order.device) >= counts[:, :, None], 0)


def _open(scores, allowed):
    allowed = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand(scores.shape)
    return scores.float(), allowed


def _order(scores, allowed):
    return scores.masked_fill(~allowed, -torch.inf).argsort(dim=2, descending=True, stable=True)
