"""The masks that the bench, the parity check and the tests run: a pattern's name and a length make a mask."""

import dataclasses
import inspect
from typing import Any

import numpy as np

from workload import block_masks, documents, masks
from workload.block_masks import BlockMask
from workload.errors import integer
from workload.masks import IntervalMask

DYNAMIC_BUILDERS = {f.__name__: f for f in (block_masks.uniform_block, block_masks.variable_block)}
ALL_BUILDERS = (*masks.STATIC_MASKS, *DYNAMIC_BUILDERS)


@dataclasses.dataclass(frozen=True)
class SuiteSettings:
    """Parameters of the fourteen masks; the defaults are the paper's settings.

    Attributes:
      documents: data set ("auto" by length), or document lengths that sum to the sequence length.
      cap, long_share: see `documents.pack`.
      window: of both sliding windows and the global one, in tokens; w >= length is full or causal.
      window_share: the window as a share of the length instead, or None.
      block: of block_causal_document, in tokens.
      prefix_share, global_share: prefix and global tokens as a share of the length; None draws each uniformly
        from the seed, so that a sweep over lengths keeps the share.
      answers: answers per group of shared_question; None makes one group, as in the paper.
      sparse_block: block of uniform_block and mean block of variable_block, in tokens.
      sparse_minimum: shortest block of variable_block; None for half of sparse_block.
      density, top_p, selection, sparse_causal: of the dynamic masks, see `block_masks.uniform_block`.

    Raises ValueError naming the field that is out of range.
    """

    documents: str | tuple[int, ...] = "auto"
    cap: float | None = 0.25
    long_share: float = 0.0
    window: int = 1024
    window_share: float | None = None
    block: int = 1024
    prefix_share: float | None = None
    global_share: float | None = None
    answers: int | None = None
    sparse_block: int = 128
    sparse_minimum: int | None = None
    density: float | None = 0.25
    top_p: float | None = None
    selection: str = "random"
    sparse_causal: bool = False

    def __post_init__(self):
        for name in ("long_share", "window_share", "prefix_share", "global_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: {value} is not within [0, 1]")
        for name, low in (("window", 0), ("block", 1), ("answers", 1), ("sparse_block", 1), ("sparse_minimum", 1)):
            value = getattr(self, name)
            if value is not None:
                integer(name, value, low)
        if isinstance(self.documents, str) and self.documents not in ("auto", *documents.DATASETS):
            raise ValueError(f"documents: {self.documents!r} is none of auto, {', '.join(documents.DATASETS)}")


def mask_suite(
    name: str, seq_len: int, *, seed: int = 0, q_len: int | None = None, heads: int = 1, **settings: Any
) -> IntervalMask | BlockMask:
    """The mask of a pattern at a length.

    Args:
      name: one of the twelve static patterns or uniform_block, variable_block.
      seq_len: number of keys.
      seed: of the documents, the drawn shares, and the blocks.
      q_len: number of query rows, seq_len by default.
      heads: masks of a dynamic pattern (1, kv_heads or q_heads).
      settings: fields of `SuiteSettings`.

    >>> mask_suite("causal_sliding_window", 8, window=2).area
    21
    """
    chosen = SuiteSettings(**settings)
    if isinstance(chosen.documents, tuple) and sum(chosen.documents) != seq_len:
        raise ValueError(f"documents: sum is {sum(chosen.documents)}, the sequence has {seq_len}")
    q_len = seq_len if q_len is None else q_len
    if name in masks.STATIC_MASKS:
        return masks.STATIC_MASKS[name](q_len, seq_len, **static_arguments(name, seq_len, seed, chosen))
    if name in DYNAMIC_BUILDERS:
        return DYNAMIC_BUILDERS[name](q_len, seq_len, heads, **dynamic_arguments(name, seq_len, seed, chosen))
    raise ValueError(f"mask: {name!r} is none of {', '.join(ALL_BUILDERS)}")


def static_arguments(
    name: str, seq_len: int, seed: int = 0, settings: SuiteSettings = SuiteSettings()
) -> dict[str, Any]:
    """Arguments of a static pattern besides its lengths, found by the names of its builder's parameters."""
    lengths = settings.documents
    if isinstance(lengths, str):
        lengths = documents.pack(seq_len, lengths, seed=seed, cap=settings.cap, long_share=settings.long_share)
    rng = np.random.Generator(np.random.PCG64([seed, 1]))  # another stream than the documents'
    drawn = rng.random(2)
    prefix, global_tokens = (
        round(seq_len * (drawn[n] if given is None else given))
        for n, given in enumerate((settings.prefix_share, settings.global_share))
    )
    share = settings.window_share
    values = {
        "lengths": lengths,
        "blocks": lengths,
        "groups": documents.grouped(lengths, settings.answers),
        "prefixes": rng.integers(0, np.asarray(lengths) + 1),
        "prefix": prefix,
        "global_tokens": global_tokens,
        "window": settings.window if share is None else round(share * seq_len),
        "block": settings.block,
    }
    wanted = list(inspect.signature(masks.STATIC_MASKS[name]).parameters)[2:]  # after q_len, kv_len
    return {parameter: values[parameter] for parameter in wanted}


def dynamic_arguments(name: str, seq_len: int, seed: int, settings: SuiteSettings) -> dict[str, Any]:
    """Arguments of a dynamic pattern besides its lengths and heads; blocks are never longer than the sequence."""
    block = min(settings.sparse_block, seq_len)
    if name == "uniform_block":
        sizes = {"block": settings.sparse_block}
    else:
        sizes = {"mean": block, "minimum": min(settings.sparse_minimum or max(1, block // 2), block)}
    density = None if settings.top_p is not None else settings.density
    return {
        **sizes, "density": density, "top_p": settings.top_p, "selection": settings.selection,
        "causal": settings.sparse_causal, "seed": seed,
    }
