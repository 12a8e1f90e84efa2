"""What the Hopper kernels share on the host's side: operands, the contract's two passes, the hardware they need."""

import dataclasses
import heapq
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels import hopper_masks
from jax_impl.kernels.base import Running
from jax_impl.kernels.hopper_backward import BackwardTiles, key_major
from jax_impl.kernels.hopper_dq import QueryTiles, query_major
from jax_impl.kernels.hopper_forward import LOG2E, ForwardTiles, round_up
from jax_impl.kernels.hopper_forward import forward as forward_pass
from jax_impl.kernels.hopper_masks import Policy
from workload.capability import HALF, Capability
from workload.errors import Unsupported
from workload.masks import IntervalMask
from workload.problem import AttentionProblem

HEAD_DIMS = (64, 128)
PROCESSORS = 132  # streaming multiprocessors of an H100 or H200; a thread block of these kernels fills one
MANY_BLOCKS = 4096  # with more key tiles than this the tail of a run is short whatever the mask
FEW_HEADS = 4  # kv heads of all batch entries
BLOCK_STEPS = 2.5  # what a block's start and end cost, in steps


def capability(masks: tuple[str, ...], source: str) -> Capability:
    """What every Hopper kernel takes, under these masks."""
    return Capability(masks, dtypes=HALF, head_dims=HEAD_DIMS, devices=("gpu",), source=source)


def missing_hardware() -> str | None:
    """None where the default device is a Hopper GPU, else why the kernels cannot run."""
    if jax.default_backend() != "gpu":
        return f"needs a Hopper GPU, JAX runs on {jax.default_backend()}"
    found = getattr(jax.devices()[0], "compute_capability", "unknown")
    return None if found == "9.0" else f"needs compute capability 9.0, the GPU has {found}"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The schedules of the three passes; hashable, a static part of the operands."""

    forward: ForwardTiles = ForwardTiles()
    key_major: BackwardTiles = BackwardTiles()
    query_major: QueryTiles = QueryTiles()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HopperOperands:
    """A mask as the three passes read it.

    Attributes:
      forward: rows are queries.
      key_major: rows are keys.
      query_major: rows are queries; None unless the backward pass is deterministic.
      tiles: the schedules.
    """

    forward: Policy
    key_major: Policy
    query_major: Policy | None
    tiles: Tiles = dataclasses.field(metadata={"static": True})


def heads_split(problem: AttentionProblem, by_key: IntervalMask, tiles: BackwardTiles) -> int:
    """Thread blocks among which the query heads of a key tile are divided, so that none outlasts all others.

    The least power of two after which list scheduling, heaviest first, ends within a twentieth of the best one's end.
    Ranks share one program, so that of a shard's mask ("custom") must not depend on the intervals: two blocks where
    few kv heads leave few blocks, of which the last can end at twice the mean (a head exchange, long documents).
    """
    group, copies = problem.group, problem.batch * problem.kv_heads
    options = [n for n in (1, 2, 4, 8) if group % n == 0]
    key_tiles = -(-problem.kv_len // tiles.row_tokens)
    if problem.mask.name == "custom":
        return 2 if 2 in options and copies < FEW_HEADS else 1
    if len(options) == 1 or key_tiles * copies > MANY_BLOCKS:
        return 1
    runs = by_key.tile_runs(tiles.row_tokens, tiles.columns)
    steps = np.sort(runs.full_count + 1.3 * runs.partial_count)[::-1]  # a partial tile costs an element test more
    ends = [_list_schedule(np.repeat(steps * group / n + BLOCK_STEPS, n * copies)) for n in options]
    return next(n for n, end in zip(options, ends, strict=True) if end <= 1.05 * min(ends))


def _list_schedule(costs: np.ndarray) -> float:
    """When the last of these blocks ends if each, in this order, goes to the processor that is free first."""
    free = [0.0] * PROCESSORS
    for cost in costs.tolist():
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def default_tiles(problem: AttentionProblem, by_key: IntervalMask) -> Tiles:
    """The schedules that measured best for a head_dim (bench/results/NOTES.md), and the split of `heads_split`.

    by_key: the transpose of the problem's mask.
    """
    backward = BackwardTiles(columns=128 if problem.head_dim == 64 else 64)
    return Tiles(key_major=dataclasses.replace(backward, split=heads_split(problem, by_key, backward)))


def build(query_rows: Callable, key_rows: Callable, tiles: Tiles, deterministic: bool) -> HopperOperands:
    """Operands from two functions (row_tokens, column_tokens) -> Policy, rows being queries and keys."""

    def policy(make, of):
        return make(of.row_tokens, of.columns)

    query_major = policy(query_rows, tiles.query_major) if deterministic else None
    return HopperOperands(policy(query_rows, tiles.forward), policy(key_rows, tiles.key_major), query_major, tiles)


def prepare_intervals(
    problem: AttentionProblem, device=None, *, deterministic: bool = False, tiles: Tiles | None = None
) -> HopperOperands:
    """Operands of any row-interval mask: O(q_len + kv_len) metadata.

    Args:
      deterministic: whether the backward pass is the same bit for bit every time (seven products instead of five).
      tiles: the schedules, or None for the measured ones.
    """
    mask = problem.mask
    by_key = mask.transpose()

    def maker(m: IntervalMask):
        return lambda rows, columns: hopper_masks.intervals(m, rows, columns, device)

    return build(maker(mask), maker(by_key), tiles or default_tiles(problem, by_key), deterministic)


def _positive_scale(q, scale: float):
    """(q, scale > 0, sign) with the same logits: the online softmax takes the maximum before it scales."""
    if scale > 0:
        return q, scale, 1.0
    sign = -1.0 if scale < 0 else 0.0
    return q * jnp.asarray(sign, q.dtype), (-scale if scale else 1.0), sign


def whole_rows(*arrays):
    """The arrays with their sequences padded to a multiple of eight, the rows of a tile that TMA moves."""

    def pad(x):
        extra = round_up(x.shape[1], 8) - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else x

    return tuple(pad(x) for x in arrays)


def forward(q, k, v, operands: HopperOperands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    if not q.size or not k.size:
        lse = jnp.full((q.shape[0], q.shape[2], q.shape[1]), -jnp.inf, jnp.float32)
        return jnp.zeros(q.shape, out_dtype or q.dtype), lse
    return _rows(q, *_forward(None, q, k, v, operands, scale, out_dtype))


def _rows(q, out, lse):
    return out[:, : q.shape[1]], lse[:, :, : q.shape[1]]


def _forward(before, q, k, v, operands, scale, out_dtype=jnp.float32):
    """out, lse, rows padded to whole tiles; merged with those before, if any."""
    q, scale, _ = _positive_scale(q, scale)
    tiles = operands.tiles.forward
    return forward_pass(*whole_rows(q, k, v), operands.forward, scale, tiles, out_dtype=out_dtype, before=before)


def backward(q, k, v, out, lse, dout, operands: HopperOperands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse (and delta) may belong to a larger problem; see WORKSPACE.md for the contract."""
    grad_dtype = jnp.dtype(grad_dtype or q.dtype)
    if not q.size or not k.size:
        return tuple(jnp.zeros(x.shape, grad_dtype) for x in (q, k, v))
    if delta is None:
        delta = jnp.einsum(
            "bshd,bshd->bhs", out, dout, preferred_element_type=jnp.float32, precision="highest")
    if operands.query_major is None:
        dq, dk, dv = _backward(None, q, k, v, lse, dout, operands, scale, delta, grad_dtype)
        return _gradient(dq, q, scale, grad_dtype), dk, dv
    shared, positive, sign = _both_sides(q, k, v, lse, dout, scale, delta)
    _, dk, dv = key_major(*shared, operands.key_major, positive, operands.tiles.key_major, grad_dtype=grad_dtype,
                          with_dq=False)
    dq = query_major(*shared, operands.query_major, positive, operands.tiles.query_major, grad_dtype=grad_dtype)
    dq = dq if sign == 1.0 else dq * jnp.asarray(sign, grad_dtype)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _both_sides(q, k, v, lse, dout, scale, delta):
    """(what the passes read, a scale > 0, the sign of the one given)."""
    padding = ((0, 0), (0, 0), (0, round_up(q.shape[1], 128) - q.shape[1]))
    base2 = jnp.pad(jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E), padding, constant_values=jnp.inf)
    delta = jnp.pad(delta.astype(jnp.float32), padding)
    positive, scale, sign = _positive_scale(q, scale)
    return (*whole_rows(positive, k, v, dout.astype(q.dtype)), base2, delta), scale, sign


