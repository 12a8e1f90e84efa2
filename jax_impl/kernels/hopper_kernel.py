"""What the Hopper kernels share on the host's side: operands, the contract's two passes, the hardware they need."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_impl.kernels import hopper_masks, hopper_order
from jax_impl.kernels.base import Running
from jax_impl.kernels.hopper_add import by_token
from jax_impl.kernels.hopper_backward import BackwardTiles, key_major
from jax_impl.kernels.hopper_dq import QueryTiles, query_major
from jax_impl.kernels.hopper_forward import ForwardTiles, heads_side_by_side, round_up
from jax_impl.kernels.hopper_forward import forward as forward_pass
from jax_impl.kernels.hopper_masks import Policy
from jax_impl.kernels.hopper_order import BUSY, waves_of
from jax_impl.kernels.hopper_statistics import base2
from workload.capability import HALF, Capability
from workload.errors import Unsupported
from workload.masks import IntervalMask
from workload.problem import AttentionProblem

HEAD_DIMS = (64, 128)
CACHE = 36 << 20  # of the 50 MB of L2 cache, what queries, douts and dq may take
MANY = 10  # thread blocks a processor, of which the longest is no longer than the rest take together


def capability(masks: tuple[str, ...], source: str) -> Capability:
    """What every Hopper kernel takes, under these masks."""
    return Capability(masks, dtypes=HALF, head_dims=HEAD_DIMS, source=source)


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


def heads_in_work(problem: AttentionProblem, row_tokens: int) -> tuple[int, int]:
    """(kv heads side by side, parts of a group's query heads) of the key-major pass.

    Thread blocks that walk the same queries should meet them in the L2 cache: as few kv heads side by side as keep all
    processors busy, two at least, and as many parts as it takes for the queries, douts and dq of the heads in work to
    fit there, but not less than two query heads a part, unless it takes more for a block a processor. Where a processor
    has many blocks and a group's queries nearly fit, as of few queries and gathered keys, a group stays whole: parts
    are added in memory, for little work each.
    By shapes alone, so that ranks, which share one program, agree whatever their masks.
    """
    tiles, group = -(-problem.kv_len // row_tokens), problem.group
    heads = [n for n in range(1, problem.kv_heads + 1) if problem.kv_heads % n == 0]
    side = next((n for n in heads if n > 1 and n * tiles >= BUSY), problem.kv_heads)
    head_bytes = max(1, 8 * problem.q_len * problem.head_dim)  # 16-bit q and dout, float32 dq
    blocks = problem.batch * problem.kv_heads * tiles
    if blocks >= MANY * BUSY and group * head_bytes <= 2 * CACHE:
        return side, 1
    fitting = max(2, CACHE // head_bytes)
    parts = (n for n in range(1, group + 1) if group % n == 0 and n * blocks >= BUSY)
    return side, next((n for n in parts if group // n <= max(2, fitting // side)), group)


def default_tiles(problem: AttentionProblem) -> Tiles:
    """The schedules that measured best (bench/results/NOTES.md)."""
    tiles = BackwardTiles(columns=128 if problem.head_dim == 64 else 64)
    side, split = heads_in_work(problem, tiles.row_tokens)
    return Tiles(key_major=dataclasses.replace(tiles, side=side, split=split))


def build(problem: AttentionProblem, query_rows: Callable, key_rows: Callable, tiles: Tiles, deterministic: bool
          ) -> HopperOperands:
    """Operands from two functions (row_tokens, column_tokens, order) -> Policy, rows being queries and keys.

    order: of `hopper_masks.intervals`.
    """
    t, items = tiles.forward, problem.batch * problem.q_heads
    heads = problem.q_heads, problem.kv_heads
    in_cache = heads_side_by_side(*heads, 4 * problem.kv_len * problem.head_dim, t.l2_bytes)
    parts = 1 if deterministic else math.gcd(tiles.key_major.split, problem.group)

    def forward_order(_, weight):
        waves = waves_of(items * len(weight), t)
        side = min(in_cache, hopper_order.heads_with_work(*heads, len(weight)))
        return hopper_order.shares(problem.batch, problem.q_heads, side, t.processors, waves, weight)

    def key_order(by_key, weight):
        return hopper_order.block_order(by_key, tiles.key_major.row_tokens, problem.kv_heads, parts, weight)

    query_major = query_rows(tiles.query_major.row_tokens, tiles.query_major.columns, None) if deterministic else None
    forward = query_rows(t.row_tokens, t.columns, forward_order)
    return HopperOperands(
        forward, key_rows(tiles.key_major.row_tokens, tiles.key_major.columns, key_order), query_major, tiles)


def prepare_intervals(
    problem: AttentionProblem, device=None, *, deterministic: bool = False, tiles: Tiles | None = None
) -> HopperOperands:
    """Operands of any row-interval mask: O(q_len + kv_len) metadata.

    Args:
      deterministic: whether the backward pass is the same bit for bit every time (seven products instead of five).
      tiles: the schedules, or None for the measured ones.
    """
    def maker(mask: IntervalMask, halves: bool = False):
        return lambda rows, columns, order: hopper_masks.intervals(mask, rows, columns, device, order, halves)

    tiles = tiles or default_tiles(problem)
    # One query head a thread block, in tiles of 64 queries: elsewhere what a half leaves out is no gain.
    halves = not deterministic and problem.group == 1 and tiles.key_major.columns == 64
    makers = maker(problem.mask), maker(problem.mask.transpose(), halves)
    return build(problem, *makers, tiles, deterministic)


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
    if operands.query_major is None:
        dq, dk, dv = _backward(None, q, k, v, out, lse, dout, operands, scale, delta, grad_dtype)
        return _gradient(dq, q, scale, grad_dtype), dk, dv
    if delta is None:
        delta = jnp.einsum(
            "bshd,bshd->bhs", out, dout, preferred_element_type=jnp.float32, precision="highest")
    (*sides, lse), delta, positive, sign = _both_sides(q, k, v, dout, lse, delta, scale)
    _, dk, dv = key_major(*sides, lse, delta, operands.key_major, positive, operands.tiles.key_major,
                          grad_dtype=grad_dtype, with_dq=False)
    dq = query_major(*sides, base2(lse), delta, operands.query_major, positive, operands.tiles.query_major,
                     grad_dtype=grad_dtype)
    dq = dq if sign == 1.0 else dq * jnp.asarray(sign, grad_dtype)
    return dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _both_sides(q, k, v, dout, lse, delta, scale: float):
    """What the passes read: (q, k, v, dout, lse), delta, if any; a scale > 0, the sign of the one given."""
    padding = ((0, 0), (0, 0), (0, round_up(q.shape[1], 128) - q.shape[1]))
    lse = jnp.pad(lse, padding, constant_values=-jnp.inf)
    if delta is not None:
        delta = jnp.pad(delta.astype(jnp.float32), padding)
    positive, scale, sign = _positive_scale(q, scale)
    return (*whole_rows(positive, k, v, dout.astype(q.dtype)), lse), delta, scale, sign


def _backward(total, q, k, v, out, lse, dout, operands, scale, delta, grad_dtype=jnp.float32):
    """dq that `_gradient` is yet to finish, added to that of other keys, if any; dk, dv. out: where delta is None."""
    shared, delta, scale, _ = _both_sides(q, k, v, dout, lse, delta, scale)
    (out,) = whole_rows(out) if delta is None else (None,)
    dq, dk, dv = key_major(*shared, delta, operands.key_major, scale, operands.tiles.key_major,
                           grad_dtype=jnp.dtype(grad_dtype), with_dq=True, total=total, out=out)
    return dq, dk[:, : k.shape[1]], dv[:, : k.shape[1]]


def _gradient(dq, q, scale, grad_dtype=jnp.float32):
    _, scale, sign = _positive_scale(q, scale)
    return by_token(dq, q.shape[2], scale * sign, grad_dtype)[:, : q.shape[1]]


# ---- keys that come block by block ---------------------------------------------------------------


def _add_forward(part, q, k, v, operands, scale, *, out_dtype=jnp.float32):
    return _forward(part, q, k, v, operands, scale, out_dtype) if q.size and k.size else part


def _result(part, q):
    return forward(q, q[:, :0], q[:, :0], None, 1.0, out_dtype=jnp.float32) if part is None else _rows(q, *part)


def _add_backward(total, q, k, v, out, lse, dout, operands, scale, *, delta):
    if operands.query_major is not None:
        raise Unsupported("Hopper kernels", "deterministic: cannot be had of keys that come block by block")
    if q.size and k.size:
        return _backward(total, q, k, v, out, lse, dout, operands, scale, delta)
    return total, *(jnp.zeros(x.shape, jnp.float32) for x in (k, v))


def _finish(total, q, scale):
    return jnp.zeros(q.shape, jnp.float32) if total is None else _gradient(total, q, scale)


RUNNING = Running(_add_forward, _result, _add_backward, _finish)
