"""flex: the Hopper kernels under a traced predicate, and with traced logits, after FlexAttention (Dong et al., 2024).

A predicate (`workload.predicate.Predicate`) says which elements are visible, its score_mod changes logits; both are
ordinary jnp functions of indices, traced into the kernels' bodies, and the backward pass differentiates score_mod by
`jax.vjp` there. Indices are those of a tile's elements, arrays int32.

Which tiles are empty or full is found without a dense picture: from the intervals where the mask alone decides, else
by evaluating the predicate a tile at a time, O(blocks) memory.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels import hopper_kernel, hopper_masks
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_masks import COLUMN, ROW, Policy, Walk
from workload.capability import ALL_STATIC
from workload.masks import IntervalMask
from workload.predicate import Predicate, check_seen, given, heads_of
from workload.problem import AttentionProblem


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """A mask_mod whose equality is by value, so that a mask prepared twice compiles once.

    offset: a query's key position less its index (bottom-right aligned); rows before the first key see nothing.
    """

    offset: int

    def __call__(self, b, h, i, j, q_values, kv_values):
        p = i + self.offset
        seen = self.seen(p, j, q_values, kv_values)
        return seen if self.offset >= 0 else (p >= 0) & seen

    def seen(self, p, j, q_values, kv_values):
        """Whether the query at key position p sees key j."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Window(_Pattern):
    """Keys p - left .. p + right; None is unbounded."""

    left: int | None
    right: int

    def seen(self, p, j, q_values, kv_values):
        before = j <= p + self.right
        return before if self.left is None else before & (j >= p - self.left)


@dataclasses.dataclass(frozen=True)
class _Prefix(_Pattern):
    """Causal, and a prefix seen by all."""

    prefix: int

    def seen(self, p, j, q_values, kv_values):
        return (j <= p) | (j < self.prefix)


@dataclasses.dataclass(frozen=True)
class _GlobalWindow(_Pattern):
    """A window, and global tokens that see and are seen by all."""

    tokens: int
    window: int

    def seen(self, p, j, q_values, kv_values):
        near = (j >= p - self.window) & (j <= p + self.window)
        return (p < self.tokens) | (j < self.tokens) | near


@dataclasses.dataclass(frozen=True)
class _Document(_Pattern):
    """Within a document; the arrays hold document numbers."""

    causal: bool

    def seen(self, p, j, q_values, kv_values):
        same = q_values[0] == kv_values[0]
        return same & (j <= p) if self.causal else same


def _intervals(b, h, i, j, q_values, kv_values):
    seen = (q_values[0] <= j) & (j < q_values[1])
    for start, end in zip(q_values[2::2], q_values[3::2], strict=True):
        seen = seen | ((start <= j) & (j < end))
    return seen


def _document_numbers(mask: IntervalMask) -> tuple[np.ndarray, np.ndarray]:
    """Document of each query (rows before the first key count to the first) and of each key."""
    of_key = np.repeat(np.arange(len(mask.params["lengths"])), mask.params["lengths"]).astype(np.int32)
    position = np.arange(mask.q_len) + mask.kv_len - mask.q_len
    return of_key[np.maximum(position, 0)], of_key


