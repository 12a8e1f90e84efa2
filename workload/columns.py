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

    A key's hidden rows are those before, between and after its visible intervals: three stretches, of which the form
    holds two, and the rows before the key where it is causal. Raises `Unsupported` where neither form suffices.
    """
    by_key, rows = mask.transpose(), mask.q_len
    if by_key.intervals > 2:
        raise Unsupported("column_bounds", f"a key is seen by {by_key.intervals} intervals of rows, the form has two")
    by_key = by_key.padded(2)
    own = np.clip(np.arange(mask.kv_len) - (mask.kv_len - rows), 0, rows)
    for causal, first in ((False, np.zeros_like(own)), (True, own)):
        found = _two_gaps(by_key.starts, by_key.ends, first, rows)
        if found is not None:
            return ColumnBounds(*(x.astype(np.int32) for x in found), causal, rows)
    raise Unsupported("column_bounds", "a key needs a third hidden interval of rows")


def _two_gaps(starts, ends, first, rows):
    """lts, lte, uts, ute of the hidden stretches from row `first` of each key on; None where two do not suffice."""
    (a0, a1), (b0, b1) = starts, ends  # an absent interval is (rows, rows)
    some = b0 > a0
    before = (first, a0)
    between = (np.where(some, b0, rows), a1)
    after = (np.where(b1 > a1, b1, rows), np.full_like(a0, rows))
    there = [hi > lo for lo, hi in (before, between, after)]
    if (some & (a0 < first)).any() or (sum(x.astype(int) for x in there) > 2).any():
        return None
    upper = [np.where(there[0], x, y) for x, y in zip(before, between, strict=True)]
    lower = [np.where(there[2], x, y) for x, y in zip(after, between, strict=True)]
    return *lower, *upper
