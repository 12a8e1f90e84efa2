"""The collectives of a group of ranks: asynchronous, counted, watched.

Every call is made by all ranks of the group in one order, takes contiguous tensors, counts the operand bytes it
hands to torch.distributed, and returns a `Pending`. On NCCL the collective runs on the group's own stream behind
the caller's stream, beside the kernels that are launched after it; `Pending.wait` makes the caller's stream wait.
Until then the `Pending` keeps every buffer alive, so the allocator cannot hand out memory that is still in use.
"""

import atexit
import collections
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torch_impl.launch import LAGGED, Progress

MAX_BATCH = 256  # point-to-point operations of one batched call
POLL_S = 0.1


class Watch:
    """Ends the process where a collective stays unfinished past its deadline, naming rank, step and peers.

    A collective that waits for a rank that is gone or stuck never returns by itself on NCCL. A daemon thread looks
    at the oldest unfinished one; past the deadline it says so on stderr and exits with `LAGGED`.
    """

    def __init__(self, rank: int, deadline_s: float, progress: Progress | None = None):
        self.rank, self.deadline_s = rank, deadline_s
        self.progress = progress or Progress()
        self._open: collections.deque = collections.deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends the thread; at the exit of the process by itself.

        A daemon thread that is inside torch while the interpreter goes down takes the process with it (SIGABRT).
        """
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, step: str, peers: Sequence[int], done: Callable[[], bool]) -> None:
        """A collective starts; `done` tells whether it is over, successful or not."""
        self.progress.at(step, peers)
        with self._lock:
            self._open.append((time.monotonic(), step, tuple(peers), done))
        if self._thread is None:
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threading.Thread(target=self._run, args=(device,), daemon=True, name="collective watch")
            self._thread.start()
            atexit.register(self.close)

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins on GPU 0, and asking after an event would open it
        since = time.monotonic()  # when the oldest became the oldest: work queued behind it is not its fault
        while not self._closed.wait(POLL_S):
            while True:
                with self._lock:
                    if not self._open:
                        break
                    started, step, peers, done = self._open[0]
                    if done():
                        self._open.popleft()
                        since = time.monotonic()
                        continue
                if time.monotonic() - max(started, since) > self.deadline_s:
                    self._give_up(step, peers)
                break

    def _give_up(self, step, peers) -> None:
        self.progress.at(step, peers)
        print(f"rank {self.rank}: step '{step}' waited more than {self.deadline_s:g} s for peer "
              f"{', '.join(map(str, peers))}", file=sys.stderr, flush=True)
        os._exit(LAGGED)


class Pending:
    """A collective in flight: `wait`, once, returns what it filled.

    It keeps the operands alive until `wait`. After that it keeps nothing (not even the works, which hold their
    outputs): memory is then ordered by the caller's stream alone, and the allocator may hand it out again.
    """

    def __init__(self, name: str, works: Sequence, operands: Sequence[torch.Tensor], result):
        self._name, self._works, self._operands, self._result = name, list(works), operands, result
        self._passed: torch.cuda.Event | None = None

    def done(self) -> bool:
        """Whether it is over (on the device too)."""
        if self._passed is not None:
            return self._passed.query()
        return all(work.is_completed() for work in self._works)

    def wait(self):
        """The result, once the current stream may read it. RuntimeError naming rank, step and peers if it failed."""
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"{self._name} failed: {error}") from error
        if any(x.is_cuda for x in self._operands):  # NCCL's wait only orders streams; gloo's is the end of it
            self._passed = torch.cuda.Event()
            self._passed.record()
        result, self._result, self._works, self._operands = self._result, None, [], ()
        return result


class Communicator:
    """Collectives of one group of ranks, of which the caller is one.

    Attributes:
      rank, size: in the group.
      ranks: the job's ranks that make the group, in group order.
      bytes: operand bytes handed over so far, by kind of collective.
      calls: collectives so far, by kind.
    """

    def __init__(self, rank: int, ranks: Sequence[int]):
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)
        self.bytes: collections.Counter = collections.Counter()
        self.calls: collections.Counter = collections.Counter()

    def all_to_all(self, x: torch.Tensor, step: str) -> Pending:
        """x [size, ...]: piece j goes to rank j. Result, as x: piece j is what rank j held for this rank."""
        self._check("all_to_all", step, x, leading=True)
        return Pending(step, (), (), x) if self.size == 1 else self._all_to_all(x, step)

    def all_gather(self, x: torch.Tensor, step: str) -> Pending:
        """x of any shape; result [size, *x.shape], rank j's x at j."""
        self._check("all_gather", step, x)
        return Pending(step, (), (), x[None]) if self.size == 1 else self._all_gather(x, step)

    def reduce_scatter(self, x: torch.Tensor, step: str) -> Pending:
        """x [size, ...]; result x.shape[1:]: the sum over the ranks of their piece for this rank."""
        self._check("reduce_scatter", step, x, leading=True)
        return Pending(step, (), (), x[0]) if self.size == 1 else self._reduce_scatter(x, step)

    def permute(self, tensors: Sequence[torch.Tensor], to: int, source: int, step: str) -> Pending:
        """Each tensor goes to group rank `to`; result: tensors like them, from group rank `source`.

        All ranks of the group call it with the same permutation; `to` and `source` are this rank's part of it.
        """
        for x in tensors:
            self._check("permute", step, x)
        if to == source == self.rank:
            return Pending(step, (), (), list(tensors))
        return self._permute(list(tensors), to, source, step)

    def rotate(self, tensors: Sequence[torch.Tensor], by: int, step: str) -> Pending:
        """Each tensor goes `by` ranks up; result: those of the rank `by` below."""
        return self.permute(tensors, (self.rank + by) % self.size, (self.rank - by) % self.size, step)

    def warm_up(self, device: torch.device) -> None:
        """One small collective of each kind: connections are made here, by all ranks, not inside a schedule.

        The first batched point-to-point call of a NCCL group needs all of its ranks, and rotations that follow may
        leave some pairs of ranks unconnected until then.
        """
        x = torch.ones(self.size, 8, device=device)
        self.all_gather(x, "warm-up all_gather").wait()
        self.all_to_all(x, "warm-up all_to_all").wait()
        self.reduce_scatter(x, "warm-up reduce_scatter").wait()
        for by in range(1, self.size):
            self.rotate([x], by, f"warm-up rotate by {by}").wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.forget()

    def forget(self) -> None:
        """Sets the counts of bytes and calls to zero."""
        self.bytes.clear()
        self.calls.clear()

    def _check(self, kind, step, x, leading=False) -> None:
        if not x.is_contiguous():  # a strided buffer is sent as if it were dense: silently wrong data
            raise ValueError(f"{kind} at step '{step}': operand of shape {tuple(x.shape)} is not contiguous")
        if leading and (x.ndim == 0 or x.shape[0] != self.size):
            raise ValueError(f"{kind} at step '{step}': shape {tuple(x.shape)} does not begin with {self.size} ranks")

    def _count(self, kind: str, operands: Sequence[torch.Tensor]) -> None:
        self.bytes[kind] += sum(x.numel() * x.element_size() for x in operands)
        self.calls[kind] += 1

    def _all_to_all(self, x, step) -> Pending:
        raise NotImplementedError

    def _all_gather(self, x, step) -> Pending:
        raise NotImplementedError

    def _reduce_scatter(self, x, step) -> Pending:
        raise NotImplementedError

    def _permute(self, tensors, to, source, step) -> Pending:
        raise NotImplementedError


