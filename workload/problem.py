"""AttentionProblem: what is computed, and what it costs in FLOPs and bytes."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

from workload.block_masks import BlockMask
from workload.errors import integer
from workload.masks import IntervalMask

PASSES = ("forward", "backward")
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FLOPS_FORMULA = {
    "forward": "4 * head_dim * batch * sum over q_heads of visible cells",
    "backward": "10 * head_dim * batch * sum over q_heads of visible cells",
}


def check_operands(kinds: tuple[type[Any], ...], **operands: Any) -> None:
    """Refuses what is no tensor of a stack: TypeError, or ValueError where it is not [batch, seq, heads, head_dim].

    Args:
      kinds: what the stack takes for a tensor; operands: by name, for the message.
    """
    for name, x in operands.items():
        check_kind(name, x, *kinds)
        shape = tuple(x.shape)
        if len(shape) != 4:
            raise ValueError(f"{name}: shape {shape} is not [batch, seq, heads, head_dim]")


def check_tokens(kinds: tuple[type[Any], ...], x: Any, tokens: int, holder: str) -> None:
    """Refuses what is no tensor of a stack (TypeError) or not [batch, tokens, ...] (ValueError naming the holder)."""
    check_kind("x", x, *kinds)
    if len(x.shape) < 2:
        raise ValueError(f"x: shape {tuple(x.shape)} is not [batch, tokens, ...]")
    if x.shape[1] != tokens:
        raise ValueError(f"x: {x.shape[1]} tokens, {holder} {tokens}")


def check_kind(name: str, x: Any, *kinds: type[Any]) -> None:
    """Refuses what is of none of these types: TypeError naming the argument."""
    if not isinstance(x, kinds):
        wanted = " or ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        raise TypeError(f"{name}: {type(x).__module__}.{type(x).__qualname__} is no {wanted}")


def of_problem(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which a first argument that is no `AttentionProblem` is a TypeError naming it."""
    @functools.wraps(function)
    def checked(problem, *args, **kwargs):
        check_kind("problem", problem, AttentionProblem)
        return function(problem, *args, **kwargs)

    return checked


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionProblem:
    """Shapes, dtype, scale and mask of one attention call; tensors are [batch, seq, heads, head_dim].

    Attributes:
      mask: an `IntervalMask` or a `BlockMask`; it carries q_len and kv_len.
      batch, q_heads, kv_heads, head_dim: sizes; kv_heads divides q_heads, query head h reads
        kv head h // (q_heads // kv_heads).
      dtype: of q, k, v, out and the gradients; lse is float32.
      scale: a float, logits are scale * q.k; head_dim ** -0.5 by default.

    >>> from workload.masks import causal
    >>> AttentionProblem(causal(4, 4), head_dim=1).flops("forward")
    40
    """

    mask: Any
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    dtype: str = "bfloat16"
    scale: Any = None

    def __post_init__(self):
        if not isinstance(self.mask, IntervalMask | BlockMask):
            raise ValueError(f"mask: {type(self.mask).__name__} is neither an IntervalMask nor a BlockMask")
        for name in ("batch", "q_heads", "kv_heads", "head_dim"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        if self.q_heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide q_heads {self.q_heads}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        if self.mask.heads not in (1, self.kv_heads, self.q_heads):
            raise ValueError(f"mask: holds {self.mask.heads} heads, neither 1 nor kv_heads nor q_heads")
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        elif not isinstance(self.scale, numbers.Real) or not math.isfinite(self.scale):
            raise ValueError(f"scale: {self.scale!r} is not a finite number of Python or NumPy")
        object.__setattr__(self, "scale", float(self.scale))  # a NumPy number would be no constant to a compiler

    @property
    def q_len(self) -> int:
        """Number of query rows."""
        return self.mask.q_len

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return self.mask.kv_len

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q_heads // self.kv_heads

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Shape of q, out, dout, dq."""
        return (self.batch, self.q_len, self.q_heads, self.head_dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """Shape of k, v, dk, dv."""
        return (self.batch, self.kv_len, self.kv_heads, self.head_dim)

    @property
    def cells(self) -> int:
        """Visible cells summed over batch and query heads (mask.area sums over the mask's own heads)."""
        return self.batch * self.mask.area * self.q_heads // self.mask.heads

    def flops(self, which: str) -> int:
        """Exact FLOPs of a pass: 4 * area * q_heads * head_dim forward, 2.5 times that backward."""
        return {"forward": 4, "backward": 10}[which] * self.cells * self.head_dim

    def bytes(self, which: str) -> int:
        """Fewest bytes a pass moves: each operand read once, each result written once."""
        size = ITEM_BYTES[self.dtype]
        q, kv = math.prod(self.q_shape) * size, math.prod(self.kv_shape) * size
        lse = 4 * self.batch * self.q_heads * self.q_len
        return {"forward": 2 * q + 2 * kv + lse, "backward": 4 * q + 4 * kv + lse}[which]
