"""The two dynamic masks: per head, for each query block the ascending list of key blocks it sees.

One object, `BlockMask`, holds the block boundaries and the lists; the dense picture, the exact
area, the transposed lists, finer blocks and the restriction to any pair of shards are derived
from it. `workload/selection.py` scores and chooses the blocks.
"""

import dataclasses
from functools import cached_property

import numpy as np

from workload import selection as choose
from workload.errors import ascending, integer


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """A dynamic mask: row i sees key j iff i's query block lists j's key block (and, if causal, j is not later).

    Attributes:
      q_bounds: int32 [heads, q_blocks + 1]; query block n holds rows q_bounds[h, n] .. q_bounds[h, n + 1] - 1.
        From 0 to q_len, not descending; a head with fewer blocks repeats the last bound.
      kv_bounds: int32 [heads, kv_blocks + 1], the same for keys.
      counts: int32 [heads, q_blocks], how many key blocks each query block sees.
      indices: int32 [heads, q_blocks, max_count], those key blocks, ascending, zero after counts.
      causal: whether a row sees no key at a position after its own.
      q_positions, kv_positions: int32 [q_len], [kv_len], ascending global positions. Built masks are
        bottom-right aligned: row i stands at i + kv_len - q_len. Only a causal mask looks at them.
      block: the size of all blocks but a ragged last one, of queries and keys alike; else None.
      name: "uniform_block" or "variable_block".

    `heads` is 1, kv_heads or q_heads. Raises ValueError naming the field whose shape or order is wrong.
    """

    q_bounds: np.ndarray
    kv_bounds: np.ndarray
    counts: np.ndarray
    indices: np.ndarray
    q_positions: np.ndarray
    kv_positions: np.ndarray
    causal: bool = False
    block: int | None = None
    name: str = "variable_block"

    def __post_init__(self):
        for label in ("q_bounds", "kv_bounds", "counts", "indices", "q_positions", "kv_positions"):
            held = np.asarray(getattr(self, label))
            if held.size and held.dtype.kind not in "iu":
                raise ValueError(f"{label}: {held.dtype}, must be integers")
            object.__setattr__(self, label, held.astype(np.int32, copy=False))
        for label, x, n in (("q_bounds", self.q_bounds, self.q_len), ("kv_bounds", self.kv_bounds, self.kv_len)):
            if x.ndim != 2 or (x[:, 0] != 0).any() or (x[:, -1] != n).any() or (np.diff(x) < 0).any():
                raise ValueError(f"{label}: rows must ascend from 0 to {n}")
        lists = (self.heads, self.q_blocks)
        if self.counts.shape != lists or self.indices.shape[:2] != lists or self.indices.ndim != 3:
            raise ValueError(f"indices: shape {self.indices.shape} with counts {self.counts.shape}, need {lists}")
        if len(self.kv_bounds) != self.heads:
            raise ValueError(f"kv_bounds: {len(self.kv_bounds)} heads, q_bounds has {self.heads}")
        for label, x in (("q_positions", self.q_positions), ("kv_positions", self.kv_positions)):
            if (np.diff(x) <= 0).any():
                raise ValueError(f"{label}: must be strictly ascending")
        self._check_block()
        self._check_lists()

    def _check_block(self) -> None:
        """Kernels of uniform blocks read the size alone, never the bounds."""
        if self.block is None:
            if self.name == "uniform_block":
                raise ValueError("block: uniform_block needs the size of its blocks")
            return
        block = integer("block", self.block, 1)
        for label, x in (("q_bounds", self.q_bounds), ("kv_bounds", self.kv_bounds)):
            if not _is_uniform(x, block):
                raise ValueError(f"block: {label} are not those of blocks of {block}")

    def _check_lists(self) -> None:
        """Kernels read what the lists name: it must be there, and once."""
        slots = self.indices.shape[2]
        if self.counts.size and not 0 <= self.counts.min() <= self.counts.max() <= slots:
            raise ValueError(f"counts: {self.counts.min()} to {self.counts.max()}, the lists have {slots} slots")
        if self.indices.size and not 0 <= self.indices.min() <= self.indices.max() < max(1, self.kv_blocks):
            raise ValueError(f"indices: {self.indices.min()} to {self.indices.max()}, of {self.kv_blocks} key blocks")
        if (self.listed[:, :, 1:] & (self.indices[:, :, 1:] <= self.indices[:, :, :-1])).any():
            raise ValueError("indices: the key blocks of a query block must ascend")

    @property
    def heads(self) -> int:
        """How many masks this object holds."""
        return len(self.q_bounds)

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return len(self.q_positions)

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return len(self.kv_positions)

    @property
    def q_blocks(self) -> int:
        """Number of query blocks (of the head that has most)."""
        return self.q_bounds.shape[1] - 1

    @property
    def kv_blocks(self) -> int:
        """Number of key blocks (of the head that has most)."""
        return self.kv_bounds.shape[1] - 1

    @cached_property
    def limits(self) -> np.ndarray:
        """How many leading keys each row may see at all, int32 [q_len]: kv_len unless causal."""
        if not self.causal:
            return np.full(self.q_len, self.kv_len, np.int32)
        return np.searchsorted(self.kv_positions, self.q_positions, side="right").astype(np.int32)

    @property
    def listed(self) -> np.ndarray:
        """Which entries of `indices` are meant, bool [heads, q_blocks, max_count]."""
        return np.arange(self.indices.shape[2]) < self.counts[:, :, None]

    @property
    def row_area(self) -> np.ndarray:
        """Visible keys of each row summed over the heads, int64 [q_len].

        A listed key block [a, b) gives row i min(max(limit_i - a, 0), b - a) keys. Limits ascend, so
        that is 0, then limit_i - a, then b - a along the rows of a query block: sums of three steps.
        """
        limits = self.limits
        slope, level = np.zeros(self.q_len + 1, np.int64), np.zeros(self.q_len + 1, np.int64)
        for h in range(self.heads):
            row, slot = np.nonzero(self.listed[h])
            key_block = self.indices[h, row, slot]
            begin, end = self.kv_bounds[h, key_block], self.kv_bounds[h, key_block + 1]
            first, last = self.q_bounds[h, row], self.q_bounds[h, row + 1]
            rises = np.clip(np.searchsorted(limits, begin, side="right"), first, last)
            tops = np.clip(np.searchsorted(limits, end, side="left"), first, last)
            for at, sign in ((rises, 1), (tops, -1)):
                slope += sign * np.bincount(at, minlength=len(slope))
            for at, amount in ((rises, -begin), (tops, end), (last, begin - end)):
                level += np.bincount(at, amount, len(level)).astype(np.int64)  # in float64: exact below 2 ** 53
        return np.cumsum(slope)[:-1] * limits + np.cumsum(level)[:-1]

    @cached_property
    def area(self) -> int:
        """Visible cells summed over the heads, counted by element, an exact Python integer."""
        return int(self.row_area.sum())

    @property
    def density(self) -> float:
        """area / (heads * q_len * kv_len)."""
        return self.area / max(1, self.heads * self.q_len * self.kv_len)

    def block_bitmap(self) -> np.ndarray:
        """Which key blocks each query block lists, bool [heads, q_blocks, kv_blocks]; not the element mask."""
        out = np.zeros((self.heads, self.q_blocks, self.kv_blocks), bool)
        listed = self.listed
        h, n, _ = np.nonzero(listed)
        out[h, n, self.indices[listed]] = True
        return out

    def q_block_ids(self) -> np.ndarray:
        """The query block of each row, int32 [heads, q_len]."""
        return _ids(self.q_bounds, self.q_len)

    def kv_block_ids(self) -> np.ndarray:
        """The key block of each key, int32 [heads, kv_len]."""
        return _ids(self.kv_bounds, self.kv_len)

    def dense_rows(self, begin: int, end: int, head: int = 0) -> np.ndarray:
        """The element mask of rows begin..end-1 of a head, bool [end - begin, kv_len]."""
        row, key = _ids(self.q_bounds[head : head + 1], self.q_len)[0, begin:end], self.kv_block_ids()[head]
        blocks = np.zeros((self.q_blocks, self.kv_blocks), bool)
        n, slot = np.nonzero(self.listed[head])
        blocks[n, self.indices[head, n, slot]] = True
        return blocks[row][:, key] & (np.arange(self.kv_len) < self.limits[begin:end, None])

    def dense(self, head: int = 0) -> np.ndarray:
        """The element mask of a head, bool [q_len, kv_len]."""
        return self.dense_rows(0, self.q_len, head)

    def by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """The transposed lists: counts int32 [heads, kv_blocks], ascending query blocks [heads, kv_blocks, max]."""
        return lists_of(self.block_bitmap().transpose(0, 2, 1))

    def refine(self, q_block: int, kv_block: int | None = None) -> "BlockMask":
        """The same mask in blocks of at most `q_block` queries and `kv_block` (default: the same) keys.

        Every block is cut from its start, so 128 -> 64 halves each block, whatever the count of either side.
        """
        kv_block = q_block if kv_block is None else kv_block
        q_bounds, q_from = _cut(self.q_bounds, q_block)
        kv_bounds, kv_from = _cut(self.kv_bounds, kv_block)
        return self._with_blocks(q_bounds, q_from, kv_bounds, kv_from, q_block if q_block == kv_block else None)

    def restrict(self, q_positions: np.ndarray, kv_positions: np.ndarray) -> "BlockMask":
        """The local mask of a (query shard, key shard) pair: the sharding law for blocks.

        Args:
          q_positions, kv_positions: ascending places of this mask's rows and keys that the shards hold.

        Consecutive tokens are consecutive in any ascending subset, so a block stays a block: its bounds
        are counted in places of the shard. Blocks that a shard does not hold are dropped.
        """
        q_at = ascending("q_positions", q_positions, self.q_len)
        kv_at = ascending("kv_positions", kv_positions, self.kv_len)
        local = dataclasses.replace(
            self,
            q_bounds=np.searchsorted(q_at, self.q_bounds),
            kv_bounds=np.searchsorted(kv_at, self.kv_bounds),
            q_positions=self.q_positions[q_at],
            kv_positions=self.kv_positions[kv_at],
            block=None,
            name="variable_block",
        )
        q_bounds, q_from = _held(local.q_bounds)
        kv_bounds, kv_from = _held(local.kv_bounds)
        return local._with_blocks(q_bounds, q_from, kv_bounds, kv_from, self.block)

    def padded(self, q_blocks: int, kv_blocks: int, max_count: int) -> "BlockMask":
        """The same mask with exactly these numbers of blocks and list slots (for stacking across ranks)."""
        have = {"q_blocks": self.q_blocks, "kv_blocks": self.kv_blocks, "max_count": self.indices.shape[2]}
        want = {"q_blocks": q_blocks, "kv_blocks": kv_blocks, "max_count": max_count}
        for label, n in want.items():
            if n < have[label]:
                raise ValueError(f"{label}: {n} < {have[label]} that the mask holds")
        more = {label: n - have[label] for label, n in want.items()}
        return dataclasses.replace(
            self,
            q_bounds=np.pad(self.q_bounds, ((0, 0), (0, more["q_blocks"])), mode="edge"),
            kv_bounds=np.pad(self.kv_bounds, ((0, 0), (0, more["kv_blocks"])), mode="edge"),
            counts=np.pad(self.counts, ((0, 0), (0, more["q_blocks"]))),
            indices=np.pad(self.indices, ((0, 0), (0, more["q_blocks"]), (0, more["max_count"]))),
        )

    def _with_blocks(self, q_bounds, q_from, kv_bounds, kv_from, block):
        """This mask over new blocks, given the old block that each is part of (-1 for none), ascending.

        Key blocks that no row of the query block can see (causal) leave the lists.
        """
        cells = self.block_bitmap()
        heads = []
        for h in range(self.heads):
            seen = cells[h][q_from[h]][:, kv_from[h]] & (q_from[h] >= 0)[:, None] & (kv_from[h] >= 0)
            last_row = np.maximum(q_bounds[h, 1:] - 1, 0)
            reach = self.limits[last_row] if self.q_len else np.zeros_like(last_row)
            heads.append(seen & (kv_bounds[h, :-1] < reach[:, None]))
        counts, indices = lists_of(np.stack(heads))
        uniform = block is not None and _is_uniform(q_bounds, block) and _is_uniform(kv_bounds, block)
        return dataclasses.replace(
            self, q_bounds=q_bounds, kv_bounds=kv_bounds, counts=counts, indices=indices,
            block=block if uniform else None, name="uniform_block" if uniform else "variable_block",
        )


