"""How much of the parity matrix some rows hold. Pure functions of records: nothing is asked of a machine."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bench import parity_kernels, parity_schemes
from parity.matrix import CPU_SHAPES, GPU_SHAPES, RANK_SHAPES
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Status:
    """Cells by what became of them.

    Attributes:
      agree, refused, missing: how many; refused: by one stack or both, for a reason that the row has.
      failed: keys of the others.
    """

    agree: int = 0
    refused: int = 0
    missing: int = 0
    failed: tuple[str, ...] = ()

    def __add__(self, other: "Status") -> "Status":
        return Status(self.agree + other.agree, self.refused + other.refused, self.missing + other.missing,
                      self.failed + other.failed)

    @property
    def short(self) -> str:
        """Agree / refused / not run, and how many fail where any does."""
        counts = f"{self.agree:,} / {self.refused:,} / {self.missing:,}"
        return f"{counts}; {len(self.failed)} fail" if self.failed else counts

    def __str__(self) -> str:
        told = ((self.agree, "agree"), (self.refused, "refused"), (len(self.failed), "fail"), (self.missing, "not run"))
        return ", ".join(f"{n:,} {what}" for n, what in told if n) or "none"


def status(rows: Sequence[Row]) -> dict[tuple[str, str], Status]:
    """What became of each cell of the matrices that the rows belong to, by (kernel or scheme, shape).

    The matrix of a GPU or of a CPU is that of `bench.parity` without further flags; of schemes, whose numbers of ranks
    are the machine's, all masks for each number of ranks and each sharding that the rows have.
    """
    known = {row["key"]: row for row in rows if row["kind"] == "parity"}
    found: dict[tuple[str, str], Status] = collections.defaultdict(Status)
    for cell in _matrix(known.values()):
        what = cell.case.scheme if isinstance(cell, parity_schemes.Cell) else cell.kernel
        found[what, cell.shape] += _of(cell.key, known.get(cell.key))
    return dict(found)


def _matrix(rows: Iterable[Row]) -> list[Any]:
    rows = list(rows)
    shapes = {row["case"].get("shape") for row in rows}
    cells: list[Any] = []
    for machine in (GPU_SHAPES, CPU_SHAPES):
        if shapes & set(machine):
            cells += parity_kernels.cells(parity_kernels.SHARED, ALL_BUILDERS, machine, PASSES, 0)
    for shape in RANK_SHAPES:
        grids = dict.fromkeys((row["case"]["world"], row["case"]["sharding"]) for row in rows
                              if row["case"].get("shape") == shape)
        for world, sharding in grids:
            cells += parity_schemes.cells(SCHEMES, ALL_BUILDERS, [world], [sharding], shape, 0)
    return cells


def _of(key: str, row: Row | None) -> Status:
    if row is None:
        return Status(missing=1)
    return {"ok": Status(agree=1), "unsupported": Status(refused=1)}.get(row["status"], Status(failed=(key,)))


def table(found: dict[tuple[str, str], Status]) -> tuple[list[str], list[list[str]]]:
    """Head and lines, as `Status.short`: a line a kernel or scheme, a column a shape, the whole at the end of each."""
    names, shapes = (list(dict.fromkeys(key[n] for key in found)) for n in (0, 1))

    def line(label: str, some: dict[tuple[str, str], Status]) -> list[str]:
        each = [sum((s for (_, x), s in some.items() if x == shape), Status()) for shape in shapes]
        return [label, *(one.short for one in each), sum(each, Status()).short]

    body = [line(name, {key: s for key, s in found.items() if key[0] == name}) for name in names]
    return ["", *shapes, "all"], [*body, line("all", found)]
