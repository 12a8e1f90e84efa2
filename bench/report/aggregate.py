"""What the report tells of rows: packs pooled, floors, causes, pivots. Pure functions of records."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from workload.capability import DYNAMIC_MASKS
from workload.suite import ALL_BUILDERS, SuiteSettings

Row = dict[str, Any]
FAIR = 0.8
TILE = 128  # of `waste`
SHORT_WALK = 16  # tiles
FEWEST = 5  # rows that a line is laid through


CASE_FIELDS = ("stack", "kernel", "mask", "pass", "seq_len", "q_heads", "kv_heads", "head_dim", "dtype")


def attention_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of kernels on problems. Raises ValueError naming what a row's case lacks."""
    found = [row for row in rows if row["kind"] == "attention"]
    for row in found:
        lacks = [name for name in CASE_FIELDS if name not in row["case"]]
        if lacks:
            raise ValueError(f"{row['key']}: its case lacks {', '.join(lacks)}")
    return found


@dataclasses.dataclass(frozen=True)
class Entry:
    """The packs (seeds) of one case, pooled: total FLOPs over total time.

    Attributes:
      stack, kernel, mask, which, seq_len, shape, dtype: what was run; shape as "64:8 heads of 128", with settings.
      status: "ok" where any pack is; else that of the first row. reason: of that row.
      seconds: mean of the medians; spread: the largest; rate: FLOP/s; bandwidth: bytes/s; flops: mean.
      floor: seconds below which no version runs: FLOPs over the matrix peak or bytes over the copy bandwidth.
      bound: which of the two is larger, "arithmetic" or "memory".
      waste: cells of the visited 128 x 128 tiles over visible cells. density: visible share.
      error, budget: the worst result's, as a share of its budget in `error_share`.
      packs, flags, peak_bytes, compile_seconds, prepare_seconds, source, warm_seconds.
    """

    stack: str
    kernel: str
    mask: str
    which: str
    seq_len: int
    shape: str
    dtype: str
    status: str
    reason: str
    packs: int
    seconds: float | None = None
    spread: float | None = None
    rate: float | None = None
    bandwidth: float | None = None
    floor: float | None = None
    bound: str = ""
    waste: float | None = None
    density: float | None = None
    error_share: float | None = None
    worst: str = ""
    peak_bytes: int | None = None
    compile_seconds: float | None = None
    prepare_seconds: float | None = None
    warm_seconds: float | None = None
    source: str = ""
    flags: tuple[str, ...] = ()

    @property
    def column(self) -> str:
        """Kernel and stack, as a column of a pivot."""
        return f"{self.kernel} {self.stack}"

    @property
    def walk(self) -> float | None:
        """How many 128 x 128 tiles of keys 128 queries visit on average; None where that is not known."""
        if self.waste is None or self.density is None:
            return None
        return self.density * self.waste * self.seq_len / TILE

    @property
    def setting(self) -> tuple[str, int, str, str]:
        """What entries must have in common to stand in one table."""
        return (self.which, self.seq_len, self.shape, self.dtype)


def shape_of(case: Row) -> str:
    """Heads and their size, blocks of a dynamic mask, then batch, rows and settings where they are not the plain ones.

    >>> shape_of({"mask": "uniform_block", "q_heads": 8, "kv_heads": 2, "head_dim": 64, "settings": {"density": 0.2}})
    '8:2 heads of 64, blocks of 128, density 0.2'
    """
    settings = dict(case.get("settings", {}))
    blocks, density = (settings.pop(n, getattr(SuiteSettings, n)) for n in ("sparse_block", "density"))
    parts = [f"{case['q_heads']}:{case['kv_heads']} heads of {case['head_dim']}"]
    if case["mask"] in DYNAMIC_MASKS:
        parts += [f"blocks of {blocks}", *([] if density is None else [f"density {density:g}"])]
    parts += [f"masks for {case['mask_heads']} heads"] if case.get("mask_heads") else []
    parts += [f"batch {case['batch']}"] if case.get("batch", 1) > 1 else []
    parts += [f"{case['q_len']} queries"] if case.get("q_len") else []
    return ", ".join([*parts, *(f"{k}={v}" for k, v in settings.items())])


def ceilings(rows: Iterable[Row]) -> list[Row]:
    """The rows that measured a matrix peak and a copy bandwidth."""
    return [row for row in rows if row["kind"] == "ceiling" and row["status"] == "ok"]


