"""Records: one JSON line a row, flushed as it is made, found again by its key.

A row is a dict with at least `key` (unique in a file), `kind`, `case`, `status`, `reason` and `environment`;
`bench/attention_task.py` says what an attention row holds besides. A run that was killed leaves whole lines and at
most one torn last line (it lacks its newline), which reading skips and appending cuts off.

A run that asks some rows again says so in a line of its own, {"again": keys}. The rows stay until new ones are
appended, which readers then see in their place. The end of the run leaves one line a row; one that was killed leaves
what readers take for that.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

STATUSES = ("ok", "unsupported", "out_of_memory", "mismatch", "error", "timeout", "skipped")
AGAIN = "again"
NEEDED = {"key": str, "kind": str, "case": dict, "status": str, "reason": str, "environment": dict}


def validate(row: dict[str, Any]) -> None:
    """Raises ValueError naming the field that a row lacks or that holds what it may not."""
    if not isinstance(row, dict):
        raise ValueError(f"record: {type(row).__name__} is no object with fields")
    for field, kind in NEEDED.items():
        if field not in row:
            raise ValueError(f"record: lacks {field}")
        if not isinstance(row[field], kind):
            raise ValueError(f"{field}: {row[field]!r} is no {kind.__name__}")
    if row["status"] not in STATUSES:
        raise ValueError(f"status: {row['status']!r} is none of {', '.join(STATUSES)}")
    if row["status"] != "ok" and not row["reason"]:
        raise ValueError(f"reason: a row with status {row['status']} needs one")


def _plain(value):
    """JSON has no NaN and no infinity: they are written as the strings "nan", "inf", "-inf"."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _restored(value):
    """The inverse of `_plain`."""
    if isinstance(value, dict):
        return {k: _restored(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restored(v) for v in value]
    return NUMBERS.get(value, value) if isinstance(value, str) else value


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(_plain(entry), allow_nan=False).encode() + b"\n"


class Writer:
    """Appends rows to a file; each is on disk when `write` returns. Refuses a key that it has.

    Args:
      alone: refuse a file that another `alone` writer has open: two runs would write the same rows.
      again: with `alone`, tells of a row whether it is to be written anew; None: none is.

    Attributes:
      keys: of the rows that need not be written.

    Raises ValueError naming the file where it cannot be written or holds what is no record.
    """

    def __init__(self, path: str | Path, alone: bool = False, again: Callable[[dict[str, Any]], bool] | None = None):
        self.path, self._alone = Path(path), alone
        with contextlib.ExitStack() as held, self._told():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = held.enter_context(open(self.path, "ab", buffering=0))
            if alone:
                self._lock()
            rows, asked = _rows(self.path)
            _cut_torn_line(self.path)
            if alone:
                before, asked = asked, {row["key"] for row in rows if again and again(row)}
                if asked != before:  # some may be of a run that was killed
                    self._append({AGAIN: sorted(asked)})
            self.keys = {row["key"] for row in rows} - asked
            held.pop_all()

    def write(self, row: dict[str, Any]) -> None:
        """Adds one row. Raises ValueError where it is no record, its key is taken or the file cannot grow."""
        validate(row)
        if row["key"] in self.keys:
            raise ValueError(f"key: {row['key']!r} is in {self.path} already")
        with self._told():
            self._append(row)
        self.keys.add(row["key"])

    def _append(self, entry: dict[str, Any]) -> None:
        line = _line(entry)
        written = self._file.write(line)
        if written < len(line):  # what is torn off must be the last line
            os.truncate(self.path, self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise ValueError(f"{self.path}: {problem.strerror}") from problem

    def _lock(self) -> None:
        with contextlib.suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
                ours = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))  # or it was tidied meanwhile
            except BlockingIOError:
                ours = False
            if not ours:
                raise ValueError(f"{self.path}: another run writes it")

    def close(self) -> None:
        """Closes the file; a run's, with one line a row."""
        if self._alone and not self._file.closed:
            with contextlib.suppress(OSError):  # a full disk: nothing is lost, and the next run tries again
                _tidy(self.path)
        self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def there(paths: Iterable[str]) -> list[Path]:
    """The paths, each of a file; ValueError naming those that are none."""
    found = [Path(path) for path in paths]
    missing = [str(path) for path in found if not path.is_file()]
    if missing:
        raise ValueError(f"records: no such file: {', '.join(missing)}")
    return found


def read(*paths: str | Path) -> list[dict[str, Any]]:
    """All rows of files in order; absent files hold none. Raises ValueError on a broken whole line."""
    return [row for path in paths for row in _rows(Path(path))[0]]


def keys(path: str | Path) -> set[str]:
    """Of the rows that a file holds, without those that the run which writes it is yet to ask again."""
    rows, asked = _rows(Path(path))
    return {row["key"] for row in rows} - asked


def _rows(path: Path) -> tuple[list[dict[str, Any]], set[str]]:
    """The rows of a file, and keys of those that are yet to be asked again."""
    rows, asked = [], set[str]()
    for entry in _entries(path):
        if AGAIN in entry:
            asked = set(entry[AGAIN])
        else:
            rows.append(entry)
            asked.discard(entry["key"])
    return latest(rows), asked


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    *lines, _ = path.read_bytes().split(b"\n")  # what stands behind the last newline was cut short
    for number, line in enumerate(lines, 1):
        try:
            entry = _restored(json.loads(line))
            if not (isinstance(entry, dict) and list(entry) == [AGAIN]):
                validate(entry)
        except ValueError as problem:
            raise ValueError(f"{path}:{number}: {problem}") from problem
        yield entry


def _tidy(path: Path) -> None:
    """One line a row, where some were replaced or asked again."""
    entries = list(_entries(path))
    rows = latest(entry for entry in entries if AGAIN not in entry)
    if len(rows) == len(entries):
        return
    place = path.resolve()
    new = place.with_name(f"{place.name}.new")
    try:
        with open(new, "wb") as file:
            file.writelines(map(_line, rows))
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(place, new)
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)


def _cut_torn_line(path: Path) -> None:
    data = path.read_bytes()
    if not data.endswith(b"\n"):  # else others may be appending meanwhile
        os.truncate(path, data.rfind(b"\n") + 1)


def latest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows of one kind and key the last, where the first stood: a later run replaces what an earlier one measured.

    A case's run on real ranks and its replay share a key; they are of two kinds.

    >>> latest([{"key": "a", "n": 1}, {"key": "b"}, {"key": "a", "n": 2}])
    [{'key': 'a', 'n': 2}, {'key': 'b'}]
    """
    return list({(row.get("kind"), row["key"]): row for row in rows}.values())


def select(rows: Iterable[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The rows whose top-level or case fields equal all of `wanted`."""
    def fits(row):
        return all(row.get(k, row["case"].get(k)) == v for k, v in wanted.items())
    return [row for row in rows if fits(row)]
