"""Float32 tiles of dq on their way to device memory, in the order in which a warpgroup's registers hold them.

A tile of 64 rows lies there as the threads do, four numbers each, so that it is staged without conflicts and added as
one run of memory. `natural` brings such tiles back into rows and columns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from jax_impl.kernels.hopper_masks import TILE

ROWS = 64
THREADS = 128
RUN = 256  # numbers of a row of the rearranged tile


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


def natural(tiles: jax.Array) -> jax.Array:
    """[..., rows, 256] in the order of registers to [..., 64, columns]."""
    lead = tiles.shape[:-2]
    # columns / 8, warp, row, columns / 2 within 8, upper or lower 8 rows, 2
    x = tiles.reshape(*lead, -1, 4, 8, 4, 2, 2)
    order = (len(lead) + n for n in (1, 4, 2, 0, 3, 5))
    return jnp.transpose(x, (*range(len(lead)), *order)).reshape(*lead, ROWS, -1)
