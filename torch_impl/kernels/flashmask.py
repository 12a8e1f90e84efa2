"""flashmask: our Triton kernel on row intervals, all static masks, forward and backward.

The forward pass and dq walk, per tile of queries, the runs of key tiles that the mask's rows see; dk and dv
walk, per tile of keys, the runs of query tiles of the transposed mask, for all heads of the group.
Metadata is O(q_len + kv_len). Wang et al., FlashMask, 2024; Dao, FlashAttention-2, 2023.
"""

import dataclasses
import functools
import math

import numpy as np
import torch

from torch_impl.kernels import triton_support as support
from torch_impl.kernels.base import Kernel, Running
from torch_impl.kernels.walks import Launch, RunWalk, head_by_head, longest_load, ragged_runs, run_walk
from workload.capability import ALL_STATIC, Capability
from workload.errors import Unsupported
from workload.masks import IntervalMask
from workload.problem import AttentionProblem

NAME = "flashmask"
# The model behind `_key_splits`, for an H200: a step is a tile of 64 x 64 at 128 columns, 2 microseconds when two
# programs share a processor; a float of a share is written and read at 4 TB/s.
PROGRAMS_PER_PROCESSOR = 2
STEPS_PER_PROGRAM = 4
STEPS_PER_FLOAT = 8 / 4e12 / 2e-6
MANY_WAVES = 16  # past so many programs a slot the last wave is too short to matter
WORTHWHILE = 0.95  # the model is not better than that


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of a problem: forward, dk and dv (keys own the tiles), dq.

    key_splits: programs that share the query heads of a kv head in the key pass; key_heavy: how many of its heaviest
      tiles go head after head; None chooses by the mask.
    """

    forward: Launch
    key: Launch
    query: Launch
    key_splits: int | None = None
    key_heavy: int | None = None


@dataclasses.dataclass(frozen=True)
class FlashMaskOperands:
    """The walks of the three passes; of the key pass how many programs share a kv head, and how many of its heaviest
    tiles go head after head (`walks.head_by_head`).
    """

    forward: RunWalk
    key: RunWalk
    query: RunWalk
    key_splits: int
    key_heavy: int


def launches_for(head_dim: int, dtype: torch.dtype, arch: int) -> Launches:
    """Launches chosen by measurement on an H200 (arch 9); elsewhere small enough for 100 KB of shared memory.

    Args:
      head_dim: of the problem; dtype: of q; arch: major compute capability, 0 under the interpreter.
    """
    dim = support.padded_dim(head_dim)
    if arch == 0:
        return Launches(Launch(64, 64, 4, 1), Launch(64, 64, 4, 1), Launch(64, 32, 4, 1))
    if dtype == torch.float32:
        cols = 32 if dim <= 128 else 16
        return Launches(Launch(64, cols, 4, 2), Launch(32, cols, 4, 1), Launch(32, cols, 4, 1))
    if arch == 9 and dim <= 128:
        return Launches(Launch(64, 64, 4, 3), Launch(64, 64, 4, 2 if dim > 64 else 3), Launch(64, 64, 4, 3))
    if arch == 9:  # not measured: the shapes that spill least
        return Launches(Launch(64, 64, 4, 2), Launch(64, 32, 8, 1), Launch(64, 32, 4, 2))
    if dim <= 128:
        return Launches(Launch(128, 64, 4 if dim <= 64 else 8, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 2))
    return Launches(Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1))


def prepare(problem: AttentionProblem, device=None, *, launches: Launches | None = None) -> FlashMaskOperands:
    """The walks of a mask on the device; O(q_len + kv_len) time and memory.

    Args:
      launches: tile sizes and launch shapes other than the measured ones (for tuning).

    Raises: `Unsupported` where a row of head_dim is not whole 16-byte units.
    """
    dtype = getattr(torch, problem.dtype)
    support.require_head_dim(NAME, problem.head_dim, dtype)
    chosen = launches or launches_for(problem.head_dim, dtype, support.arch(device))
    forward = run_walk(problem.mask, chosen.forward, device)
    by_key = problem.mask.transpose()
    key = run_walk(by_key, chosen.key, device)
    splits = chosen.key_splits or _key_splits(problem, by_key, chosen.key, device)
    if problem.group % splits:
        raise Unsupported(f"torch kernel {NAME}", f"key_splits {splits} with {problem.group} query heads a kv head")
    same = (chosen.query.rows, chosen.query.cols) == (chosen.forward.rows, chosen.forward.cols)
    query = dataclasses.replace(forward, launch=chosen.query) if same else run_walk(problem.mask, chosen.query, device)
    heavy = chosen.key_heavy
    if heavy is None:
        heavy = head_by_head(key.loads, problem.batch * problem.kv_heads * splits, slots(device))
    elif not 0 <= heavy <= len(key.loads):
        raise Unsupported(f"torch kernel {NAME}", f"key_heavy {heavy} of {len(key.loads)} tiles")
    return FlashMaskOperands(forward, key, query, splits, heavy)


def slots(device) -> int:
    """Programs of the key pass that run at a time; few under the interpreter: a small problem shows both orders."""
    if torch.device(device or "cpu").type != "cuda":
        return PROGRAMS_PER_PROCESSOR
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _key_splits(problem: AttentionProblem, by_key: IntervalMask, launch: Launch, device) -> int:
    """How many programs share a kv head in the key pass: the fewest estimated steps of the longest-loaded slot.

    One long list of query tiles times a large group can outlast all other work (a question that every answer sees),
    and few equal programs leave the last wave half empty; but shares must be summed through memory.
    """
    if torch.device(device or "cpu").type != "cuda":
        return 1
    at_a_time = slots(device)
    heads = problem.batch * problem.kv_heads
    if -(-by_key.q_len // launch.rows) * heads > MANY_WAVES * at_a_time:
        return 1
    runs = ragged_runs(by_key, launch.rows, launch.cols)
    lengths = -np.sort(-(runs.full_count + runs.partial_count))
    floats = 2 * problem.batch * problem.kv_len * problem.kv_heads * problem.head_dim
    cost = {}
    for splits in (n for n in (1, 2, 4, 8) if problem.group % n == 0):
        steps = lengths * (problem.group // splits) + STEPS_PER_PROGRAM
        through_memory = 0 if splits == 1 else splits * floats * STEPS_PER_FLOAT
        heavy = head_by_head(steps, heads * splits, at_a_time)
        jobs = np.concatenate([np.tile(steps[:heavy], heads * splits), np.repeat(steps[heavy:], heads * splits)])
        cost[splits] = longest_load(jobs, at_a_time) + through_memory
    best = min(cost, key=cost.get)
    return best if cost[best] < WORTHWHILE * cost[1] else 1


def _split_scale(scale: float) -> tuple[float, float]:
    """(sign, size), size > 0, of a logit scale: the kernels take a row's maximum before they scale it.

    >>> _split_scale(-0.5), _split_scale(0.0)
    ((-1.0, 0.5), (0.0, 1.0))
    """
    return (math.copysign(1.0, scale), abs(scale)) if scale else (0.0, 1.0)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if not q.shape[1] or not k.shape[1]:
        return out.zero_(), lse.fill_(-torch.inf)
    _write_forward(q, k, v, out, lse, None, operands.forward, scale)
    return out, lse


def _write_forward(q, k, v, out, lse, before, walk, scale):
    """Writes out and lse, merged with those `before`, of other keys, if any: out float32, which may be this out."""
    from torch_impl.kernels.flashmask_triton import forward_kernel  # needs triton

    launch = walk.launch
    (b, q_len, q_heads, d), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    q, k, v = (support.computed(x) for x in (q, k, v))
    sign, size = _split_scale(scale)
    group, dim = q_heads // kv_heads, support.padded_dim(d)
    section = group * support.heads_per_section(b * kv_heads, 2 * kv_len * d * k.element_size())
    earlier, lse_before = before or (out, lse)
    forward_kernel[(walk.order.shape[0] * b * q_heads,)](
        support.descriptor(q, launch.rows, dim), support.descriptor(k, launch.cols, dim),
        support.descriptor(v, launch.cols, dim), support.descriptor(out, launch.rows, dim), lse,
        support.descriptor(earlier, launch.rows, dim), lse_before, *walk.arguments(), q_len, q_heads, group, section,
        size * support.LOG2E, sign, R=walk.starts.shape[0], M=launch.rows, N=launch.cols, D=dim,
        PRECISION=support.precision(q), ADDS=before is not None, IN_PLACE=earlier is out, **launch.options())


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse, out and delta may belong to a larger problem; see WORKSPACE.md for the contract."""
    query, keys = gradient_parts(None, q, k, v, out, lse, dout, operands, scale, grad_dtype=grad_dtype, delta=delta)
    return query(), *keys()