def _backward(total, q, k, v, lse, dout, operands, scale, delta, grad_dtype=jnp.float32):
    """dq that `_gradient` is yet to finish, added to that of other keys, if any; dk, dv."""
    shared, scale, _ = _both_sides(q, k, v, lse, dout, scale, delta)
    dq, dk, dv = key_major(*shared, operands.key_major, scale, operands.tiles.key_major,
                           grad_dtype=jnp.dtype(grad_dtype), with_dq=True, total=total)
    return dq, dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _gradient(dq, q, scale, grad_dtype=jnp.float32):
    _, scale, sign = _positive_scale(q, scale)
    return (dq * (scale * sign)).astype(grad_dtype)[:, : q.shape[1]]


# ---- keys that come block by block ---------------------------------------------------------------


def _add_forward(part, q, k, v, operands, scale):
    return _forward(part, q, k, v, operands, scale) if q.size and k.size else part


def _result(part, q):
    return forward(q, q[:, :0], q[:, :0], None, 1.0, out_dtype=jnp.float32) if part is None else _rows(q, *part)


def _add_backward(total, q, k, v, out, lse, dout, operands, scale, *, delta):
    del out
    if operands.query_major is not None:
        raise Unsupported("Hopper kernels", "deterministic: cannot be had of keys that come block by block")
    if q.size and k.size:
        return _backward(total, q, k, v, lse, dout, operands, scale, delta)
    return total, *(jnp.zeros(x.shape, jnp.float32) for x in (k, v))


def _finish(total, q, scale):
    return jnp.zeros(q.shape, jnp.float32) if total is None else _gradient(total, q, scale)


RUNNING = Running(_add_forward, _result, _add_backward, _finish)
