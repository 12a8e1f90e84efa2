"""In which order the Hopper kernels' thread blocks run, and what each does: by the mask, on the host, once."""

import heapq

import jax.numpy as jnp
import numpy as np
from jax import lax

from workload.masks import IntervalMask

BUSY = 125  # thread blocks that keep the 132 processors of an H100 or H200 busy, but for a few
ENOUGH = 4  # items a processor, of which their order can make shares that are even
STARTS = 2  # what an item costs besides its tiles, in the unit of weights: a full tile is 2
GREEDY = 100_000  # items; of more than these each block has so many that dealing them to and fro is even


def components(mask: IntervalMask, row_tokens: int, tiles: int) -> np.ndarray:
    """[tiles]: number of the group of consecutive row tiles whose middle rows see common columns, as documents do."""
    middle = np.minimum(np.arange(tiles) * row_tokens + row_tokens // 2, mask.q_len - 1)
    starts, ends = mask.starts[:, middle], mask.ends[:, middle]
    some = starts < ends
    first = np.where(some, starts, mask.kv_len).min(axis=0)
    last = np.maximum.accumulate(np.where(some, ends, 0).max(axis=0))
    return np.concatenate([[0], np.cumsum((first[1:] >= last[:-1]) & some.any(axis=0)[1:])])


def block_order(mask: IntervalMask, row_tokens: int, kv_heads: int, parts: int, weight: np.ndarray) -> np.ndarray:
    """1 + numbers of the thread blocks of a key-major pass (see `Policy.block`) in the order to run them in, int32.

    Blocks that walk the same queries should meet them in the L2 cache, and those with most to do should not come last:
    the heaviest component first, and of each as few kv heads side by side as keep all processors busy (two at least),
    one part of their query heads after another, its heaviest tiles first. Where parts of a tile of keys are added,
    nobody works on a tile that nobody sees: zeros at the end.
    """
    group = components(mask, row_tokens, len(weight))
    sizes, heaviest = np.bincount(group), np.zeros(group[-1] + 1, np.int64)
    np.maximum.at(heaviest, group, weight)
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-heaviest, kind="stable")] = np.arange(len(sizes))
    divisors = np.array([n for n in range(1, kv_heads + 1) if kv_heads % n == 0])
    enough = (divisors > 1) & (divisors * sizes[:, None] >= BUSY)
    side = np.where(enough.any(axis=1), divisors[enough.argmax(axis=1)], kv_heads)
    number = np.arange(len(weight) * parts * kv_heads)
    tile, part, head = number // (parts * kv_heads), number // kv_heads % parts, number % kv_heads
    order = np.lexsort((head, -weight[tile], part, head // side[group[tile]], rank[group[tile]]))
    order = order[(weight[tile[order]] > 0) | (parts == 1)]
    return np.pad(1 + order, (0, len(number) - len(order))).astype(np.int32)


def heads_with_work(q_heads: int, kv_heads: int, tiles: int) -> int:
    """Query heads, those of as few kv heads as have work for all processors: `ENOUGH` items each; divides q_heads."""
    group = q_heads // kv_heads
    heads = (n * group for n in range(1, kv_heads) if kv_heads % n == 0)
    return next((n for n in heads if n * tiles >= ENOUGH * BUSY), q_heads)


def shares(batch: int, q_heads: int, side: int, processors: int, waves: int, weight: np.ndarray) -> np.ndarray:
    """What each thread block of the forward does, int32 [blocks, 1 + most items], of a size that weights
    do not change: see `Policy.share`.

    Neighbours in time read the same keys: items come batch entry by batch entry, `side` heads at a time, the heaviest
    tiles of these first. They are dealt out in waves of a block a processor, each half as long as the one before but
    for the last: a processor that is late, or busy with something else, gets fewer blocks, and the last are short. In a
    wave an item goes to the block that has least to do so far, up to twice as many as a block of the first wave has on
    the average.
    """
    tiles = np.argsort(-weight, kind="stable")
    entry, section, tile, head = np.meshgrid(
        np.arange(batch), np.arange(0, q_heads, side), tiles, np.arange(side), indexing="ij")
    numbers = ((tile * batch + entry) * q_heads + section + head).reshape(-1)
    cost = weight[tile].reshape(-1) + STARTS
    blocks = min(processors, len(numbers))
    most = -(-len(numbers) // blocks) * (2 if waves == 1 else 1)
    ends = np.cumsum(cost) / cost.sum()
    bounds = np.searchsorted(ends, [1 - 2.0**-n for n in range(1, waves)])
    dealt: list[list[int]] = []
    for stretch, costs in zip(np.split(numbers, bounds), np.split(cost, bounds), strict=True):
        mine: list[list[int]] = [[] for _ in range(blocks)]
        if len(numbers) > GREEDY:
            places = np.arange(len(stretch))
            turn, place = places // blocks, places % blocks
            taker = np.where(turn % 2 == 1, blocks - 1 - place, place)
            for b in range(blocks):
                mine[b] = stretch[taker == b].tolist()
        else:
            load = [(0, b) for b in range(blocks)]
            for number, c in zip(stretch.tolist(), costs.tolist(), strict=True):
                least, b = heapq.heappop(load)
                mine[b].append(number)
                if len(mine[b]) < most:
                    heapq.heappush(load, (least + c, b))
        dealt += mine
    table = np.zeros((len(dealt), 1 + most), np.int32)
    for b, numbers_of_block in enumerate(dealt):
        table[b, : 1 + len(numbers_of_block)] = [len(numbers_of_block), *numbers_of_block]
    return table


# ---- where no policy says what a thread block does -----------------------------------------------


def blocks_of(items: int, tiles) -> int:
    """Thread blocks for this many items: a wave of the processors for every `tiles.items` of them each, up to four.

    A block that goes from one item to the next loads under products where a new one would start cold. More waves than
    one, so that processors that are late, or busy with something else, get fewer blocks.
    """
    return min(items, tiles.processors * waves_of(items, tiles))


def waves_of(items: int, tiles) -> int:
    """How many waves of thread blocks share this many items."""
    return max(1, min(4, items // (tiles.processors * tiles.items)))


def item_number(n, blocks: int):
    """The n-th item of a thread block. They come heaviest first; to and fro, so that blocks have as much to do each."""
    block, back = lax.axis_index("block"), lax.rem(jnp.int32(n), jnp.int32(2))
    return n * blocks + jnp.where(back == 1, blocks - 1 - block, block)


def items_of_block(items: int, blocks: int):
    """How many items a thread block has."""
    rounds = -(-items // blocks)
    return rounds - (item_number(rounds - 1, blocks) >= items).astype(jnp.int32)