def lists_of(bitmap: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """counts [heads, q_blocks] and zero-padded ascending indices of a bool [heads, q_blocks, kv_blocks] bitmap."""
    counts = bitmap.sum(axis=2, dtype=np.int32)
    indices = np.zeros((*counts.shape, max(1, int(counts.max(initial=0)))), np.int32)
    indices[np.arange(indices.shape[2]) < counts[:, :, None]] = np.nonzero(bitmap)[2]  # both in the same order
    return counts, indices


def _ids(bounds, length):
    """The block of each token: the last whose first token is not later, so that empty blocks own none."""
    token = np.arange(length)
    return np.stack([np.searchsorted(b[1:], token, side="right") for b in bounds]).astype(np.int32)


def _is_uniform(bounds, block):
    return bool((bounds == np.minimum(np.arange(bounds.shape[1]) * block, bounds[:, -1:])).all())


def _cut(bounds, size):
    """Bounds of the pieces of at most `size` tokens of every block, and the block each piece is from."""
    integer("block", size, 1)
    heads = []
    for b in bounds:
        pieces = -(-np.diff(b) // size)
        source = np.repeat(np.arange(len(pieces)), pieces)
        place = np.arange(len(source)) - (np.cumsum(pieces) - pieces)[source]
        heads.append((b[source] + place * size, source))
    return _aligned(heads, bounds[:, -1])


def _held(bounds):
    """Bounds of the blocks that hold a token, and which blocks those are."""
    heads = []
    for b in bounds:
        source = np.flatnonzero(np.diff(b) > 0)
        heads.append((b[source], source))
    return _aligned(heads, bounds[:, -1])


def _aligned(heads, length):
    """(first tokens, source blocks) of each head, padded to one count of at least one block."""
    blocks = max(1, max(len(first) for first, _ in heads))
    bounds = np.repeat(length[:, None], blocks + 1, axis=1).astype(np.int32)
    source = np.full((len(heads), blocks), -1)
    for h, (first, come_from) in enumerate(heads):
        bounds[h, : len(first)], source[h, : len(first)] = first, come_from
    bounds[:, 0] = 0
    return bounds, source


# ---- builders ------------------------------------------------------------------------------------


def from_bitmap(bitmap, q_bounds, kv_bounds, *, causal=False, block=None, name="variable_block") -> BlockMask:
    """The mask that lists exactly these blocks.

    Args:
      bitmap: bool [heads, q_blocks, kv_blocks].
      q_bounds, kv_bounds: integer [heads, blocks + 1], see `BlockMask`.

    >>> from_bitmap([[[1, 0], [1, 1]]], [[0, 2, 4]], [[0, 3, 5]], causal=True).area
    14
    """
    q_bounds, kv_bounds, bitmap = np.asarray(q_bounds), np.asarray(kv_bounds), np.asarray(bitmap, bool)
    for label, x in (("q_bounds", q_bounds), ("kv_bounds", kv_bounds)):
        if x.ndim != 2 or not x.size:
            raise ValueError(f"{label}: shape {x.shape} is not [heads, blocks + 1]")
    shape = (len(q_bounds), q_bounds.shape[1] - 1, kv_bounds.shape[1] - 1)
    if bitmap.shape != shape:
        raise ValueError(f"bitmap: shape {bitmap.shape}, the bounds make {shape}")
    counts, indices = lists_of(bitmap)
    q_len, kv_len = int(q_bounds[0, -1]), int(kv_bounds[0, -1])
    positions = np.arange(q_len) + kv_len - q_len
    return BlockMask(q_bounds, kv_bounds, counts, indices, positions, np.arange(kv_len), causal, block, name)


def from_scores(
    scores, q_bounds, kv_bounds, *, density=None, top_p=None, causal=False, block=None, name="variable_block"
) -> BlockMask:
    """The mask of the best blocks: a share of the key blocks, or the fewest that hold a softmax mass.

    Args:
      scores: float [heads, q_blocks, kv_blocks].
      density: keep k = max(1, floor(density * key blocks)) of them, ties to the lower index.
      top_p: or keep the smallest set whose softmax mass reaches top_p.
      causal: only key blocks that some row of the query block may see are candidates; k is capped by them.
    """
    scores = np.asarray(scores)
    if not np.isfinite(scores).all():
        raise ValueError("scores: NaN or infinity among them")
    nothing = from_bitmap(np.zeros(scores.shape, bool), q_bounds, kv_bounds, causal=causal)
    sizes = np.diff(nothing.kv_bounds)
    last_row = np.maximum(nothing.q_bounds[:, 1:] - 1, 0)
    allowed = (nothing.kv_bounds[:, None, :-1] < nothing.limits[last_row][:, :, None]) & (sizes > 0)[:, None, :]
    if (density is None) == (top_p is None):
        raise ValueError("density, top_p: give exactly one of them")
    if density is not None:
        keep = [choose.count(density, int((n > 0).sum())) for n in sizes]
        chosen = np.stack([choose.top_k(s, k, a) for s, k, a in zip(scores, keep, allowed, strict=True)])
    else:
        chosen = np.stack([choose.top_p(s, top_p, a) for s, a in zip(scores, allowed, strict=True)])
    return from_bitmap(chosen, q_bounds, kv_bounds, causal=causal, block=block, name=name)


def uniform_block(
    q_len: int, kv_len: int, heads: int, block: int, density: float | None = None, *, top_p: float | None = None,
    selection: str = "random", q=None, k=None, causal: bool = False, seed: int = 0,
) -> BlockMask:
    """Query and key blocks of `block` tokens, the last may be short; each query block sees its best key blocks.

    Args:
      q_len, kv_len, heads: sizes; heads is the number of masks (1, kv_heads or q_heads).
      density, top_p, causal: see `from_scores`.
      selection: "random" scores, or "importance": mean-pooled q . mean-pooled k.
      q, k: [batch, seq, heads, head_dim] for "importance"; without them it pools features drawn from `seed`.
      seed: of a PCG64 generator.

    A mask that is not causal has no use for positions: like `full`, every row takes part, q_len > kv_len included.

    >>> uniform_block(8, 12, 1, 4, 0.67).counts.tolist()
    [[2, 2]]
    """
    heads = integer("heads", heads, 1)
    q_bounds, kv_bounds = (np.repeat(choose.uniform_bounds(n, block)[None], heads, 0) for n in (q_len, kv_len))
    scores = choose.scores(selection, q_bounds, kv_bounds, np.random.Generator(np.random.PCG64(seed)), q, k)
    return from_scores(scores, q_bounds, kv_bounds, density=density, top_p=top_p, causal=causal, block=block,
                       name="uniform_block")


def variable_block(
    q_len: int, kv_len: int, heads: int, mean: int, minimum: int, density: float | None = None, *,
    top_p: float | None = None, selection: str = "random", q=None, k=None, causal: bool = False, seed: int = 0,
) -> BlockMask:
    """Blocks of drawn lengths, own boundaries for each head and for queries and keys.

    Args:
      mean, minimum: about `mean` tokens a block, none shorter than `minimum`.
      others: as in `uniform_block`.
    """
    rng, heads = np.random.Generator(np.random.PCG64(seed)), integer("heads", heads, 1)
    q_bounds, kv_bounds = (
        np.stack([choose.drawn_bounds(n, mean, minimum, rng) for _ in range(heads)]) for n in (q_len, kv_len)
    )
    scores = choose.scores(selection, q_bounds, kv_bounds, rng, q, k)
    return from_scores(scores, q_bounds, kv_bounds, density=density, top_p=top_p, causal=causal, name="variable_block")
