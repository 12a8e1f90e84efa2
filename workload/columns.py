"""FlashMask's column form of an interval mask: per key, the rows that are hidden from it."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from workload.errors import Unsupported

if TYPE_CHECKING:
    from workload.masks import IntervalMask


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnBounds:
    """Four vectors of row indices; Wang et al., FlashMask, 2024, section 4.1.

    Attributes:
      lts, lte, uts, ute: int32 [kv_len]; row i is hidden from key j iff lts[j] <= i < lte[j] or uts[j] <= i < ute[j]
        (the lower and the upper hidden interval), or by `causal`.
      causal: whether every key is hidden from the rows before it as well, bottom-right aligned.
      q_len: number of query rows.
    """

    lts: np.ndarray
    lte: np.ndarray
    uts: np.ndarray
    ute: np.ndarray
    causal: bool
    q_len: int

    def hidden(self, i, j):
        """Whether rows i are hidden from keys j, elementwise on broadcastable integer arrays."""
        out = ((self.lts[j] <= i) & (i < self.lte[j])) | ((self.uts[j] <= i) & (i < self.ute[j]))
        return out | (i + len(self.lts) - self.q_len < j) if self.causal else out


def column_bounds(mask: "IntervalMask") -> ColumnBounds:
    """The column form of a mask whose keys are seen by at most two intervals of rows.

    One visible interval hides two stretches of rows, and two hide three, one of which must be empty or
    the rows before the key. Raises `Unsupported` where neither holds.
    """
    by_key, rows = mask.transpose(), mask.q_len
    if by_key.intervals > 2:
        raise Unsupported("column_bounds", f"a key is seen by {by_key.intervals} intervals of rows, the form has two")
    by_key = by_key.padded(2)
    (a0, a1), (b0, b1) = by_key.starts, by_key.ends
    two, some = b1 > a1, b0 > a0
    zero, last = np.zeros_like(a0), np.full_like(a0, rows)
    causal = bool((two & (a0 > 0)).any())
    if causal:
        own = np.clip(np.arange(mask.kv_len) - (mask.kv_len - rows), 0, rows)
        if (some & (a0 != own)).any():
            raise Unsupported("column_bounds", "a key needs a third hidden interval of rows")
        lts, lte = np.where(some, b0, 0), np.where(two, a1, last)
        uts, ute = np.where(two, b1, zero), np.where(two, last, zero)
    else:
        lts, lte = np.where(two, b1, b0), last
        uts, ute = np.where(two, b0, 0), np.where(two, a1, a0)
    lts, lte, uts, ute = (x.astype(np.int32) for x in (lts, lte, uts, ute))
    return ColumnBounds(lts, lte, uts, ute, causal, rows)
