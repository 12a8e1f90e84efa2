"""What the Hopper kernels say below Pallas: a fence and a wait that are no barrier, roundings in pairs, a store as the
registers are; and one thing that they keep from the compiler."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jax_impl.kernels.hopper_masks import TILE


def opaque_zero(count):
    """0, of a number that is never negative, as the compiler cannot tell: what it is added to seems to vary with it."""
    return lax.shift_right_logical(count, jnp.int32(31))


def fence() -> None:
    """Makes this thread's stores to shared memory visible to TMA and wgmma, as `commit_smem` does, and waits for none.

    Whoever reads them has to wait for all threads that stored: `barrier_arrive` is an arrival of every one.
    """

    @plgpu.inline_mgpu()
    def fenced(_):
        _asm("fence.proxy.async.shared::cta;")

    fenced()


def warp_sync() -> None:
    """Waits for the threads of this thread's warp."""

    @plgpu.inline_mgpu()
    def synced(_):
        _asm("bar.warp.sync 0xffffffff;")

    synced()


def _asm(text: str, *operands: ir.Value) -> None:
    constraints = ",".join([*"r" * len(operands), "~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def rounded(x: jax.Array, dtype) -> jax.Array:
    """A float32 tile in wgmma's layout in 16 bits, two numbers an instruction.

    LLVM takes the rounding apart, number by number, where the result is also widened again.
    """
    dtype = jnp.dtype(dtype)
    name = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype.name]

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, dtype, TILE))
    def in_pairs(ctx, x):
        del ctx
        word, element = ir.IntegerType.get_signless(32), {"bf16x2": ir.BF16Type, "f16x2": ir.F16Type}[name].get()

        def pair(register):
            low, high = (vector.extract(register, dynamic_position=[], static_position=[i]) for i in range(2))
            found = llvm.inline_asm(word, [high, low], f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f")
            return mosaic_utils.bitcast(found, ir.VectorType.get((2,), element))

        return _each_register(x, pair)

    return in_pairs(x)


def widened(x: jax.Array) -> jax.Array:
    """The float32 of a 16-bit tile in wgmma's layout: of a pair of bfloat16 a shift and a mask."""
    if x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)

    @plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, TILE))
    def from_pairs(ctx, x):
        del ctx
        word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()

        def pair(register):
            both = mosaic_utils.bitcast(register, word)
            low = arith.shli(both, arith.constant(word, ir.IntegerAttr.get(word, 16)))
            high = arith.andi(both, arith.constant(word, ir.IntegerAttr.get(word, -65536)))
            return vector.from_elements(
                ir.VectorType.get((2,), number), [arith.bitcast(number, x) for x in (low, high)])

        return _each_register(x, pair)

    return from_pairs(x)


def store(x: jax.Array, ref) -> None:
    """Stores a 16-bit tile [64, n] in wgmma's layout, n a multiple of 64, to a tile as `shared_tile` makes it.

    The four registers that hold 16 columns are stored as they lie. Pallas stores those of 32 columns of eight rows
    together, which it has to gather first.
    """
    columns = x.shape[1]
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), TILE))
    def stored(ctx, ref, x):
        del ctx
        word = ir.IntegerType.get_signless(32)

        def number(n: int):
            return arith.constant(word, ir.IntegerAttr.get(word, n))

        thread = nvvm.read_ptx_sreg_tid_x()
        row, eight = arith.andi(thread, number(7)), arith.andi(arith.shrui(thread, number(3)), number(1))
        warp, right = (arith.shrui(thread, number(5)), arith.andi(arith.shrui(thread, number(4)), number(1)))
        block = arith.addi(arith.muli(arith.andi(warp, number(3)), number(2)), eight)  # of eight rows
        within = arith.addi(arith.muli(row, number(128)), arith.muli(arith.xori(right, row), number(16)))
        start = arith.addi(arith.muli(block, number(columns // 64 * 1024)), within)
        base = llvm.ptrtoint(word, mosaic_utils.memref_ptr(ref))
        registers = [mosaic_utils.bitcast(register, word) for register in x.registers.flat]
        for n in range(columns // 16):
            place = arith.xori(start, number(n % 4 * 32))
            at = arith.addi(arith.addi(base, number(n // 4 * 1024)), place)
            _asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", at, *registers[4 * n : 4 * n + 4])

    stored(ref, x)


def _each_register(x, change):
    registers = np.empty(x.registers.shape, object)
    for place, register in np.ndenumerate(x.registers):
        registers[place] = change(register)
    return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)
