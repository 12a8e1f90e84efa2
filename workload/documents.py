"""Document lengths of Pile and ProLong, and packs of documents that fill a sequence exactly.

`data/` holds each data set twice: NAME_counts.json, the document counts published with the data
(used by default), and NAME.json, the coarse bins of the published benchmark. Lengths are drawn
log-uniformly inside a bin. The coarse form puts all of Pile above 14K tokens into one bin up to
9.3M, so that even log-uniformly its mean length is 3,950 where the counts say 830.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from importlib import resources

import numpy as np

from workload.errors import integer, length

DATASETS = ("pile", "prolong64k", "prolong512k")
FORMS = ("counts", "coarse")
LONG_DOCUMENTS = (8192, 30720)  # tokens, the long half of the paper's distributed mix
CHUNK = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class LengthHistogram:
    """Document lengths in tokens, as bins.

    Attributes:
      name: data set.
      low, high: int64 [bins], lengths low <= l < high; low is at least 1.
      weight: float64 [bins], share of the documents, sums to 1.
    """

    name: str
    low: np.ndarray
    high: np.ndarray
    weight: np.ndarray

    @property
    def mean(self) -> float:
        """Mean length when log-uniform inside a bin: sum of weight * (high - low) / ln(high / low), half a token less.

        The half is what rounding down to whole tokens takes away.
        """
        return float((self.weight * (self.high - self.low) / np.log(self.high / self.low)).sum() - 0.5)

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Lengths of `count` documents, int64: a bin by weight, then log-uniform inside it."""
        bins = np.searchsorted(np.cumsum(self.weight)[:-1], rng.random(count), side="right")
        return log_uniform(rng, self.low[bins], self.high[bins])


def log_uniform(rng: np.random.Generator, low, high) -> np.ndarray:
    """One integer in [low, high) for each pair of bounds, uniform in its logarithm, int64."""
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    value = low * (high / low) ** rng.random(np.broadcast(low, high).shape)
    return np.clip(np.floor(value), low, high - 1).astype(np.int64)


@functools.cache
def histogram(name: str, form: str = "counts") -> LengthHistogram:
    """The histogram of a data set of `DATASETS`; `form` is "counts" or "coarse"."""
    if name not in DATASETS:
        raise ValueError(f"documents: {name!r} is none of {', '.join(DATASETS)}")
    if form not in FORMS:
        raise ValueError(f"form: {form!r} is none of {', '.join(FORMS)}")
    file = resources.files("workload") / "data" / (f"{name}_counts.json" if form == "counts" else f"{name}.json")
    raw = json.loads(file.read_text())
    low, high, weight = (np.array(column) for column in zip(*raw["bins"], strict=True))
    inclusive = "inclusive" in raw["interval"]
    return LengthHistogram(name, np.maximum(low, 1), high + inclusive, weight / weight.sum())


def dataset_for(seq_len: int) -> str:
    """The data set the paper uses at a total length: Pile to 8K, ProLong-64K to 64K, ProLong-512K above.

    >>> dataset_for(8192), dataset_for(8193), dataset_for(65537)
    ('pile', 'prolong64k', 'prolong512k')
    """
    return "pile" if seq_len <= 8192 else "prolong64k" if seq_len <= 65536 else "prolong512k"


def pack(
    seq_len: int,
    documents: str = "auto",
    *,
    seed: int = 0,
    cap: float | None = 0.25,
    long_share: float = 0.0,
    form: str = "counts",
) -> np.ndarray:
    """Draws documents until they fill a sequence; the last is cut to fit.

    Args:
      seq_len: tokens to fill.
      documents: a name of `DATASETS`, or "auto" for `dataset_for(seq_len)`.
      seed: of a PCG64 generator: the same pack on every platform.
      cap: longest document as a share of seq_len, so that one does not swallow the pack; None for no cap.
      long_share: share of tokens that come from documents of `LONG_DOCUMENTS` tokens (0.6 is the paper's distributed
        setting); long and other documents are shuffled together.
      form: see `histogram`.

    Returns: lengths int64 [documents], >= 1, sum seq_len.

    >>> int(pack(5000, "pile", seed=3).sum())
    5000
    """
    length("seq_len", seq_len)
    if cap is not None and not 0 < cap <= 1:
        raise ValueError(f"cap: {cap} is not within (0, 1]")
    if not 0 <= long_share <= 1:
        raise ValueError(f"long_share: {long_share} is not within [0, 1]")
    lengths = histogram(dataset_for(seq_len) if documents == "auto" else documents, form)
    rng = np.random.Generator(np.random.PCG64(seed))
    most = seq_len if cap is None else max(1, int(cap * seq_len))
    long_tokens = round(long_share * seq_len)
    long = _fill(long_tokens, most, lambda n: log_uniform(rng, *(np.full(n, x) for x in LONG_DOCUMENTS)))
    rest = _fill(seq_len - long_tokens, most, lambda n: lengths.sample(rng, n))
    return rng.permutation(np.concatenate([long, rest])) if long_tokens else rest


def _fill(tokens, most, draw):
    """Documents from draw(count), none longer than `most`, cut to `tokens` in all."""
    total, parts = 0, [np.zeros(0, np.int64)]
    while total < tokens:
        drawn = np.minimum(draw(CHUNK), most)
        ends = total + np.cumsum(drawn)
        keep = int(np.searchsorted(ends, tokens)) + 1
        parts.append(drawn[:keep])
        total = int(ends[:keep][-1])
    lengths = np.concatenate(parts)
    if len(lengths):
        lengths[-1] -= total - tokens
    return lengths


def grouped(lengths: Sequence[int], answers: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Documents as the groups of `shared_question`: a question, then answers.

    Args:
      lengths: document lengths.
      answers: per group, or None for one group (the paper's): all documents answer the first.

    >>> grouped([3, 2, 4, 1, 5], answers=2)
    ((3, 2, 4), (1, 5))
    """
    size = max(1, len(lengths)) if answers is None else integer("answers", answers, 1) + 1
    flat = tuple(int(n) for n in lengths)
    return tuple(flat[at : at + size] for at in range(0, len(flat), size))
