"""fa1: FlashAttention-1's schedule in Triton, under any interval mask.

One program per head; keys are the outer loop, queries the inner one; out, the running maximum and sum, and dq
lie in memory between key tiles. Dao et al., FlashAttention, 2022, algorithms 1 and 4 (5 for the empty tiles).
"""

import dataclasses

import torch

from torch_impl.kernels import triton_support as support
from torch_impl.kernels.base import Kernel
from torch_impl.kernels.walks import Launch, RunWalk, run_walk
from workload.capability import ALL_STATIC, Capability
from workload.problem import AttentionProblem

NAME = "fa1"


@dataclasses.dataclass(frozen=True)
class Fa1Operands:
    """The walk of the transposed mask: keys own the tiles."""

    key: RunWalk


def launch_for(head_dim: int, dtype: torch.dtype, arch: int) -> Launch:
    """Tile sizes and launch shape of both passes; arguments as in flashmask.launches_for."""
    if arch == 0:
        return Launch(64, 64, 4, 1)
    if dtype == torch.float32 or head_dim > 128:
        return Launch(32, 32, 4, 1)
    return Launch(64, 64, 8, 1) if arch < 9 else Launch(128, 64, 8, 1)


def prepare(problem: AttentionProblem, device=None, *, launch: Launch | None = None) -> Fa1Operands:
    """The walk on the device; O(q_len + kv_len). `launch` replaces the default tile sizes.

    Raises: `Unsupported` where a row of head_dim is not whole 16-byte units.
    """
    dtype = getattr(torch, problem.dtype)
    support.require_head_dim(NAME, problem.head_dim, dtype)
    launch = launch or launch_for(problem.head_dim, dtype, support.arch(device))
    return Fa1Operands(run_walk(problem.mask.transpose(), launch, device))


def _padded(b, s, h, d, device):
    """Zeroed float32 [B, S, H, padded head_dim]: what the kernels read back is addressed without a descriptor."""
    return torch.zeros(b, s, h, support.padded_dim(d), dtype=torch.float32, device=device)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    from torch_impl.kernels.fa1_triton import forward_kernel  # needs triton

    walk, launch = operands.key, operands.key.launch
    (b, q_len, q_heads, d), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    out = _padded(b, q_len, q_heads, d, q.device)
    total = torch.zeros(b, q_heads, q_len, dtype=torch.float32, device=q.device)
    top = torch.full_like(total, -torch.inf)
    want = out_dtype or q.dtype
    if not q_len or not kv_len:
        return out[..., :d].to(want), top
    q, k, v = (support.computed(x) for x in (q, k, v))
    dim = support.padded_dim(d)
    starts, ends, *runs, _, full_slots, partial_slots = walk.arguments()
    forward_kernel[(b * q_heads,)](
        support.descriptor(q, launch.cols, dim), support.descriptor(k, launch.rows, dim),
        support.descriptor(v, launch.rows, dim), out, total, top, starts, ends, *runs, full_slots, partial_slots, q_len,
        kv_len, q_heads, q_heads // kv_heads, scale * support.LOG2E, R=starts.shape[0], M=launch.cols, N=launch.rows,
        D=dim, PRECISION=support.precision(q), **launch.options())
    return out[..., :d].to(want), (top / support.LOG2E + torch.log(total)).masked_fill(total == 0, -torch.inf)


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse, out and delta may belong to a larger problem; see WORKSPACE.md for the contract."""
    from torch_impl.kernels.fa1_triton import backward_kernel

    walk, launch = operands.key, operands.key.launch
    (b, q_len, q_heads, d), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    wants = [grad_dtype or x.dtype for x in (q, k, v)]
    dq = _padded(b, q_len, q_heads, d, q.device)
    dk, dv = (torch.zeros(b, kv_len, q_heads, d, dtype=torch.float32, device=q.device) for _ in range(2))
    if q_len and kv_len:
        q, k, v, dout = (support.computed(x) for x in (q, k, v, dout.to(q.dtype)))
        delta = (support.row_delta(out, dout) if delta is None else delta).contiguous()
        dim = support.padded_dim(d)
        starts, ends, *runs, _, full_slots, partial_slots = walk.arguments()
        rows, cols = ((lambda x, n=n: support.descriptor(x, n, dim)) for n in (launch.rows, launch.cols))
        backward_kernel[(b * q_heads,)](
            cols(q), rows(k), rows(v), cols(dout), dq, rows(dk), rows(dv), lse.contiguous(), delta, starts, ends, *runs,
            full_slots, partial_slots, q_len, kv_len, q_heads, q_heads // kv_heads, scale, scale * support.LOG2E,
            R=starts.shape[0], M=launch.cols, N=launch.rows, D=dim, PRECISION=support.precision(q), **launch.options())
    dk, dv = (x.unflatten(2, (kv_heads, q_heads // kv_heads)).sum(dim=3) for x in (dk, dv))
    return tuple(x.to(t) for x, t in zip((dq[..., :d], dk, dv), wants, strict=True))


KERNEL = Kernel(
    NAME,
    Capability(ALL_STATIC, source="own, Triton: FlashAttention-1's schedule"),
    prepare,
    forward,
    backward,
    support.available,
)
