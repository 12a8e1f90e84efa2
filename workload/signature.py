"""The static part of a context-parallel schedule: steps, hops, collectives and their bytes, for one kind of rank.

Five schemes, two parts. A head exchange of degree U (all-to-all: tokens for heads) puts the tokens of U ranks on each
of them; then R = world / U ring indices share the keys, by a ring walk (blocks hop, partial results merge) or by one
all-gather. ulysses: U = world. ring, all_gather: U = 1. usp: both. loongtrain: both, the ring walked window by
window.
"""

import dataclasses

from workload.problem import ITEM_BYTES, PASSES
from workload.topology import HeadLayout, Hop, Topology


@dataclasses.dataclass(frozen=True)
class Step:
    """One local computation of every rank.

    Attributes:
      outer, inner: the block computed against has gone this far from home (`Topology.source` says whose it is).
      hop: what brought the block, None where it was there.
      grad_hop: in the backward pass, brings the window's sum of dk, dv from its step before, None where the sum begins.
      carried_hop: in the backward pass, brings the sum of the earlier windows, to be added after this step's part.
    """

    outer: int = 0
    inner: int = 0
    hop: Hop | None = None
    grad_hop: Hop | None = None
    carried_hop: Hop | None = None

    @property
    def enters(self) -> bool:
        """Whether it is the first of a later window, whose block left when the window before was entered."""
        return self.hop is not None and self.hop.from_entry

    @property
    def at_home(self) -> bool:
        """Whether every rank computes against its own block."""
        return self.outer == self.inner == 0


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective that every rank enters.

    Attributes:
      kind: "all_to_all", "all_gather", "permute", "reduce_scatter".
      tensor: what travels.
      axis: "ring" or "ulysses".
      operand_bytes: what a rank hands in, its own part included (HLO and torch show this).
      wire_bytes: what leaves a rank.
      step: the step it feeds (or, for gradients, ends), None outside the walk.
      hop: of a permute.
    """

    kind: str
    tensor: str
    axis: str
    operand_bytes: int
    wire_bytes: int
    step: int | None = None
    hop: Hop | None = None


@dataclasses.dataclass(frozen=True)
class Signature:
    """The static part of a schedule: equal signatures run the same compiled program on other data.

    Attributes:
      scheme, topology, heads: the scheme, its grid, its head layout.
      batch, head_dim, dtype, scale: of the problem.
      q_length, kv_length: tokens of every rank's local arrays, padding included.
      q_total, kv_total: all tokens.
      steps: in order; an all-gather has one.
      home: the hop that takes the travelling sums of dk, dv home, None where nothing travels.
      gathers: whether keys are all-gathered over the ring rather than walked.
      sorts_q, sorts_kv: whether an exchanged sequence is permuted to ascending order (a copy).
      sorts_gathered: whether gathered keys are chosen and put in ascending order (a copy); where False, they are the
        first kv_total places.
      gathered_rows: how many of the gathered keys a kernel is handed.
      travel: dtype of gradient sums in flight, "float32" or the problem's dtype.
      with_lse: whether lse is put back in token order too.
    """

    scheme: str
    topology: Topology
    heads: HeadLayout
    batch: int
    head_dim: int
    dtype: str
    scale: float
    q_length: int
    kv_length: int
    q_total: int
    kv_total: int
    steps: tuple[Step, ...]
    home: Hop | None
    gathers: bool
    sorts_q: bool
    sorts_kv: bool
    sorts_gathered: bool
    gathered_rows: int
    travel: str
    with_lse: bool

    @property
    def q_rows(self) -> int:
        """Query rows of a local problem: the exchanged length."""
        return self.q_length * self.topology.ulysses

    @property
    def kv_block(self) -> int:
        """Keys of one ring index, padding included."""
        return self.kv_length * self.topology.ulysses

    @property
    def kv_rows(self) -> int:
        """Keys of a local problem."""
        return self.gathered_rows if self.gathers else self.kv_block

    @property
    def sums_dtype(self) -> str:
        """dtype of dk, dv in the exchange back: `travel` where several ranks' parts are summed, else the problem's."""
        return self.travel if self.heads.sums else self.dtype

    @property
    def remote(self) -> tuple[int, ...]:
        """Steps that compute against another ring index' keys."""
        return tuple(t for t, s in enumerate(self.steps) if not s.at_home)

    def collectives(self, which: str) -> tuple[Collective, ...]:
        """All collectives of a pass in the order in which ranks enter them.

        Args:
          which: "forward" or "backward". Residuals are the exchanged tensors; an all-gather is made again.
        """
        if which not in PASSES:
            raise ValueError(f"which: {which!r} is none of {', '.join(PASSES)}")
        item = ITEM_BYTES[self.dtype]
        walk = self._gather(which) if self.gathers else self._walk(which)
        if which == "forward":
            before = [self._exchange(x, item) for x in ("q", "k", "v")]
            after = [self._exchange("out", item)]
            if self.with_lse:
                after.append(self._exchange("lse", 4))
        else:
            sums = ITEM_BYTES[self.sums_dtype]
            before = [self._exchange("dout", item)]
            after = [self._exchange("dq", item), self._exchange("dk", sums), self._exchange("dv", sums)]
        return tuple(c for c in (*before, *walk, *after) if c is not None)

    def _exchange(self, tensor: str, item: int) -> Collective | None:
        degree = self.topology.ulysses
        if degree == 1:
            return None
        keys = tensor in ("k", "v", "dk", "dv")
        heads = len(self.heads.kv_slots) if keys else len(self.heads.q_slots)
        width = 1 if tensor == "lse" else self.head_dim
        operand = self.batch * (self.kv_length if keys else self.q_length) * heads * width * item
        return Collective("all_to_all", tensor, "ulysses", operand, operand // degree * (degree - 1))

    def _block_bytes(self, item: int) -> int:
        return self.batch * self.kv_block * self.heads.kv_local * self.head_dim * item

    def _gather(self, which: str) -> list[Collective]:
        ring, part = self.topology.ring, self._block_bytes(ITEM_BYTES[self.dtype])
        if ring == 1:
            return []
        out = [Collective("all_gather", x, "ring", part, part * (ring - 1), 0) for x in ("k", "v")]
        if which == "forward":
            return out
        part = self._block_bytes(ITEM_BYTES[self.travel])
        kind = "reduce_scatter" if self.travel == "float32" else "all_to_all"
        return out + [Collective(kind, x, "ring", part * ring, part * (ring - 1), 0) for x in ("dk", "dv")]

    def _walk(self, which: str) -> list[Collective]:
        keys, sums = self._block_bytes(ITEM_BYTES[self.dtype]), self._block_bytes(ITEM_BYTES[self.travel])
        out: list[Collective] = []

        def send(names, size, t, hop):
            out.extend(Collective("permute", x, "ring", size, size, t, hop) for x in names if hop is not None)

        for t, step in enumerate(self.steps):
            send(("k", "v"), keys, t, step.hop)
            if which == "backward":
                send(("dk", "dv"), sums, t, step.grad_hop)
                send(("dk", "dv"), sums, t, step.carried_hop)
        if which == "backward":
            send(("dk", "dv"), sums, len(self.steps) - 1, self.home)
        return out

    def operand_bytes(self, which: str) -> int:
        """Bytes that a rank hands to collectives in a pass."""
        return sum(c.operand_bytes for c in self.collectives(which))

    def wire_bytes(self, which: str) -> int:
        """Bytes that leave a rank in a pass."""
        return sum(c.wire_bytes for c in self.collectives(which))
