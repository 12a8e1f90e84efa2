"""The reference of a problem and the error budget that goes with it, on heads that are affordable.

Up to `NUMPY_CELLS` logits (2K tokens of eight heads) the reference is `workload.oracle` on all heads; above, a float64
computation of its own (`chunked`), on the GPU where there is one, on the first and the last kv head (and all query
heads of their groups) of the first batch entry; above `WHOLE_CELLS` a head, at some rows and keys of these
(`parity.spots`). The naive run that sets the budget is the same chunked computation in
the problem's dtype: products of operands in that dtype summed in float32, P and dS rounded before they are multiplied,
results rounded.
"""

import dataclasses
import functools
from typing import Any

import numpy as np

from parity.budgets import budgets
from parity.compare import RESULTS
from parity.inputs import InputSpec, make_inputs, places, pool, tiled, widened
from parity.spots import spot_results
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

NUMPY_CELLS = 1 << 25
WHOLE_CELLS = 1 << 26  # logits of a head of which every row and key is judged: 8K tokens
BOTH_HEADS_CELLS = 1 << 33  # logits of both kv heads' groups; above, the last kv head alone is judged
SPOT_ROWS, SPOT_KEYS = 256, 128
ROWS = 2048  # query rows of a chunk


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which part of a problem is judged.

    Attributes:
      batch, kv_heads: batch entries and kv heads, with all query heads of those.
      rows, keys: query rows (of out, lse, dq) and keys (of dk, dv); None for all.
    """

    batch: tuple[int, ...]
    kv_heads: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None

    def q_heads(self, group: int) -> list[int]:
        """The query heads of the kv heads."""
        return [h * group + g for h in self.kv_heads for g in range(group)]

    def heads(self, name: str, x, group: int):
        """The sampled heads of a tensor or a result, by its name; works on arrays of any stack."""
        heads = self.q_heads(group) if name in ("q", "out", "dout", "dq", "lse") else list(self.kv_heads)
        axis = 1 if name == "lse" else 2
        if len(self.batch) == x.shape[0] and len(heads) == x.shape[axis]:
            return x
        at = np.array(heads)
        x = x[: len(self.batch)]
        return x[:, at] if axis == 1 else x[:, :, at]

    def take(self, name: str, x, group: int):
        """The sampled part of a result, by its name; works on arrays of any stack."""
        places = self.keys if name in ("dk", "dv") else self.rows
        if places is None:
            return self.heads(name, x, group)
        at = np.array(places)
        return self.heads(name, x, group)[:, :, at] if name == "lse" else self.heads(name, x[:, at], group)


def _small(problem: AttentionProblem) -> bool:
    return problem.batch * problem.q_heads * problem.q_len * problem.kv_len <= NUMPY_CELLS


def sample_of(problem: AttentionProblem, whole_cells: int | None = None) -> Sample:
    """All of a small problem, else the first and last kv head of the first batch entry; of a long one some rows.

    Args:
      whole_cells: logits of a head above which it is long; `WHOLE_CELLS` if None.
    """
    if _small(problem):
        return Sample(tuple(range(problem.batch)), tuple(range(problem.kv_heads)))
    heads, cells = tuple(sorted({0, problem.kv_heads - 1})), problem.q_len * problem.kv_len
    if cells <= (WHOLE_CELLS if whole_cells is None else whole_cells):
        return Sample((0,), heads)
    return spots_of(problem, heads[-1:] if cells * problem.group * len(heads) > BOTH_HEADS_CELLS else heads)


def spots_of(problem: AttentionProblem, kv_heads: tuple[int, ...] | None = None) -> Sample:
    """Some rows and keys of kv heads (of the last, unless told) of the first batch entry: the cheapest judge."""
    heads = kv_heads or (problem.kv_heads - 1,)
    return Sample((0,), heads, _some(problem.q_len, SPOT_ROWS), _some(problem.kv_len, SPOT_KEYS))


def _some(length: int, count: int) -> tuple[int, ...]:
    """The first, the last and some further places, ascending; the same ones whenever they are asked for."""
    drawn = np.random.default_rng(length).integers(0, length, count)
    return tuple(int(n) for n in np.unique([0, length - 1, *drawn]))


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """Reference results (float64, sampled) by name, their budgets, and how they came about."""

    results: dict[str, np.ndarray]
    budget: dict[str, float]
    oracle: str

    def save(self, path: str) -> None:
        """Writes it to one .npz file."""
        extra = {f"budget_{k}": np.float64(v) for k, v in self.budget.items()}
        np.savez(path, oracle=np.array(self.oracle), **self.results, **extra)

    @staticmethod
    def load(path: str, names: tuple[str, ...] = RESULTS) -> "Reference":
        """Reads what `save` wrote, of some results."""
        with np.load(path) as held:
            return Reference(
                {name: held[name] for name in names},
                {name: float(held[f"budget_{name}"]) for name in names},
                str(held["oracle"]),
            )


def reference_of(problem: AttentionProblem, spec: InputSpec, sample: Sample | None = None) -> Reference:
    """Reference and budget of a problem on its inputs; imports PyTorch, uses its GPU if there is one.

    Args:
      sample: which part; `sample_of` the problem if None, else one of `spots_of`.
    """
    sample = sample or sample_of(problem)
    head_of = _mask_heads(problem, sample)
    if sample.rows is not None:
        taken = _long_inputs(problem.q_shape, problem.kv_shape, problem.dtype, spec, sample)
        exact, naive = spot_results(taken, problem.mask, head_of, problem.scale, problem.dtype,
                                    np.array(sample.rows), np.array(sample.keys))
        heads = ", ".join(map(str, sample.kv_heads))
        oracle = f"float64, batch 0, kv heads {heads}, {len(sample.rows)} rows, {len(sample.keys or ())} keys"
        return Reference(exact, budgets(naive, exact), oracle)
    made = make_inputs(problem, spec)
    taken = {name: sample.heads(name, x, problem.group) for name, x in made.items()}
    naive = chunked(taken, problem.mask, head_of, problem.scale, problem.dtype)
    if _small(problem):
        q, k, v, dout = (widened(made[name]) for name in ("q", "k", "v", "dout"))
        found = attention_oracle(q, k, v, problem.mask, problem.scale, dout)
        exact = {name: getattr(found, name) for name in RESULTS}
        oracle = "NumPy float64, all heads"
    else:
        exact = chunked(taken, problem.mask, head_of, problem.scale, "float64")
        oracle = f"chunked float64, batch 0, kv heads {', '.join(map(str, sample.kv_heads))}"
    return Reference(exact, budgets(naive, exact), oracle)


@functools.lru_cache(maxsize=2)
def _long_inputs(q_shape, kv_shape, dtype: str, spec: InputSpec, sample: Sample) -> dict[str, np.ndarray]:
    """The sampled heads of a long problem's inputs: all masks of a shape read the same; a run may alternate two."""
    group = q_shape[2] // kv_shape[2]
    return {
        name: np.ascontiguousarray(sample.heads(name, tiled(pool(spec.seed, dtype), offset, shape), group))
        for name, (offset, shape) in places(q_shape, kv_shape, spec).items()
    }


