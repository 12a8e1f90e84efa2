"""flex_sparse: the flex kernel over block lists, on Hopper: blocks say where, a traced predicate and logits say what.

Lists take the place of the runs of `flex`; the causal diagonal and the ragged end are a predicate on the rows' limits.
A mask_mod of one's own narrows the listed blocks further, a score_mod changes logits. Where the tiles do not divide the
blocks, every block is laid out on tiles of its own, and the predicate is asked of the tokens that stand there. Blocks
that 128 does not divide have a forward of tiles of 64, which gathers two pieces of keys a step (hopper_sparse_forward).
"""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels import hopper_kernel
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.flex import Traced, _pad
from jax_impl.kernels.hopper_backward import BackwardTiles
from jax_impl.kernels.hopper_forward import ForwardTiles, round_up
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_lists import Layout, Lists, Pieces, by_key, by_query, listed, pieces
from jax_impl.kernels.hopper_masks import ROW, Policy, Walk
from jax_impl.kernels.hopper_sparse import NARROW, WIDE, default_schedules, heads_last, over_lists
from jax_impl.kernels.hopper_sparse_backward import kv_heads_in_cache
from jax_impl.kernels.hopper_sparse_forward import list_refs, row_tile
from workload.predicate import Predicate, check_seen, given
from workload.problem import AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ListPolicy(Policy):
    """Lists as the policy of the Hopper kernels that take one, where tokens stay where they are.

    Attributes:
      lists: the pieces are the column tiles.
      q_heads: query heads, static.
    """

    lists: Lists
    q_heads: int = dataclasses.field(metadata={"static": True})

    @property
    def row_tokens(self) -> int:
        """Rows of a tile."""
        return self.lists.rows

    @property
    def column_tokens(self) -> int:
        """Columns of a tile."""
        return self.lists.piece

    @property
    def heads_differ(self) -> bool:
        """Whether every query head has a list of its own."""
        return 1 < self.lists.heads == self.q_heads

    def operands(self):
        return self.lists.operands()

    def _mask_head(self, head):
        return lax.div(head.q * self.lists.heads, jnp.int32(self.q_heads))

    def row_tile(self, refs, head, place):
        return row_tile(list_refs(refs), self._mask_head(head), place)

    def walk(self, refs, head, tile):
        r, h = list_refs(refs), self._mask_head(head)
        total, full = r.counts[h, tile], r.full[h, tile]
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
class _Places:
    """Which token stands at a place of an axis: blocks of `block` tokens stand `stride` places apart."""

    block: int
    stride: int

    def token(self, place):
        """The token at a place that holds one."""
        if self.stride == self.block:
            return place
        stride = jnp.int32(self.stride)
        return lax.div(place, stride) * self.block + lax.rem(place, stride)

    def held(self, place):
        """Whether a place holds a token, where no limit says so; None if all do."""
        return None if self.stride == self.block else lax.rem(place, jnp.int32(self.stride)) < self.block


@dataclasses.dataclass(frozen=True)
class _Within:
    """Keys before the row's limit, q_values[0], that a mask_mod sees too; it reads the arrays after that one."""

    mask_mod: Callable | None
    queries: _Places
    keys: _Places

    def __call__(self, b, h, i, j, q_values, kv_values):
        key, held = self.keys.token(j), self.keys.held(j)
        seen = key < q_values[0]
        if held is not None:
            seen = seen & held
        if self.mask_mod is None:
            return seen
        own = self.mask_mod(b, h, self.queries.token(i), key, q_values[1:], kv_values)
        check_seen(own)
        return seen & own


@dataclasses.dataclass(frozen=True)
class _Scored:
    """A score_mod on the tokens at their places."""

    score_mod: Callable
    queries: _Places
    keys: _Places

    def __call__(self, score, b, h, i, j):
        return self.score_mod(score, b, h, self.queries.token(i), self.keys.token(j))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlexSparseOperands:
    """The policies of both passes, and where each has its tokens.

    Attributes:
      policies: `Traced` over `ListPolicy`, as the Hopper kernels read them; the forward's of narrow tiles are for
        `sparse_forward`.
      forward, backward: layouts of queries and of keys; None where tokens stay where they are.
    """

    policies: HopperOperands
    forward: tuple[Layout, Layout] | None
    backward: tuple[Layout, Layout] | None


