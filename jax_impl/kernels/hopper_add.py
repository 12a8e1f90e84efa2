"""Float32 tiles on their way to sums in device memory, in the order in which a warpgroup's registers hold them.

A tile of 64 rows lies there warp by warp and in a warp as its threads do, four numbers each. It is staged without
conflicts, and each warp adds what its threads staged as one run of memory: none waits for another one. `by_token`
brings such tiles back into rows and columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_impl.kernels.hopper_forward import COMPILER, shared_tile
from jax_impl.kernels.hopper_inline import fence, warp_sync
from jax_impl.kernels.hopper_masks import TILE

ROWS = 64
PART = 64  # columns of a tile in this order: as many as are staged at a time
WARPS = 4
CHUNKS = 8  # rows of a warp's share in this order
RUN = 128  # numbers of such a row: four of each thread
# of which axes are warps, threads, numbers of one
LAYOUT = fragmented_array.Tiling(((WARPS * CHUNKS, RUN), (CHUNKS, RUN), (4,))), (-5,), (-2,), -1


def register_shape(columns: int) -> tuple[int, int]:
    """Shape of a tile of 64 rows in the order of registers, one PART of its columns after the other."""
    return columns // PART * WARPS * CHUNKS, RUN


def in_register_order(x: jax.Array) -> jax.Array:
    """float32 [64, PART] in wgmma's layout as `register_shape(PART)`: no number leaves its register."""
    shape, layout = register_shape(PART), plgpu.Layout.TILED(*LAYOUT)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout))
    def rearranged(ctx, x):
        del ctx
        pairs = list(x.registers.flat)  # neighbours in a row: row r, row r + 8, then the next eight columns
        assert len(pairs) == 2 * CHUNKS and ir.VectorType(pairs[0].type).shape == [2]
        fours = [vector.shuffle(a, b, [0, 1, 2, 3]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return _fragments(fours, mosaic.TiledLayout(*LAYOUT), shape)

    return rearranged(x)


def in_rows(x: jax.Array) -> jax.Array:
    """The inverse of `in_register_order`."""
    shape, layout = (ROWS, PART), plgpu.Layout.TILED(*LAYOUT)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, TILE))
    def arranged(ctx, x):
        del ctx
        fours = list(x.registers.flat)
        assert ir.VectorType(fours[0].type).shape == [4]
        pairs = [vector.shuffle(a, a, half) for a in fours for half in ([0, 1], [2, 3])]
        return _fragments(pairs, mosaic.WGMMA_LAYOUT, shape)

    return arranged(x)


def _fragments(registers, layout, shape):
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def add(x: jax.Array, staging, target, pending: int = 0, stored=None):
    """Adds float32 [64, PART] in wgmma's layout to device memory, by way of `staging` of `register_shape(PART)`.

    pending: younger additions than the one that last used this staging.
    stored: called as soon as all that this thread has stored to shared memory, here and before, is visible to TMA and
      wgmma.
    """
    wait(pending)
    staging[...] = in_register_order(x)
    fence()
    if stored is not None:
        stored()
    warp_sync()

    def send(warp):
        rows = pl.ds(warp * CHUNKS, CHUNKS)
        plgpu.copy_smem_to_gmem(staging.at[rows], target.at[rows], reduction_op="add")

    plgpu.warp_map(send)


def add_at_once(x: jax.Array, staging, target, waited: bool = False):
    """As `add`, but all warps together, by one copy; waited: whether the addition before has been waited for."""
    if not waited:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[...] = in_register_order(x)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def add_by_parts(x: jax.Array, staging, target):
    """Adds [64, n * PART] by `add_at_once`, PART columns at a time."""
    rows = register_shape(PART)[0]
    for part in range(x.shape[1] // PART):
        add_at_once(x[:, part * PART : (part + 1) * PART], staging, target.at[pl.ds(part * rows, rows)])


def wait(pending: int = 0):
    """Waits until no more than this many additions have yet to be read from their staging, each warp for its own."""
    plgpu.warp_map(lambda warp: plgpu.wait_smem_to_gmem(pending, wait_read_only=True))


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
            x = in_rows(plgpu.load(source, layout=plgpu.Layout.TILED(*LAYOUT), optimized=False))
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
