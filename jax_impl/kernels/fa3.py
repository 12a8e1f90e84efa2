"""fa3: FlashAttention-3's schedule (Shah et al., 2024) on Pallas Mosaic GPU, for the six regular masks.

They are row intervals as in flashmask: static bounds, which need no metadata, left the kernels fewer registers and were
slower (bench/results/NOTES.md).
"""

from jax_impl.kernels import hopper_kernel
from jax_impl.kernels.base import Kernel
from workload.capability import REGULAR

KERNEL = Kernel(
    "fa3",
    hopper_kernel.capability(REGULAR, "own, Pallas Mosaic GPU, row intervals"),
    hopper_kernel.prepare_intervals,
    hopper_kernel.forward,
    hopper_kernel.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
