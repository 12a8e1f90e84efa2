"""Triton kernels of fa1: keys outside, queries inside, one program per head. Notation as in flashmask_triton.

out (normalised at every step, as published), the running maximum and sum of every row, and dq in the backward pass
lie in float32 memory and are read, rescaled and written once per key tile. A barrier parts a key tile from the
next, since a row's tile may be read back by other threads than wrote it.
Dao et al., FlashAttention, 2022, algorithms 1 and 4.
"""

import triton
import triton.language as tl

from torch_impl.kernels.flashmask_triton import load_tile, seen, store_tile


@triton.jit
def _tile(x, batch, head, rows, q_len, q_heads, D: tl.constexpr):
    """Pointers to rows of one head of contiguous float32 x [B, q_len, q_heads, D]."""
    start = x + (batch.to(tl.int64) * q_len * q_heads + head) * D
    return start + rows.to(tl.int64)[:, None] * q_heads * D + tl.arange(0, D)[None, :]


@triton.jit
def _update(q_desc, k_ND, v_ND, out, total, top, starts, ends, keys, tile, batch, head, place, q_len, kv_len, q_heads,
            scale_log2, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
            PRECISION: tl.constexpr):
    """Folds one key tile into out, total and top of one query tile, all in memory."""
    rows = tile * M + tl.arange(0, M)
    inside = rows < q_len
    s = tl.dot(k_ND, load_tile(q_desc, batch, head, tile * M, M, D).T, input_precision=PRECISION) * scale_log2
    if MASKED:
        s = tl.where(seen(starts, ends, keys, rows, kv_len, R), s, float("-inf"))
    at = place.to(tl.int64) * q_len + rows
    old_top = tl.load(top + at, mask=inside, other=0.0)
    old_total = tl.load(total + at, mask=inside, other=0.0)
    new_top = tl.maximum(old_top, tl.max(s, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(s - base[None, :])
    kept = old_total * tl.exp2(old_top - base)
    new_total = kept + tl.sum(p, 0)
    safe = tl.where(new_total > 0, new_total, 1.0)
    cell = _tile(out, batch, head, rows, q_len, q_heads, D)
    old_out = tl.load(cell, mask=inside[:, None], other=0.0)
    share = tl.dot(p.T.to(v_ND.dtype), v_ND, input_precision=PRECISION)
    tl.store(cell, (old_out * kept[:, None] + share) / safe[:, None], mask=inside[:, None])
    tl.store(top + at, new_top, mask=inside)
    tl.store(total + at, new_total, mask=inside)


@triton.jit
def forward_kernel(q_desc, k_desc, v_desc, out, total, top, starts, ends, full_begin, full_end, partial_begin,
                   partial_end, full_slots, partial_slots, q_len, kv_len, q_heads, group, scale_log2,
                   R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """out, total and top of one head; out and total come as 0, top as -inf."""
    place = tl.program_id(0)
    batch, head = place // q_heads, place % q_heads
    for j in range(tl.cdiv(kv_len, N)):
        k_ND = load_tile(k_desc, batch, head // group, j * N, N, D)
        v_ND = load_tile(v_desc, batch, head // group, j * N, N, D)
        keys = j * N + tl.arange(0, N)
        for r in range(j * full_slots, (j + 1) * full_slots):
            for tile in range(tl.load(full_begin + r), tl.load(full_end + r)):
                _update(q_desc, k_ND, v_ND, out, total, top, starts, ends, keys, tile, batch, head, place, q_len,
                        kv_len, q_heads, scale_log2, R, M, D, False, PRECISION)
        for r in range(j * partial_slots, (j + 1) * partial_slots):
            for tile in range(tl.load(partial_begin + r), tl.load(partial_end + r)):
                _update(q_desc, k_ND, v_ND, out, total, top, starts, ends, keys, tile, batch, head, place, q_len,
                        kv_len, q_heads, scale_log2, R, M, D, True, PRECISION)
        tl.debug_barrier()


@triton.jit
def _gradients(dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, dq, lse, delta, starts, ends, keys, tile, batch, head,
               place, q_len, kv_len, q_heads, scale, scale_log2, R: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
               MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one query tile's share to dk / scale and dv, and this key tile's share to dq in memory."""
    rows = tile * M + tl.arange(0, M)
    inside = rows < q_len
    at = place.to(tl.int64) * q_len + rows
    q_MD = load_tile(q_desc, batch, head, tile * M, M, D)
    dout_MD = load_tile(dout_desc, batch, head, tile * M, M, D)
    lse_M = tl.load(lse + at, mask=inside, other=float("inf")) * 1.4426950408889634
    p = tl.exp2(tl.dot(k_ND, q_MD.T, input_precision=PRECISION) * scale_log2 - lse_M[None, :])
    if MASKED:
        p = tl.where(seen(starts, ends, keys, rows, kv_len, R), p, 0.0)
    dv_ND = tl.dot(p.to(dout_MD.dtype), dout_MD, dv_ND, input_precision=PRECISION)
    dp = tl.dot(v_ND, dout_MD.T, input_precision=PRECISION)
    ds = (p * (dp - tl.load(delta + at, mask=inside, other=0.0)[None, :])).to(q_MD.dtype)
    dk_ND = tl.dot(ds, q_MD, dk_ND, input_precision=PRECISION)
    cell = _tile(dq, batch, head, rows, q_len, q_heads, D)
    share = tl.dot(ds.T, k_ND, input_precision=PRECISION) * scale
    tl.store(cell, tl.load(cell, mask=inside[:, None], other=0.0) + share, mask=inside[:, None])
    return dk_ND, dv_ND


@triton.jit
def backward_kernel(q_desc, k_desc, v_desc, dout_desc, dq, dk_desc, dv_desc, lse, delta, starts, ends, full_begin,
                    full_end, partial_begin, partial_end, full_slots, partial_slots, q_len, kv_len, q_heads, group,
                    scale, scale_log2, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                    PRECISION: tl.constexpr):
    """dq of one query head, which comes as 0, and that head's share of dk and dv."""
    place = tl.program_id(0)
    batch, head = place // q_heads, place % q_heads
    for j in range(tl.cdiv(kv_len, N)):
        k_ND = load_tile(k_desc, batch, head // group, j * N, N, D)
        v_ND = load_tile(v_desc, batch, head // group, j * N, N, D)
        keys = j * N + tl.arange(0, N)
        dk_ND = tl.zeros([N, D], tl.float32)
        dv_ND = tl.zeros([N, D], tl.float32)
        for r in range(j * full_slots, (j + 1) * full_slots):
            for tile in range(tl.load(full_begin + r), tl.load(full_end + r)):
                dk_ND, dv_ND = _gradients(
                    dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, dq, lse, delta, starts, ends, keys, tile, batch, head,
                    place, q_len, kv_len, q_heads, scale, scale_log2, R, M, D, False, PRECISION)
        for r in range(j * partial_slots, (j + 1) * partial_slots):
            for tile in range(tl.load(partial_begin + r), tl.load(partial_end + r)):
                dk_ND, dv_ND = _gradients(
                    dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, dq, lse, delta, starts, ends, keys, tile, batch, head,
                    place, q_len, kv_len, q_heads, scale, scale_log2, R, M, D, True, PRECISION)
        store_tile(dk_desc, batch, head, j * N, dk_ND * scale, N, D)
        store_tile(dv_desc, batch, head, j * N, dv_ND, N, D)
        tl.debug_barrier()
