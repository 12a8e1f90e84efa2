"""Temporary folders that outlive nobody: not even one who was killed and could not clear up."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "attention-bench-"
LOCK = "owner.lock"  # held as long as the owner lives: the system lets go of it, however the owner ends


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A temporary folder for the time of a `with`; what killed owners left behind is cleared first.

    Args:
      name: what it is for, a part of the folder's name.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with _held(left) as dead:
            if dead:
                shutil.rmtree(left.parent, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
        lock = folder / LOCK
        lock.touch()
        with _held(lock) as held:
            if not held or not lock.exists():  # who clears up was here between the last two lines
                continue
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[bool]:
    """Whether nobody else holds a lock; it is ours while the `with` lasts."""
    try:
        opened = os.open(lock, os.O_RDWR)
    except OSError:  # gone, or another user's
        yield False
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            got = True
        except OSError:
            got = False
        yield got
    finally:
        os.close(opened)
