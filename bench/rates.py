"""What rate a row has, and whether it can be true: beside the machine's ceiling, the dense rate, the forward's time."""

import json
from typing import Any

GPU_BACKENDS = ("gpu", "cuda")
CEILING_SLACK = 1.1  # a card's matrix rate drifts by this much between minutes, so the measured peak does too
USUAL_RATIO = (1.5, 5.0)  # of a backward pass' time to its forward's: 2.5 times the FLOPs
SPARSE_SLACK = 1.1  # a masked rate further above the same kernel's dense rate is counted wrongly, or means a fault


def above_ceiling(rate: float, peak: float) -> str | None:
    """Why a rate in FLOP/s cannot be true: above the matrix peak measured on this machine; None where it can."""
    if rate > CEILING_SLACK * peak:
        return f"rate {rate / 1e12:.4g} TFLOP/s is above the measured matrix peak of {peak / 1e12:.4g} TFLOP/s"
    return None


def above_dense(rate: float, dense_rate: float) -> str | None:
    """A flag for a masked rate above 1.1 x the same kernel's rate under the full mask; None where all is well."""
    if rate > SPARSE_SLACK * dense_rate:
        return f"{rate / dense_rate:.2f} x the same kernel's rate under the full mask"
    return None


def unusual_ratio(backward: float, forward: float) -> str | None:
    """A flag for a backward pass whose time does not fit its forward's: a default configuration, or a fault."""
    low, high = USUAL_RATIO
    ratio = backward / forward
    return None if low <= ratio <= high else f"backward takes {ratio:.3g} x the forward's time"


def with_rates(row: dict[str, Any], peak: float) -> dict[str, Any]:
    """The row with rate and bandwidth; a rate above the ceiling makes it an error."""
    median = row["seconds"]["median"]
    if median <= 0:
        return row | {"status": "error", "reason": f"measured {median:g} s: shorter than the timer can tell"}
    rate = row["flops"] / median
    row = row | {"rate": rate, "bandwidth": row["bytes"] / median, "peak_flops": peak}
    impossible = above_ceiling(rate, peak)
    return row | {"status": "error", "reason": impossible} if impossible else row


def dense_key(case: dict[str, Any]) -> tuple:
    """What a masked row and the full-mask row it is held against have in common."""
    return tuple(case[name] for name in (
        "stack", "kernel", "pass", "seq_len", "q_len", "batch", "q_heads", "kv_heads", "head_dim", "dtype"))


def flag(row: dict[str, Any], seen: dict[tuple, float]) -> dict[str, Any]:
    """The row, flagged where its figures do not fit those of rows before it, which it adds itself to (`seen`).

    A rate above 1.1 x that of the same kernel under the full mask (its fastest sample against the median here: noise
    flags nothing); on a GPU, a backward pass that takes less than 1.5 or more than 5 times its forward.
    """
    if row["status"] != "ok" or "rate" not in row:
        return row
    case, key, complaints = row["case"], dense_key(row["case"]), []
    problem = tuple(json.dumps(v) for k, v in sorted(case.items()) if k != "pass")
    if case["mask"] == "full":
        seen[key] = row["flops"] / row["seconds"]["min"]
    elif key in seen:
        complaints.append(above_dense(row["rate"], seen[key]))
    if case["pass"] == "forward":
        seen[problem] = row["seconds"]["median"]
    elif problem in seen and row["environment"].get("backend") in GPU_BACKENDS:
        complaints.append(unusual_ratio(row["seconds"]["median"], seen[problem]))
    return row | {"flags": [*row["flags"], *filter(None, complaints)]}
