"""flashinfer: block-sparse attention of any and of variable blocks on Hopper, forward and backward.

FlashInfer's wrapper (Ye et al., 2025) gathers keys token by token, boundaries per kv head, forward only. Here blocks
that 128 divides run in tiles of 128; all others in tiles of 64, where need be after laying every block out on tiles
of its own, from one token on.
"""

from jax_impl.kernels import hopper_kernel, hopper_sparse
from jax_impl.kernels.base import Kernel
from workload.capability import DYNAMIC_MASKS

KERNEL = Kernel(
    "flashinfer",
    hopper_kernel.capability(DYNAMIC_MASKS, "own, Pallas Mosaic GPU, tiles of 128 or 64"),
    hopper_sparse.prepare,
    hopper_sparse.forward,
    hopper_sparse.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