def gradient_parts(total, q, k, v, out, lse, dout, operands, scale, *, grad_dtype, delta=None):
    """(query, keys): query() writes dq, or adds to a `total` that is there, and returns it; keys() returns dk, dv."""
    empty, key = not q.shape[1] or not k.shape[1], k
    dq = torch.empty(q.shape, dtype=grad_dtype or q.dtype, device=q.device) if total is None else total
    if not empty:
        q, k, v, dout = (support.computed(x) for x in (q, k, v, dout.to(q.dtype)))
        delta = (support.row_delta(out, dout) if delta is None else delta).contiguous()
        lse = lse.contiguous()

    def query():
        if not empty:
            query_gradient(q, k, v, dout, dq, lse, delta, operands.query, scale, adds=total is not None)
        elif total is None:
            dq.zero_()
        return dq

    def keys():
        dk, dv = (torch.empty(key.shape, dtype=grad_dtype or key.dtype, device=key.device) for _ in "kv")
        if empty:
            return dk.zero_(), dv.zero_()
        if operands.key_splits == 1:
            key_gradient(q, k, v, dout, dk, dv, lse, delta, operands.key, operands.key_heavy, scale)
            return dk, dv
        shares = (*k.shape[:2], k.shape[2] * operands.key_splits, k.shape[3])
        parts = [torch.empty(shares, dtype=torch.float32, device=k.device) for _ in range(2)]
        key_gradient(q, k, v, dout, *parts, lse, delta, operands.key, operands.key_heavy, scale)
        for whole, part in zip((dk, dv), parts, strict=True):
            whole.copy_(part.unflatten(2, (k.shape[2], operands.key_splits)).sum(dim=3))
        return dk, dv

    return query, keys