def bandwidths(rows: Iterable[Row]) -> float | None:
    """The best copy bandwidth measured, bytes/s."""
    return max((row["bandwidth"] for row in ceilings(rows)), default=None)


def entries(rows: Sequence[Row]) -> list[Entry]:
    """Attention rows pooled over their seeds, in the order of their first row."""
    copy = bandwidths(rows)
    groups: dict[tuple, list[Row]] = {}
    for row in attention_rows(rows):
        case = row["case"]
        key = *(case[n] for n in ("stack", "kernel", "mask", "pass", "seq_len")), shape_of(case), case["dtype"]
        groups.setdefault(key, []).append(row)
    return [_entry(key, group, copy) for key, group in groups.items()]


def _entry(key: tuple, group: list[Row], copy: float | None) -> Entry:
    good = [r for r in group if r["status"] == "ok"]
    first = (good or group)[0]
    entry = Entry(*key, first["status"], first["reason"], len(group), source=first.get("source", ""))
    known: dict[str, Any] = {"density": first.get("density"), "waste": first.get("tiles", {}).get("waste")}
    known["flags"] = tuple(dict.fromkeys(flag for r in group for flag in _flags(r, bool(good))))
    shares = [(float(e) / r["budget"][n], n) for r in group for n, e in r.get("errors", {}).items()]
    if shares:
        known["error_share"], known["worst"] = worst(shares)
    timed = [r for r in good if "rate" in r]
    if timed:
        seconds, flops = sum(r["seconds"]["median"] for r in timed), sum(r["flops"] for r in timed)
        moved, count = sum(r["bytes"] for r in timed), len(timed)
        arithmetic = flops / timed[0]["peak_flops"]
        memory = moved / copy if copy else 0.0
        known |= {
            "seconds": seconds / count, "rate": flops / seconds, "bandwidth": moved / seconds,
            "spread": max(r["seconds"]["spread"] for r in timed), "floor": max(arithmetic, memory) / count,
            "bound": "memory" if memory > arithmetic else "arithmetic", "peak_bytes": timed[0].get("peak_bytes"),
            "compile_seconds": timed[0].get("compile_seconds"), "prepare_seconds": timed[0].get("prepare_seconds"),
            "warm_seconds": (timed[0].get("warm_seconds") or {}).get("median"),
        }
    return dataclasses.replace(entry, **known)


def _flags(row: Row, others: bool) -> list[str]:
    """A row's own, and that it failed where others of its entry did not: no pool hides a failure."""
    failed = [f"seed {row['case'].get('seed', 0)}: {row['status']}: {row['reason']}"] if row["status"] != "ok" else []
    return [*row.get("flags", ()), *(failed if others else ())]


