"""flashmask: the Hopper kernels under any row-interval mask (Wang et al., FlashMask, 2024), all twelve patterns.

FlashMask keeps, per key, the bounds of the query rows that it is hidden from; ours keeps, per row, the intervals
of keys that it sees, and their transpose for the key-major pass, so that one element test of two comparisons an
interval serves both. Only tiles with a visible cell are visited, only partial ones tested, and metadata is
O(q_len + kv_len).
"""

from jax_impl.kernels import hopper_kernel
from jax_impl.kernels.base import Kernel
from workload.capability import ALL_STATIC

KERNEL = Kernel(
    "flashmask",
    hopper_kernel.capability(ALL_STATIC, "own, Pallas Mosaic GPU, row intervals"),
    hopper_kernel.prepare_intervals,
    hopper_kernel.forward,
    hopper_kernel.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
    hopper_kernel.RUNNING,
)
