"""Who measures what, and in which order."""

import collections
import itertools
import threading
from collections.abc import Iterable, Sequence

from bench.cases import Case


def ordered(cases: Iterable[Case]) -> list[Case]:
    """Full masks first (others are held against them), then by problem, so that a reference serves all its rows.

    Problems of a length stay in the order in which they come.
    """
    unique = {case.key: case for case in cases}
    came = {label: n for n, label in enumerate(dict.fromkeys(case.spec.label for case in unique.values()))}
    return sorted(unique.values(), key=lambda c: (
        c.spec.seq_len, c.spec.mask != "full", came[c.spec.label], c.kernel, c.which != "forward", c.stack))


def shares(cases: Sequence[Case], workers: int) -> list[list[tuple[int, Case]]]:
    """Who measures what, as (number of the worker, case) lists, one a thread.

    One worker a stack: all cases in one list, as they are ordered. Several: each takes the same kernels, heads and
    masks at every length, short ones first, so that what it compiled serves again, and a row finds those of shorter
    lengths.
    """
    def kind(c: Case) -> tuple:
        return c.kernel, c.spec.mask != "full", c.spec.mask, c.spec.q_heads, c.spec.kv_heads, repr(c.spec.settings)

    if workers == 1:
        return [[(0, case) for case in cases]]
    out = []
    for stack in sorted({case.stack for case in cases}):
        mine = [case for case in cases if case.stack == stack]
        kinds = sorted({kind(c) for c in mine})
        place = {x: n * workers // len(kinds) for n, x in enumerate(kinds)}
        lists: list[list[tuple[int, Case]]] = [[] for _ in range(workers)]
        for case in sorted(mine, key=lambda c: c.spec.seq_len):
            lists[place[kind(case)]].append((place[kind(case)], case))
        out += [x for x in lists if x]
    return out


class Shares:
    """The cases of a run as they are handed out, a problem of a kernel at a time; any thread may ask for its next ones.

    Who has finished its own share takes of the longest one that a worker of its stack still has.

    Attributes:
      workers: (stack, number) of the worker of each share.
    """

    def __init__(self, cases: Sequence[Case], workers: int):
        lists = shares(cases, workers)
        self.workers = [(x[0][1].stack, x[0][0]) for x in lists if x]
        self._left = [
            collections.deque(list(group) for _, group in itertools.groupby(
                (case for _, case in x), key=lambda c: (c.stack, c.kernel, c.spec)))
            for x in lists if x
        ]
        self._lock = threading.Lock()

    def take(self, share: int) -> list[Case]:
        """The next cases for the worker of a share, which are nobody else's from now on; none when all are given."""
        stack = self.workers[share][0]
        with self._lock:
            mine = self._left[share] or max(
                (x for x, (of, _) in zip(self._left, self.workers, strict=True) if of == stack), key=len)
            return mine.popleft() if mine else []

    def left(self, share: int, seq_len: int) -> list[Case]:
        """What of a share is still to be given of a length."""
        with self._lock:
            return [case for group in self._left[share] for case in group if case.spec.seq_len == seq_len]
