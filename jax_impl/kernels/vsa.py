"""vsa: block-sparse attention of 64 blocks on Hopper, forward and backward.

The published kernel (Zhang et al., VSA, 2025) is MHA at 64 blocks, not causal. This one takes grouped heads, lists per
kv head or per q head, a causal diagonal, rows with no or unequal numbers of blocks, and blocks of any one size, in
tiles of 64.
"""

import functools

from jax_impl.kernels import hopper_kernel, hopper_sparse
from jax_impl.kernels.base import Kernel

KERNEL = Kernel(
    "vsa",
    hopper_kernel.capability(("uniform_block",), "own, Pallas Mosaic GPU, tiles of 64"),
    functools.partial(hopper_sparse.prepare, wide=False),
    hopper_sparse.forward,
    hopper_sparse.backward,
    lambda: hopper_kernel.missing_hardware(),  # looked up at the call, so that a test can stand in for the GPU
)
