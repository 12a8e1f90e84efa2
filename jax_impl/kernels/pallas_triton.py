"""The attention body in Pallas for GPUs in general (Triton backend), shared by fa2 and the block-sparse kernels.

FlashAttention-2's schedule (Dao, 2023, algorithms 1 and 2): one program owns a tile of rows and walks the tiles
of columns that its rows see. Forward and dq walk keys from a tile of queries; dk/dv walks queries from a tile of
keys, over all query heads of its kv head, so that no sum leaves the program and every result is deterministic.
Which tiles are walked, and how a partial one is masked, is a `walk` (jax_impl/kernels/walks.py).
Tiles are the fastest grid axis, so that the programs in flight share the keys of few heads in L2; query tiles go from
the last to the first, the longest of a causal mask first.
On a CPU the same kernels run in the Pallas interpreter.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's tile, and how it is compiled.

    Attributes:
      rows: rows that a program owns, a power of two >= 16.
      columns: columns of one step, a power of two >= 16.
      num_warps, num_stages: of the Triton compiler.
    """

    rows: int
    columns: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in ("rows", "columns"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name}: {value} is not a power of two >= 16")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Tiles of the three passes; rows are queries in forward and dq, keys in dkv."""

    forward: Tile
    dq: Tile
    dkv: Tile


def interpreted() -> bool:
    """Whether kernels traced now run in the interpreter: there is no GPU, not even an abstract one."""
    return not plgpu.is_gpu_device()


def call(kernel, *, name: str, grid, in_specs, out_specs, out_shape, tile: Tile, aliases=None):
    """`pl.pallas_call` of a kernel under a tile's compiler parameters, interpreted where there is no GPU."""
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plgpu.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpreted(),
    )


def dot(a, b, contract=(1, 0)):
    """a . b over one axis of each, accumulated in float32; float32 operands stay IEEE, where the default is TF32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def barrier() -> None:
    """Orders a program's reads and writes of memory among its threads; the interpreter has one thread."""
    if not interpreted():
        plgpu.debug_barrier()


def whole(tree):
    """Block specs that hand a program each array of a pytree whole."""
    return jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim), tree)


