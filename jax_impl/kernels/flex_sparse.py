"""flex_sparse: the flex kernel over block lists, on Hopper: blocks say where, a traced predicate and logits say what.

Lists take the place of the runs of `flex`; the causal diagonal and the ragged end are a predicate on the rows' limits.
A mask_mod of one's own narrows the listed blocks further, a score_mod changes logits. Blocks that 128 does not divide
run in the kernels of `vsa` (hopper_sparse.py), in tiles of 64, and the predicate is asked there; where 64 does not
divide them, every block is laid out on tiles of its own, and the predicate is asked of the tokens that stand there.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels import hopper_kernel, hopper_sparse
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.flex import Traced, check_traced
from jax_impl.kernels.hopper_backward import BackwardTiles
from jax_impl.kernels.hopper_forward import ForwardTiles, round_up
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_lists import NEVER, Layout, Lists, by_key, by_query, listed, pieces
from jax_impl.kernels.hopper_masks import ROW, Policy, Walk
from jax_impl.kernels.hopper_sparse import NARROW, WIDE, SparseOperands
from jax_impl.kernels.hopper_sparse_backward import SparseBackwardTiles, kv_heads_in_cache
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
    """Which token stands at a place of either axis: blocks of `block` tokens stand `stride` places apart."""

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
    """What the mask leaves of a listed piece, and a mask_mod of that.

    The first of the rows' arrays is the mask's: the keys before it are seen, or the queries from it on. The mask_mod
    reads the others.
    """

    mask_mod: Callable | None
    places: _Places
    by_key: bool

    def __call__(self, b, h, i, j, q_values, kv_values):
        query, key = self.places.token(i), self.places.token(j)
        if self.by_key:  # of a place without a key it is past every query
            (first, *kv_values) = kv_values
            seen = query >= first
        else:
            (limit, *q_values), held = q_values, self.places.held(j)
            seen = key < limit if held is None else (key < limit) & held
        if self.mask_mod is None:
            return seen
        own = self.mask_mod(b, h, query, key, tuple(q_values), tuple(kv_values))
        check_seen(own)
        return seen & own


@dataclasses.dataclass(frozen=True)
class _Scored:
    """A score_mod on the tokens at their places."""

    score_mod: Callable
    places: _Places

    def __call__(self, score, b, h, i, j):
        return self.score_mod(score, b, h, self.places.token(i), self.places.token(j))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked of listed pieces, whichever the lists.

    Attributes:
      row_arrays, column_arrays, mask_mod, score_mod, n_columns: as of `Traced`.
      every: whether pieces that the mask leaves whole are asked too.
      q_heads: query heads.
    """

    row_arrays: tuple[jax.Array, ...]
    column_arrays: tuple[jax.Array, ...]
    mask_mod: Callable = dataclasses.field(metadata={"static": True})
    score_mod: Callable | None = dataclasses.field(metadata={"static": True})
    n_columns: int = dataclasses.field(metadata={"static": True})
    every: bool = dataclasses.field(metadata={"static": True})
    q_heads: int = dataclasses.field(metadata={"static": True})

    def over(self, lists: Lists) -> Traced:
        """The policy over these lists."""
        if self.every:
            lists = dataclasses.replace(lists, full=jnp.zeros_like(lists.full))
        return Traced(ListPolicy(lists, self.q_heads), self.row_arrays, self.column_arrays, self.mask_mod,
                      self.score_mod, self.n_columns, lists.rows, lists.piece, lists.by_key)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlexSparseOperands:
    """The mask as the passes read it: in wide tiles or in narrow ones, None for the other.

    Attributes:
      wide: policies, as the Hopper kernels of static masks read them.
      narrow: lists, as `vsa` has them.
      asked: of the narrow lists, by query and by key; None without a predicate.
    """

    wide: HopperOperands | None
    narrow: SparseOperands | None
    asked: tuple[Asked, Asked] | None


