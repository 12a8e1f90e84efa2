"""One timing protocol for both stacks: warm up until steady, sample, report median and spread.

What a sample is depends on the machine and is the stack adapter's business (`bench/jax_stack.py`,
`bench/torch_stack.py`): seconds of device time on a GPU, with the L2 cache flushed before the timed region and the
flush outside it; seconds of wall time on a CPU. The loop and the statistics stand here once, so both stacks are
measured alike.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

MOST_AHEAD = 16
FEELS_THE_HOST = 0.1  # seconds; a longer run does not, for a launch is late by a millisecond or two
FEELS_A_BUSY_HOST = 1.0  # one that is late by 0.07 s was seen


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How long to measure.

    Attributes:
      samples: samples wanted.
      least: samples taken even when the time is up.
      seconds: time after which no further sample is begun.
      steady: warm-up ends when the last three samples lie within this share of their median.
      warmups: the most samples the warm-up takes (three at least); 0 for none, where the work has just run.
    """

    samples: int = 15
    least: int = 3
    seconds: float = 1.0
    steady: float = 0.05
    warmups: int = 12

    def __post_init__(self):
        for name in ("samples", "least"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} < 1")
        if self.seconds <= 0 or self.steady <= 0:
            raise ValueError("seconds and steady must be positive")


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples in seconds, and what is told of them.

    >>> t = Timing((3.0, 1.0, 2.0))
    >>> t.minimum, t.median, t.maximum
    (1.0, 2.0, 3.0)
    """

    samples: tuple[float, ...]
    warmups: int = 0

    @property
    def minimum(self) -> float:
        """The fastest sample."""
        return min(self.samples)

    @property
    def maximum(self) -> float:
        """The slowest sample."""
        return max(self.samples)

    @property
    def median(self) -> float:
        """The median: what rates are computed from."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median if self.median else math.inf

    def record(self) -> dict:
        """As it stands in a row."""
        return {
            "samples": list(self.samples), "median": self.median, "min": self.minimum, "max": self.maximum,
            "spread": self.spread, "warmups": self.warmups,
        }


def measure(sample: Callable[[int], float], protocol: Protocol = Protocol()) -> Timing:
    """Warms up, then samples.

    Args:
      sample: sample(n) runs the work on input set n (callers take it modulo the sets they have) and returns the
        seconds of that run, waiting until it is finished.
      protocol: how long.
    """
    began = time.perf_counter()
    warm: list[float] = []
    while protocol.warmups and len(warm) < max(3, protocol.warmups) and not _steady(warm[-3:], protocol.steady):
        warm.append(sample(len(warm)))
        if time.perf_counter() - began > protocol.seconds and len(warm) >= 1:
            break
    began = time.perf_counter()
    taken: list[float] = []
    while len(taken) < protocol.samples:
        taken.append(sample(len(warm) + len(taken)))
        if len(taken) >= protocol.least and time.perf_counter() - began > protocol.seconds:
            break
    return Timing(tuple(taken), len(warm))


def _steady(last: list[float], share: float) -> bool:
    return len(last) == 3 and max(last) - min(last) <= share * statistics.median(last)


def wall(call: Callable[[], object], finish: Callable[[object], object]) -> float:
    """Seconds from the call until `finish` has waited for its result: an asynchronous call is never timed alone."""
    began = time.perf_counter()
    finish(call())
    return time.perf_counter() - began


def wall_sampler(call: Callable[[int], object], finish: Callable[[object], object]) -> Callable[[int], float]:
    """sample(n) for work that runs on the host: wall time to the finished result."""
    return lambda n: wall(lambda: call(n), finish)


class EventSampler:
    """sample(n): seconds of a run between two events on the device, enqueued behind work that is not timed.

    That work gives the host a head start, so that the run stands in the queue before the device comes to it; else the
    device waits for the host between the events, and the host is timed. A sample where the device may have waited is
    taken again with twice the head start, up to `MOST_AHEAD` times the first; a long one once: the shorter counts.

    Args:
      take: take(n, ahead) runs the work behind `ahead` units of the work that is not timed, and returns the seconds
        and whether the device had come to the first event before the host had enqueued the last.

    Attributes:
      waited: samples returned for which the device may have waited all the same.
    """

    def __init__(self, take: Callable[[int, int], tuple[float, bool]]):
        self._take, self._ahead, self.waited = take, 1, 0

    def __call__(self, n: int) -> float:
        """Seconds of a run on input set n."""
        seconds, waited = self._take(n, self._ahead)
        if waited and FEELS_THE_HOST <= seconds < FEELS_A_BUSY_HOST:
            again, waited = self._take(n, self._ahead)
            seconds = min(seconds, again)
        while waited and seconds < FEELS_THE_HOST and self._ahead < MOST_AHEAD:
            self._ahead *= 2
            seconds, waited = self._take(n, self._ahead)
        self.waited += waited and seconds < FEELS_THE_HOST
        return seconds
