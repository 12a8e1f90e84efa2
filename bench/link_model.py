"""What links cost, and a job's time from them and from measured local work: the schedule played on a clock.

A message costs latency + bytes / bandwidth, at the level (inside a node, between nodes) of the pair that it joins.
Every rank has links of its own of either level, one message at a time on each. A hop takes as long as its slowest pair,
since a ring moves together; a step as long as its slowest rank. An exchange stands between copies in a rank's own
memory.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from workload.signature import Collective, Signature
from workload.topology import Hop

LEVELS = ("inner", "outer")


@dataclasses.dataclass(frozen=True)
class Links:
    """Seconds and bytes per second, per rank and direction, inside a node and between nodes; and a rank's own memory's
    bytes per second, read and written.
    """

    inner_latency: float = 5e-6
    inner_bandwidth: float = 350e9
    outer_latency: float = 15e-6
    outer_bandwidth: float = 45e9
    memory_bandwidth: float = 4.2e12

    def __post_init__(self):
        for field in dataclasses.fields(Links):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name.endswith("bandwidth")):
                raise ValueError(f"{field.name}: {value} is not positive")

    def seconds(self, level: str, messages: float, size: float) -> float:
        """Time of `messages` of `size` bytes each, one after the other."""
        latency, bandwidth = getattr(self, f"{level}_latency"), getattr(self, f"{level}_bandwidth")
        return messages * (latency + size / bandwidth)


    def hop(self, level: str, size: int) -> float:
        """Time of one message of a hop."""
        return self.seconds(level, 1, size)

    def collective(self, kind: str, ranks: int, size: int) -> float | None:
        """Time of a collective on operands of `size` bytes, where it is known as a whole."""
        del kind, ranks, size
        return None


@dataclasses.dataclass(frozen=True)
class MeasuredLinks(Links):
    """Links of one level whose collectives were timed among some ranks.

    Attributes:
      ranks: how many took part.
      curves: by kind of collective, (operand bytes, seconds) ascending; times in between lie on straight lines, times
        beyond at the last one's rate.
    """

    ranks: int = 0
    curves: dict[str, tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=dict)

    def hop(self, level: str, size: int) -> float:
        """Time of one message of a hop."""
        return self._on_curve("permute", size)

    def collective(self, kind: str, ranks: int, size: int) -> float | None:
        """Time of a collective on operands of `size` bytes, among as many ranks as were measured."""
        return self._on_curve(kind, size) if ranks == self.ranks else None

    def _on_curve(self, kind: str, size: int) -> float:
        sizes, seconds = zip(*self.curves[kind], strict=True)
        return float(np.interp(size, sizes, seconds)) * max(1.0, size / sizes[-1])


def links_of(measured: dict[str, Sequence[dict[str, Any]]], ranks: int) -> MeasuredLinks:
    """From a row of links: its curves, and of hops the smallest's time and the largest's rate."""
    curves = {kind: tuple(sorted((x["operand_bytes"], x["seconds"]) for x in points))
              for kind, points in measured.items()}
    (_, latency), (size, seconds) = curves["permute"][0], curves["permute"][-1]
    return MeasuredLinks(latency, size / seconds, latency, size / seconds, ranks=ranks, curves=curves)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Seconds of one pass: all of it, the local work of each step's slowest rank, what links and copies add to that."""

    total: float
    compute: float

    @property
    def exposed(self) -> float:
        """Link time that no computation hides."""
        return self.total - self.compute


def level_of_hop(signature: Signature, hop: Hop) -> str:
    """"outer" where some rank's block leaves its node."""
    grid = signature.topology
    for u in range(grid.ulysses):
        for a, b in grid.pairs(hop):
            if grid.node(grid.rank(a, u)) != grid.node(grid.rank(b, u)):
                return "outer"
    return "inner"


def collective_seconds(signature: Signature, collective: Collective, links: Links) -> float:
    """Time of one collective, by its slowest rank.

    all_to_all: every pair's piece, both levels at once. all_gather and reduce_scatter: a ring of size - 1 messages, at
    the slowest level that the group has.
    """
    grid = signature.topology
    if collective.kind == "permute":
        assert collective.hop is not None
        return links.hop(level_of_hop(signature, collective.hop), collective.operand_bytes)
    size = grid.ulysses if collective.axis == "ulysses" else grid.ring
    known = links.collective(collective.kind, size, collective.operand_bytes)
    if known is not None:
        return known
    groups = {grid.group(collective.axis, rank) for rank in range(grid.world)}
    return max(_group_seconds([grid.node(r) for r in group], collective, links) for group in groups)


