"""The comparison that judges: relative L2 error, each result on its own; NaN always fails."""

import numpy as np

RESULTS = ("out", "lse", "dq", "dk", "dv")
OF_PASS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}


def relative_error(got, want, least: float = 0.0) -> float:
    """||got - want|| / ||want|| over what is finite in `want`, in float64; of `least`, where ||want|| is less.

    NaN on either side (a reference that is NaN judges nothing), or an infinity that the other side does not have,
    is infinitely wrong. Where `want` is all zero the norm of `got` is the error.

    >>> relative_error([3.0, 4.0], [3.0, 3.0]) < 0.24, relative_error([0.0], [float("nan")])
    (True, inf)
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shape {got.shape}, wanted {want.shape}")
    if np.isnan(got).any() or np.isnan(want).any():
        return float("inf")
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]):
        return float("inf")
    size = max(np.linalg.norm(want[finite]), least)
    return float(np.linalg.norm(got[finite] - want[finite]) / (size if size else 1.0))


def errors(got: dict, want: dict) -> dict[str, float]:
    """relative_error of each result in `got`."""
    return {name: relative_error(value, want[name]) for name, value in got.items()}


def over_budget(measured: dict[str, float], budget: dict[str, float]) -> list[str]:
    """One line per result whose error is not within its budget (NaN is not)."""
    return [
        f"{name}: error {error:.3g} > {budget[name]:.3g}"
        for name, error in measured.items()
        if not error <= budget[name]
    ]
