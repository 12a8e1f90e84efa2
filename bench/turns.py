"""Who may use the machine: many at a time, or one alone whom nothing disturbs."""

import contextlib
import threading
from typing import Any


class Turns:
    """Turns of the threads of one process, each of which has worker processes do its work.

    What is timed runs alone; what only has to be right runs together with its kind. The two take turns as crowds: once
    someone waits to be alone nobody is let in any more to work together; those who are at it finish, then all who wait
    to be alone go one after another, what comes first in `order` first. (Let in at once, who has just been alone or
    was late would keep all others waiting for its next piece of work: on a card twelve workers then timed for a
    seventh of the time.)
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._together, self._busy, self._alone = 0, False, False  # alone: it is the turn of those who are
        self._waiting: list[Any] = []

    @contextlib.contextmanager
    def together(self):
        """Among others, but not beside one who is alone, and behind all who wait to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not self._waiting)
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
            self._changed.wait_for(lambda: not self._busy and not self._together and order <= min(self._waiting))
            self._waiting.remove(order)
            self._alone = self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._alone = False, bool(self._waiting)
                self._changed.notify_all()
