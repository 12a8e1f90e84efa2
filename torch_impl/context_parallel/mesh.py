"""The grid of a job in PyTorch: which communicators a rank has, and hops over the ring."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from torch_impl.context_parallel.communicator import Communicator, GroupCommunicator, Pending, Watch
from workload.topology import Hop, Topology


class Ranks(Protocol):
    """Where a rank gets its communicators from: a job of processes (`Job`) or threads (`threads.ThreadRanks`)."""

    device: torch.device

    def communicator(self, rank: int, ranks: Sequence[int], name: str) -> Communicator:
        """The communicator of a rank in the group of these ranks; groups of other names are other channels."""
        ...


class Job:
    """The ranks of the running `torch.distributed` job; connections are made once per group and kept.

    Args:
      device: of the tensors that will travel.
      deadline_s: longest wait for a peer in a collective; past it the process ends, naming rank, step and peer.
    """

    def __init__(self, device: torch.device | str = "cpu", *, deadline_s: float = 60.0):
        self.device = torch.device(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.watch = Watch(self.rank, deadline_s)
        self._known: dict[tuple, Communicator] = {}

    def communicator(self, rank: int, ranks: Sequence[int], name: str) -> Communicator:
        """See `Ranks`. All members must ask for their groups in one order."""
        key = name, tuple(ranks)
        if rank != self.rank:
            raise ValueError(f"rank: this process is {self.rank}, not {rank}")
        if key not in self._known:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            made = GroupCommunicator(group, watch=self.watch)
            made.warm_up(self.device)
            self._known[key] = made
        return self._known[key]


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """A rank's place in a grid and its communicators.

    Attributes:
      topology: the grid.
      rank: this one, 0 .. world - 1.
      world, ring, ulysses: communicators over all ranks and over the two axes.
      outer: a second channel over the ring, for what travels between windows while a window computes.
      ranks: where the communicators came from.
    """

    topology: Topology
    rank: int
    world: Communicator
    ring: Communicator
    ulysses: Communicator
    outer: Communicator
    ranks: Ranks

    @property
    def device(self) -> torch.device:
        """Of the tensors that travel."""
        return self.ranks.device

    def windowed(self, window: int) -> "Mesh":
        """The same grid with inner rings of `window` ranks; all ranks call it."""
        return make_mesh(dataclasses.replace(self.topology, window=window), self.ranks, self.rank)

    @property
    def ring_index(self) -> int:
        """Place on the ring."""
        return self.topology.place(self.rank)[0]

    def send(self, tensors: Sequence[torch.Tensor], hop: Hop, step: str) -> Pending:
        """Sends tensors along a hop that all ranks make; what arrives is what the rank that far back sent."""
        to = self.topology.target(self.ring_index, hop)
        source = self.topology.source(self.ring_index, hop.outer, hop.inner)
        channel = self.outer if hop.outer else self.ring
        return channel.permute([x.contiguous() for x in tensors], to, source, step)

    @property
    def bytes(self) -> dict[str, int]:
        """Operand bytes handed to collectives over the two axes since `forget`, by kind."""
        total: dict[str, int] = {}
        for communicator in self._axes:
            for kind, count in communicator.bytes.items():
                total[kind] = total.get(kind, 0) + count
        return total

    def forget(self) -> None:
        """Sets the counts to zero."""
        for communicator in self._axes:
            communicator.forget()

    @property
    def _axes(self) -> list[Communicator]:
        return list({id(c): c for c in (self.ring, self.ulysses, self.outer)}.values())


def make_mesh(topology: Topology, ranks: Ranks, rank: int) -> Mesh:
    """The mesh of a topology over the first `topology.world` ranks; all of them call it, with equal topologies."""
    def connect(members, name="main"):
        if len(members) == 1:  # a group of one never communicates
            return Communicator(0, members)
        return ranks.communicator(rank, members, name)

    if not 0 <= rank < topology.world:
        raise ValueError(f"rank: {rank} is not within the topology's world of {topology.world}")
    ring = topology.group("ring", rank)
    world, ulysses = tuple(range(topology.world)), topology.group("ulysses", rank)
    outer = connect(ring, "outer" if topology.windows > 1 else "main")
    return Mesh(topology, rank, connect(world), connect(ring), connect(ulysses), outer, ranks)