def prepare(problem: AttentionProblem, device=None, *, predicate: Predicate | None = None) -> FlexSparseOperands:
    """The lists of both passes, and what is asked of their pieces.

    Args:
      predicate: a mask_mod and a score_mod besides the mask; a mask_mod is asked in every listed tile. TypeError or
        ValueError as of `workload.predicate.given` and `check_traced`.
    """
    mask, used = problem.mask, given(predicate, problem)
    check_traced(used)
    if mask.block % WIDE:
        return _narrow(problem, used, device)
    columns = NARROW if problem.head_dim == 128 else WIDE
    side = kv_heads_in_cache(problem.q_len, problem.kv_heads, problem.head_dim, SparseBackwardTiles.l2_bytes)
    tiles = Tiles(ForwardTiles(columns=WIDE), BackwardTiles(columns, side=side))
    cuts = pieces(mask, WIDE, WIDE, False), pieces(mask, columns, WIDE, False)
    policies = (asked.over(way(cut, listed(cut, device), device))
                for asked, way, cut in zip(_asked(problem, used, None, device), (by_query, by_key), cuts, strict=True))
    return FlexSparseOperands(HopperOperands(*policies, None, tiles), None, None)


def _narrow(problem: AttentionProblem, used: Predicate, device) -> FlexSparseOperands:
    lists = hopper_sparse.prepare(problem, device)
    layouts = lists.q_layout and [Layout(x.token[:1], x.place[:1]) for x in (lists.q_layout, lists.kv_layout)]
    if layouts:  # blocks of one size stand alike for all heads
        lists = dataclasses.replace(lists, q_layout=layouts[0], kv_layout=layouts[1])
    if used.mask_mod is None and used.score_mod is None:
        return FlexSparseOperands(None, lists, None)
    asked = _asked(problem, used, layouts, device)
    forward = lists.schedules.forward  # key values take the room of a tile
    forward = dataclasses.replace(forward, slots=forward.slots - bool(used.kv_arrays))
    schedules = dataclasses.replace(lists.schedules, forward=forward)
    return FlexSparseOperands(None, dataclasses.replace(lists, schedules=schedules), asked)


def _asked(problem: AttentionProblem, used: Predicate, layouts, device) -> tuple[Asked, Asked]:
    """What is asked by query and by key, in tiles of 128 keys or pairs of 64."""
    mask = problem.mask
    first = np.searchsorted(mask.limits, np.arange(mask.kv_len), side="right")
    stride = round_up(mask.block, NARROW) if layouts else mask.block
    places = _Places(mask.block, stride)
    scored = used.score_mod and _Scored(used.score_mod, places)

    def put(arrays, axis: int, fill=0):
        """Vectors by token as those by place, in whole tiles; `fill` where none stands."""
        token = np.asarray(layouts[axis].token[0]) if layouts else 1 + np.arange((problem.q_len, problem.kv_len)[axis])
        token = np.pad(token, (0, -len(token) % WIDE))
        return tuple(jax.device_put(np.append(x, fill).astype(np.int32)[token - 1], device) for x in arrays)

    def asked(by_key: bool):
        q_arrays, kv_arrays = put(used.q_arrays, 0), put(used.kv_arrays, 1)
        if by_key:
            rows, columns = (*put([first], 1, NEVER), *kv_arrays), q_arrays
        else:
            rows, columns = (*put([mask.limits], 0), *q_arrays), kv_arrays
        # Past the last of whole tiles nothing is seen: queries have an infinite lse there, `held` tells laid out keys.
        length = WIDE if by_key or layouts else problem.kv_len
        test = _Within(used.mask_mod, places, by_key)
        return Asked(rows, columns, test, scored, length, used.mask_mod is not None, problem.q_heads)

    return asked(False), asked(True)


def forward(q, k, v, operands: FlexSparseOperands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    if operands.narrow is None:
        return hopper_kernel.forward(q, k, v, operands.wide, scale, out_dtype=out_dtype)
    policy_of = operands.asked and operands.asked[0].over
    return hopper_sparse.forward(q, k, v, operands.narrow, scale, out_dtype=out_dtype, policy_of=policy_of)


def backward(q, k, v, out, lse, dout, operands: FlexSparseOperands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    options = {"grad_dtype": grad_dtype, "delta": delta}
    if operands.narrow is None:
        return hopper_kernel.backward(q, k, v, out, lse, dout, operands.wide, scale, **options)
    policy_of = operands.asked and operands.asked[1].over
    return hopper_sparse.backward(q, k, v, out, lse, dout, operands.narrow, scale, policy_of=policy_of, **options)


KERNEL = Kernel(
    "flex_sparse",
    hopper_kernel.capability(("uniform_block",), "own, Pallas Mosaic GPU, traced predicate over block lists"),
    prepare,
    forward,
    backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