def query_gradient(q, k, v, dout, dq, lse, delta, walk, scale, *, adds: bool = False):
    """Writes dq, or adds to what is there, query tile by query tile."""
    from torch_impl.kernels.flashmask_triton import query_gradient_kernel

    launch, dim = walk.launch, support.padded_dim(q.shape[3])
    (b, q_len, q_heads, d), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    rows, cols = ((lambda x, n=n: support.descriptor(x, n, dim)) for n in (launch.rows, launch.cols))
    group, (sign, size) = q_heads // kv_heads, _split_scale(scale)
    section = group * support.heads_per_section(b * kv_heads, 2 * kv_len * d * k.element_size())
    query_gradient_kernel[(walk.order.shape[0] * b * q_heads,)](
        rows(q), cols(k), cols(v), rows(dout), rows(dq), lse, delta, *walk.arguments(), q_len, q_heads, group, section,
        scale, size * support.LOG2E, sign, R=walk.starts.shape[0], M=launch.rows, N=launch.cols, D=dim,
        PRECISION=support.precision(q), ADDS=adds, **launch.options())


def key_gradient(q, k, v, dout, dk, dv, lse, delta, walk, heavy, scale):
    """Writes dk and dv, key tile by key tile; they have the heads of k, or several shares of each.

    heavy: how many of the heaviest tiles go head after head.
    """
    from torch_impl.kernels.flashmask_triton import key_gradient_kernel

    launch, dim = walk.launch, support.padded_dim(q.shape[3])
    (b, q_len, q_heads, _), kv_len, shares = q.shape, k.shape[1], dk.shape[2]
    rows, cols = ((lambda x, n=n: support.descriptor(x, n, dim)) for n in (launch.rows, launch.cols))
    key_gradient_kernel[(walk.order.shape[0] * b * shares,)](
        cols(q), rows(k), rows(v), cols(dout), rows(dk), rows(dv), lse, delta, *walk.arguments(), q_len, kv_len,
        q_heads, q_heads // shares, shares // k.shape[2], heavy, b * shares, scale, scale * support.LOG2E,
        R=walk.starts.shape[0], M=launch.cols, N=launch.rows, D=dim, PRECISION=support.precision(q),
        **launch.options())


def _add_forward(part, q, k, v, operands, scale, *, out_dtype=torch.float32):
    if part is None:
        return forward(q, k, v, operands, scale, out_dtype=out_dtype)
    out, before = part
    if not q.shape[1] or not k.shape[1]:
        return out.to(out_dtype), before
    made = out if out.dtype == out_dtype else torch.empty(out.shape, dtype=out_dtype, device=out.device)
    lse = torch.empty_like(before)
    _write_forward(q, k, v, made, lse, part, operands.forward, scale)
    return made, lse


def _add_backward(total, q, k, v, out, lse, dout, operands, scale, *, delta):
    query, keys = gradient_parts(total, q, k, v, out, lse, dout, operands, scale, grad_dtype=torch.float32, delta=delta)
    return query(), *keys()


KERNEL = Kernel(
    NAME,
    Capability(ALL_STATIC, source="own, Triton: row intervals"),
    prepare,
    forward,
    backward,
    support.available,
    Running(_add_forward, _add_backward, functools.partial(gradient_parts, grad_dtype=torch.float32)),
)
