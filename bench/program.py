"""How every binary of the bench begins and ends."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

from bench import options, records

INTERRUPTED = 128 + signal.SIGINT
FAILED = ("mismatch", "error", "timeout")


def run(main: Callable[..., int], files: bool = False) -> None:
    """Ends this process with the status that main() returns; 2 for bad flags, 130 where it was interrupted.

    Args:
      main: reads `flags.FLAGS`, whose sizes suit the machine (`options.fit`); its ValueError says which flag or file
        is wrong. With `files` it is given the arguments that are no flags, which others refuse.
    """
    def started(argv: list[str]) -> int:
        if argv[1:] and not files:
            raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
        small = options.fit(flags.FLAGS)
        if small:
            print(f"no GPU here: {small}, unless given", flush=True)
        try:
            return main(argv[1:]) if files else main()
        except ValueError as problem:
            print(problem, file=sys.stderr)
            return 2

    try:
        app.run(started)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def ended(out: str | Path) -> int:
    """Says what a record file holds and how to see it; the status of its run: 1 where a row failed."""
    rows = records.read(out)
    bad = sum(row["status"] in FAILED for row in rows)
    print(f"{len(rows)} rows, {bad} failed; see them: python -m bench.report {out}")
    return 1 if bad else 0
