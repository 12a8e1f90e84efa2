"""Block lists in PyTorch: they are the tiles with visible cells, both ways round, and the twins agree."""

import numpy as np
import pytest
import torch

from torch_impl.kernels.block_lists import key_walk, query_walk, tile_lists, transposed
from torch_impl.kernels.walks import Launch
from workload.block_masks import from_bitmap, uniform_block
from workload.selection import uniform_bounds


def entries(lists, last) -> list:
    """[heads][row tiles] sets of the first `last[h, n]` entries of each list."""
    rows, last = lists.indices.numpy(), last.numpy()
    return [[set(rows[h, n, : last[h, n]].tolist()) for n in range(rows.shape[1])] for h in range(len(rows))]


def tiles_of(mask, rows, columns):
    """By brute force on the dense picture: [heads][row tile] sets of tiles with some cell visible, and with all."""
    some, every = [], []
    for head in range(mask.heads):
        seen = mask.dense(head)
        cut = lambda i, j, seen=seen: seen[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]  # noqa: E731
        across, down = range(-(-mask.kv_len // columns)), range(-(-mask.q_len // rows))
        some.append([{j for j in across if cut(i, j).any()} for i in down])
        every.append([{j for j in across if cut(i, j).all() and cut(i, j).shape[1] == columns} for i in down])
    return some, every


def flipped(heads, columns) -> list:
    """The same pairs by column: [heads][columns] sets of rows."""
    return [[{i for i, row in enumerate(rows) if j in row} for j in range(columns)] for rows in heads]


MASKS = [
    uniform_block(150, 210, 2, 32, 0.4, seed=3),
    uniform_block(210, 150, 3, 64, 0.6, causal=True, seed=4),
    uniform_block(200, 300, 2, 48, top_p=0.7, selection="importance", causal=True, seed=5),
]
CORNERS = [uniform_block(96, 96 + n, 1, 32, 0.8, causal=True, seed=9) for n in (-1, 0, 1)]  # D12: about a tile's corner


@pytest.mark.parametrize("mask", MASKS + CORNERS,
                         ids=["plain", "causal_tall", "causal_48", "before", "at", "after"])
def test_lists_are_the_tiles_with_visible_cells(mask):
    """Both ways round: the listed tiles are those with a visible cell, the leading ones those with all visible."""
    some, every = tiles_of(mask, 16, 16)
    by_query, by_key = query_walk(mask, Launch(16, 16, 4, 1)).lists, key_walk(mask, Launch(16, 16, 4, 1)).lists
    assert entries(by_query, by_query.counts) == some
    assert entries(by_query, by_query.full) == every
    assert entries(by_key, by_key.counts) == flipped(some, by_key.counts.shape[1])
    assert entries(by_key, by_key.full) == flipped(every, by_key.counts.shape[1])


def test_transposed_is_the_masks_own_transpose():
    """Where nothing is partial the lists by key are `BlockMask.by_key`, in its order, and longest is only a pad."""
    mask = uniform_block(256, 384, 2, 32, 0.3, seed=6)
    arrays = (torch.tensor(x) for x in (mask.counts, mask.indices, mask.limits))
    lists = tile_lists(*arrays, block=32, rows=32, columns=32)
    counts, indices = mask.by_key()
    got = transposed(lists, column_tiles=12, longest=indices.shape[2])
    assert np.array_equal(got.counts, counts) and np.array_equal(got.indices, indices)
    longer = transposed(lists, column_tiles=12)
    assert longer.indices.shape[2] == 8 and np.array_equal(longer.indices[:, :, : indices.shape[2]], indices)


def test_blocks_of_128_as_tiles_of_64():
    """A 5 x 3 map of 128 blocks read in tiles of 64: shapes and dense picture are equal (query axis not stretched)."""
    picks = np.random.default_rng(8).random((1, 5, 3)) < 0.5
    mask = from_bitmap(picks, uniform_bounds(640, 128)[None], uniform_bounds(384, 128)[None], block=128)
    lists = query_walk(mask, Launch(64, 64, 4, 1)).lists
    picture = np.zeros((1, 10, 6), bool)
    for n, row in enumerate(entries(lists, lists.counts)[0]):
        picture[0, n, list(row)] = True
    assert lists.counts.shape == (1, 10)
    assert np.array_equal(picture.repeat(64, 1).repeat(64, 2)[0], mask.dense())
