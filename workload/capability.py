"""What a kernel takes: one value per kernel, the same type in both stacks, asked before any launch."""

import dataclasses
from collections.abc import Iterable

from workload.masks import REGULAR_MASKS, STATIC_MASKS
from workload.problem import PASSES, AttentionProblem

DYNAMIC_MASKS = ("uniform_block", "variable_block")
ALL_MASKS = (*STATIC_MASKS, *DYNAMIC_MASKS)
ALL_STATIC = tuple(STATIC_MASKS)
REGULAR = REGULAR_MASKS
HALF = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Capability:
    """The problems a kernel takes.

    Attributes:
      masks: pattern names it takes; "custom" (an interval mask of no named pattern, as every local
        mask of a sharded problem is) is taken by kernels that take all twelve static ones.
      dtypes: of q, k, v.
      head_dims: exact sizes, or None for any.
      grouped_heads: whether q_heads may exceed kv_heads.
      passes: "forward", "backward".
      square_only: whether q_len must equal kv_len.
      block_sizes: block sizes of dynamic masks, or None for any.
      positive_scale: whether scale must be above 0, as where a row's maximum is taken, and keys are hidden, before
        logits are scaled.
      source: where the kernel comes from (own schedule, package and version).
    """

    masks: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32", *HALF)
    head_dims: tuple[int, ...] | None = None
    grouped_heads: bool = True
    passes: tuple[str, ...] = PASSES
    square_only: bool = False
    block_sizes: tuple[int, ...] | None = None
    positive_scale: bool = False
    source: str = ""

    def refuse(self, problem: AttentionProblem, passes: Iterable[str] = PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        name = problem.mask.name
        takes_custom = set(ALL_STATIC) <= set(self.masks)
        checks = (
            (name in self.masks or (name not in ALL_MASKS and takes_custom), f"mask {name}"),
            (problem.dtype in self.dtypes, f"dtype {problem.dtype}"),
            (self.head_dims is None or problem.head_dim in self.head_dims, f"head_dim {problem.head_dim}"),
            (self.grouped_heads or problem.q_heads == problem.kv_heads,
             f"q_heads {problem.q_heads} with kv_heads {problem.kv_heads}"),
            (not self.square_only or problem.q_len == problem.kv_len,
             f"q_len {problem.q_len} with kv_len {problem.kv_len}"),
            (not self.positive_scale or problem.scale > 0, f"scale {problem.scale}"),
            *((p in self.passes, f"pass {p}") for p in passes),
            (self.block_sizes is None or name not in DYNAMIC_MASKS or
             getattr(problem.mask, "block", None) in self.block_sizes,
             f"block size {getattr(problem.mask, 'block', None)}"),
        )
        return next((f"does not take {what}" for good, what in checks if not good), None)
