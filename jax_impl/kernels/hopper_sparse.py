"""What the block-sparse Hopper kernels share on the host's side: operands and the two passes of the contract.

Blocks that 128 divides run in tiles of 128 rows, two warpgroups on one list: forward in hopper_sparse_forward.py,
backward in hopper_backward.py under `ListPolicy`. All other blocks run in tiles of 64, a list a warpgroup;
where 64 does not divide them, every block is laid out on tiles of its own first.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_backward import BackwardTiles, key_major
from jax_impl.kernels.hopper_forward import LOG2E, round_up
from jax_impl.kernels.hopper_kernel import whole_rows
from jax_impl.kernels.hopper_lists import Layout, Lists, both_ways, pieces
from jax_impl.kernels.hopper_masks import ROW, Policy, Walk
from jax_impl.kernels.hopper_sparse_backward import SparseBackwardTiles, kv_heads_in_cache, sparse_backward
from jax_impl.kernels.hopper_sparse_forward import SparseTiles, list_refs, row_tile, sparse_forward
from workload.problem import AttentionProblem

NARROW, WIDE = 64, 128


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
class SparseSchedules:
    """The schedules of the passes; hashable, a static part of the operands."""

    forward: SparseTiles = SparseTiles()
    narrow: SparseBackwardTiles = SparseBackwardTiles()
    wide: BackwardTiles = BackwardTiles()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseOperands:
    """A dynamic mask as the passes read it.

    Attributes:
      forward: rows are queries.
      backward: rows are keys: lists for tiles of 64, a policy for tiles of 128.
      q_layout, kv_layout: where tokens are laid out anew, else None.
      schedules: static.
    """

    forward: Lists
    backward: Lists | ListPolicy
    q_layout: Layout | None
    kv_layout: Layout | None
    schedules: SparseSchedules = dataclasses.field(metadata={"static": True})


def default_schedules(head_dim: int, wide: bool) -> SparseSchedules:
    """The schedules that measured best (bench/results/NOTES.md); tiles of head_dim 64 are half as large."""
    slots = 6 if head_dim == 128 else 12
    backward = BackwardTiles(columns=NARROW if head_dim == 128 else WIDE)
    return SparseSchedules(SparseTiles(1 if wide else 2, slots), SparseBackwardTiles(slots // 2), backward)


def prepare(
    problem: AttentionProblem, device=None, *, wide: bool | None = None, schedules: SparseSchedules | None = None
) -> SparseOperands:
    """The lists of both passes; those by key are transposed on the device.

    Args:
      wide: whether to use tiles of 128; by default where 128 divides the blocks.
      schedules: other than the measured ones.
    """
    mask = problem.mask
    divides = mask.block is not None and mask.block % WIDE == 0
    wide = divides if wide is None else wide and divides
    schedules = schedules or default_schedules(problem.head_dim, wide)
    cut = pieces(mask, *(WIDE, WIDE) if wide else (NARROW, NARROW), not wide)
    by_query, by_key = both_ways(cut, device)
    if not wide:
        layouts = jax.device_put((cut.q_layout, cut.kv_layout), device)
        return SparseOperands(by_query, by_key, *layouts, schedules)
    by_key = both_ways(pieces(mask, schedules.wide.columns, WIDE, False), device)[1]
    return SparseOperands(by_query, ListPolicy(by_key, problem.q_heads), None, None, schedules)


def _heads_last(x):
    """[batch, heads, seq] to [batch, seq, heads], or back."""
    return x.transpose(0, 2, 1)


def forward(q, k, v, operands: SparseOperands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    q_len, layout = q.shape[1], operands.q_layout
    if not q.size or not k.size:
        lse = jnp.full((q.shape[0], q.shape[2], q_len), -jnp.inf, jnp.float32)
        return jnp.zeros(q.shape, out_dtype or q.dtype), lse
    if scale <= 0:  # the kernel takes a row's maximum before it scales
        q, scale = (-q, -scale) if scale else (jnp.zeros_like(q), 1.0)
    if layout is not None:
        k, v = (operands.kv_layout.spread(x) for x in _apart(k, v, q.shape[2], operands.forward))
        q = layout.spread(q)
    q, k, v = whole_rows(q, k, v)
    out, lse = sparse_forward(q, k, v, operands.forward, scale, operands.schedules.forward, out_dtype=out_dtype)
    if layout is not None:
        return layout.gather(out), _heads_last(layout.gather(_heads_last(lse)))
    return out[:, :q_len], lse[:, :, :q_len]


def backward(q, k, v, out, lse, dout, operands: SparseOperands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract.

    dq is summed by additions in an order of chance; dk and dv are the same bits every time.
    """
    grad_dtype = jnp.dtype(grad_dtype or q.dtype)
    if not q.size or not k.size:
        return tuple(jnp.zeros(x.shape, grad_dtype) for x in (q, k, v))
    if delta is None:
        delta = jnp.einsum("bshd,bshd->bhs", out, dout, preferred_element_type=jnp.float32)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    rows = (lse, delta.astype(jnp.float32))
    dout = dout.astype(q.dtype)
    policy = operands.backward
    if isinstance(policy, ListPolicy):
        lse, delta = _padded(lse, rows[1], WIDE)
        q_len, kv_len = q.shape[1], k.shape[1]
        q, k, v, dout = whole_rows(q, k, v, dout)
        wide = operands.schedules.wide
        side = wide.side or kv_heads_in_cache(q_len, k.shape[2], q.shape[3], operands.schedules.narrow.l2_bytes)
        dq, dk, dv = key_major(q, k, v, dout, lse, delta, policy, scale, dataclasses.replace(wide, side=side),
                               grad_dtype=grad_dtype, with_dq=True)
        dq, dk, dv = dq[:, :q_len], dk[:, :kv_len], dv[:, :kv_len]
    else:
        dq, dk, dv = _narrow(q, k, v, dout, *rows, operands, scale, grad_dtype)
    return (dq * scale).astype(grad_dtype), dk, dv


