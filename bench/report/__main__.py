"""From records to a terminal table, CSV, Markdown, PNG pictures and one HTML page.

    python -m bench.report out/dense.jsonl more.jsonl --folder=out/report

Of a row that several files hold the last file's counts: name earlier runs first.
"""

import sys
from pathlib import Path

from absl import app
from rich.console import Console

from bench import options, records
from bench.report.write import write_report

FOLDER = options.define_folder("", "Where the report goes; the first file's folder when empty.")


def main(argv):
    """Writes the report of record files; 2 where one cannot be read."""
    paths = [Path(x) for x in argv[1:]]
    missing = [str(p) for p in paths if not p.is_file()]
    if not paths or missing:
        print(f"records: no such file: {', '.join(missing)}" if missing else "records: name at least one file",
              file=sys.stderr)
        return 2
    try:
        rows = records.latest(records.read(*paths))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    write_report(rows, Path(FOLDER.value or paths[0].parent), Console(width=None if sys.stdout.isatty() else 160))
    return 0


if __name__ == "__main__":
    app.run(main)
