"""Float32 tiles on their way to sums in device memory, in the order in which a warpgroup's registers hold them.

A tile of 64 rows lies there as the threads do, four numbers each, so that it is staged without conflicts and added as
one run of memory. `natural` brings such tiles back into rows and columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_impl.kernels.hopper_masks import TILE

ROWS = 64
THREADS = 128
RUN = 256  # numbers of a row of the rearranged tile
PART = 64  # columns that are staged at a time


def register_shape(columns: int) -> tuple[int, int]:
    """Shape of a tile of 64 rows in the order of registers."""
    return ROWS * columns // RUN, RUN


def in_register_order(x: jax.Array) -> jax.Array:
    """float32 [64, columns] in wgmma's layout as `register_shape(columns)`: no number leaves its register."""
    shape = register_shape(x.shape[1])
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=4)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout))
    def rearranged(ctx, x):
        del ctx
        pairs = list(x.registers.flat)  # neighbours in a row: row r, row r + 8, then the next eight columns
        assert len(pairs) == x.shape[1] // 4 and ir.VectorType(pairs[0].type).shape == [2]
        fours = [vector.shuffle(a, b, [0, 1, 2, 3]) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        return mosaic.FragmentedArray(
            _registers=np.array(fours, dtype=object), _layout=mosaic.WGStridedFragLayout(shape, 4), _is_signed=None)

    return rearranged(x)


def add(x: jax.Array, staging, target, pending: int = 0):
    """Adds float32 [64, columns] in wgmma's layout to device memory, by way of `staging` of its `register_shape`.

    pending: younger additions than the one that last used this staging.
    """
    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
    staging[...] = in_register_order(x)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")


def add_by_parts(x: jax.Array, staging, target):
    """As `add`, with a staging of PART columns."""
    rows = register_shape(PART)[0]
    for part in range(x.shape[1] // PART):
        add(x[:, part * PART : (part + 1) * PART], staging, target.at[pl.ds(part * rows, rows)])


def natural(tiles: jax.Array) -> jax.Array:
    """[..., rows, 256] in the order of registers to [..., 64, columns]."""
    lead = tiles.shape[:-2]
    # columns / 8, warp, row, columns / 2 within 8, upper or lower 8 rows, 2
    x = tiles.reshape(*lead, -1, 4, 8, 4, 2, 2)
    order = (len(lead) + n for n in (1, 4, 2, 0, 3, 5))
    return jnp.transpose(x, (*range(len(lead)), *order)).reshape(*lead, ROWS, -1)
