"""Some rows and some keys of an attention result of any size against float64: no dense matrix, no other kernel."""

from typing import Any

import numpy as np

from parity.compare import relative_error
from workload.problem import AttentionProblem

COUNT = 24  # rows drawn; two for each query head of a larger group
LARGE = 1 << 19  # query rows times heads of a group


def spot_errors(stack, problem: AttentionProblem, inputs, results, seed: int = 0) -> dict[str, float]:
    """Relative errors of out, dq at some rows and of dk, dv at some keys, of the first and the last kv head.

    A group's query heads share the rows. The rows' softmax is computed anew from q and k; a key's gradients use the
    kernel's lse, which out has vouched for. Of a large problem one query head's out and dq are checked alone. dq and dk
    are differences (see the oracle): where they are smaller than what is subtracted, their errors are relative to that.

    Args:
      inputs: q, k, v, dout; results: out, lse, dq, dk, dv, arrays of `stack`.
    """
    rng = np.random.default_rng(seed)
    rows = np.unique(rng.integers(0, problem.q_len, max(COUNT, 2 * problem.group)))
    keys = np.unique(rng.integers(0, problem.kv_len, COUNT // 4))
    errors: dict[str, float] = {}
    large = problem.q_len * problem.group > LARGE
    for head in {0} if large else sorted({0, problem.kv_heads - 1}):
        for name, e in _head_errors(stack, problem, inputs, results, head, rows, () if large else keys).items():
            errors[name] = max(errors.get(name, 0.0), e)
    return errors


def _head_errors(stack, problem, inputs, results, kv_head: int, rows, keys) -> dict[str, float]:
    """One kv head of the first batch entry; its query heads all add to dk and dv."""
    mask, group, scale = problem.mask, problem.group, problem.scale
    heads = range(kv_head * group, (kv_head + 1) * group)[: None if len(keys) else 1]
    k, v = (stack.head(x, kv_head) for x in inputs[1:3])
    dk, dk_subtracted, dv = np.zeros((3, len(keys), k.shape[1]))
    got: dict[str, list[Any]] = {"out": [], "dq": []}
    want: dict[str, list[Any]] = {"out": [], "dq": []}
    subtracted: list[np.ndarray] = []
    for n, h in enumerate(heads):
        q, dout, out, dq = (stack.head(x, h) for x in (inputs[0], inputs[3], results[0], results[2]))
        lse = stack.head(results[1], h, axis=1)
        mask_head = h * mask.heads // problem.q_heads
        mine = rows[n :: len(heads)]
        seen, ks, vs = _seen(mask, mine, mask_head, k, v)
        p = _softmax(np.where(seen, scale * (q[mine] @ ks.T), -np.inf))
        value = p @ vs
        delta = (value * dout[mine]).sum(axis=1)
        got["out"].append(out[mine])
        got["dq"].append(dq[mine])
        want["out"].append(value)
        want["dq"].append(scale * (p * (dout[mine] @ vs.T - delta[:, None])) @ ks)
        subtracted.append(scale * delta[:, None] * (p @ ks))
        if not len(keys):
            continue
        by_key = _columns(mask, keys, mask_head)
        p = np.where(by_key, np.exp(scale * (q @ k[keys].T) - np.where(lse == -np.inf, np.inf, lse)[:, None]), 0.0)
        delta = (dout * out).sum(axis=1)[:, None]
        dv += p.T @ dout
        dk += scale * (p * (dout @ v[keys].T - delta)).T @ q
        dk_subtracted += scale * (p * delta).T @ q
    least = {"out": 0.0, "dq": np.linalg.norm(np.concatenate(subtracted))}
    found = {name: relative_error(*map(np.concatenate, (got[name], want[name])), least[name]) for name in got}
    if not len(keys):
        return found
    found["dk"] = relative_error(stack.head(results[3], kv_head)[keys], dk, np.linalg.norm(dk_subtracted))
    found["dv"] = relative_error(stack.head(results[4], kv_head)[keys], dv)
    return found


def _seen(mask, rows: np.ndarray, head: int, k, v):
    """Which of the keys from the first that one of the rows sees to the last they see, bool [rows, keys], and these."""
    seen = np.array([mask.dense_rows(r, r + 1, head)[0] for r in rows], bool).reshape(len(rows), mask.kv_len)
    some = np.flatnonzero(seen.any(axis=0))
    span = slice(some[0], some[-1] + 1) if len(some) else slice(0)
    return seen[:, span], k[span], v[span]


def _softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1, keepdims=True, initial=-np.inf)
    weight = np.exp(logits - np.where(top == -np.inf, 0.0, top))
    total = weight.sum(axis=1, keepdims=True)
    return weight / np.where(total == 0, 1.0, total)


def _columns(mask, keys: np.ndarray, head: int) -> np.ndarray:
    """Which rows see these keys, bool [q_len, keys]."""
    if hasattr(mask, "starts"):
        return ((mask.starts[:, :, None] <= keys) & (keys < mask.ends[:, :, None])).any(axis=0)
    step = max(1, (1 << 26) // max(1, mask.kv_len))
    return np.concatenate([
        mask.dense_rows(b, min(b + step, mask.q_len), head)[:, keys] for b in range(0, mask.q_len, step)])
