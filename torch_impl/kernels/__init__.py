"""The kernel table of the PyTorch stack: names, and the record behind each."""

import importlib

from torch_impl.kernels.base import Kernel

NAMES = (
    "naive",
    "sdpa",
    "cudnn",
    "cudnn_flex",
    "fa1",
    "fa2",
    "fa3",
    "fa3_mask",
    "flex",
    "flashmask",
    "vsa",
    "triton_vsa",
    "fa2_sparse",
    "flex_sparse",
    "flashinfer",
    "cudnn_sparse",
)


def get(name: str) -> Kernel:
    """The kernel of that name; its module is imported on first use. Raises ValueError on other names."""
    if name not in NAMES:
        raise ValueError(f"kernel: {name!r} is none of {', '.join(NAMES)}")
    return importlib.import_module(f"torch_impl.kernels.{name}").KERNEL
