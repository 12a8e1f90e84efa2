"""Float32 tiles on their way to sums in device memory, in the order in which a warpgroup's registers hold them.

A tile of 64 rows lies there as the threads do, four numbers each, so that it is staged without conflicts and added as
one run of memory. `by_token` brings such tiles back into rows and columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_impl.kernels.hopper_forward import COMPILER, shared_tile
from jax_impl.kernels.hopper_masks import TILE

ROWS = 64
THREADS = 128
RUN = 256  # numbers of a row of the rearranged tile
PART = 64  # columns that are staged at a time


def register_shape(columns: int) -> tuple[int, int]:
    """Shape of a tile of 64 rows in the order of registers."""
    return ROWS * columns // RUN, RUN


def _strided(shape):
    return plgpu.Layout.WG_STRIDED(shape, vec_size=4)


def in_register_order(x: jax.Array) -> jax.Array:
    """float32 [64, columns] in wgmma's layout as `register_shape(columns)`: no number leaves its register."""
    shape = register_shape(x.shape[1])

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _strided(shape)))
    def rearranged(ctx, x):
        del ctx
        pairs = list(x.registers.flat)  # neighbours in a row: row r, row r + 8, then the next eight columns
        assert len(pairs) == x.shape[1] // 4 and ir.VectorType(pairs[0].type).shape == [2]
        fours = [vector.shuffle(a, b, [0, 1, 2, 3]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return mosaic.FragmentedArray(
            _registers=np.array(fours, dtype=object), _layout=mosaic.WGStridedFragLayout(shape, 4), _is_signed=None)

    return rearranged(x)


def in_rows(x: jax.Array) -> jax.Array:
    """The inverse of `in_register_order`."""
    shape = ROWS, x.size // ROWS

    @plgpu.inline_mgpu(arg_types=(_strided(x.shape),), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, TILE))
    def arranged(ctx, x):
        del ctx
        fours, layout = list(x.registers.flat), mosaic.WGMMA_LAYOUT
        assert ir.VectorType(fours[0].type).shape == [4]
        pairs = np.array([vector.shuffle(a, a, half) for a in fours for half in ([0, 1], [2, 3])], dtype=object)
        return mosaic.FragmentedArray(
            _registers=pairs.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None)

    return arranged(x)


def add(x: jax.Array, staging, target, pending: int | None = 0):
    """Adds float32 [64, columns] in wgmma's layout to device memory, by way of `staging` of its `register_shape`.

    pending: younger additions than the one that last used this staging; None where that one was waited for.
    """
    if pending is not None:
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
    staging[...] = in_register_order(x)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def add_by_parts(x: jax.Array, staging, target):
    """As `add`, with a staging of PART columns."""
    rows = register_shape(PART)[0]
    for part in range(x.shape[1] // PART):
        add(x[:, part * PART : (part + 1) * PART], staging, target.at[pl.ds(part * rows, rows)])


def by_token(tiles: jax.Array, heads: int, scale: float, dtype) -> jax.Array:
    """Sums, float32 [batch, heads * n, *register_shape(head_dim)], times scale, as [batch, 64 n, heads, head_dim].

    A kernel of its own: what it reads and writes are whole runs of memory, where a transposition would be neither.
    """
    batch, count = tiles.shape[:2]
    dim, n, dtype = tiles.shape[2] * RUN // ROWS, count // heads, jnp.dtype(dtype)
    rows = register_shape(PART)[0]

    def body(tiles_g, out_g, staging_s):
        entry, number = lax.axis_index("batch"), lax.axis_index("tile")
        for part in range(dim // PART):
            source = tiles_g.at[entry, number, pl.ds(part * rows, rows)]
            x = in_rows(plgpu.load(source, layout=_strided((rows, RUN))))
            staging_s[:, pl.ds(part * PART, PART)] = (x * scale).astype(dtype)
        plgpu.commit_smem()
        tokens = pl.ds(lax.rem(number, jnp.int32(n)) * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(staging_s, out_g.at[entry, tokens, lax.div(number, jnp.int32(n))])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, n * ROWS, heads, dim), dtype),
        scratch_types=[shared_tile((ROWS, dim), dtype)],
        grid=(batch, count),
        grid_names=("batch", "tile"),
        compiler_params=COMPILER,
        kernel_name="hopper_by_token",
    )(tiles)
