"""The grid of a job in PyTorch: which communicators a rank has, and hops over the ring."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from torch_impl.context_parallel.communicator import Communicator, GroupCommunicator, Pending, Watch
from workload.errors import integer
from workload.problem import check_kind
from workload.topology import Hop, Topology


class Ranks(Protocol):
    """Where a rank gets its communicators from: a job of processes (`Job`), or threads in its place."""

    device: torch.device
    world: int

    def communicator(self, rank: int, groups: Sequence[Sequence[int]], name: str) -> Communicator | None:
        """A rank's communicator in the one of these disjoint groups that it is in, None where it is in none.

        Groups of another name are another channel. All ranks of the job call it, with equal arguments, in one order.
        """
        ...


class Job:
    """The ranks of the running `torch.distributed` job; connections are made once per group and kept.

    Args:
      device: of the tensors that will travel; by default this rank's GPU under NCCL, else the CPU.
      deadline_s: longest wait for a peer in a collective; past it the process ends, naming rank, step and peer.
    """

    def __init__(self, device: torch.device | str | None = None, *, deadline_s: float = 300.0):
        own = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        self.device = own if device is None else torch.device(device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.watch = Watch(self.rank, deadline_s)
        self._known: dict[tuple, Communicator | None] = {}

    def communicator(self, rank: int, groups: Sequence[Sequence[int]], name: str) -> Communicator | None:
        """See `Ranks`."""
        if rank != self.rank:
            raise ValueError(f"rank: this process is {self.rank}, not {rank}")
        mine = None
        for members in map(tuple, groups):
            if (name, members) not in self._known:
                self._known[name, members] = self._connect(members)
            if rank in members:
                mine = self._known[name, members]
        return mine

    def _connect(self, members: tuple[int, ...]) -> Communicator | None:
        if len(members) == 1:  # a group of one never communicates
            return Communicator(0, members) if self.rank in members else None
        # Every rank of the job enters new_group: its way for members alone hangs where ranks made unequal numbers.
        group = dist.new_group(list(members), pg_options=_options())
        if self.rank not in members:
            return None
        made = GroupCommunicator(group, watch=self.watch)
        made.warm_up(self.device)
        return made


def _options():
    """NCCL's streams come first: a kernel whose blocks fill the device would keep a hop waiting until it ends, and hide
    nothing.
    """
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if dist.get_backend() == "nccl" else None


@dataclasses.dataclass(frozen=True, eq=False)
class Mesh:
    """A rank's place in a grid and its communicators.

    Attributes:
      topology: the grid.
      rank: this one in the grid, 0 .. world - 1.
      world, ring, ulysses: communicators over all ranks and over the two axes.
      outer: a second channel over the ring, for what travels between windows while a window computes.
      ranks: where the communicators came from.
      group, groups: which of so many such grids side by side this one is.
    """

    topology: Topology
    rank: int
    world: Communicator
    ring: Communicator
    ulysses: Communicator
    outer: Communicator
    ranks: Ranks
    group: int = 0
    groups: int = 1

    @property
    def device(self) -> torch.device:
        """Of the tensors that travel."""
        return self.ranks.device

    def windowed(self, window: int) -> "Mesh":
        """The same grid with inner rings of `window` ranks; all ranks of the job call it."""
        topology = dataclasses.replace(self.topology, window=window)
        mesh = make_mesh(topology, self.ranks, self.group * topology.world + self.rank, groups=self.groups)
        assert mesh is not None  # this rank is in the grid already
        return mesh

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


def make_mesh(topology: Topology, ranks: Ranks, rank: int, *, groups: int = 1) -> Mesh | None:
    """The mesh of a topology over the first `topology.world` ranks of a job; None for a rank that is in none.

    All ranks of the job call it, with equal arguments but their own rank, in one order: groups are made by all.

    Args:
      groups: such meshes side by side, each over the next `topology.world` ranks, for as many parts of a batch.

    Raises: ValueError where the job has fewer ranks.
    """
    check_kind("topology", topology, Topology)
    world, count = topology.world, integer("groups", groups, 1)
    if ranks.world < count * world:
        raise ValueError(f"ranks: {ranks.world} for {count} groups of world {world}")

    def connect(members, name="main"):
        moved = [tuple(first + r for r in m) for first in range(0, count * world, world) for m in members]
        return ranks.communicator(rank, moved, name)

    everyone = range(world)
    rings, exchanges = (sorted({topology.group(axis, r) for r in everyone}) for axis in ("ring", "ulysses"))
    whole, ring, ulysses = connect([everyone]), connect(rings), connect(exchanges)
    outer = connect(rings, "outer" if topology.windows > 1 else "main")
    if rank not in range(count * world):
        return None
    return Mesh(topology, rank % world, whole, ring, ulysses, outer, ranks, rank // world, count)
