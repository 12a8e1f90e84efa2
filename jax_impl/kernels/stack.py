"""Operands of several ranks as one pytree with a leading rank axis, so that one program serves all ranks."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from workload.errors import Unsupported


def stack_operands(operands: Sequence[Any]) -> Any:
    """Zero-pads every array to the largest shape among the ranks and stacks them: leaves [ranks, ...], NumPy.

    The kernel contract makes a trailing pad of zeros mean "absent".

    Args:
      operands: one `prepare` result per rank, of one kernel and one problem shape.

    Raises: `Unsupported` where their static parts differ, which no single program can serve.
    """
    leaves, trees = zip(*(jax.tree.flatten(x) for x in operands), strict=True)
    if any(t != trees[0] for t in trees):
        raise Unsupported("stack_operands", "the static parts of the ranks' kernel operands differ")
    return jax.tree.unflatten(trees[0], [_stack([np.asarray(x) for x in ranks]) for ranks in zip(*leaves, strict=True)])


def _stack(arrays: list[np.ndarray]) -> np.ndarray:
    shape = np.max([x.shape for x in arrays], axis=0).astype(int)
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, x in zip(out, arrays, strict=True):
        row[tuple(slice(0, n) for n in x.shape)] = x
    return out
