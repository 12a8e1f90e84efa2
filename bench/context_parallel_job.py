"""What a rank of the context-parallel bench needs of its stack, and what it is told.

`Job` is one process's part of a job, `Ready` a case on it; bench/context_parallel_jax_worker.py and its twin say how a
stack does these things, bench/context_parallel_worker.py what is done with them.
"""

import abc
import dataclasses
import functools
import json
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.link_model import Links
from bench.timing import MOST_AHEAD, Protocol
from bench.worker_main import failure_of
from workload.problem import AttentionProblem
from workload.schedule import Schedule

SIDES = {"q": "q", "k": "kv", "v": "kv", "out": "q", "dout": "q", "dq": "q", "dk": "kv", "dv": "kv"}
RESULTS = ("out", "dq", "dk", "dv")
TRACED_CALLS = 3


@dataclasses.dataclass(frozen=True)
class Request:
    """What a job is told.

    Attributes:
      cases: records of the cases, in order.
      protocol: how long a pass is timed.
      check_len: tokens of the check, 0 for the case's own length.
      timed: whether rows are timed, or only checked.
      checked: a record file whose good rows stand for the check of cases that differ from theirs in length alone.
      links: operand bytes at which links are measured, none for not.
      inside: whether each step's local work is also timed alone, and the job predicted from it and the links.
      trace: (scheme, mask) or (scheme, mask, sharding) of the cases of which a call is traced.
      deadline: seconds a row may take.
      references: a folder where what rank 0 of any job computed as a reference is kept for the others, "" for none.
      after: a file that must be there before anything runs on a device, "" for none; building goes on meanwhile.
      until: `time.time()` after which no row is begun.
    """

    cases: Sequence[dict[str, Any]]
    protocol: dict[str, Any] = dataclasses.field(default_factory=dict)
    check_len: int = 0
    timed: bool = True
    checked: str = ""
    links: Sequence[int] = ()
    inside: bool = False
    trace: Sequence[Sequence[str]] = ()
    deadline: float = 60.0
    references: str = ""
    after: str = ""
    until: float = float("inf")


class Agreed(RuntimeError):
    """A failure that all ranks know of: a status and its reason."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Ready(abc.ABC):
    """A case on this rank, its tensors placed and its passes to be run.

    It holds nothing that holds it, so that its memory is free with its last reference, before the next case.

    Attributes:
      kernel: the local kernel's name.
    """

    kernel: str

    @abc.abstractmethod
    def begin(self) -> None:
        """Runs the forward pass, whose results the backward pass reads."""

    @abc.abstractmethod
    def run(self, which: str) -> Any:
        """Runs a pass, after `begin`; all ranks call it."""

    @abc.abstractmethod
    def results(self) -> dict[str, Any]:
        """out, dq, dk, dv of this rank's tokens, finished."""

    @abc.abstractmethod
    def same(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        """Whether two `results` are equal bit for bit."""

    @abc.abstractmethod
    def whole(self, results: dict[str, Any]) -> dict[str, Any]:
        """Results of all tokens in token order; all ranks call it."""

    @abc.abstractmethod
    def moved(self, which: str) -> dict[str, int]:
        """Bytes that this rank hands to collectives in a pass, by kind; all ranks call it."""

    @abc.abstractmethod
    def peak(self) -> int:
        """Most bytes of device memory that the two passes hold; all ranks call it."""

    @abc.abstractmethod
    def traced(self, which: str) -> dict[str, Any]:
        """A Chrome trace of `TRACED_CALLS` calls back to back; all ranks call it."""

    @abc.abstractmethod
    def steps(self, which: str, protocol: Protocol) -> list[float]:
        """Seconds of this rank's local work at each step, alone, joining it to the steps before included."""

    groups = 1  # of heads that travel and compute in turn


class Job(abc.ABC):
    """One process's part of a job of a stack.

    Attributes:
      request: what it is told.
      stack: the bench's view of the stack; progress: where this process says what it does.
      rank, world: where it stands.
      timer: what a sample is, in words.
      links: what links cost, once measured.
    """

    stack: Any
    rank: int
    world: int
    progress: Any
    timer: str

    def __init__(self, request: Request):
        self.request = request
        self.links: Links | None = None
        self.singles: dict[tuple, float | None] = {}

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every process's value (JSON), by rank."""

    @abc.abstractmethod
    def build(self, cases: Sequence[tuple[Case, int]]) -> None:
        """Makes what these cases at these lengths (0 for their own) need, as far as that runs nothing on a device."""

    @abc.abstractmethod
    def ready(self, case: Case, schedule: Schedule, arrays: dict[str, np.ndarray] | None = None) -> Ready | None:
        """The case on the given q, k, v, dout (whole, as stored), or on random ones; None on a rank outside its world.

        All ranks call it; it fails on all or sends nothing.
        """

    @abc.abstractmethod
    def sampler(self, call: Callable[[], Any] | None) -> tuple[Callable[[], float], float]:
        """(sample, what one takes): sample() is this rank's seconds of one call that all ranks begin together."""

    @abc.abstractmethod
    def single(self, spec: ProblemSpec, kernel: str, which: str) -> float | None:
        """Seconds of a kernel on a whole problem on this device alone; None where it does not fit there."""

    @abc.abstractmethod
    def default_kernel(self, problem: AttentionProblem) -> str:
        """The local kernel of a case that names none."""

    @abc.abstractmethod
    def link_calls(self, size: int) -> tuple[dict[str, Callable[[], Any]], int]:
        """A call of each of `LINK_KINDS` among all ranks, and the bytes of its operand, about `size`."""

    def agreed(self, work: Callable[[], Any]) -> Any:
        """work() on every rank; where one fails all raise, naming it, so that none enters what others will not."""
        failure, result = None, None
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()
            failure = {"status": error.status, "reason": str(error)} if isinstance(error, Agreed) else failure_of(error)
        for rank, found in enumerate(self.gather(failure)):
            if found is not None:
                raise Agreed(found["status"], f"rank {rank}: {found['reason']}")
        return result

    def head_start(self, take: Callable[[int], tuple[float, bool]]) -> int:
        """The least head start, of those twice the one before, that no rank's host outlasts; `MOST_AHEAD` at most.

        Args:
          take: take(ahead) is this rank's seconds of a call that all ranks begin together, behind so many units of work
            that is not timed, and whether its device may have waited for the host.
        """
        ahead, (_, waited) = 1, take(1)
        while ahead < MOST_AHEAD and any(self.gather(waited)):
            ahead *= 2
            _, waited = take(ahead)
        return ahead

    def samples(self, call: Callable[[], Any] | None, protocol: Protocol) -> list[list[float]]:
        """Seconds of each iteration by rank, of the ranks that have a call; all take equally many."""
        sample, estimate = self.agreed(lambda: self.sampler(call))
        count = int(protocol.seconds / max(*self.gather(estimate), 1e-9))
        count = max(protocol.least, min(protocol.samples, count))
        mine = self.agreed(lambda: [sample() for _ in range(count)])
        return [samples for samples in self.gather(mine if call is not None else None) if samples is not None]


# ---- what both stacks' ranks share ---------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def problem_of(spec) -> AttentionProblem:
    """The problem, made once."""
    return spec.problem()


def at_length(case: Case, length: int) -> Case:
    """The case at another length; 0 for its own."""
    return case if not length else dataclasses.replace(case, spec=case.spec.at_length(length))


def read_request(path: str) -> Request:
    """The request of a file."""
    return Request(**json.loads(Path(path).read_text()))
