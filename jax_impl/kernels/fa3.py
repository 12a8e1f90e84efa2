"""fa3: FlashAttention-3's schedule (Shah et al., 2024) on Pallas Mosaic GPU, for the six regular masks.

Full, causal and window masks are static bounds in the forward pass: no metadata at all, tile ranges and element tests
are arithmetic on row and column numbers. Documents, and the key-major backward pass, are row intervals as in flashmask.
"""

from jax_impl.kernels import hopper_kernel, hopper_masks
from jax_impl.kernels.base import Kernel
from jax_impl.kernels.hopper_kernel import HopperOperands, Tiles
from jax_impl.kernels.hopper_masks import Band
from workload.capability import REGULAR
from workload.masks import IntervalMask
from workload.problem import AttentionProblem


def band_of(mask: IntervalMask) -> tuple[int | None, int | None] | None:
    """(low, high): row i sees keys i + low .. i + high - 1 (None: unbounded); None where the mask is no such band."""
    regular, offset = mask.regular, mask.kv_len - mask.q_len
    if regular is None or regular.cu_seqlens_q is not None:
        return None
    left, right = regular.window or (None, None)
    if regular.causal:
        right = 0 if right is None else min(right, 0)
    if offset < 0 and (left, right) != (None, None) and right != 0:
        return None  # rows before the first key see nothing, but this band would show them some
    return (None if left is None else offset - left), (None if right is None else offset + right + 1)


def prepare(
    problem: AttentionProblem, device=None, *, deterministic: bool = False, tiles: Tiles | None = None
) -> HopperOperands:
    """Static bounds where the mask has them, else row intervals; options as of `hopper_kernel.prepare_intervals`."""
    band = band_of(problem.mask)
    if band is None:
        return hopper_kernel.prepare_intervals(problem, device, deterministic=deterministic, tiles=tiles)
    low, high = band
    q_len, kv_len = problem.q_len, problem.kv_len

    def query_rows(rows, columns):
        return Band(low, high, q_len, kv_len, rows, columns)

    by_key = problem.mask.transpose()

    def key_rows(rows, columns):
        # Not a band: its element test leaves the key-major kernel too few registers (bench/results/NOTES.md).
        return hopper_masks.intervals(by_key, rows, columns, device)

    tiles = tiles or hopper_kernel.default_tiles(problem)
    return hopper_kernel.build(query_rows, key_rows, tiles, deterministic)


KERNEL = Kernel(
    "fa3",
    hopper_kernel.capability(REGULAR, "own, Pallas Mosaic GPU, static bounds"),
    prepare,
    hopper_kernel.forward,
    hopper_kernel.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
