"""Ranks as threads of one process, their collectives as local copies: a schedule run whole on one device.

The code of the schemes is the same as over `torch.distributed`; only the `Communicator` differs. Operands are handed
over as they are, so a rank that changed one in flight would be seen by its peers.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_impl.context_parallel.communicator import Communicator, Pending


class Rendezvous:
    """Where the threads of a group leave what they send and fetch what they receive, one collective at a time."""

    def __init__(self, size: int, timeout_s: float):
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._slots: list[Any] = [None] * size
        self.timeout_s = timeout_s

    def exchange(self, rank: int, kind: tuple, operands: Any, read: Callable[[list], Any]) -> Any:
        """Leaves this rank's operands, and reads all ranks' once they are there; all must enter the same `kind`."""
        self._slots[rank] = kind, operands
        self._barrier.wait()
        kinds = {slot[0] for slot in self._slots}
        got = read([slot[1] for slot in self._slots]) if len(kinds) == 1 else None
        self._barrier.wait()  # nobody overwrites a slot before all have read
        if len(kinds) > 1:
            raise RuntimeError(f"ranks entered different collectives: {sorted(map(str, kinds))}")
        return got

    def abort(self) -> None:
        """Lets every waiting rank fail."""
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """A `Communicator` among threads."""

    def __init__(self, rank: int, ranks: Sequence[int], meet: Rendezvous):
        super().__init__(rank, ranks)
        self._meet = meet

    def _all_to_all(self, x, step):
        return self._launch("all_to_all", step, [x], lambda all_x: torch.stack([y[0][self.rank] for y in all_x]))

    def _all_gather(self, x, step):
        return self._launch("all_gather", step, [x], lambda all_x: torch.stack([y[0] for y in all_x]))

    def _reduce_scatter(self, x, step):
        def add(all_x):
            total = all_x[0][0][self.rank].clone()
            for y in all_x[1:]:
                total += y[0][self.rank]
            return total
        return self._launch("reduce_scatter", step, [x], add)

    def _permute(self, tensors, to, source, step):
        return self._launch("permute", step, tensors, lambda all_x: [y.clone() for y in all_x[source]])

    def _launch(self, kind, step, operands, read) -> Pending:
        self._count(kind, operands)
        shapes = tuple(tuple(x.shape) for x in operands)
        try:
            got = self._meet.exchange(self.rank, (kind, step, shapes), operands, read)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"rank {self.ranks[self.rank]}: step '{step}' waited {self._meet.timeout_s:g} s "
                               "for its peers, or one of them failed") from None
        return Pending(step, (), (), got)


class ThreadRanks:
    """`world` ranks in one process; each group of ranks meets at a `Rendezvous` of its own."""

    def __init__(self, world: int, device: torch.device | str = "cpu", *, timeout_s: float = 60.0):
        self.world, self.device, self._timeout_s = world, torch.device(device), timeout_s
        self._meets: dict[tuple, Rendezvous] = {}
        self._lock = threading.Lock()

    def communicator(self, rank: int, groups: Sequence[Sequence[int]], name: str) -> Communicator | None:
        """See `mesh.Ranks`; counts begin at zero."""
        members = next((tuple(g) for g in groups if rank in g), None)
        if members is None:
            return None
        with self._lock:
            meet = self._meets.setdefault((name, members), Rendezvous(len(members), self._timeout_s))
        return ThreadCommunicator(members.index(rank), members, meet)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """work(rank) on every rank at once; the results by rank. The first failure ends all, and is raised."""
        results: list[Any] = [None] * self.world
        failures: list[tuple[int, BaseException]] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:  # whatever ends a rank must end its peers' waiting too
                failures.append((rank, error))
                with self._lock:
                    for meet in self._meets.values():
                        meet.abort()

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            rank, error = failures[0]
            raise RuntimeError(f"rank {rank} failed: {error}") from error
        return results