def predicate_of(mask: IntervalMask) -> Predicate:
    """The mask as a predicate: arithmetic where the pattern is, document numbers, or its intervals as query arrays."""
    offset, of = mask.kv_len - mask.q_len, mask.params
    if mask.name == "full":
        return Predicate()
    if mask.name == "causal":
        return Predicate(_Window(offset, None, 0))
    if mask.name in ("full_sliding_window", "causal_sliding_window"):
        right = 0 if mask.name.startswith("causal") else of["window"]
        return Predicate(_Window(offset, of["window"], right))
    if mask.name == "prefix_lm_causal":
        return Predicate(_Prefix(offset, of["prefix"]))
    if mask.name == "global_sliding_window":
        return Predicate(_GlobalWindow(offset, of["global_tokens"], of["window"]))
    if mask.name in ("full_document", "causal_document"):
        of_query, of_key = _document_numbers(mask)
        return Predicate(_Document(offset, mask.name.startswith("causal")), None, (of_query,), (of_key,))
    return Predicate(_intervals, None, tuple(x for pair in zip(mask.starts, mask.ends, strict=True) for x in pair))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Listed(Policy):
    """Column tiles as lists, for predicates that no run describes.

    Attributes:
      counts: int32 [tiles, 2]: partial and all column tiles of each row tile.
      indices: int32 [tiles, longest list]: the column tiles, partial ones first.
      order: as of `hopper_masks.Intervals`.
    """

    counts: jax.Array
    indices: jax.Array
    order: jax.Array

    def operands(self):
        return self.counts, self.indices, self.order

    def row_tile(self, refs, head, place):
        chosen = refs[2][place]
        return jnp.where(chosen == 0, place, chosen - 1)

    def walk(self, refs, head, tile):
        return Walk(refs[0][tile, 0], refs[0][tile, 1], lambda n: refs[1][tile, n])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Traced(Policy):
    """Tiles of another policy, elements by a predicate.

    Attributes:
      tiles: the policy that says which tiles are visited, `Intervals` or `Listed`.
      row_arrays, column_arrays: int32 vectors padded to whole tiles.
      mask_mod, score_mod: of the predicate, or None.
      n_columns: true number of columns.
      row_tokens, column_tokens: tile sizes.
      transposed: whether rows are keys.
    """

    tiles: Policy
    row_arrays: tuple[jax.Array, ...]
    column_arrays: tuple[jax.Array, ...]
    mask_mod: Callable | None = dataclasses.field(metadata={"static": True})
    score_mod: Callable | None = dataclasses.field(metadata={"static": True})
    n_columns: int = dataclasses.field(metadata={"static": True})
    row_tokens: int = dataclasses.field(metadata={"static": True})
    column_tokens: int = dataclasses.field(metadata={"static": True})
    transposed: bool = dataclasses.field(metadata={"static": True})

    @property
    def changes_scores(self):
        """Whether there is a score_mod."""
        return self.score_mod is not None

    @property
    def heads_differ(self):
        """Whether query heads that share keys visit different column tiles."""
        return self.tiles.heads_differ

    def operands(self):
        return *self.tiles.operands(), *self.row_arrays, *self.column_arrays

    def row_tile(self, refs, head, place):
        return self.tiles.row_tile(refs, head, place)

    def walk(self, refs, head, tile):
        return self.tiles.walk(refs, head, tile)

    @property
    def orders_blocks(self):
        """Whether `block` or `share` says what thread blocks do."""
        return self.tiles.orders_blocks

    def block(self, refs, number):
        return self.tiles.block(refs, number)

    @property
    def share_blocks(self):
        """Thread blocks of a forward whose blocks are ordered."""
        return self.tiles.share_blocks

    def share(self, refs, block, field):
        return self.tiles.share(refs, block, field)

    @property
    def values(self):
        """How many vectors `column_values` returns."""
        return len(self.column_arrays)

    def column_values(self, refs):
        return tuple(refs[len(refs) - self.values :])

    def load_rows(self, refs, head, row0, rows):
        vectors = refs[len(refs) - self.values - len(self.row_arrays) : len(refs) - self.values]
        return [plgpu.load(x.at[pl.ds(row0, rows)], layout=ROW, optimized=False) for x in vectors]

    def _indices(self, head, place):
        """(batch, q_head, i, j) of a tile."""
        i, j = (place.index(axis) for axis in ((1, 0) if self.transposed else (0, 1)))
        return head.batch, head.q, i, j

    def _values(self, place, row_values):
        """(q_values, kv_values) of a tile."""
        by_row = tuple(place.by_row(x) for x in row_values)
        by_column = tuple(place.by_column(plgpu.load(x, layout=COLUMN)) for x in place.values)
        return (by_column, by_row) if self.transposed else (by_row, by_column)

    def seen(self, state, head, place):
        tests = []  # whole tiles hold no columns beyond the last
        if self.n_columns % self.column_tokens or self.mask_mod is None:
            tests.append(place.index(1) < self.n_columns)
        if self.mask_mod is not None:
            tests.append(self.mask_mod(*self._indices(head, place), *self._values(place, state)))
        return functools.reduce(jnp.logical_and, tests)

    def scores(self, s, head, place):
        return self.score_mod(s, *self._indices(head, place))

    def score_gradient(self, s, ds, head, place):
        indices = self._indices(head, place)
        return jax.vjp(lambda score: self.score_mod(score, *indices), s)[1](ds)[0]


def _pad(x: np.ndarray, tokens: int) -> np.ndarray:
    return np.pad(np.asarray(x, np.int32), (0, -len(x) % tokens))


