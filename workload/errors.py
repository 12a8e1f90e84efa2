"""The one exception every path raises when it cannot honour a request, and the check of a number that is given."""

import numbers
from typing import Any


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
