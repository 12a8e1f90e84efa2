"""The kernel table of the JAX stack: names, and the record behind each."""

import importlib

from jax_impl.kernels.base import Kernel

NAMES = (
    "naive", "sdpa", "cudnn", "fa1", "fa2", "fa3", "flashmask",
    "flex", "vsa", "triton_vsa", "fa2_sparse", "flex_sparse", "flashinfer",
)


def get(name: str) -> Kernel:
    """The kernel of that name; its module is imported on first use. Raises ValueError on other names."""
    if name not in NAMES:
        raise ValueError(f"kernel: {name!r} is none of {', '.join(NAMES)}")
    return importlib.import_module(f"jax_impl.kernels.{name}").KERNEL