class GroupCommunicator(Communicator):
    """A `Communicator` over a group of `torch.distributed`.

    Args:
      group: the group, all ranks of the job by default.
      deadline_s: longest wait for a peer in a collective, where no `watch` is handed in.
      watch: shared by the groups of a job.
    """

    def __init__(self, group=None, *, deadline_s: float = 60.0, watch: Watch | None = None):
        self.group = dist.group.WORLD if group is None else group
        super().__init__(dist.get_rank(self.group), dist.get_process_group_ranks(self.group))
        self.watch = watch or Watch(dist.get_rank(), deadline_s)

    def _all_to_all(self, x, step):
        got = torch.empty_like(x)
        return self._launch("all_to_all", step, self._others(), [x], got, lambda: [
            dist.all_to_all_single(got, x, group=self.group, async_op=True)])

    def _all_gather(self, x, step):
        got = x.new_empty((self.size, *x.shape))
        return self._launch("all_gather", step, self._others(), [x], got, lambda: [
            dist.all_gather_into_tensor(got.view(-1), x.view(-1), group=self.group, async_op=True)])

    def _reduce_scatter(self, x, step):
        got = torch.empty_like(x[0])
        return self._launch("reduce_scatter", step, self._others(), [x], got, lambda: [
            dist.reduce_scatter_tensor(got.view(-1), x.view(-1), group=self.group, async_op=True)])

    def _permute(self, tensors, to, source, step):
        got = [torch.empty_like(x) for x in tensors]
        pairs = [(dist.P2POp(dist.isend, x, group=self.group, group_peer=to),
                  dist.P2POp(dist.irecv, y, group=self.group, group_peer=source)) for x, y in zip(tensors, got)]
        half = MAX_BATCH // 2  # a pair stays in one batch: a send alone would wait for a receive not yet posted
        return self._launch("permute", step, sorted({self.ranks[to], self.ranks[source]}), tensors, got, lambda: [
            work for first in range(0, len(pairs), half)
            for work in dist.batch_isend_irecv([op for pair in pairs[first : first + half] for op in pair])])

    def _others(self) -> list[int]:
        return [r for i, r in enumerate(self.ranks) if i != self.rank]

    def _launch(self, kind, step, peers, operands, result, start) -> Pending:
        self._count(kind, operands)
        name = f"rank {self.ranks[self.rank]}: step '{step}' with peer {', '.join(map(str, peers))}"
        pending = Pending(name, (), operands, result)
        posted = threading.Event()
        self.watch.begin(step, peers, lambda: posted.is_set() and pending.done())
        try:
            pending._works = start()
        except RuntimeError as error:
            raise RuntimeError(f"{name} failed: {error}") from error
        finally:
            posted.set()
        return pending