def pad(x, axis: int, multiple: int, value=0):
    """x padded at the end of an axis to a multiple, at least one; x itself where it fits."""
    size = max(1, -(-x.shape[axis] // multiple)) * multiple
    if size == x.shape[axis]:
        return x
    widths = [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value)


def pad_rows(x, multiple: int):
    """BSHD padded to whole tiles of the sequence, and of head_dim to the power of two that Triton asks for."""
    depth = max(16, 1 << (x.shape[3] - 1).bit_length())
    return pad(pad(x, 1, multiple), 3, depth)


def saved_lse(lse, multiple: int):
    """Base-2 lse padded to whole tiles; +inf where a row is empty or padding, so that exp2(s - lse) is 0."""
    return pad(jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E), 2, multiple, jnp.inf)


def row_delta(out, dout, delta):
    """delta = rowsum(out * dout), float32 [B, H, S], unless the caller has it."""
    if delta is not None:
        return delta
    return jnp.einsum("bshd,bshd->bhs", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest")


def softmax_step(s, m, masked: bool):
    """Online softmax over one tile of base-2 logits: p, the factor of what was summed before, the new maximum."""
    top = jnp.maximum(m, s.max(axis=1))
    reference = jnp.where(top == -jnp.inf, 0.0, top) if masked else top
    return jnp.exp2(s - reference[:, None]), jnp.exp2(m - reference), top


def _forward_kernel(walk, q_ref, k_ref, v_ref, out_ref, lse_ref, *, scale, tile, tiles):
    row, head = tiles - 1 - pl.program_id(0), pl.program_id(1)
    q = q_ref[...]

    def step(column, carry, masked):
        acc, m, total = carry
        at = pl.ds(column * tile.columns, tile.columns)
        s = dot(q, k_ref[at, :], (1, 1)) * (scale * LOG2E)
        if masked:
            s = jnp.where(walk.visible(head, row, column, tile), s, -jnp.inf)
        p, alpha, m = softmax_step(s, m, masked)
        v = v_ref[at, :]
        acc = acc * alpha[:, None] + dot(p.astype(v.dtype), v)
        return acc, m, total * alpha + p.sum(axis=1)

    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(tile.rows, -jnp.inf, jnp.float32),
        jnp.zeros(tile.rows, jnp.float32),
    )
    acc, m, total = walk.visit(head, row, step, start)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(some, (m + jnp.log2(total)) * LN2, -jnp.inf)


def forward(q, k, v, walk, scale: float, tile: Tile, *, out_dtype=None, name: str):
    """out [B, q_len, q_heads, D] and natural-log lse float32 [B, q_heads, q_len]; `walk` has queries as rows."""
    q_len, depth, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    dtype = out_dtype or q.dtype
    q, k, v = pad_rows(q, tile.rows), pad_rows(k, tile.columns), pad_rows(v, tile.columns)
    batch, rows, heads, d = q.shape
    tiles = rows // tile.rows
    q_spec = pl.BlockSpec((None, tile.rows, None, d), lambda i, h, b: (b, tiles - 1 - i, h, 0))
    kv_spec = pl.BlockSpec((None, k.shape[1], None, d), lambda i, h, b: (b, 0, h // group, 0))
    row_spec = pl.BlockSpec((None, None, tile.rows), lambda i, h, b: (b, h, tiles - 1 - i))
    out, lse = call(
        functools.partial(_forward_kernel, scale=scale, tile=tile, tiles=tiles),
        name=f"{name}_forward",
        grid=(tiles, heads, batch),
        in_specs=[whole(walk), q_spec, kv_spec, kv_spec],
        out_specs=[q_spec, row_spec],
        out_shape=[jax.ShapeDtypeStruct(q.shape, dtype), jax.ShapeDtypeStruct((batch, heads, rows), jnp.float32)],
        tile=tile,
    )(walk, q, k, v)
    return out[:, :q_len, :, :depth], lse[:, :, :q_len]


def _dq_kernel(walk, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dq_ref, *, scale, tile, tiles):
    row, head = tiles - 1 - pl.program_id(0), pl.program_id(1)
    q, dout, lse, delta = q_ref[...], dout_ref[...], lse_ref[...], delta_ref[...]

    def step(column, dq, masked):
        at = pl.ds(column * tile.columns, tile.columns)
        k = k_ref[at, :]
        p = jnp.exp2(dot(q, k, (1, 1)) * (scale * LOG2E) - lse[:, None])
        if masked:
            p = jnp.where(walk.visible(head, row, column, tile), p, 0.0)
        ds = p * (dot(dout, v_ref[at, :], (1, 1)) - delta[:, None])
        return dq + dot(ds.astype(k.dtype), k)

    dq = walk.visit(head, row, step, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * scale).astype(dq_ref.dtype)


def _dkv_kernel(
    walk, q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, dk_ref, dv_ref, *, scale, tile, group
):
    row, first_head = pl.program_id(0), pl.program_id(1) * group
    k, v = k_ref[...], v_ref[...]

    def head(g, carry):
        def step(column, carry, masked):
            dk, dv = carry
            at = pl.ds(column * tile.columns, tile.columns)
            q, dout = q_ref[at, g, :], dout_ref[at, g, :]
            p = jnp.exp2(dot(k, q, (1, 1)) * (scale * LOG2E) - lse_ref[g, at][None, :])
            if masked:
                p = jnp.where(walk.visible(first_head + g, row, column, tile), p, 0.0)
            dv = dv + dot(p.astype(dout.dtype), dout)
            ds = p * (dot(v, dout, (1, 1)) - delta_ref[g, at][None, :])
            return dk + dot(ds.astype(q.dtype), q), dv

        return walk.visit(first_head + g, row, step, carry)

    zero = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(0, group, head, (zero, zero))
    dk_ref[...] = (dk * scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def backward_dq(q, k, v, dout, lse, delta, walk, scale: float, tile: Tile, *, grad_dtype=None, name: str):
    """dq as q; lse natural log and delta float32 [B, q_heads, q_len]; `walk` has queries as rows."""
    q_len, depth, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    dtype = grad_dtype or q.dtype
    q, dout, k, v = (pad_rows(x, n) for x, n in zip((q, dout, k, v), (tile.rows,) * 2 + (tile.columns,) * 2))
    batch, rows, heads, d = q.shape
    tiles = rows // tile.rows
    q_spec = pl.BlockSpec((None, tile.rows, None, d), lambda i, h, b: (b, tiles - 1 - i, h, 0))
    kv_spec = pl.BlockSpec((None, k.shape[1], None, d), lambda i, h, b: (b, 0, h // group, 0))
    row_spec = pl.BlockSpec((None, None, tile.rows), lambda i, h, b: (b, h, tiles - 1 - i))
    dq = call(
        functools.partial(_dq_kernel, scale=scale, tile=tile, tiles=tiles),
        name=f"{name}_dq",
        grid=(tiles, heads, batch),
        in_specs=[whole(walk), q_spec, kv_spec, kv_spec, q_spec, row_spec, row_spec],
        out_specs=q_spec,
        out_shape=jax.ShapeDtypeStruct(q.shape, dtype),
        tile=tile,
    )(walk, q, k, v, dout, saved_lse(lse, tile.rows), pad(delta, 2, tile.rows))
    return dq[:, :q_len, :, :depth]


def backward_dkv(q, k, v, dout, lse, delta, walk, scale: float, tile: Tile, *, grad_dtype=None, name: str):
    """dk, dv as k; lse natural log and delta float32 [B, q_heads, q_len]; `walk` has keys as rows."""
    kv_len, depth, group = k.shape[1], k.shape[3], q.shape[2] // k.shape[2]
    dtype = grad_dtype or k.dtype
    q, dout, k, v = (pad_rows(x, n) for x, n in zip((q, dout, k, v), (tile.columns,) * 2 + (tile.rows,) * 2))
    batch, rows, heads, d = k.shape
    columns = q.shape[1]
    kv_spec = pl.BlockSpec((None, tile.rows, None, d), lambda i, h, b: (b, i, h, 0))
    q_spec = pl.BlockSpec((None, columns, group, d), lambda i, h, b: (b, 0, h, 0))
    column_spec = pl.BlockSpec((None, group, columns), lambda i, h, b: (b, h, 0))
    dk, dv = call(
        functools.partial(_dkv_kernel, scale=scale, tile=tile, group=group),
        name=f"{name}_dkv",
        grid=(rows // tile.rows, heads, batch),
        in_specs=[whole(walk), q_spec, kv_spec, kv_spec, q_spec, column_spec, column_spec],
        out_specs=[kv_spec, kv_spec],
        out_shape=[jax.ShapeDtypeStruct(k.shape, dtype)] * 2,
        tile=tile,
    )(walk, q, k, v, dout, saved_lse(lse, tile.columns), pad(delta, 2, tile.columns))
    return dk[:, :kv_len, :, :depth], dv[:, :kv_len, :, :depth]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Walks:
    """What the three passes walk: `forward` and `dq` have queries as rows, `dkv` keys; `schedule` is static."""

    forward: object
    dq: object
    dkv: object
    schedule: Schedule = dataclasses.field(metadata={"static": True})


def attend(q, k, v, operands: Walks, scale: float, *, out_dtype=None, name: str):
    """The forward pass of a kernel record whose operands are `Walks`."""
    return forward(q, k, v, operands.forward, scale, operands.schedule.forward, out_dtype=out_dtype, name=name)


def gradients(q, k, v, out, lse, dout, operands: Walks, scale: float, *, grad_dtype=None, delta=None, name: str):
    """The backward pass of a kernel record whose operands are `Walks`."""
    schedule, delta = operands.schedule, row_delta(out, dout, delta)
    options = {"grad_dtype": grad_dtype, "name": name}
    dq = backward_dq(q, k, v, dout, lse, delta, operands.dq, scale, schedule.dq, **options)
    return dq, *backward_dkv(q, k, v, dout, lse, delta, operands.dkv, scale, schedule.dkv, **options)
