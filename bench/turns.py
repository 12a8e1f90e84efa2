"""Who may use the machine: many at a time, or one alone whom nothing disturbs."""

import contextlib
import threading
from typing import Any


class Turns:
    """Turns of the threads of one process, each of which has worker processes do its work.

    What is timed runs alone; what only has to be right runs together with its kind. Those who come to work together
    are let in before those who wait to be alone: all build and check at the same time until each has something to
    time, and then they time one after another, what comes first in `order` first.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._together, self._alone = 0, False
        self._waiting: list[Any] = []

    @contextlib.contextmanager
    def together(self):
        """Among others, but not beside one who is alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self, order: Any = 0):
        """Alone, after those who wait with a smaller `order`."""
        with self._changed:
            self._waiting.append(order)
            self._changed.wait_for(
                lambda: not self._alone and not self._together and order <= min(self._waiting))
            self._waiting.remove(order)
            self._alone = True
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()