def _classes(mask_mod, q_arrays, kv_arrays, shape, tiles, heads) -> np.ndarray:
    """int8 [q_tiles, kv_tiles]: 0 empty, 1 partial, 2 full, over all (batch, q_head) in `heads`; a tile at a time."""
    (q_len, kv_len), (tile_q, tile_k) = shape, tiles
    q_tiles, k_tiles = -(-q_len // tile_q), -(-kv_len // tile_k)
    q_arrays = [jnp.asarray(_pad(x, tile_q)) for x in q_arrays]
    kv_arrays = [jnp.asarray(_pad(x, tile_k)) for x in kv_arrays]

    def one(number):
        i = number // k_tiles * tile_q + jnp.arange(tile_q, dtype=jnp.int32)
        j = number % k_tiles * tile_k + jnp.arange(tile_k, dtype=jnp.int32)
        values = tuple(x[i][:, None] for x in q_arrays), tuple(x[j][None, :] for x in kv_arrays)
        inside = (j < kv_len)[None, :]
        some, every = jnp.bool_(False), jnp.bool_(True)
        for b, h in heads:
            seen = mask_mod(b, h, i[:, None], j[None, :], *values)
            check_seen(seen)
            seen = jnp.broadcast_to(seen & inside, (tile_q, tile_k))
            real = (i < q_len)[:, None]
            some, every = some | (seen & real).any(), every & (seen | ~real).all()
        return some.astype(jnp.int8) + (some & every)

    found = jax.jit(lambda: jax.lax.map(one, jnp.arange(q_tiles * k_tiles), batch_size=64))()
    return np.asarray(found).reshape(q_tiles, k_tiles)


def check_traced(used: Predicate) -> None:
    """TypeError naming the function that cannot be traced or gives no bool, ValueError the one that holds an array of
    JAX, be it a number (kernels take none but q_arrays and kv_arrays), or a traced value, whose gradient would be lost.
    """
    index, element = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (1, 1)))
    place = index, index, element, element
    calls = {"mask_mod": (*place, (element,) * len(used.q_arrays), (element,) * len(used.kv_arrays)),
             "score_mod": (jax.ShapeDtypeStruct((1, 1), jnp.float32), *place)}
    for name, arguments in calls.items():
        function = getattr(used, name)
        if function is None:
            continue
        try:
            traced = jax.make_jaxpr(function)(*arguments)
        except jax.errors.JAXTypeError as problem:
            raise TypeError(f"{name}: {str(problem).splitlines()[0]}") from problem
        if name == "mask_mod":
            check_seen(next(iter(traced.out_avals), None))
        for x in traced.consts:
            if isinstance(x, jax.core.Tracer):
                raise ValueError(f"{name}: holds a value that is traced, {x.dtype} {np.shape(x)}, not a constant")
            raise ValueError(f"{name}: holds an array, {x.dtype} {np.shape(x)}; kernels read q_arrays, kv_arrays and "
                             "numbers of Python or NumPy")


def _listed(classes: np.ndarray, device) -> Listed:
    """Lists of the visited tiles of each row of classes, partial ones first, heaviest rows first."""
    key = np.where(classes == 0, 3, classes)  # partial 1, full 2, empty last
    indices = np.argsort(key, axis=1, kind="stable").astype(np.int32)
    counts = np.stack([(classes == 1).sum(axis=1), (classes > 0).sum(axis=1)], axis=1).astype(np.int32)
    indices = np.where(np.arange(indices.shape[1]) < counts[:, 1:], indices, 0)
    indices = indices[:, : max(1, counts[:, 1].max(initial=1))]
    order = np.argsort(-(2 * counts[:, 1] + counts[:, 0]), kind="stable").astype(np.int32) + 1
    return Listed(*(jax.device_put(np.ascontiguousarray(x), device) for x in (counts, indices, order)))


def prepare(
    problem: AttentionProblem,
    device=None,
    *,
    predicate: Predicate | None = None,
    per_head: bool = False,
    deterministic: bool = False,
    tiles: Tiles | None = None,
) -> HopperOperands:
    """Operands of the problem's mask as a predicate, or of a predicate of one's own.

    Args:
      predicate: replaces the mask where it has a mask_mod; its score_mod applies in any case. TypeError or ValueError
        as of `workload.predicate.given` and `check_traced`.
      per_head: whether the mask_mod reads batch or q_head (ValueError where it does without); a tile is visited if any
        of them sees a cell of it.
      deterministic, tiles: as of `hopper_kernel.prepare_intervals`.
    """
    used = given(predicate, problem)
    check_traced(used)
    own = used.mask_mod is not None
    if not own:
        used = dataclasses.replace(predicate_of(problem.mask), score_mod=used.score_mod)
    heads = [tuple(jnp.int32(x) for x in pair) if per_head else pair for pair in heads_of(problem, per_head)]
    by_key = problem.mask.transpose()

    def rows_of(transposed, rows, columns, order):
        lengths = (problem.kv_len, problem.q_len) if transposed else (problem.q_len, problem.kv_len)
        if own:
            sizes = (columns, rows) if transposed else (rows, columns)
            shape = (problem.q_len, problem.kv_len)
            classes = _classes(used.mask_mod, used.q_arrays, used.kv_arrays, shape, sizes, heads)
            base = _listed(classes.T if transposed else classes, device)
        else:
            base = hopper_masks.intervals(by_key if transposed else problem.mask, rows, columns, device, order)
        arrays = (used.kv_arrays, used.q_arrays) if transposed else (used.q_arrays, used.kv_arrays)
        padded = (
            tuple(jax.device_put(_pad(x, tokens), device) for x in of)
            for of, tokens in zip(arrays, (rows, columns), strict=True)
        )
        return Traced(base, *padded, used.mask_mod, used.score_mod, lengths[1], rows, columns, transposed)

    if tiles is None:
        tiles = hopper_kernel.default_tiles(problem)
        if used.kv_arrays:  # a tile's key values take the registers that queries would
            tiles = dataclasses.replace(tiles, forward=dataclasses.replace(tiles.forward, q_registers=False))
    makers = functools.partial(rows_of, False), functools.partial(rows_of, True)
    return hopper_kernel.build(problem, *makers, tiles, deterministic)


KERNEL = Kernel(
    "flex",
    hopper_kernel.capability(ALL_STATIC, "own, Pallas Mosaic GPU, traced predicate"),
    prepare,
    hopper_kernel.forward,
    hopper_kernel.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
