"""Triton kernels of block-sparse attention: forward, dq and dk/dv over lists of tiles.

Notation as in flashmask_triton. A row of tiles walks its *list*: the full tiles first, then those that the
limits of the rows cut (row i sees keys below limits[i]: the causal diagonal and the ragged end). The index of the
next tile is fetched a step ahead, so that its loads never wait for it. Where query heads of a group share a
list, a program takes PACK of them as one tile of rows, and each k and v tile serves them all.
Every sum stays inside one program: no atomics, the same bits every time. Dao, FlashAttention-2, 2023.
"""

import triton
import triton.language as tl

from torch_impl.kernels.flashmask_triton import load_tile, store_tile


@triton.jit
def _place(order, tiles, mask_heads, heads, heads_per_section):
    """(tile, batch, head, mask head) of this program: long lists first, heads of a section side by side."""
    per = tiles * heads_per_section
    section, rest = tl.program_id(0) // per, tl.program_id(0) % per
    place = section * heads_per_section + rest % heads_per_section
    batch, head = place // heads, place % heads
    mask_head = head * mask_heads // heads
    return tl.load(order + mask_head * tiles + rest // heads_per_section), batch, head, mask_head


@triton.jit
def load_rows(desc, batch, head, row, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of pack heads as one matrix [PACK * ROWS, D]."""
    return desc.load([batch, head, row, 0]).reshape(PACK * ROWS, D)


@triton.jit
def store_rows(desc, batch, head, row, x, PACK: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Writes x back to the rows of PACK heads that `load_rows` reads, in their dtype."""
    desc.store([batch, head, row, 0], x.to(desc.dtype).reshape(1, PACK, ROWS, D))


@triton.jit
def _packed(batch, head, q_heads, q_len, tile, PACK: tl.constexpr, ROWS: tl.constexpr):
    """(row in its head, offset in [B, q_heads, q_len]) of each row of a tile of PACK heads."""
    each = tl.arange(0, PACK * ROWS)
    rows = tile * ROWS + each % ROWS
    return rows, (batch * q_heads + head + each // ROWS).to(tl.int64) * q_len + rows


@triton.jit
def _attend(acc, total, top, q_MD, k_desc, v_desc, batch, head, row, begin, end, limits_M, scale_log2,
            N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Online softmax over the listed tiles row[begin:end]."""
    tile = tl.load(row + begin, mask=begin < end, other=0)
    for n in tl.range(begin, end):
        following = tl.load(row + n + 1, mask=n + 1 < end, other=0)
        k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
        s = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        if MASKED:
            s = tl.where(tile * N + tl.arange(0, N)[None, :] < limits_M[:, None], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1) * scale_log2)
        base = new
        if MASKED:  # a row may have seen nothing yet: -inf - -inf is NaN
            base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s * scale_log2 - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        v_ND = load_tile(v_desc, batch, head, tile * N, N, D)
        acc = tl.dot(p.to(v_ND.dtype), v_ND, acc, input_precision=PRECISION)
        top = new
        tile = following
    return acc, total, top


@triton.jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, lse, full, counts, indices, order, limits, mask_heads, tiles,
                   longest, q_len, q_heads, group, heads_per_section, scale_log2, PACK: tl.constexpr,
                   ROWS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """out and lse of one tile of ROWS queries of PACK heads."""
    tile, batch, pack, mask_head = _place(order, tiles, mask_heads, q_heads // PACK, heads_per_section)
    head = pack * PACK
    rows, offset = _packed(batch, head, q_heads, q_len, tile, PACK, ROWS)
    limits_M = tl.load(limits + rows, mask=rows < q_len, other=0)
    at = mask_head * tiles + tile
    row, whole, count = indices + at.to(tl.int64) * longest, tl.load(full + at), tl.load(counts + at)
    q_MD = load_rows(q_desc, batch, head, tile * ROWS, PACK, ROWS, D)
    acc = tl.zeros([PACK * ROWS, D], tl.float32)
    total = tl.zeros([PACK * ROWS], tl.float32)
    top = tl.full([PACK * ROWS], float("-inf"), tl.float32)
    acc, total, top = _attend(acc, total, top, q_MD, k_desc, v_desc, batch, head // group, row, 0, whole, limits_M,
                              scale_log2, N, D, False, PRECISION)
    acc, total, top = _attend(acc, total, top, q_MD, k_desc, v_desc, batch, head // group, row, whole, count, limits_M,
                              scale_log2, N, D, True, PRECISION)
    some = total > 0
    safe = tl.where(some, total, 1.0)
    store_rows(out_desc, batch, head, tile * ROWS, acc / safe[:, None], PACK, ROWS, D)
    natural = tl.where(some, (top + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + offset, natural, mask=rows < q_len)


@triton.jit
def _query_tiles(dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head, row, begin, end, limits_M,
                 scale_log2, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """dq / scale of a tile of queries, summed over the listed key tiles row[begin:end]."""
    tile = tl.load(row + begin, mask=begin < end, other=0)
    for n in tl.range(begin, end):
        following = tl.load(row + n + 1, mask=n + 1 < end, other=0)
        k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
        v_ND = load_tile(v_desc, batch, head, tile * N, N, D)
        s = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        dp = tl.dot(dout_MD, v_ND.T, input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse_M[:, None])
        if MASKED:
            p = tl.where(tile * N + tl.arange(0, N)[None, :] < limits_M[:, None], p, 0.0)
        ds = (p * (dp - delta_M[:, None])).to(k_ND.dtype)
        dq_MD = tl.dot(ds, k_ND, dq_MD, input_precision=PRECISION)
        tile = following
    return dq_MD


@triton.jit
def query_gradient_kernel(q_desc, k_desc, v_desc, dout_desc, dq_desc, lse, delta, full, counts, indices, order, limits,
                          mask_heads, tiles, longest, q_len, q_heads, group, heads_per_section, scale, scale_log2,
                          PACK: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
                          PRECISION: tl.constexpr):
    """dq of one tile of ROWS queries of PACK heads."""
    tile, batch, pack, mask_head = _place(order, tiles, mask_heads, q_heads // PACK, heads_per_section)
    head = pack * PACK
    rows, offset = _packed(batch, head, q_heads, q_len, tile, PACK, ROWS)
    limits_M = tl.load(limits + rows, mask=rows < q_len, other=0)
    lse_M = tl.load(lse + offset, mask=rows < q_len, other=float("inf")) * 1.4426950408889634
    delta_M = tl.load(delta + offset, mask=rows < q_len, other=0.0)
    at = mask_head * tiles + tile
    row, whole, count = indices + at.to(tl.int64) * longest, tl.load(full + at), tl.load(counts + at)
    q_MD = load_rows(q_desc, batch, head, tile * ROWS, PACK, ROWS, D)
    dout_MD = load_rows(dout_desc, batch, head, tile * ROWS, PACK, ROWS, D)
    dq_MD = tl.zeros([PACK * ROWS, D], tl.float32)
    dq_MD = _query_tiles(dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head // group, row, 0, whole,
                         limits_M, scale_log2, N, D, False, PRECISION)
    dq_MD = _query_tiles(dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head // group, row, whole, count,
                         limits_M, scale_log2, N, D, True, PRECISION)
    store_rows(dq_desc, batch, head, tile * ROWS, dq_MD * scale, PACK, ROWS, D)


@triton.jit
def _key_tiles(dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, limits, batch, head, row, begin, end, keys,
               q_len, q_heads, scale_log2, M: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
               PRECISION: tl.constexpr):
    """dk / scale and dv of a tile of keys, summed over the listed query tiles row[begin:end] of one head."""
    tile = tl.load(row + begin, mask=begin < end, other=0)
    for n in tl.range(begin, end):
        following = tl.load(row + n + 1, mask=n + 1 < end, other=0)
        rows, offset = _packed(batch, head, q_heads, q_len, tile, 1, M)
        q_MD = load_tile(q_desc, batch, head, tile * M, M, D)
        lse_M = tl.load(lse + offset, mask=rows < q_len, other=float("inf")) * 1.4426950408889634
        s_NM = tl.dot(k_ND, q_MD.T, input_precision=PRECISION)
        dout_MD = load_tile(dout_desc, batch, head, tile * M, M, D)
        dp_NM = tl.dot(v_ND, dout_MD.T, input_precision=PRECISION)
        p_NM = tl.exp2(s_NM * scale_log2 - lse_M[None, :])
        if MASKED:
            limits_M = tl.load(limits + rows, mask=rows < q_len, other=0)
            p_NM = tl.where(keys[:, None] < limits_M[None, :], p_NM, 0.0)
        dv_ND = tl.dot(p_NM.to(dout_MD.dtype), dout_MD, dv_ND, input_precision=PRECISION)
        delta_M = tl.load(delta + offset, mask=rows < q_len, other=0.0)
        ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
        dk_ND = tl.dot(ds_NM, q_MD, dk_ND, input_precision=PRECISION)
        tile = following
    return dk_ND, dv_ND


@triton.jit
def key_gradient_kernel(q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse, delta, full, counts, indices, order,
                        limits, mask_heads, tiles, longest, q_len, q_heads, group, heads_per_section, scale,
                        scale_log2, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv of one tile of N keys of one kv head; the lists are those of the transposed mask."""
    kv_heads = q_heads // group
    tile, batch, head, _ = _place(order, tiles, mask_heads, kv_heads, heads_per_section)
    keys = tile * N + tl.arange(0, N)
    k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
    v_ND = load_tile(v_desc, batch, head, tile * N, N, D)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    for q_head in range(head * group, (head + 1) * group):
        at = q_head * mask_heads // q_heads * tiles + tile
        row, whole, count = indices + at.to(tl.int64) * longest, tl.load(full + at), tl.load(counts + at)
        dk_ND, dv_ND = _key_tiles(dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, limits, batch, q_head, row,
                                  0, whole, keys, q_len, q_heads, scale_log2, M, D, False, PRECISION)
        dk_ND, dv_ND = _key_tiles(dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, limits, batch, q_head, row,
                                  whole, count, keys, q_len, q_heads, scale_log2, M, D, True, PRECISION)
    store_tile(dk_desc, batch, head, tile * N, dk_ND * scale, N, D)
    store_tile(dv_desc, batch, head, tile * N, dv_ND, N, D)
