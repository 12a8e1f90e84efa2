"""Where ranks stand: the grid of a context-parallel job, and which heads each rank of a head exchange takes."""

import dataclasses
from functools import cached_property

import numpy as np

from workload.errors import Unsupported, integer

SCHEMES = ("ulysses", "ring", "all_gather", "usp", "loongtrain")


@dataclasses.dataclass(frozen=True)
class Hop:
    """One permutation of the ring that all ranks make: block (outer, inner) of the grid goes `outer` windows and
    `inner` places on, both cyclic.

    Attributes:
      outer, inner: how far; not both zero.
      from_entry: whether what moves is the block that the current window was entered with, else the last one held.
    """

    outer: int
    inner: int
    from_entry: bool = False


@dataclasses.dataclass(frozen=True)
class Topology:
    """`world` ranks as a grid of `ring` x `ulysses`, the ring being `windows` windows of `window` places.

    Attributes:
      world: number of ranks.
      ulysses: degree of the head exchange; ring = world // ulysses.
      window: ranks of an inner ring (LoongTrain); ring for a flat ring.
      ranks_per_node: for telling links inside a node from those between nodes.
      head_first: rank = ring_index * ulysses + u, so a head exchange stays among neighbours (inside a node);
        else rank = u * ring + ring_index, and the ring does.
    """

    world: int
    ulysses: int = 1
    window: int = 1
    ranks_per_node: int = 8
    head_first: bool = True

    def __post_init__(self):
        for name in ("world", "ulysses", "window", "ranks_per_node"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.world % self.ulysses:
            raise Unsupported("topology", f"ulysses degree {self.ulysses} does not divide world {self.world}")
        if self.ring % self.window:
            raise Unsupported("topology", f"window {self.window} does not divide ring {self.ring}")

    @property
    def ring(self) -> int:
        """Ranks of a ring."""
        return self.world // self.ulysses

    @property
    def windows(self) -> int:
        """Windows of a ring."""
        return self.ring // self.window

    @property
    def axes(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Names and sizes of the two mesh axes, slowest first, so that row-major order is rank order."""
        ring, ulysses = ("ring", self.ring), ("ulysses", self.ulysses)
        return (ring, ulysses) if self.head_first else (ulysses, ring)

    def rank(self, ring_index: int, u: int) -> int:
        """The rank at a place of the grid."""
        return ring_index * self.ulysses + u if self.head_first else u * self.ring + ring_index

    def place(self, rank: int) -> tuple[int, int]:
        """(ring_index, u) of a rank."""
        return divmod(rank, self.ulysses) if self.head_first else divmod(rank, self.ring)[::-1]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that share a collective over `axis` with this one, in the axis' order."""
        r, u = self.place(rank)
        if axis == "ulysses":
            return tuple(self.rank(r, x) for x in range(self.ulysses))
        return tuple(self.rank(x, u) for x in range(self.ring))

    def node(self, rank: int) -> int:
        """The node that a rank runs on."""
        return rank // self.ranks_per_node

    def target(self, ring_index, hop: Hop):
        """Where a hop takes what ring_index holds; works on arrays too."""
        outer, inner = ring_index // self.window, ring_index % self.window
        return (outer + hop.outer) % self.windows * self.window + (inner + hop.inner) % self.window

    def pairs(self, hop: Hop) -> tuple[tuple[int, int], ...]:
        """(from, to) ring indices of a hop: one permutation of the whole ring."""
        return tuple((r, int(self.target(r, hop))) for r in range(self.ring))

    def source(self, ring_index, outer: int, inner: int):
        """Whose block ring_index holds once blocks have gone (outer, inner) from home; works on arrays too."""
        return self.target(ring_index, Hop(-outer, -inner))


def make_topology(
    scheme: str, world: int, *, ulysses: int | None = None, window: int | None = None, ranks_per_node: int = 8,
    head_first: bool = True,
) -> Topology:
    """The grid of a scheme.

    Args:
      scheme: one of `SCHEMES`.
      ulysses: head exchange degree. Fixed to world by ulysses and to 1 by ring; 1 by default for all_gather;
        for usp and loongtrain by default the largest divisor of world up to ranks_per_node that leaves a ring of 2.
      window: loongtrain's inner ring; by default the largest divisor of the ring up to its square root.

    Raises: `Unsupported` naming the argument that the scheme cannot take.

    >>> make_topology("loongtrain", 16, ulysses=2).window
    2
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: {scheme!r} is none of {', '.join(SCHEMES)}")
    for label, n in (("world", world), ("ulysses", ulysses), ("window", window), ("ranks_per_node", ranks_per_node)):
        if n is not None:
            integer(label, n, 1)
    fixed = {"ulysses": world, "ring": 1}.get(scheme)
    if fixed is not None and ulysses not in (None, fixed):
        raise Unsupported(scheme, f"ulysses {ulysses}: the scheme has {fixed} at world {world}")
    if window is not None and scheme != "loongtrain":
        raise Unsupported(scheme, f"window {window}: only loongtrain has windows")
    if ulysses is None:
        ulysses = fixed or (1 if scheme == "all_gather" else _divisor(world, min(ranks_per_node, max(1, world // 2))))
    if world % ulysses:
        raise Unsupported("topology", f"ulysses degree {ulysses} does not divide world {world}")
    ring = world // ulysses
    if scheme == "loongtrain":
        window = _divisor(ring, int(ring**0.5)) if window is None else window
    else:
        window = ring
    return Topology(world, ulysses, window, ranks_per_node, head_first)


def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return max(d for d in range(1, max(1, limit) + 1) if n % d == 0)


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """Which heads travel to which rank of a head exchange: slots of one kv head with `group` query heads each.

    Attributes:
      q_slots: q head of each travelling query head, -1 for padding; rank u takes the u-th of `degree` equal parts.
      kv_slots: kv head of each slot, -1 for padding; the same.
      degree, q_heads, kv_heads: what it was made for.
    """

    q_slots: tuple[int, ...]
    kv_slots: tuple[int, ...]
    degree: int
    q_heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        """Query heads of a slot."""
        return len(self.q_slots) // len(self.kv_slots)

    @property
    def q_local(self) -> int:
        """Query heads that a rank computes."""
        return len(self.q_slots) // self.degree

    @property
    def kv_local(self) -> int:
        """kv heads that a rank computes with."""
        return len(self.kv_slots) // self.degree

    @property
    def padding(self) -> int:
        """Query heads that are computed and dropped."""
        return len(self.q_slots) - self.q_heads

    @property
    def sums(self) -> bool:
        """Whether some kv head has several slots, whose gradients are summed."""
        return len(self.kv_slots) - self.kv_slots.count(-1) > self.kv_heads

    @property
    def q_identity(self) -> bool:
        """Whether query heads travel as they are."""
        return self.q_slots == tuple(range(self.q_heads))

    @property
    def kv_identity(self) -> bool:
        """Whether kv heads travel as they are."""
        return self.kv_slots == tuple(range(self.kv_heads))

    @cached_property
    def q_places(self) -> tuple[int, ...]:
        """The slot entry of each query head: the inverse of q_slots."""
        return tuple(self.q_slots.index(h) for h in range(self.q_heads))

    @cached_property
    def kv_places(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each kv head; padded to one length with -1."""
        places = [[s for s, h in enumerate(self.kv_slots) if h == head] for head in range(self.kv_heads)]
        most = max(map(len, places))
        return tuple(tuple(p + [-1] * (most - len(p))) for p in places)

    def mask_heads(self, u: int, heads: int) -> np.ndarray | None:
        """Which of a mask's `heads` the rank u computes under, or None where one serves all."""
        if heads == 1:
            return None
        slots, local = (self.kv_slots, self.kv_local) if heads == self.kv_heads else (self.q_slots, self.q_local)
        return np.maximum(slots[u * local : (u + 1) * local], 0)


def head_layout(q_heads: int, kv_heads: int, degree: int) -> HeadLayout:
    """The layout with the fewest computed query heads, then the fewest travelling kv heads.

    A slot holds one kv head and `group` of its query heads, group <= q_heads // kv_heads; a kv head whose
    query heads fill several slots travels to several ranks, and its gradients are summed. Heads that do not
    divide are padded up.

    >>> head_layout(8, 2, 4).kv_slots
    (0, 0, 1, 1)
    """
    if q_heads % kv_heads:
        raise ValueError(f"kv_heads: {kv_heads} does not divide q_heads {q_heads}")
    width = q_heads // kv_heads
    def slots(group):
        return -(-kv_heads * -(-width // group) // degree) * degree
    group = min(range(1, width + 1), key=lambda g: (slots(g) * g, slots(g)))
    per_head, total = -(-width // group), slots(group)
    kv_slots = [s // per_head if s < kv_heads * per_head else -1 for s in range(total)]
    q_slots = []
    for s, head in enumerate(kv_slots):
        for x in range(group):
            within = s % per_head * group + x
            q_slots.append(head * width + within if head >= 0 and within < width else -1)
    return HeadLayout(tuple(q_slots), tuple(kv_slots), degree, q_heads, kv_heads)