def prepare(problem: AttentionProblem, device=None, *, predicate: Predicate | None = None) -> FlexSparseOperands:
    """The lists of both passes as policies of the Hopper kernels.

    Args:
      predicate: a mask_mod and a score_mod besides the mask; a mask_mod is asked in every listed tile. TypeError or
        ValueError as of `workload.predicate.given`.
    """
    mask, used = problem.mask, given(predicate, problem)
    columns = NARROW if problem.head_dim == 128 else WIDE
    side = kv_heads_in_cache(problem.q_len, problem.kv_heads, problem.head_dim, 32 << 20)
    tiles = Tiles(ForwardTiles(columns=WIDE), BackwardTiles(columns, side=side))

    def traced(lists: Lists, cut: Pieces) -> Traced:
        if used.mask_mod is not None:  # every piece takes the element test
            lists = dataclasses.replace(lists, full=jnp.zeros_like(lists.full))
        laid = cut.q_layout is not None
        queries, keys = (_Places(mask.block, round_up(mask.block, n) if laid else mask.block)
                         for n in (cut.q_tile, cut.kv_tile))
        arrays = ((mask.limits, *used.q_arrays), used.kv_arrays)
        if laid:
            arrays = tuple(tuple(_at_places(x, layout) for x in of)
                           for of, layout in zip(arrays, (cut.q_layout, cut.kv_layout), strict=True))
        if lists.by_key:
            arrays = arrays[::-1]
        padded = (tuple(jax.device_put(_pad(x, tokens), device) for x in of)
                  for of, tokens in zip(arrays, (lists.tiles * lists.rows, lists.piece), strict=True))
        base = ListPolicy(lists, problem.q_heads)
        scored = used.score_mod and _Scored(used.score_mod, queries, keys)
        across = problem.q_len if lists.by_key else problem.kv_len
        length = lists.piece if laid else across  # what is laid out ends in a whole tile
        return Traced(base, *padded, _Within(used.mask_mod, queries, keys), scored, length, lists.rows, lists.piece,
                      lists.by_key)

    narrow = mask.block % WIDE != 0
    tile = NARROW if narrow else WIDE
    cuts = pieces(mask, tile, tile, narrow), pieces(mask, columns, WIDE, False)
    policies = (traced(way(cut, listed(cut, device), device), cut)
                for way, cut in zip((by_query, by_key), cuts, strict=True))
    return FlexSparseOperands(HopperOperands(*policies, None, tiles), *(_layouts(cut, device) for cut in cuts))


def _layouts(cut: Pieces, device) -> tuple[Layout, Layout] | None:
    """Those of the first head: blocks of one size stand alike for all."""
    if cut.q_layout is None:
        return None
    return jax.device_put(tuple(Layout(x.token[:1], x.place[:1]) for x in (cut.q_layout, cut.kv_layout)), device)


def _at_places(x: np.ndarray, layout: Layout) -> np.ndarray:
    """A vector by token as one by place, 0 where none stands."""
    return np.append(x, 0)[layout.token[0] - 1]


def forward(q, k, v, operands: FlexSparseOperands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    policy = cast(Traced, operands.policies.forward)
    if policy.row_tokens == WIDE or not q.size or not k.size:
        return hopper_kernel.forward(q, k, v, operands.policies, scale, out_dtype=out_dtype)
    tiles = default_schedules(q.shape[-1], wide=False).forward
    if policy.values:  # they take the room of a tile
        tiles = dataclasses.replace(tiles, slots=tiles.slots - 1)
    lists = cast(ListPolicy, policy.tiles).lists
    return over_lists(q, k, v, lists, operands.forward, scale, tiles, out_dtype=out_dtype, policy=policy)


def backward(q, k, v, out, lse, dout, operands: FlexSparseOperands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    if operands.backward is None or not q.size or not k.size:
        return hopper_kernel.backward(
            q, k, v, out, lse, dout, operands.policies, scale, grad_dtype=grad_dtype, delta=delta)
    queries, keys = operands.backward
    lse = heads_last(queries.spread(heads_last(lse), -jnp.inf))
    delta = delta if delta is None else heads_last(queries.spread(heads_last(delta)))
    dq, dk, dv = hopper_kernel.backward(
        queries.spread(q), keys.spread(k), keys.spread(v), queries.spread(out), lse, queries.spread(dout),
        operands.policies, scale, grad_dtype=grad_dtype, delta=delta)
    return queries.gather(dq), keys.gather(dk), keys.gather(dv)


KERNEL = Kernel(
    "flex_sparse",
    hopper_kernel.capability(("uniform_block",), "own, Pallas Mosaic GPU, traced predicate over block lists"),
    prepare,
    forward,
    backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
