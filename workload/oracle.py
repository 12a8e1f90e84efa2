"""float64 attention in plain NumPy: out, lse, dq, dk, dv. Shares no code with what it judges.

S = scale * q k^T, P = exp(S - lse) on visible cells, out = P v; with dout: dv = P^T dout,
dS = P * (dout v^T - rowsum(dout * out)), dq = scale * dS k, dk = scale * dS^T q.
A row without visible keys gives out 0, lse -inf and contributes nothing to any gradient.
"""

import dataclasses
from typing import Any

import numpy as np

CHUNK_CELLS = 1 << 22  # rows are taken in chunks of about this many cells


@dataclasses.dataclass(frozen=True, eq=False)
class OracleResult:
    """float64 results: out, dq [batch, q_len, q_heads, head_dim]; lse [batch, q_heads, q_len]; dk, dv as k."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None


def attention_oracle(q, k, v, mask: Any, scale: float, dout=None) -> OracleResult:
    """Attention and, where dout is given, its gradients, in float64.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k, v: [batch, kv_len, kv_heads, head_dim]; any float dtype.
      mask: anything with heads and dense_rows(begin, end, head) -> bool [rows, kv_len].
      scale: logit scale.
      dout: cotangent of out, as q, or None.

    Returns: `OracleResult`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, q_len, q_heads, _ = q.shape
    kv_len, kv_heads = k.shape[1:3]
    out = np.zeros((batch, q_len, q_heads, v.shape[-1]))
    lse = np.full((batch, q_heads, q_len), -np.inf)
    grads: list[Any] = [None] * 3
    if dout is not None:
        dout = np.asarray(dout, np.float64)
        grads = [np.zeros_like(x) for x in (q, k, v)]
    rows = max(1, CHUNK_CELLS // max(1, kv_len))
    for begin in range(0, q_len, rows):
        at = slice(begin, min(q_len, begin + rows))
        for h in range(q_heads):
            hk = h * kv_heads // q_heads
            seen = mask.dense_rows(at.start, at.stop, h * mask.heads // q_heads)
            for b in range(batch):
                _rows(q[b, at, h], k[b, :, hk], v[b, :, hk], seen, scale,
                      out[b, at, h], lse[b, h, at],
                      None if dout is None else dout[b, at, h],
                      None if dout is None else (grads[0][b, at, h], grads[1][b, :, hk], grads[2][b, :, hk]))
    return OracleResult(out, lse, *grads)


def _rows(q, k, v, seen, scale, out, lse, dout, grads):
    """One head's chunk of rows; writes out and lse, adds into the gradients."""
    some = seen.any(axis=1)
    logits = np.where(seen, scale * (q @ k.T), -np.inf)
    top = np.where(some, logits.max(axis=1, initial=-np.inf), 0.0)
    weight = np.exp(logits - top[:, None])
    total = weight.sum(axis=1)
    p = weight / np.where(some, total, 1.0)[:, None]
    out[:] = p @ v
    lse[:] = np.where(some, top + np.log(np.where(some, total, 1.0)), -np.inf)
    if dout is None:
        return
    dq, dk, dv = grads
    ds = p * (dout @ v.T - (dout * out).sum(axis=1)[:, None])
    dq += scale * (ds @ k)
    dk += scale * (ds.T @ q)
    dv += p.T @ dout
