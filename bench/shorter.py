"""What rows at shorter lengths say of a row that is not run yet."""

import json
from collections.abc import Iterable
from typing import Any


class Shorter:
    """What rows at shorter lengths say of a row: how long it will take, or that it will not fit either."""

    def __init__(self, patience: float | None, longest: Iterable[tuple[str, int]] = ()):
        self._patience, self._longest = patience, dict(longest)
        self._found: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Takes a row's word."""
        case = row["case"]
        self._found.setdefault(_but_length(case), []).append((case["seq_len"], row))

    def skip(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Status and reason where a row, with its FLOPs, is not to be run."""
        case = row["case"]
        longest = self._longest.get(case["kernel"], case["seq_len"])
        if case["seq_len"] > longest:
            return {"status": "skipped", "reason": f"longer than the {longest:,} tokens asked of this kernel"}
        shorter = [(n, x) for n, x in self._found.get(_but_length(case), ()) if n < case["seq_len"]]
        if self._patience is None or not shorter:
            return None
        n, last = max(shorter, key=lambda x: x[0])
        if last["status"] in ("out_of_memory", "timeout"):
            return {"status": last["status"], "reason": f"not run: at {n:,} tokens {last['reason']}"}
        seconds = last["seconds"]["median"] if last.get("seconds") and last["status"] == "ok" else last.get("estimate")
        if seconds is None:
            return None
        estimate = seconds * row["flops"] / max(1, last["flops"])
        if estimate <= self._patience:
            return None
        return {"status": "skipped", "estimate": estimate, "reason": (
            f"a run would take {estimate:.3g} s, going by {seconds:.3g} s at {n:,} tokens: above {self._patience:g} s")}


def _but_length(case: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in case.items() if k not in ("seq_len", "q_len")}, sort_keys=True)
