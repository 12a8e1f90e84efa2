"""Which blocks a dynamic mask keeps: block boundaries, scores, top-k and top-p."""

import numpy as np

from workload.errors import integer

CHUNK_CELLS = 1 << 22  # scores that are ranked at a time
FEATURES = 64  # head_dim of the features that importance pools where the caller has no tensors


def uniform_bounds(length: int, block: int) -> np.ndarray:
    """Boundaries of blocks of `block` tokens, the last may be short: int32 [blocks + 1].

    >>> uniform_bounds(10, 4).tolist()
    [0, 4, 8, 10]
    """
    integer("block", block, 1)
    integer("length", length, 1)
    return np.minimum(np.arange(-(-length // block) + 1) * block, length).astype(np.int32)


def drawn_bounds(length: int, mean: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
    """Boundaries of about length / mean blocks of at least `minimum` tokens: int32 [blocks + 1].

    What the minimum leaves over is cut at uniformly drawn places.
    """
    for label, n in (("length", length), ("mean", mean), ("minimum", minimum)):
        integer(label, n)
    if not 1 <= minimum <= mean:
        raise ValueError(f"minimum: {minimum} is not within 1..mean ({mean})")
    if length < minimum:
        raise ValueError(f"minimum: {minimum} > length {length}")
    blocks = max(1, min(round(length / mean), length // minimum))
    spare = length - blocks * minimum
    cuts = np.sort(rng.integers(0, spare + 1, blocks - 1))
    return np.concatenate([[0], cuts + minimum * np.arange(1, blocks), [length]]).astype(np.int32)


def scores(selection: str, q_bounds, kv_bounds, rng: np.random.Generator, q=None, k=None) -> np.ndarray:
    """Scores float32 [heads, q_blocks, kv_blocks]; `selection` is "random" or "importance"."""
    shape = (len(q_bounds), q_bounds.shape[1] - 1, kv_bounds.shape[1] - 1)
    if (q is None) != (k is None):
        raise ValueError("q, k: give both or neither")
    if selection == "random":
        if q is not None:
            raise ValueError("selection: 'random' takes no q and k")
        return rng.random(shape, np.float32)
    if selection != "importance":
        raise ValueError(f"selection: {selection!r} is none of random, importance")
    if q is None:
        q_mean, k_mean = (drifting_features(rng, len(b), b.shape[1] - 1) for b in (q_bounds, kv_bounds))
        return np.einsum("hqd,hkd->hqk", q_mean, k_mean) / np.float32(FEATURES**0.5)
    return importance(q, k, q_bounds, kv_bounds)


def importance(q, k, q_bounds, kv_bounds) -> np.ndarray:
    """Mean-pooled q . mean-pooled k, scaled as logits, averaged over the batch and the query heads of a mask.

    Args:
      q: [batch, q_len, q_heads, head_dim]; k: [batch, kv_len, kv_heads, head_dim].
      q_bounds, kv_bounds: [heads, blocks + 1]; heads divides q_heads.
    """
    q, k = np.asarray(q, np.float32), np.asarray(k, np.float32)
    check_pooled(q, k, q_bounds, kv_bounds)
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    heads, q_heads = len(q_bounds), q.shape[2]
    out = np.zeros((heads, q_bounds.shape[1] - 1, kv_bounds.shape[1] - 1), np.float32)
    for h in range(q_heads):
        m = h * heads // q_heads
        pooled = np.einsum("bqd,bkd->qk", _pool(q[:, :, h], q_bounds[m]), _pool(k[:, :, h], kv_bounds[m]))
        out[m] += pooled * (q.shape[3] ** -0.5 * heads / q_heads / len(q))
    return out


def check_pooled(q, k, q_bounds, kv_bounds) -> None:
    """ValueError naming what does not go together; arguments as of `importance`, in any stack."""
    shapes = tuple(q.shape), tuple(k.shape)
    for label, shape, bounds in zip("qk", shapes, (q_bounds, kv_bounds), strict=True):
        if len(shape) != 4 or shape[1] != bounds[0, -1]:
            raise ValueError(f"{label}: shape {shape} is not [batch, {bounds[0, -1]}, heads, head_dim]")
    if shapes[0][2] % shapes[1][2] or shapes[0][::3] != shapes[1][::3]:
        raise ValueError(f"k: shape {shapes[1]} does not go with q's {shapes[0]}")
    if shapes[0][2] % len(q_bounds):
        raise ValueError(f"heads: {len(q_bounds)} does not divide q_heads {shapes[0][2]}")


def check_slots(k, blocks: int) -> int:
    """k as an int within 1..blocks; ValueError where it is none."""
    if integer("k", k, 1) > blocks:
        raise ValueError(f"k: {k} of {blocks} key blocks")
    return int(k)


def check_mass(label: str, p: float) -> None:
    """ValueError where p is no share of a row's softmax mass."""
    if not 0 < p <= 1:
        raise ValueError(f"{label}: {p} is not within (0, 1]")


def _pool(x, bounds):
    """Mean over the tokens of each block: [batch, seq, d] to [batch, blocks, d]; 0 for an empty block."""
    total = np.concatenate([np.zeros_like(x[:, :1], np.float64), np.cumsum(x, axis=1, dtype=np.float64)], axis=1)
    size = np.maximum(np.diff(bounds), 1)[None, :, None]
    return (np.diff(total[:, bounds], axis=1) / size).astype(np.float32)


def drifting_features(rng: np.random.Generator, heads: int, blocks: int) -> np.ndarray:
    """Pooled features that drift along the sequence, float32 [heads, blocks, FEATURES]: near blocks are alike.

    Independent features would make importance one more random choice; a drift of 1/8 a block gives
    scores with hot and cold key blocks, and so unequal counts under top-p.
    """
    steps = rng.standard_normal((heads, blocks, FEATURES), np.float32)
    out = np.empty_like(steps)
    keep = np.float32((1 - 1 / 8**2) ** 0.5)
    state = steps[:, 0]
    for n in range(blocks):
        state = keep * state + steps[:, n] / np.float32(8)
        out[:, n] = state
    return out


def count(density: float, blocks: int) -> int:
    """k = max(1, floor(density * blocks)); the sum with 1e-9 keeps 0.29 * 100 at 29."""
    if not 0 < density <= 1:
        raise ValueError(f"density: {density} is not within (0, 1]")
    return max(1, int(density * blocks + 1e-9))


def top_k(scores, k: int, allowed) -> np.ndarray:
    """The k best allowed entries of each row, ties to the lower index: bool, as scores [rows, n].

    >>> top_k(np.array([[1.0, 3.0, 3.0, 3.0]]), 2, np.ones((1, 4), bool)).tolist()
    [[False, True, True, False]]
    """
    chosen = np.zeros(allowed.shape, bool)
    n = allowed.shape[1]
    k = min(k, n)
    step = max(1, CHUNK_CELLS // max(1, n))
    for rows in (slice(at, at + step) for at in range(0, len(chosen), step)):
        row = np.where(allowed[rows], scores[rows], -np.inf)
        least = np.partition(row, n - k, axis=1)[:, n - k, None]  # the k-th best
        chosen[rows] = row > least
        ties = row == least
        chosen[rows] |= ties & (np.cumsum(ties, axis=1) <= k - chosen[rows].sum(axis=1, keepdims=True))
    return chosen & allowed


def top_p(scores, p: float, allowed) -> np.ndarray:
    """The smallest set of allowed entries of each row whose softmax mass reaches p, ties to the lower index.

    >>> top_p(np.log([[0.5, 0.3, 0.2]]), 0.75, np.ones((1, 3), bool)).tolist()
    [[True, True, False]]
    """
    check_mass("top_p", p)
    scores = np.where(allowed, np.asarray(scores, np.float64), -np.inf)
    order = np.argsort(-scores, axis=1, kind="stable")
    top = np.where(allowed.any(axis=1), scores.max(axis=1, initial=-np.inf), 0.0)
    weight = np.exp(np.take_along_axis(scores, order, 1) - top[:, None])
    total = weight.sum(axis=1, keepdims=True)
    before = np.cumsum(weight, axis=1) - weight
    chosen = np.zeros(allowed.shape, bool)
    np.put_along_axis(chosen, order, before < p * total, axis=1)
    return chosen & allowed


FRACTION_BITS = 8  # of a doubling
WEIGHT_BITS = 17  # of the largest weight; 2 ** 13 blocks of it still sum below 2 ** 31


def fixed_point_weights() -> tuple[np.float32, np.ndarray, int]:
    """exp in fixed point, the same integers on every machine: (steps, table, limit).

    A score that lies d below the row's best, rounded to n = round(d * steps) and capped by limit, weighs
    table[n % len(table)] >> (n // len(table)): 2 ** 17 at d = 0, and 0 from 18 doublings on.
    """
    size = 1 << FRACTION_BITS
    table = np.rint(2.0 ** (WEIGHT_BITS - np.arange(size) / size)).astype(np.int32)
    return np.float32(size / np.log(2)), table, size * (WEIGHT_BITS + 1)
