"""The reference of a long problem at some rows and some keys of some heads, in float64 and as a naive run.

A row's out, lse and dq need that row alone; a key's dk and dv need every row's lse and rowsum(out * dout), which one
forward pass over the columns that the mask shows gives. So the cost is that of a forward pass of a few heads, and the
memory that of a chunk of rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workload.block_masks import BlockMask

ROWS = 2048  # query rows of a chunk


def spot_results(
    arrays: dict[str, np.ndarray], mask: Any, mask_heads: Sequence[int], scale: float, dtype: str, rows: np.ndarray,
    keys: np.ndarray,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(exact, naive) results: out, dq [1, rows, heads, D], lse [1, heads, rows], dk, dv [1, keys, kv_heads, D].

    Args:
      arrays: q, k, v, dout as `parity.inputs.stored`, [1, seq, heads, D].
      mask: the problem's; mask_heads: for each query head of `arrays`, its head in the mask.
      dtype: of the naive run, whose operands of products are rounded to it and summed in float32.
      rows, keys: indices, ascending.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v, dout = (_put(arrays[name][0], device).double().transpose(0, 1) for name in ("q", "k", "v", "dout"))
    at, by = (torch.from_numpy(x).to(device) for x in (rows, keys))
    group, narrow = q.shape[0] // k.shape[0], getattr(torch, dtype)

    def rounded(x):
        return x.to(narrow).to(x.dtype)

    styles = {"exact": (torch.float64, lambda x: x), "naive": (torch.float32, rounded)}
    found: dict[str, dict[str, list]] = {style: {n: [] for n in ("out", "lse", "dq", "dk", "dv")} for style in styles}
    views = {head: _visible(mask, head, device) for head in set(mask_heads)}
    tf32, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    for h, mask_head in enumerate(mask_heads):
        seen, hk = views[mask_head], h // group
        lse, out = _forward(q[h], k[hk], v[hk], seen, scale)
        for style, (work, narrowed) in styles.items():
            operands = [x.to(work) for x in (q[h], k[hk], v[hk], dout[h])]
            delta = (operands[3] * narrowed(out.to(work))).sum(dim=1)
            got = _rows(operands, seen, scale, narrowed, at, delta)
            got |= _keys(operands, seen, scale, narrowed, by, lse.to(work), delta)
            for name, x in got.items():
                if name in ("dk", "dv") and h % group:
                    found[style][name][-1] += x
                else:
                    found[style][name].append(x)
    torch.backends.cuda.matmul.allow_tf32 = tf32
    results = []
    for style, (_, narrowed) in styles.items():
        stacked = {name: torch.stack(x, dim=0 if name == "lse" else 1)[None] for name, x in found[style].items()}
        results.append({
            name: (x if name == "lse" else narrowed(x)).double().cpu().numpy() for name, x in stacked.items()})
    return results[0], results[1]


def _put(x: np.ndarray, device: str):
    """An array, as it is or as `stored` (uint16 is bfloat16), on the device."""
    import torch

    bits = torch.from_numpy(np.ascontiguousarray(x.view(np.int16) if x.dtype == np.uint16 else x)).to(device)
    return bits.view(torch.bfloat16) if x.dtype == np.uint16 else bits


def _visible(mask: Any, head: int, device: str) -> Callable:
    """seen(rows, columns) of index tensors: bool [rows, columns] on the device, whichever type the mask is of."""
    if not isinstance(mask, BlockMask):
        starts, ends = _put(mask.starts, device), _put(mask.ends, device)
        return lambda i, j: ((starts[:, i, None] <= j) & (j < ends[:, i, None])).any(dim=0)
    blocks, limits = _put(mask.block_bitmap()[head], device), _put(mask.limits, device)
    row_block, key_block = (_put(x[head].astype(np.int64), device) for x in (mask.q_block_ids(), mask.kv_block_ids()))
    return lambda i, j: blocks[row_block[i]][:, key_block[j]] & (j < limits[i, None])


def _forward(q, k, v, seen, scale):
    """lse and out of all rows of a head."""
    import torch

    lse, out = torch.full(q.shape[:1], -torch.inf, dtype=q.dtype, device=q.device), torch.zeros_like(q)
    for begin in range(0, len(q), ROWS):
        i = torch.arange(begin, min(begin + ROWS, len(q)), device=q.device)
        shown = seen(i, torch.arange(len(k), device=q.device))
        columns = shown.any(dim=0).nonzero()[:, 0]  # what no row of the chunk sees costs nothing
        if not len(columns):
            continue
        first, last = int(columns[0]), int(columns[-1]) + 1
        logits = (scale * (q[i] @ k[first:last].T)).masked_fill_(~shown[:, first:last], -torch.inf)
        lse[i] = logits.logsumexp(dim=1)
        out[i] = _weights(logits, lse[i]) @ v[first:last]
    return lse, out


def _weights(logits, lse):
    """exp(logits - lse), 0 in rows that see nothing."""
    return (logits - lse.masked_fill(lse == -float("inf"), 0.0)[:, None]).exp()


def _rows(operands, seen, scale, rounded, at, delta):
    """out, lse and dq of some rows."""
    import torch

    q, k, v, dout = operands
    shown = seen(at, torch.arange(len(k), device=q.device))
    logits = (scale * (q[at] @ k.T)).masked_fill(~shown, -float("inf"))
    lse = logits.logsumexp(dim=1)
    p = _weights(logits, lse)
    ds = rounded(p * (dout[at] @ v.T - delta[at, None]))
    return {"out": rounded(p) @ v, "lse": lse, "dq": scale * (ds @ k)}


def _keys(operands, seen, scale, rounded, by, lse, delta):
    """What one query head adds to dk and dv of some keys."""
    import torch

    q, k, v, dout = operands
    shown = seen(torch.arange(len(q), device=q.device), by)
    p = _weights((scale * (q @ k[by].T)).masked_fill(~shown, -float("inf")), lse)
    ds = rounded(p * (dout @ v[by].T - delta[:, None]))
    return {"dk": scale * (ds.T @ q), "dv": rounded(p).T @ dout}