def _mask_heads(problem: AttentionProblem, sample: Sample) -> list[int]:
    """For each sampled query head the mask's head that it is under."""
    return [h * problem.mask.heads // problem.q_heads for h in sample.q_heads(problem.group)]


def chunked(arrays: dict[str, np.ndarray], mask: Any, mask_heads: list[int], scale: float, dtype: str) -> dict:
    """out, lse, dq, dk, dv by rows and heads, in float64 or as a naive run in a working dtype.

    Args:
      arrays: q, k, v, dout as `stored`, [batch, seq, heads, head_dim].
      mask: the problem's mask, read by rows; mask_heads: for each query head of `arrays`, its head in the mask.
      dtype: "float64", or the dtype that operands of products are rounded to.

    Returns: float64 arrays by name.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = torch.float64 if dtype == "float64" else torch.float32
    narrow = getattr(torch, dtype)

    def rounded(x):
        return x if narrow == work else x.to(narrow).to(work)

    q, k, v, dout = (
        torch.from_numpy(widened(arrays[name])).to(device, work).permute(0, 2, 1, 3) for name in ("q", "k", "v", "dout")
    )
    group = q.shape[1] // k.shape[1]
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=work, device=device)
    shared = len(set(mask_heads)) == 1
    precise = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    for begin in range(0, q.shape[2], ROWS):
        rows = slice(begin, min(begin + ROWS, q.shape[2]))
        seen = None
        for h, mask_head in enumerate(mask_heads):
            if seen is None or not shared:
                seen = torch.from_numpy(mask.dense_rows(rows.start, rows.stop, mask_head)).to(device)
            for b in range(q.shape[0]):
                hk = h // group
                found = _chunk(q[b, h, rows], k[b, hk], v[b, hk], dout[b, h, rows], seen, scale, rounded)
                out[b, h, rows], lse[b, h, rows], dq[b, h, rows] = found[:3]
                dk[b, hk] += found[3]
                dv[b, hk] += found[4]
    torch.backends.cuda.matmul.allow_tf32 = precise
    results = {name: rounded(x).permute(0, 2, 1, 3) for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    return {name: x.double().cpu().numpy() for name, x in (results | {"lse": lse}).items()}


def _chunk(q, k, v, dout, seen, scale, rounded):
    """out, lse, dq of a chunk of rows of one head, and what it adds to dk and dv."""
    logits = (scale * (q @ k.T)).masked_fill(~seen, -float("inf"))
    lse = logits.logsumexp(dim=1)
    p = (logits - lse.masked_fill(lse == -float("inf"), 0.0)[:, None]).exp()
    low = rounded(p)
    out = rounded(low @ v)
    ds = rounded(p * (dout @ v.T - (dout * out).sum(dim=1, keepdim=True)))
    return out, lse, scale * (ds @ k), scale * (ds.T @ q), low.T @ dout
