"""Triton kernels of flashmask: forward, delta, and the backward in a q-major and a kv-major pass.

Notation: q_MD is a tile of M queries, k_ND a tile of N keys; S = scale * q k^T, P = exp(S - lse).
A row of tiles visits *runs* of tiles: full runs need no mask code, partial ones are masked by the row's
intervals. Runs are walked in one flat loop, so that the software pipeline never drains between runs.
All tensors come as descriptors [B, H, S, D] (64-bit addresses, edges read 0 and writes past them are
dropped); lse and delta are float32 [B, H, S] behind 64-bit offsets. Dao, FlashAttention-2, 2023,
algorithms 1 and 2; Wang et al., FlashMask, 2024.
"""

import triton
import triton.language as tl


@triton.jit
def _runs(begin, end, slots):
    """Number of tiles and of runs of a row; an absent run has begin == end and stands last."""
    tiles, runs = 0, 0
    for r in range(slots):
        length = tl.load(end + r) - tl.load(begin + r)
        tiles += length
        runs += (length > 0).to(tl.int32)
    return tiles, runs


@triton.jit
def _advance(begin, end, runs, head, run, tile, stop):
    """The place after (head, run, tile): the next tile of the run, the next run, the next head's first run."""
    tile += 1
    turn = tile >= stop
    run += turn.to(tl.int32)
    head += (run >= runs).to(tl.int32)
    run = tl.where(run >= runs, 0, run)
    tile = tl.where(turn, tl.load(begin + run), tile)
    return head, run, tile, tl.load(end + run)


@triton.jit
def seen(starts, ends, rows, cols, length, R: tl.constexpr):
    """Visible cells [rows, cols] of a tile; intervals are those of `rows`, of which there are `length`."""
    cells = _between(starts, ends, rows, cols, length)
    if R == 2:
        cells = cells | _between(starts + length, ends + length, rows, cols, length)
    else:
        for r in range(1, R):  # no named pattern comes here: not worth unrolling
            cells = cells | _between(starts + r * length, ends + r * length, rows, cols, length)
    return cells


@triton.jit
def _between(starts, ends, rows, cols, length):
    lo = tl.load(starts + rows, mask=rows < length, other=0)
    hi = tl.load(ends + rows, mask=rows < length, other=0)
    return (cols[None, :] >= lo[:, None]) & (cols[None, :] < hi[:, None])


