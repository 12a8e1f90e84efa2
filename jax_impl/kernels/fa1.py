"""fa1: FlashAttention-1's schedule in Pallas for GPUs in general, under any interval mask.

Dao et al., FlashAttention, 2022, algorithms 1 and 4 (5 for the empty tiles): one program per head; keys are the
outer loop, queries the inner one. Running out, maximum and sum of every row lie in memory and are read, rescaled
(out is normalised at every step, as published) and written back once per key tile; so is dq in the backward pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_impl.kernels import pallas_triton as body
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.fa2 import HEAD_DIMS
from jax_impl.kernels.pallas_triton import Tile, dot
from jax_impl.kernels.walks import RunWalk, run_walk
from workload.capability import ALL_STATIC, Capability
from workload.problem import AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """Walks with keys as rows, for the two passes; the tiles are static."""

    forward: RunWalk
    backward: RunWalk
    forward_tile: Tile = dataclasses.field(metadata={"static": True})
    backward_tile: Tile = dataclasses.field(metadata={"static": True})


def default_tiles(problem: AttentionProblem) -> tuple[Tile, Tile]:
    """Forward and backward tiles, rows are keys; those of half precision to 128 are the best measured on an H200."""
    if problem.dtype == "float32" or problem.head_dim > 128:
        return Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)
    return Tile(128, 128, 8, 1), Tile(128, 128, 8, 1)


def prepare(problem: AttentionProblem, device=None, *, tiles: tuple[Tile, Tile] | None = None) -> Operands:
    """Tile runs and column intervals, keys as rows; O(q_len + kv_len)."""
    tiles = tiles or default_tiles(problem)
    by_key = problem.mask.transpose()
    forward, backward = (run_walk(by_key, tile.rows, tile.columns, device, hide_padding=True) for tile in tiles)
    return Operands(forward, backward, *tiles)


def _for_each(count: int, store) -> None:
    """Runs store(n) for n < count, then makes the stores visible to the whole program."""

    def once(n, carry):
        store(n)
        return carry

    lax.fori_loop(0, count, once, 0)
    body.barrier()


def _forward_kernel(walk, q_ref, k_ref, v_ref, out_ref, m_ref, total_ref, *, scale, tile):
    queries = lambda column: pl.ds(column * tile.columns, tile.columns)  # noqa: E731

    def clear(column):
        at = queries(column)
        out_ref[at, :] = jnp.zeros((tile.columns, out_ref.shape[1]), jnp.float32)
        m_ref[at] = jnp.full(tile.columns, -jnp.inf, jnp.float32)
        total_ref[at] = jnp.zeros(tile.columns, jnp.float32)

    def keys(row, carry):
        at_k = pl.ds(row * tile.rows, tile.rows)
        k, v = k_ref[at_k, :], v_ref[at_k, :]

        def step(column, carry, masked):
            at = queries(column)
            s = dot(q_ref[at, :], k, (1, 1)) * (scale * body.LOG2E)
            if masked:
                s = jnp.where(walk.visible(None, row, column, tile).T, s, -jnp.inf)
            before = total_ref[at]
            p, alpha, m = body.softmax_step(s, m_ref[at], masked)
            total = before * alpha + p.sum(axis=1)
            inverse = 1.0 / jnp.where(total > 0, total, 1.0)
            old = out_ref[at, :] * (before * alpha * inverse)[:, None]
            out = old + dot(p.astype(v.dtype), v) * inverse[:, None]
            body.barrier()  # a row may be read by more threads than the one that writes it
            out_ref[at, :] = out
            m_ref[at], total_ref[at] = m, total
            return carry

        carry = walk.visit(None, row, step, carry)
        body.barrier()  # the next key tile reads what other threads of this program wrote
        return carry

    _for_each(q_ref.shape[0] // tile.columns, clear)
    lax.fori_loop(0, k_ref.shape[0] // tile.rows, keys, 0)


def _specs(q, k, group):
    """Block specs of one (head, batch) program: a query head's sequence, its kv head's, its rows."""
    q_spec = pl.BlockSpec((None, q.shape[1], None, q.shape[3]), lambda h, b: (b, 0, h, 0))
    kv_spec = pl.BlockSpec((None, k.shape[1], None, k.shape[3]), lambda h, b: (b, 0, h // group, 0))
    return q_spec, kv_spec, pl.BlockSpec((None, None, q.shape[1]), lambda h, b: (b, h, 0))


def forward(q, k, v, operands: Operands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    tile, dtype = operands.forward_tile, out_dtype or q.dtype
    q_len, depth, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    q, k, v = body.pad_rows(q, tile.columns), body.pad_rows(k, tile.rows), body.pad_rows(v, tile.rows)
    batch, rows, heads, _ = q.shape
    q_spec, kv_spec, row_spec = _specs(q, k, group)
    running = jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)
    out, m, total = body.call(
        functools.partial(_forward_kernel, scale=scale, tile=tile),
        name="fa1_forward",
        grid=(heads, batch),
        in_specs=[body.whole(operands.forward), q_spec, kv_spec, kv_spec],
        out_specs=[q_spec, row_spec, row_spec],
        out_shape=[jax.ShapeDtypeStruct(q.shape, jnp.float32), running, running],
        tile=tile,
    )(operands.forward, q, k, v)
    lse = jnp.where(total > 0, (m + jnp.log2(total)) * body.LN2, -jnp.inf)
    return out[:, :q_len, :, :depth].astype(dtype), lse[:, :, :q_len]


def _backward_kernel(
    walk, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dq_ref, dk_ref, dv_ref, *, scale, tile
):
    queries = lambda column: pl.ds(column * tile.columns, tile.columns)  # noqa: E731

    def clear(column):
        dq_ref[queries(column), :] = jnp.zeros((tile.columns, dq_ref.shape[1]), jnp.float32)

    def keys(row, carry):
        at_k = pl.ds(row * tile.rows, tile.rows)
        k, v = k_ref[at_k, :], v_ref[at_k, :]

        def step(column, carry, masked):
            dk, dv = carry
            at = queries(column)
            q, dout = q_ref[at, :], dout_ref[at, :]
            p = jnp.exp2(dot(k, q, (1, 1)) * (scale * body.LOG2E) - lse_ref[at][None, :])
            if masked:
                p = jnp.where(walk.visible(None, row, column, tile), p, 0.0)
            dv = dv + dot(p.astype(dout.dtype), dout)
            ds = (p * (dot(v, dout, (1, 1)) - delta_ref[at][None, :]) * scale).astype(q.dtype)
            dq = dq_ref[at, :] + dot(ds, k, (0, 0))
            body.barrier()
            dq_ref[at, :] = dq
            return dk + dot(ds, q), dv

        zero = jnp.zeros(k.shape, jnp.float32)
        dk_ref[at_k, :], dv_ref[at_k, :] = walk.visit(None, row, step, (zero, zero))
        body.barrier()  # the next key tile adds to the dq that other threads of this program wrote
        return carry

    _for_each(q_ref.shape[0] // tile.columns, clear)
    lax.fori_loop(0, k_ref.shape[0] // tile.rows, keys, 0)


def backward(q, k, v, out, lse, dout, operands: Operands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    tile = operands.backward_tile
    lengths, depth, group = (q.shape[1], k.shape[1], k.shape[1]), q.shape[3], q.shape[2] // k.shape[2]
    dtypes = [grad_dtype or x.dtype for x in (q, k, v)]
    delta = body.pad(body.row_delta(out, dout, delta), 2, tile.columns)
    q, dout = body.pad_rows(q, tile.columns), body.pad_rows(dout, tile.columns)
    k, v = body.pad_rows(k, tile.rows), body.pad_rows(v, tile.rows)
    q_spec, kv_spec, row_spec = _specs(q, k, group)
    per_head = (k.shape[0], k.shape[1], q.shape[2], k.shape[3])
    grad_spec = pl.BlockSpec((None, k.shape[1], None, k.shape[3]), lambda h, b: (b, 0, h, 0))
    dq, dk, dv = body.call(
        functools.partial(_backward_kernel, scale=scale, tile=tile),
        name="fa1_backward",
        grid=(q.shape[2], q.shape[0]),
        in_specs=[body.whole(operands.backward), q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=[q_spec, grad_spec, grad_spec],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (q.shape, per_head, per_head)],
        tile=tile,
    )(operands.backward, q, k, v, dout, body.saved_lse(lse, tile.columns), delta)
    dk, dv = (x.reshape(*k.shape[:3], group, k.shape[3]).sum(axis=3) for x in (dk, dv))
    return tuple(x[:, :n, :, :depth].astype(t) for x, n, t in zip((dq, dk, dv), lengths, dtypes))


KERNEL = Kernel(
    "fa1",
    Capability(ALL_STATIC, head_dims=HEAD_DIMS, source="own, Pallas (Triton backend), FlashAttention-1 schedule"),
    prepare,
    forward,
    backward,
)