def _apart(k, v, q_heads: int, lists: Lists):
    """k and v, repeated for every query head where the query heads of a group have lists of their own."""
    if lists.heads <= k.shape[2]:
        return k, v
    return tuple(jnp.repeat(x, q_heads // k.shape[2], axis=2) for x in (k, v))


def _padded(lse, delta, multiple: int):
    pad = ((0, 0), (0, 0), (0, round_up(lse.shape[2], multiple) - lse.shape[2]))
    return jnp.pad(lse, pad, constant_values=jnp.inf), jnp.pad(delta, pad)


def _narrow(q, k, v, dout, lse, delta, operands, scale, grad_dtype):
    """dq float32 unscaled, dk, dv in tiles of 64."""
    q_len, kv_len, kv_heads = q.shape[1], *k.shape[1:3]
    lists, layouts = operands.backward, (operands.q_layout, operands.kv_layout)
    apart = q.shape[2] // kv_heads if lists.heads > kv_heads else 1
    k, v = _apart(k, v, q.shape[2], lists)
    if layouts[0] is None:
        lse, delta = _padded(lse, delta, NARROW)
    else:
        lse = _heads_last(layouts[0].spread(_heads_last(lse), jnp.inf))
        delta = _heads_last(layouts[0].spread(_heads_last(delta)))
        q, dout, k, v = layouts[0].spread(q), layouts[0].spread(dout), layouts[1].spread(k), layouts[1].spread(v)
    wanted = jnp.dtype(jnp.float32) if apart > 1 else grad_dtype
    arrays = (*whole_rows(q, k, v, dout), lse, delta)
    dq, dk, dv = sparse_backward(*arrays, lists, scale, operands.schedules.narrow, grad_dtype=wanted)
    if layouts[0] is None:
        dq, dk, dv = dq[:, :q_len], dk[:, :kv_len], dv[:, :kv_len]
    else:
        dq, dk, dv = layouts[0].gather(dq), layouts[1].gather(dk), layouts[1].gather(dv)
    if apart > 1:
        dk, dv = (x.reshape(*x.shape[:2], kv_heads, apart, -1).sum(axis=3).astype(grad_dtype) for x in (dk, dv))
    return dq, dk, dv
