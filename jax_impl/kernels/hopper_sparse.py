"""What the block-sparse Hopper kernels share on the host's side: operands and the two passes of the contract.

Blocks that 128 divides run in tiles of 128 rows, two warpgroups on one list. All other blocks run in tiles of 64;
where 64 does not divide them, every block is laid out on tiles of its own first. In the backward pass two tiles of keys
then walk together what both of them see, and the rest each on its own.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_impl.kernels.hopper_forward import LOG2E, round_up
from jax_impl.kernels.hopper_kernel import whole_rows
from jax_impl.kernels.hopper_lists import Layout, Lists, by_key, by_pairs, by_query, in_ranges, listed, pieces
from jax_impl.kernels.hopper_masks import Policy
from jax_impl.kernels.hopper_sparse_backward import SparseBackwardTiles, ranges_in_cache, sparse_backward
from jax_impl.kernels.hopper_sparse_forward import SparseTiles, sparse_forward
from jax_impl.kernels.hopper_sparse_pairs import PairTiles
from jax_impl.kernels.hopper_sparse_roles import RoleTiles
from workload.problem import AttentionProblem

NARROW, WIDE = 64, 128


@dataclasses.dataclass(frozen=True)
class SparseSchedules:
    """The schedules of the passes; hashable, a static part of the operands."""

    forward: SparseTiles = SparseTiles()
    backward: SparseBackwardTiles = SparseBackwardTiles()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseOperands:
    """A dynamic mask as the passes read it.

    Attributes:
      forward: rows are queries.
      shared: rows are 128 keys: what two tiles of keys walk together; of each range of queries.
      apart: rows are 64 keys: what each walks alone, likewise; None for blocks that 128 divides.
      q_layout, kv_layout: where tokens are laid out anew, else None.
      schedules: static.
    """

    forward: Lists
    shared: tuple[Lists, ...]
    apart: tuple[Lists, ...] | None
    q_layout: Layout | None
    kv_layout: Layout | None
    schedules: SparseSchedules = dataclasses.field(metadata={"static": True})


def default_schedules(head_dim: int, wide: bool) -> SparseSchedules:
    """The schedules that measured best (bench/results/NOTES.md); tiles of head_dim 64 are half as large."""
    forward, backward = (6, (4, 3)) if head_dim == 128 else (12, (8, 6))
    tiles = SparseBackwardTiles(PairTiles(backward[0]), RoleTiles(backward[1]))
    return SparseSchedules(SparseTiles(1 if wide else 2, forward), tiles)


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

    def ranged(lists: Lists) -> tuple[Lists, ...]:
        return in_ranges(lists, ranges_in_cache(problem.q_len, problem.head_dim, schedules.backward))

    if wide:
        queries, keys = pieces(mask, WIDE, WIDE, False), pieces(mask, NARROW, WIDE, False)
        lists = by_query(queries, listed(queries, device), device), by_key(keys, listed(keys, device), device)
        return SparseOperands(lists[0], ranged(lists[1]), None, None, None, schedules)
    cut = pieces(mask, NARROW, NARROW, True)
    layouts = jax.device_put((cut.q_layout, cut.kv_layout), device)
    both = listed(cut, device)
    by_keys = map(ranged, by_pairs(by_key(cut, both, device)))
    return SparseOperands(by_query(cut, both, device), *by_keys, *layouts, schedules)


def heads_last(x):
    """[batch, heads, seq] to [batch, seq, heads], or back."""
    return x.transpose(0, 2, 1)


def forward(q, k, v, operands: SparseOperands, scale: float, *, out_dtype=None,
            policy_of: Callable[[Lists], Policy] | None = None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract.

    policy_of: what is asked of given lists' pieces, and logits changed.
    """
    if not q.size or not k.size:
        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
        return jnp.zeros(q.shape, out_dtype or q.dtype), lse
    q_len, lists, layouts = q.shape[1], operands.forward, (operands.q_layout, operands.kv_layout)
    if scale <= 0:  # the kernel takes a row's maximum before it scales
        q, scale = (-q, -scale) if scale else (jnp.zeros_like(q), 1.0)
    if layouts[0] is not None:
        k, v = _apart(k, v, q.shape[2], lists)
        q, k, v = layouts[0].spread(q), layouts[1].spread(k), layouts[1].spread(v)
    q, k, v = whole_rows(q, k, v)
    out, lse = sparse_forward(q, k, v, lists, scale, operands.schedules.forward, out_dtype=out_dtype,
                              policy=policy_of and policy_of(lists))
    if layouts[0] is None:
        return out[:, :q_len], lse[:, :, :q_len]
    return layouts[0].gather(out), heads_last(layouts[0].gather(heads_last(lse)))


def backward(q, k, v, out, lse, dout, operands: SparseOperands, scale: float, *, grad_dtype=None, delta=None,
             policy_of: Callable[[Lists], Policy] | None = None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract.

    dq is summed by additions in an order of chance; dk and dv are the same bits every time. policy_of: as of `forward`.
    """
    grad_dtype = jnp.dtype(grad_dtype or q.dtype)
    if not q.size or not k.size:
        return tuple(jnp.zeros(x.shape, grad_dtype) for x in (q, k, v))
    if delta is None:
        delta = jnp.einsum(
            "bshd,bshd->bhs", out, dout, preferred_element_type=jnp.float32, precision="highest")
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)
    delta, dout, dq_scale = delta.astype(jnp.float32), dout.astype(q.dtype), scale
    if not scale:  # the kernel divides by it
        q, scale = jnp.zeros_like(q), 1.0
    q_len, kv_len, kv_heads = q.shape[1], k.shape[1], k.shape[2]
    layouts, lists = (operands.q_layout, operands.kv_layout), operands.shared
    apart = q.shape[2] // kv_heads if lists[0].heads > kv_heads else 1
    k, v = _apart(k, v, q.shape[2], lists[0])
    if layouts[0] is None:
        pad = ((0, 0), (0, 0), (0, round_up(q_len, NARROW) - q_len))
        lse, delta = jnp.pad(lse, pad, constant_values=jnp.inf), jnp.pad(delta, pad)
    else:
        lse = heads_last(layouts[0].spread(heads_last(lse), jnp.inf))
        delta = heads_last(layouts[0].spread(heads_last(delta)))
        q, dout, k, v = layouts[0].spread(q), layouts[0].spread(dout), layouts[1].spread(k), layouts[1].spread(v)
    dq, dk, dv = sparse_backward(
        *whole_rows(q, k, v, dout), lse, delta, lists, operands.apart, scale, operands.schedules.backward,
        grad_dtype=jnp.dtype(jnp.float32) if apart > 1 else grad_dtype, dq_scale=dq_scale, dq_dtype=grad_dtype,
        policy_of=policy_of)
    if layouts[0] is None:
        dq, dk, dv = dq[:, :q_len], dk[:, :kv_len], dv[:, :kv_len]
    else:
        dq, dk, dv = layouts[0].gather(dq), layouts[1].gather(dk), layouts[1].gather(dv)
    if apart > 1:
        dk, dv = (x.reshape(*x.shape[:2], kv_heads, apart, -1).sum(axis=3).astype(grad_dtype) for x in (dk, dv))
    return dq, dk, dv


def _apart(k, v, q_heads: int, lists: Lists):
    """k and v, repeated for every query head where the query heads of a group have lists of their own."""
    if lists.heads <= k.shape[2]:
        return k, v
    return tuple(jnp.repeat(x, q_heads // k.shape[2], axis=2) for x in (k, v))
