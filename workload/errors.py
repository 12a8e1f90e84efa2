"""The one exception every path raises when it cannot honour a request, and the checks of numbers that are given."""

import numbers
from typing import Any

import numpy as np

MOST = int(np.iinfo(np.int32).max)  # tokens: intervals and positions are int32


class Unsupported(ValueError):
    """A kernel or scheme cannot honour an argument; the message names both.

    Raised before anything is launched. `subject` is the kernel, scheme or derived form that
    refuses, `reason` says which argument it cannot honour and why.
    """

    def __init__(self, subject: str, reason: str):
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason


def integer(label: str, value: Any, low: int = 0) -> int:
    """The value as an int; ValueError with its label where it is no integer >= low.

    >>> integer("window", 8.0)
    8
    """
    whole = isinstance(value, numbers.Real) and value == value // 1
    if not whole or value < low:
        raise ValueError(f"{label}: {value!r} is not an integer >= {low}")
    return int(value)


def length(label: str, value: Any) -> int:
    """A number of tokens as an int; ValueError with its label where it is none that 32 bits hold."""
    tokens = integer(label, value)
    if tokens > MOST:
        raise ValueError(f"{label}: {value} is more than {MOST} tokens")
    return tokens


def ascending(label: str, positions: Any, total: int) -> np.ndarray:
    """Positions as int64; ValueError with their label where they do not ascend strictly within 0..total - 1."""
    given = np.asarray(positions)
    held = given.astype(np.int64, copy=False) if given.dtype.kind in "iu" else np.zeros(0, np.int64)
    inside = held.size == given.size and given.ndim == 1
    if not inside or (held.size and (held[0] < 0 or held[-1] >= total or (np.diff(held) <= 0).any())):
        raise ValueError(f"{label}: must be strictly ascending within 0..{total - 1}")
    return held
