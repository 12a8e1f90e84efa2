"""The merge of partial results as one pass over memory: a row of both parts is read once and written once.

out takes the place of the first part's; lse does not. Every warp of a program reads all of its rows' lse, and a warp
that is late would read what another one has written already.
"""

import torch
import triton
import triton.language as tl

ROWS = 32  # of one head and program; 32 rows of 128 float32 are 16 KB
LEAST_COLUMNS = 16  # each element of out is read and written by one thread, of which there are fewer than elements


@triton.jit
def merge_kernel(out_a, lse_a, out_b, lse_b, lse, seq, heads, dim, M: tl.constexpr, D: tl.constexpr):
    """out_a, lse := the merge of a and b. out float32 [B, S, H, D] contiguous, lse float32 [B, H, S] contiguous."""
    tiles = tl.cdiv(seq, M)
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles  # head counts batch and head
    row = tile * M + tl.arange(0, M)
    col = tl.arange(0, D)
    held = row < seq
    at_lse = head.to(tl.int64) * seq + row
    a = tl.load(lse_a + at_lse, mask=held, other=float("-inf"))
    b = tl.load(lse_b + at_lse, mask=held, other=float("-inf"))
    top = tl.maximum(a, b)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - top), tl.exp(b - top)
    total = weight_a + weight_b
    some = total > 0
    safe = tl.where(some, total, 1.0)
    tl.store(lse + at_lse, tl.where(some, top + tl.log(safe), float("-inf")), mask=held)
    token = (head // heads).to(tl.int64) * seq + row
    at = (token * heads + head % heads)[:, None] * dim + col[None, :]
    inside = held[:, None] & (col < dim)[None, :]
    x = tl.load(out_a + at, mask=inside, other=0.0)
    y = tl.load(out_b + at, mask=inside, other=0.0)
    tl.store(out_a + at, x * (weight_a / safe)[:, None] + y * (weight_b / safe)[:, None], mask=inside)


def merge_into(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Merges b into out_a and returns the merged lse. All float32 and contiguous; out [B, S, H, D], lse [B, H, S]."""
    b, s, h, d = out_a.shape
    for x, shape in ((out_a, (b, s, h, d)), (out_b, (b, s, h, d)), (lse_a, (b, h, s)), (lse_b, (b, h, s))):
        if tuple(x.shape) != shape or x.dtype != torch.float32 or not x.is_contiguous():
            raise ValueError(f"merge: {x.dtype} of shape {tuple(x.shape)}, need contiguous float32 of {shape}")
    lse = torch.empty_like(lse_a)
    if out_a.numel():
        merge_kernel[(triton.cdiv(s, ROWS) * b * h,)](
            out_a, lse_a, out_b, lse_b, lse, s, h, d, M=ROWS, D=max(LEAST_COLUMNS, triton.next_power_of_2(d)),
            num_warps=4)
    return lse