def worst(shares: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest (error over budget, result); NaN is larger than any number.

    >>> worst([(2.0, "out"), (float("nan"), "dq"), (3.0, "dv")])
    (nan, 'dq')
    """
    return max(shares, key=lambda x: (x[0] != x[0], x[0]))


def settings(found: Sequence[Entry]) -> list[tuple[str, int, str, str]]:
    """The (pass, length, shape, dtype) settings that have rows; richest shape and telling length first, forward first.

    A shape's telling length is its longest with a fair share of the rows that its richest has: short ones say little.
    """
    rows: dict[tuple, dict[int, int]] = {}
    for e in found:
        lengths = rows.setdefault((e.shape, e.dtype), {})
        lengths[e.seq_len] = lengths.get(e.seq_len, 0) + bool(e.rate)
    first = {shape: telling(lengths) for shape, lengths in rows.items()}
    return sorted({e.setting for e in found}, key=lambda s: (
        -max(rows[s[2:]].values()), s[2:], s[1] != first[s[2:]], s[1], s[0] != "forward"))


def telling(counts: dict[int, int]) -> int:
    """The longest length with at least `FAIR` of the largest count.

    >>> telling({1024: 100, 8192: 90, 32768: 70})
    8192
    """
    return max(length for length, count in counts.items() if count >= FAIR * max(counts.values()))


def compared(rows: Iterable[Row]) -> list[Entry]:
    """What parity rows of kernels tell of each stack, as entries without times; failing cells are left out."""
    out = []
    for row in rows:
        if row["kind"] != "parity" or "scheme" in row["case"] or row["status"] not in ("ok", "unsupported"):
            continue
        case = row["case"]
        shape, reasons = shape_of(case), row.get("refused", {})
        for stack in ("jax", "torch"):
            if row["status"] == "ok" or stack in reasons:
                out.append(Entry(stack, case["kernel"], case["mask"], case["pass"], case["seq_len"], shape,
                                 case["dtype"], row["status"], reasons.get(stack, ""), 1,
                                 source=row.get("sources", {}).get(stack, "")))
    return out


def columns(found: Sequence[Entry]) -> list[str]:
    """Kernel columns in order of first appearance, the stacks of one kernel side by side."""
    kernels = dict.fromkeys(e.kernel for e in found)
    names = {e.column for e in found}
    stacks = sorted({e.stack for e in found})
    return [f"{k} {s}" for k in kernels for s in stacks if f"{k} {s}" in names]


def pivot(found: Sequence[Entry], setting: tuple) -> tuple[list[str], list[str], dict[tuple[str, str], Entry]]:
    """masks, kernel columns and the entry of each (mask, column) of a setting."""
    cells = {(e.mask, e.column): e for e in found if e.setting == setting}
    masks = [m for m in ALL_BUILDERS if any(m == mask for mask, _ in cells)]
    return masks, columns([e for e in found if e.setting == setting]), cells


def capability(found: Sequence[Entry]) -> tuple[list[str], list[str], dict[tuple[str, str], tuple[str, str]]]:
    """masks, kernel columns, and for each pair (verdict, reason); the best over lengths and passes.

    The verdict is "both", "forward", "backward", or the status of the row.
    """
    masks = [m for m in ALL_BUILDERS if any(e.mask == m for e in found)]
    cells: dict[tuple[str, str], tuple[str, str]] = {}
    for mask in masks:
        for column in columns(found):
            here = [e for e in found if e.mask == mask and e.column == column]
            ran = sorted({e.which for e in here if e.status == "ok"}, reverse=True)
            failed = [e for e in here if e.status != "ok"]
            if here:
                reason = "; ".join(dict.fromkeys(f"{e.which} {e.seq_len}: {e.reason}" for e in failed))
                verdict = "both" if len(ran) == 2 else ran[0] if ran else failed[0].status
                cells[mask, column] = verdict, reason
    return masks, columns(found), cells


def unit_of(found: Iterable[Entry]) -> tuple[float, str]:
    """(divisor, name) of the rate unit that suits the rows: TFLOP/s on a GPU, GFLOP/s on a CPU."""
    fastest = max((e.rate for e in found if e.rate), default=0.0)
    return (1e12, "TFLOP/s") if fastest >= 1e12 else (1e9, "GFLOP/s")


def walk_cost(found: Sequence[Entry]) -> float | None:
    """How many tiles a walk's beginning and end cost, where that tells the times of some rows of a setting.

    By least squares of time over floor and waste, base * (1 + cost / walk); None for few rows, or where the fit leaves
    more than half of the variance.
    """
    known = [(1 / e.walk, e.seconds / e.floor / e.waste) for e in found
             if e.walk and e.seconds and e.floor and e.waste and e.bound == "arithmetic"]
    if len(known) < FEWEST or len({x for x, _ in known}) < FEWEST:
        return None
    x, y = np.array(known).T
    slope, base = np.polyfit(x, y, 1)
    explains = np.corrcoef(x, y)[0, 1] ** 2
    return float(slope / base) if explains > 0.5 and slope > 0 else None


def cause(entry: Entry) -> str:
    """In words, what stands between a rate and the floor."""
    if entry.seconds is None or entry.floor is None:
        return entry.reason
    parts = [f"{entry.seconds / entry.floor:.3g} x its floor ({entry.bound})"]
    dense = entry.kernel in ("naive", "sdpa")
    if not dense and entry.waste and entry.waste > 1.05:
        parts.append(f"tile waste {entry.waste:.2f}")
    if not dense and entry.walk and entry.walk < SHORT_WALK:
        parts.append(f"walks of {entry.walk:.1f} tiles")
    if dense and entry.density is not None and entry.density < 0.95:
        parts.append(f"a dense kernel computes all cells, {1 / max(entry.density, 1e-9):.3g} x the visible ones")
    return "; ".join(parts)
