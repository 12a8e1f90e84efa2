"""flex_sparse: torch's FlexAttention with a BlockMask made from the mask's own lists, never from a dense mask.

The predicate reads the bitmap of blocks and the rows' limits, so that it is right by itself (a CPU's eager form looks
at nothing else); on a GPU it runs inside partial blocks only, those that the causal diagonal or the ragged end cuts.
"""

import dataclasses

import torch

from torch_impl.kernels import flex
from torch_impl.kernels.base import Kernel
from torch_impl.kernels.block_lists import TileLists, key_walk, query_walk, tile_size
from torch_impl.kernels.block_sparse import UniformBlocks
from torch_impl.kernels.flex import FlexOperands
from torch_impl.kernels.walks import Launch
from workload.problem import PASSES, AttentionProblem

NAME = "flex_sparse"
TILE = 64  # of the forward kernel in a block that its own choice, 128, does not divide


@dataclasses.dataclass(frozen=True)
class Listed:
    """The predicate of a block bitmap: block size, and query heads that share one of the mask's heads."""

    block: int
    sharing: int

    def __call__(self, b, h, i, j, bitmap, limits):
        """Whether row i of head h sees key j: its block is listed, and j is within the row's limit."""
        del b
        return bitmap[h // self.sharing, i // self.block, j // self.block] & (j < limits[i])


def prepare(problem: AttentionProblem, device=None) -> FlexOperands:
    """The predicate's tensors, and the lists both ways round, O(listed blocks); those by key are made on the device."""
    mask, launch = problem.mask, Launch(problem.mask.block, problem.mask.block, 4, 1)
    by_query, by_key = query_walk(mask, launch, device), key_walk(mask, launch, device)
    bounds = (torch.as_tensor(mask.block_bitmap(), device=device), by_query.limits)
    # The operator knows one mask, or one a query head.
    repeats = 1 if mask.heads == 1 else problem.q_heads // mask.heads
    lists = (*_partial_and_full(by_query.lists, repeats), *_partial_and_full(by_key.lists, repeats))
    tile = None if mask.block % flex.BLOCK == 0 else tile_size(TILE, mask.block)
    seen = Listed(mask.block, problem.q_heads // mask.heads)
    return FlexOperands(bounds, lists, seen, block=mask.block, tile=tile, kernel=NAME)


def _partial_and_full(lists: TileLists, repeats: int) -> list[torch.Tensor]:
    """Counts and indices of the partial blocks, then of the full ones, which lead in `lists`.

    Both of one width: the operator's kernels address either list by the strides of the partial one.
    """
    slots = torch.arange(lists.indices.shape[2], device=lists.indices.device)
    partial = lists.counts - lists.full
    place = (lists.full[:, :, None] + slots).clamp(max=len(slots) - 1)
    arrays = (partial, lists.indices.gather(2, place.long()), lists.full, lists.indices)
    return [x.repeat_interleave(repeats, dim=0)[None].contiguous() for x in arrays]


def compile_ahead(problem: AttentionProblem, device: torch.device, passes=PASSES) -> None:
    """As of `flex`."""
    flex.compile_operands(prepare(problem), problem, device, passes)


class Blocks(UniformBlocks):
    """The base's checks, and that the operator's backward kernel has a tile that divides the blocks."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason is None and "backward" in passes and problem.mask.block % flex.BLOCK:
            return f"does not take pass backward at block size {problem.mask.block} ({flex.BLOCK} must divide it)"
        return reason


KERNEL = Kernel(
    NAME,
    Blocks(("uniform_block",), passes=flex.KERNEL.capability.passes, source=flex.KERNEL.capability.source),
    prepare,
    flex.forward,
    flex.backward,
    compile_ahead=compile_ahead,
)
