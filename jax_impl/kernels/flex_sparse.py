"""flex_sparse: the flex kernel over block lists, on Hopper: blocks say where, a traced predicate and logits say what.

Lists take the place of the runs of `flex`; the causal diagonal and the ragged end are a predicate on the rows' limits.
A mask_mod of one's own narrows the listed blocks further, a score_mod changes logits; blocks that 128 divides.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels import hopper_kernel
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.flex import Traced, _pad
from jax_impl.kernels.hopper_backward import BackwardTiles
from jax_impl.kernels.hopper_forward import ForwardTiles
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_lists import Lists, both_ways, pieces
from jax_impl.kernels.hopper_masks import ROW, Policy, Walk
from jax_impl.kernels.hopper_sparse import NARROW, WIDE
from jax_impl.kernels.hopper_sparse_backward import kv_heads_in_cache
from jax_impl.kernels.hopper_sparse_forward import list_refs, row_tile
from workload.capability import HALF, Capability
from workload.predicate import Predicate, check_seen, given
from workload.problem import PASSES, AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListPolicy(Policy):
    """Lists as the policy of the Hopper kernels that take one, where tokens stay where they are.

    Attributes:
      lists: the pieces are the column tiles.
      q_heads: query heads, static.
      tested: whether every tile takes the element test, full ones too, static.
    """

    lists: Lists
    q_heads: int = dataclasses.field(metadata={"static": True})
    tested: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def row_tokens(self) -> int:
        """Rows of a tile."""
        return self.lists.rows

    @property
    def column_tokens(self) -> int:
        """Columns of a tile."""
        return self.lists.piece

    def operands(self):
        return self.lists.operands()

    def _mask_head(self, head):
        return lax.div(head.q * self.lists.heads, jnp.int32(self.q_heads))

    def row_tile(self, refs, head, place):
        return row_tile(list_refs(refs), self._mask_head(head), place)

    def walk(self, refs, head, tile):
        r, h = list_refs(refs), self._mask_head(head)
        total = r.counts[h, tile]
        full = jnp.int32(0) if self.tested else r.full[h, tile]
        partial = total - full
        return Walk(partial, total, lambda n: r.indices[h, tile, jnp.where(n < partial, full + n, n - partial)])

    def load_rows(self, refs, head, row0, rows: int):
        bound = list_refs(refs).bound.at[self._mask_head(head), pl.ds(row0, rows)]
        return plgpu.load(bound, layout=ROW, optimized=False)

    def seen(self, state, head, place):
        if self.lists.by_key:
            return place.index(1) >= place.by_row(state)
        return place.index(1) < place.by_row(state)


@dataclasses.dataclass(frozen=True)
class _Within:
    """Keys before the row's limit, q_values[0], that a mask_mod sees too; it reads the arrays after that one."""

    mask_mod: Callable | None

    def __call__(self, b, h, i, j, q_values, kv_values):
        seen = j < q_values[0]
        if self.mask_mod is None:
            return seen
        own = self.mask_mod(b, h, i, j, q_values[1:], kv_values)
        check_seen(own)
        return seen & own


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
      predicate: a mask_mod and a score_mod besides the mask; a mask_mod is asked in every listed tile. TypeError or
        ValueError as of `workload.predicate.given`.
    """
    mask, used = problem.mask, given(predicate, problem)
    columns = NARROW if problem.head_dim == 128 else WIDE
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