@triton.jit
def _place(order, tiles, heads_per_section):
    """(tile, batch * head) of this program: tiles in `order`, heads of a section side by side to share L2."""
    per = tiles * heads_per_section
    section, rest = tl.program_id(0) // per, tl.program_id(0) % per
    return tl.load(order + rest // heads_per_section), section * heads_per_section + rest % heads_per_section


@triton.jit
def _place_in_phases(order, heavy, heads):
    """(tile, batch * head) of this program: `heavy` tiles head after head, then the others with heads side by side."""
    program, many = tl.program_id(0), tl.maximum(heavy, 1)
    rest = program - heavy * heads
    rank = tl.where(rest < 0, program % many, heavy + rest // heads)
    return tl.load(order + rank), tl.where(rest < 0, program // many, rest % heads)


@triton.jit
def load_tile(desc, batch, head, row, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows of one head as one matrix [ROWS, D]."""
    return desc.load([batch, head, row, 0]).reshape(ROWS, D)


@triton.jit
def store_tile(desc, batch, head, row, x, ROWS: tl.constexpr, D: tl.constexpr):
    """Writes x back to the rows of one head that `load_tile` reads, in their dtype."""
    desc.store([batch, head, row, 0], x.to(desc.dtype).reshape(1, 1, ROWS, D))


@triton.jit
def _attend(acc, total, top, q_MD, k_desc, v_desc, batch, head, begin, end, slots, starts, ends, rows, q_len,
            scale_log2, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
            PRECISION: tl.constexpr):
    """Online softmax over the tiles of a row's runs; MASKED applies the intervals."""
    count, runs = _runs(begin, end, slots)
    zero, run, tile, stop = 0, 0, tl.load(begin), tl.load(end)
    for _ in tl.range(count):
        k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
        s = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        if MASKED:
            s = tl.where(seen(starts, ends, rows, tile * N + tl.arange(0, N), q_len, R), s, float("-inf"))
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
        zero, run, tile, stop = _advance(begin, end, runs, zero, run, tile, stop)
    return acc, total, top


@triton.jit
def forward_kernel(q_desc, k_desc, v_desc, out_desc, lse, earlier_desc, before, starts, ends, full_begin, full_end,
                   partial_begin, partial_end, order, full_slots, partial_slots, q_len, q_heads, group,
                   heads_per_section, scale_log2, sign, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   D: tl.constexpr, PRECISION: tl.constexpr, ADDS: tl.constexpr, IN_PLACE: tl.constexpr):
    """out and lse of one tile of M queries of one head.

    ADDS: merged with an earlier out and the lse `before`, of other keys; IN_PLACE: the earlier out is where out goes,
    so that a tile that sees nothing is left alone. lse is not written in place: every warp reads all rows' lse, and a
    late one would read what another has written.
    """
    tile, place = _place(order, tl.cdiv(q_len, M), heads_per_section)
    batch, head = place // q_heads, place % q_heads
    rows = tile * M + tl.arange(0, M)
    q_MD = load_tile(q_desc, batch, head, tile * M, M, D)
    q_MD = (q_MD * sign).to(q_MD.dtype)  # exact; and moves q to registers, which frees shared memory and its ports
    acc = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    acc, total, top = _attend(
        acc, total, top, q_MD, k_desc, v_desc, batch, head // group, full_begin + tile * full_slots,
        full_end + tile * full_slots, full_slots, starts, ends, rows, q_len, scale_log2, R, N, D, False, PRECISION)
    acc, total, top = _attend(
        acc, total, top, q_MD, k_desc, v_desc, batch, head // group, partial_begin + tile * partial_slots,
        partial_end + tile * partial_slots, partial_slots, starts, ends, rows, q_len, scale_log2, R, N, D, True,
        PRECISION)
    some = total > 0
    safe = tl.where(some, total, 1.0)
    natural = tl.where(some, (top + tl.log2(safe)) * 0.6931471805599453, float("-inf"))
    at_lse, held = place.to(tl.int64) * q_len + rows, rows < q_len
    if not ADDS:
        store_tile(out_desc, batch, head, tile * M, acc / safe[:, None], M, D)
    else:
        old = tl.load(before + at_lse, mask=held, other=float("-inf"))
        top = tl.maximum(old, natural)
        top = tl.where(top == float("-inf"), 0.0, top)
        old, new = tl.exp2((old - top) * 1.4426950408889634), tl.exp2((natural - top) * 1.4426950408889634)
        some = old + new > 0
        both = tl.where(some, old + new, 1.0)
        natural = tl.where(some, top + tl.log2(both) * 0.6931471805599453, float("-inf"))
        if (tl.max(total, 0) > 0) | (not IN_PLACE):
            out_MD = load_tile(earlier_desc, batch, head, tile * M, M, D) * (old / both)[:, None]
            store_tile(out_desc, batch, head, tile * M, out_MD + acc * (new / (both * safe))[:, None], M, D)
    tl.store(lse + at_lse, natural, mask=held)


@triton.jit
def delta_kernel(out_desc, dout_desc, delta, q_len, q_heads, M: tl.constexpr, D: tl.constexpr):
    """delta = rowsum(out * dout) of one tile of M queries of one head."""
    tiles = tl.cdiv(q_len, M)
    tile, place = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    batch, head = place // q_heads, place % q_heads
    out = load_tile(out_desc, batch, head, tile * M, M, D).to(tl.float32)
    dout = load_tile(dout_desc, batch, head, tile * M, M, D).to(tl.float32)
    rows = tile * M + tl.arange(0, M)
    tl.store(delta + place.to(tl.int64) * q_len + rows, tl.sum(out * dout, 1), mask=rows < q_len)


@triton.jit
def _query_tiles(dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head, begin, end, slots, starts, ends,
                 rows, q_len, scale_log2, R: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
                 PRECISION: tl.constexpr):
    """dq / scale of a tile of queries, summed over the key tiles of its runs."""
    count, runs = _runs(begin, end, slots)
    zero, run, tile, stop = 0, 0, tl.load(begin), tl.load(end)
    for _ in tl.range(count):
        k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
        v_ND = load_tile(v_desc, batch, head, tile * N, N, D)
        s = tl.dot(q_MD, k_ND.T, input_precision=PRECISION)
        dp = tl.dot(dout_MD, v_ND.T, input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse_M[:, None])
        if MASKED:
            p = tl.where(seen(starts, ends, rows, tile * N + tl.arange(0, N), q_len, R), p, 0.0)
        ds = (p * (dp - delta_M[:, None])).to(k_ND.dtype)
        dq_MD = tl.dot(ds, k_ND, dq_MD, input_precision=PRECISION)
        zero, run, tile, stop = _advance(begin, end, runs, zero, run, tile, stop)
    return dq_MD


@triton.jit
def query_gradient_kernel(q_desc, k_desc, v_desc, dout_desc, dq_desc, lse, delta, starts, ends, full_begin, full_end,
                          partial_begin, partial_end, order, full_slots, partial_slots, q_len, q_heads, group,
                          heads_per_section, scale, scale_log2, sign, R: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                          D: tl.constexpr, PRECISION: tl.constexpr, ADDS: tl.constexpr):
    """dq of one tile of M queries of one head; ADDS: added to what is there, of other keys."""
    tile, place = _place(order, tl.cdiv(q_len, M), heads_per_section)
    batch, head = place // q_heads, place % q_heads
    rows = tile * M + tl.arange(0, M)
    offset = place.to(tl.int64) * q_len + rows
    q_MD = load_tile(q_desc, batch, head, tile * M, M, D)
    q_MD = (q_MD * sign).to(q_MD.dtype)  # exact; and moves q to registers, which frees shared memory and its ports
    dout_MD = load_tile(dout_desc, batch, head, tile * M, M, D)
    lse_M = tl.load(lse + offset, mask=rows < q_len, other=float("inf")) * 1.4426950408889634
    delta_M = tl.load(delta + offset, mask=rows < q_len, other=0.0)
    dq_MD = tl.zeros([M, D], tl.float32)
    dq_MD = _query_tiles(
        dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head // group, full_begin + tile * full_slots,
        full_end + tile * full_slots, full_slots, starts, ends, rows, q_len, scale_log2, R, N, D, False, PRECISION)
    dq_MD = _query_tiles(
        dq_MD, q_MD, dout_MD, lse_M, delta_M, k_desc, v_desc, batch, head // group,
        partial_begin + tile * partial_slots, partial_end + tile * partial_slots, partial_slots, starts, ends, rows,
        q_len, scale_log2, R, N, D, True, PRECISION)
    dq_MD *= scale
    if ADDS:
        dq_MD += load_tile(dq_desc, batch, head, tile * M, M, D)
    store_tile(dq_desc, batch, head, tile * M, dq_MD, M, D)


@triton.jit
def _key_tiles(dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, batch, first_head, group, begin, end,
               slots, starts, ends, keys, q_len, kv_len, q_heads, scale_log2, R: tl.constexpr, M: tl.constexpr,
               D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """dk / scale and dv of a tile of keys, summed over heads of the group and query tiles of the runs."""
    count, runs = _runs(begin, end, slots)
    head, run, tile, stop = first_head, 0, tl.load(begin), tl.load(end)
    for _ in tl.range(count * group):
        rows = tile * M + tl.arange(0, M)
        offset = (batch * q_heads + head).to(tl.int64) * q_len + rows
        q_MD = load_tile(q_desc, batch, head, tile * M, M, D)
        lse_M = tl.load(lse + offset, mask=rows < q_len, other=float("inf")) * 1.4426950408889634
        s_NM = tl.dot(k_ND, q_MD.T, input_precision=PRECISION)
        dout_MD = load_tile(dout_desc, batch, head, tile * M, M, D)
        dp_NM = tl.dot(v_ND, dout_MD.T, input_precision=PRECISION)
        p_NM = tl.exp2(s_NM * scale_log2 - lse_M[None, :])
        if MASKED:
            p_NM = tl.where(seen(starts, ends, keys, rows, kv_len, R), p_NM, 0.0)
        dv_ND = tl.dot(p_NM.to(dout_MD.dtype), dout_MD, dv_ND, input_precision=PRECISION)
        delta_M = tl.load(delta + offset, mask=rows < q_len, other=0.0)
        ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(q_MD.dtype)
        dk_ND = tl.dot(ds_NM, q_MD, dk_ND, input_precision=PRECISION)
        head, run, tile, stop = _advance(begin, end, runs, head, run, tile, stop)
    return dk_ND, dv_ND


@triton.jit(do_not_specialize=["heavy"])
def key_gradient_kernel(q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse, delta, starts, ends,
                        full_begin, full_end, partial_begin, partial_end, order, full_slots, partial_slots, q_len,
                        kv_len, q_heads, group, splits, heavy, heads, scale, scale_log2, R: tl.constexpr,
                        M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """A share of dk and dv of one tile of N keys; runs and intervals are those of the transposed mask.

    `splits` programs share a kv head, each sums over `group` of its query heads into a head of dk and dv of its own.
    """
    tile, place = _place_in_phases(order, heavy, heads)
    shares = q_heads // group
    batch, share = place // shares, place % shares
    head = share // splits
    keys = tile * N + tl.arange(0, N)
    k_ND = load_tile(k_desc, batch, head, tile * N, N, D)
    v_ND = load_tile(v_desc, batch, head, tile * N, N, D)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)
    dk_ND, dv_ND = _key_tiles(
        dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, batch, share * group, group,
        full_begin + tile * full_slots, full_end + tile * full_slots, full_slots, starts, ends, keys, q_len, kv_len,
        q_heads, scale_log2, R, M, D, False, PRECISION)
    dk_ND, dv_ND = _key_tiles(
        dk_ND, dv_ND, k_ND, v_ND, q_desc, dout_desc, lse, delta, batch, share * group, group,
        partial_begin + tile * partial_slots, partial_end + tile * partial_slots, partial_slots, starts, ends, keys,
        q_len, kv_len, q_heads, scale_log2, R, M, D, True, PRECISION)
    store_tile(dk_desc, batch, share, tile * N, dk_ND * scale, N, D)
    store_tile(dv_desc, batch, share, tile * N, dv_ND, N, D)