def copy_seconds(signature: Signature, collective: Collective, links: Links) -> float:
    """Time of the copies around a collective: heads and tokens change places for an exchange, and what does not come in
    ascending order is put in order.
    """
    keys = collective.tensor in ("k", "v", "dk", "dv")
    if collective.axis == "ulysses":
        passes = 1 + (signature.sorts_kv if keys else signature.sorts_q)
        return 2 * passes * collective.operand_bytes / links.memory_bandwidth
    if not signature.sorts_gathered:
        return 0.0
    ring, share = signature.topology.ring, signature.kv_rows / (signature.topology.ring * signature.kv_block)
    if collective.kind == "all_gather":  # what a kernel is handed is read and written; of sums all places are written
        return 2 * share * ring * collective.operand_bytes / links.memory_bandwidth
    return (1 + share) * collective.operand_bytes / links.memory_bandwidth


def _group_seconds(nodes: Sequence[int], collective: Collective, links: Links) -> float:
    others = len(nodes) - 1
    piece = collective.wire_bytes / max(1, others)
    if collective.kind != "all_to_all":
        return links.seconds("outer" if len(set(nodes)) > 1 else "inner", others, piece)
    inside = min(nodes.count(n) - 1 for n in nodes)
    return max(links.seconds("inner", inside, piece), links.seconds("outer", others - inside, piece))


def predict(
    signature: Signature, which: str, compute: Sequence[float], links: Links, head_groups: int = 1
) -> Prediction:
    """Plays a pass in the order in which the stacks execute it.

    Args:
      which: "forward" or "backward".
      compute: seconds of the slowest rank at each step.
      head_groups: groups of heads that travel and compute in turn, of a scheme that gathers its keys.
    """
    if len(compute) != len(signature.steps):
        raise ValueError(f"compute: {len(compute)} times for {len(signature.steps)} steps")
    if head_groups > 1:
        return _in_groups(signature, which, compute[0], links, head_groups)
    clock = _Clock(signature, links)
    walk = [c for c in signature.collectives(which) if c.kind == "permute"]
    others = sum(collective_seconds(signature, c, links) + copy_seconds(signature, c, links)
                 for c in signature.collectives(which) if c.kind != "permute")
    sizes = {c.tensor: c.operand_bytes for c in walk}
    keys, sums = ("k", "v"), ("dk", "dv")
    now, arrived, entered = 0.0, 0.0, 0.0
    steps = signature.steps
    carried = 0.0
    for t, step in enumerate(steps):
        now = max(now, arrived)
        if t == 0 or step.enters:
            hop = next((s.hop for s in steps[t + 1 :] if s.enters), None)
            entered = clock.send(keys, sizes, hop, now)
        if t + 1 < len(steps):
            arrived = entered if steps[t + 1].enters else clock.send(keys, sizes, steps[t + 1].hop, now)
        end = now + compute[t]
        if which == "backward" and not step.at_home:
            if step.grad_hop is None:
                hop = next((s.carried_hop for s in steps[t:] if s.carried_hop is not None), None)
                carried = clock.send(sums, sizes, hop, now)
            end = max(end, clock.send(sums, sizes, step.grad_hop, now), carried if step.carried_hop else 0.0)
        now = end
    if which == "backward":
        now = clock.send(sums, sizes, signature.home, now)
    return Prediction(now + others, float(sum(compute)))


def _in_groups(signature: Signature, which: str, compute: float, links: Links, groups: int) -> Prediction:
    """What a group needs leaves when the group before begins to compute; what it made leaves when it has computed."""
    if not signature.gathers:
        raise ValueError(f"head_groups: {groups} with {signature.scheme}, which walks a ring")
    needed, made = 0.0, 0.0
    for c in signature.collectives(which):
        part = dataclasses.replace(c, operand_bytes=c.operand_bytes // groups, wire_bytes=c.wire_bytes // groups)
        seconds = collective_seconds(signature, part, links) + copy_seconds(signature, part, links)
        if c.tensor in ("out", "lse", "dq", "dk", "dv"):
            made += seconds
        else:
            needed += seconds
    now = 0.0
    coming = free = needed
    for n in range(groups):
        held = coming
        if n + 1 < groups:
            coming = free = max(free, now) + needed
        now = max(now, held) + compute / groups
        free = max(free, now) + made
    return Prediction(free, compute)


class _Clock:
    """Links that carry one message at a time."""

    def __init__(self, signature: Signature, links: Links):
        self.signature, self.links = signature, links
        self.free = dict.fromkeys(LEVELS, 0.0)
        self.levels: dict[Hop, str] = {}

    def send(self, tensors: Sequence[str], sizes: dict[str, int], hop: Hop | None, now: float) -> float:
        """When the tensors have made the hop; at once where there is none."""
        if hop is None:
            return now
        plain = dataclasses.replace(hop, from_entry=False)
        if plain not in self.levels:
            self.levels[plain] = level_of_hop(self.signature, plain)
        level = self.levels[plain]
        begin = max(now, self.free[level])
        self.free[level] = begin + sum(self.links.hop(level, sizes[x]) for x in tensors)
        return self.free[level]
