"""Block masks as the tile lists that kernels walk: q-major, and transposed for dk/dv; its twin is jax_impl's.

A `BlockMask` of uniform blocks becomes, per mask head and row tile, the ascending list of column tiles that some
row of it sees. Tiles divide blocks, so 128 blocks serve a kernel of 64 tiles. All of it runs on the device and is
deterministic: sums and scatters to places that are all different.
"""

import dataclasses

import numpy as np
import torch

from torch_impl.kernels.walks import Launch
from workload.block_masks import BlockMask
from workload.errors import Unsupported


@dataclasses.dataclass(frozen=True)
class TileLists:
    """Per mask head and row tile, the column tiles it walks, those that need no element mask first.

    Attributes:
      full: int32 [heads, row tiles], how many lead that are visible in every cell (a ragged one never is).
      counts: int32 [heads, row tiles], how many are listed.
      indices: int32 [heads, row tiles, longest], zero after counts.
    """

    full: torch.Tensor
    counts: torch.Tensor
    indices: torch.Tensor


@dataclasses.dataclass(frozen=True)
class ListWalk:
    """What one pass reads of a dynamic mask.

    Attributes:
      lists: the tiles that each row tile walks.
      order: int32 [heads, row tiles], the longest list first.
      limits: int32 [q_len], how many leading keys a row may see at all.
      launch: the tile sizes the lists are counted in, and how to launch.
    """

    lists: TileLists
    order: torch.Tensor
    limits: torch.Tensor
    launch: Launch

    def arguments(self) -> tuple:
        """Pointers and sizes in the kernels' order."""
        heads, tiles, longest = self.lists.indices.shape
        return self.lists.full, self.lists.counts, self.lists.indices, self.order, self.limits, heads, tiles, longest


def tile_lists(counts, indices, limits, *, block: int, rows: int, columns: int) -> TileLists:
    """Lists of `rows` x `columns` tiles of a mask's lists of block x block.

    Args:
      counts, indices: int32 [heads, q_blocks], [heads, q_blocks, max_count], as in `BlockMask`.
      limits: int32 [q_len], ascending: how many leading keys a row may see at all (kv_len unless causal).
      rows, columns: tile sizes that divide `block`.
    """
    pieces, tiles, device = block // columns, -(-limits.shape[0] // rows), limits.device
    piece = torch.arange(pieces, dtype=torch.int32, device=device)
    column = (indices[..., None] * pieces + piece).flatten(2)
    column, counts = (x.repeat_interleave(block // rows, dim=1)[:, :tiles] for x in (column, counts))
    first = torch.arange(tiles, device=device) * rows
    least, most = limits[first], limits[(first + rows).clamp(max=limits.shape[0]) - 1]
    listed = torch.arange(column.shape[2], device=device) < counts[:, :, None] * pieces
    listed &= column * columns < most[:, None]
    full = listed & ((column + 1) * columns <= least[:, None])
    return TileLists(_count(full), _count(listed), column.masked_fill(~listed, 0).contiguous())


def transposed(lists: TileLists, *, column_tiles: int, longest: int | None = None) -> TileLists:
    """The lists by column tile: which row tiles walk it, ascending, those that see all of it first.

    Args:
      column_tiles: how many there are.
      longest: slots of the result, at least its longest list; all row tiles by default.
    """
    # Head by head: a picture of all heads at once would be the largest array of a long problem.
    heads = zip(lists.full, lists.counts, lists.indices, strict=True)
    by_key = [_transposed_head(*head, column_tiles, longest) for head in heads]
    return TileLists(*(torch.stack(x) for x in zip(*by_key, strict=True)))


def _transposed_head(full, counts, indices, column_tiles: int, longest: int | None):
    """full, counts [column tiles] and indices [column tiles, longest] of one head's lists."""
    tiles, slots = indices.shape
    longest = tiles if longest is None else longest
    slot = torch.arange(slots, device=indices.device)
    # What is not listed goes to one column tile too many, which is cut off.
    column = torch.where(slot < counts[:, None], indices, column_tiles).long()
    seen = 1 + (slot < full[:, None]).to(torch.int8)
    row = torch.arange(tiles, dtype=torch.int32, device=indices.device)
    picture = torch.zeros(column_tiles + 1, tiles, dtype=torch.int8, device=indices.device)
    picture = picture.index_put_((column, row[:, None].long().expand_as(column)), seen)[:-1]
    whole, part = picture == 2, picture == 1
    leading = _count(whole)
    rank = torch.where(whole, whole.cumsum(1), leading[:, None] + part.cumsum(1)) - 1
    # As above: one slot too many takes what is not listed.
    place = torch.where(picture > 0, rank, longest)
    out = torch.zeros(column_tiles, longest + 1, dtype=torch.int32, device=indices.device)
    out.scatter_(1, place, row.expand_as(picture).contiguous())
    return leading, _count(picture > 0), out[:, :longest].contiguous()


def query_walk(mask: BlockMask, launch: Launch, device=None) -> ListWalk:
    """The walk with tiles of `launch.rows` queries as rows; the mask has uniform blocks that the tiles divide."""
    limits = torch.as_tensor(mask.limits, device=device)
    return _walk(_lists(mask, limits, launch.rows, launch.cols), limits, launch)


def key_walk(mask: BlockMask, launch: Launch, device=None) -> ListWalk:
    """The walk with tiles of `launch.rows` keys as rows and `launch.cols` queries as columns."""
    limits = torch.as_tensor(mask.limits, device=device)
    lists = _lists(mask, limits, launch.cols, launch.rows)
    tiles = -(-mask.kv_len // launch.rows)
    longest = max(1, int(_listings(lists, tiles).max())) if tiles else 1
    return _walk(transposed(lists, column_tiles=tiles, longest=longest), limits, launch)


def _listings(lists: TileLists, column_tiles: int) -> torch.Tensor:
    """How many row tiles list each column tile, int64 [heads, column_tiles]."""
    slot = torch.arange(lists.indices.shape[2], device=lists.indices.device)
    out = []
    for counts, indices in zip(lists.counts, lists.indices, strict=True):
        out.append(torch.bincount(indices[slot < counts[:, None]], minlength=column_tiles))
    return torch.stack(out)


def _lists(mask: BlockMask, limits, rows: int, columns: int) -> TileLists:
    if mask.block is None:
        raise Unsupported("tile lists", f"mask {mask.name}: its blocks are of no one size")
    counts, indices = (torch.as_tensor(x, device=limits.device) for x in (mask.counts, mask.indices))
    return tile_lists(counts, indices, limits, block=mask.block, rows=rows, columns=columns)


def _walk(lists: TileLists, limits, launch: Launch) -> ListWalk:
    order = lists.counts.argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return ListWalk(lists, order, limits, launch)


def _count(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dim=-1, dtype=torch.int32)


def tile_size(preferred: int, block: int) -> int:
    """The largest power of two that divides the block, `preferred` at most.

    >>> tile_size(64, 48), tile_size(64, 128), tile_size(128, 128)
    (16, 64, 128)
    """
    return int(np.gcd(preferred, block))
