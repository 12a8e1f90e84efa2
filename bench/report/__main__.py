"""From records to a terminal table, CSV, Markdown, PNG pictures and one HTML page.

    python -m bench.report out/dense.jsonl more.jsonl --folder=out/report

Of a row that several files hold the last file's counts: name earlier runs first.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import options, program, records
from bench.report.write import write_report

FOLDER = options.define_folder("", "Where the report goes; the first file's folder when empty.")


def main(paths: Sequence[str]) -> int:
    """Writes the report of record files; 2 where one cannot be read."""
    if not paths:
        raise ValueError("records: name at least one file")
    rows = records.latest(records.read(*records.there(paths)))
    write_report(rows, Path(FOLDER.value or Path(paths[0]).parent), Console(width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    program.run(main, files=True)
