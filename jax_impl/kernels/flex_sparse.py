"""flex_sparse: the flex kernel over block lists, on Hopper: blocks say where, a traced predicate and logits say what.

Lists take the place of the runs of `flex`; the causal diagonal and the ragged end are a predicate on the rows' limits.
A mask_mod of one's own narrows the listed blocks further, a score_mod changes logits; blocks that 128 divides.
"""

import dataclasses
from collections.abc import Callable

import jax

from jax_impl.kernels import hopper_kernel
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.flex import Predicate, Traced, _pad
from jax_impl.kernels.hopper_backward import BackwardTiles
from jax_impl.kernels.hopper_forward import ForwardTiles
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_lists import Lists, both_ways, pieces
from jax_impl.kernels.hopper_sparse import WIDE, ListPolicy, default_schedules
from jax_impl.kernels.hopper_sparse_backward import kv_heads_in_cache
from workload.capability import HALF, Capability
from workload.problem import PASSES, AttentionProblem


@dataclasses.dataclass(frozen=True)
class _Within:
    """Keys before the row's limit, q_values[0], that a mask_mod sees too; it reads the arrays after that one."""

    mask_mod: Callable | None

    def __call__(self, b, h, i, j, q_values, kv_values):
        seen = j < q_values[0]
        return seen if self.mask_mod is None else seen & self.mask_mod(b, h, i, j, q_values[1:], kv_values)


class Blocks(Capability):
    """The base's checks, and that tiles of 128 divide the blocks."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason is None and problem.mask.block % WIDE:
            return f"does not take block size {problem.mask.block} ({WIDE} must divide it)"
        return reason


def prepare(problem: AttentionProblem, device=None, *, predicate: Predicate | None = None) -> HopperOperands:
    """The lists of both passes as policies of the Hopper kernels.

    Args:
      predicate: a mask_mod and a score_mod (see `flex`) besides the mask; a mask_mod is asked in every listed tile.
    """
    mask, used = problem.mask, predicate or Predicate()
    columns = default_schedules(problem.head_dim, True).wide.columns
    side = kv_heads_in_cache(problem.q_len, problem.kv_heads, problem.head_dim, 32 << 20)
    tiles = Tiles(ForwardTiles(columns=WIDE), BackwardTiles(columns, side=side))

    def traced(lists: Lists) -> Traced:
        by_row = (mask.limits, *used.q_arrays)
        arrays = (used.kv_arrays, by_row) if lists.by_key else (by_row, used.kv_arrays)
        padded = (tuple(jax.device_put(_pad(x, tokens), device) for x in of)
                  for of, tokens in zip(arrays, (lists.rows, lists.piece), strict=True))
        base = ListPolicy(lists, problem.q_heads, used.mask_mod is not None)
        length = problem.q_len if lists.by_key else problem.kv_len
        return Traced(base, *padded, _Within(used.mask_mod), used.score_mod, length, lists.rows, lists.piece,
                      lists.by_key)

    by_query = both_ways(pieces(mask, WIDE, WIDE, False), device)[0]
    by_key = both_ways(pieces(mask, columns, WIDE, False), device)[1]
    return HopperOperands(traced(by_query), traced(by_key), None, tiles)


KERNEL = Kernel(
    "flex_sparse",
    Blocks(("uniform_block",), dtypes=HALF, head_dims=hopper_kernel.HEAD_DIMS, devices=("gpu",),
           source="own, Pallas Mosaic GPU, traced predicate over block lists"),
    prepare,
    hopper_kernel.forward,
    hopper_kernel.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
