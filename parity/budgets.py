"""Error budgets from data: a small multiple of what a naive run in the same dtype loses on the same inputs."""

from parity.compare import errors

MULTIPLE = 3.0  # flash kernels round P and dS tile by tile, and sum in another order
FLOOR = 1e-6  # eight float32 roundings: for results on which the naive run happens to lose (almost) nothing


def budgets(naive: dict, exact: dict) -> dict[str, float]:
    """The largest relative error allowed for each result.

    Args:
      naive: results of the naive run in the problem's dtype, by name; exact: those of the float64 reference.
    """
    return {name: MULTIPLE * error + FLOOR for name, error in errors(naive, exact).items()}


def cross_budget(budget: dict[str, float]) -> dict[str, float]:
    """Budget of the difference of two stacks, each of which is within `budget` of the reference."""
    return {name: 2 * value for name, value in budget.items()}
