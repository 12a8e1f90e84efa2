"""What our Triton kernels share: where they run, tensor descriptors, the interpreter's bfloat16."""

import functools
import importlib.util
import math

import torch

from workload.errors import Unsupported

HEAD_DIM_LIMIT = 256
LOG2E = math.log2(math.e)
L2_BUDGET = 24 << 20  # of the 50 MB of a Hopper chip: what is streamed through takes the rest


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1 before the first import)."""
    if not _installed():
        return False
    from triton import knobs  # here, since a machine without triton must still list the kernels

    return bool(knobs.runtime.interpret)


def available() -> str | None:
    """Why Triton kernels cannot run here: no package, or neither a CUDA GPU nor the interpreter."""
    if not _installed():
        return "the triton package is not installed"
    if torch.cuda.is_available() or interpreted():
        return None
    return "needs a CUDA GPU, or Triton's interpreter"


def require_head_dim(kernel: str, head_dim: int, dtype: torch.dtype) -> None:
    """Raises `Unsupported` where rows of head_dim are not whole 16-byte units or exceed the limit."""
    unit = 16 // dtype.itemsize
    if head_dim % unit or head_dim > HEAD_DIM_LIMIT:
        raise Unsupported(
            f"torch kernel {kernel}", f"head_dim {head_dim} is no multiple of {unit} up to {HEAD_DIM_LIMIT}"
        )


def padded_dim(head_dim: int) -> int:
    """The power of two, 16 at least, that a tile's last axis takes; columns past head_dim read as 0."""
    return max(16, 1 << (head_dim - 1).bit_length())


def descriptor(x: torch.Tensor, rows: int, dim: int, heads: int = 1):
    """Tensor descriptor of x [B, S, H, D] read as [B, H, S, D] in tiles [1, heads, rows, dim].

    Coordinates are 32 bit per axis and the address is formed in 64 bits, so no offset overflows. Reads
    past an edge give 0, writes past it are dropped.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    b, s, h, d = x.shape
    sb, ss, sh, _ = x.stride()
    return TensorDescriptor(x, [b, h, s, d], [sb, sh, ss, 1], [1, heads, rows, dim])


def describable(x: torch.Tensor) -> torch.Tensor:
    """x, copied where a descriptor cannot address it: a strided last axis, strides or base off 16 bytes."""
    unit = 16 // x.dtype.itemsize
    good = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % unit == 0 and s > 0 for s in x.stride()[:-1])
    return x if good else x.clone(memory_format=torch.contiguous_format)


def computed(x: torch.Tensor) -> torch.Tensor:
    """x as the kernels read it: the interpreter multiplies bfloat16 matrices wrongly, so there it is float32."""
    return describable(x.float() if interpreted() and x.dtype == torch.bfloat16 else x)


def heads_per_section(heads: int, bytes_per_head: int) -> int:
    """The most heads, a divisor of `heads`, whose operands stay in L2 together; one at least."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * bytes_per_head <= L2_BUDGET))


def arch(device) -> int:
    """Major compute capability of a CUDA device; 0 for the CPU, where the interpreter runs."""
    on_gpu = torch.device(device or "cpu").type == "cuda"
    return torch.cuda.get_device_capability(device)[0] if on_gpu else 0


def precision(x: torch.Tensor) -> str:
    """How matrix products of x are computed: float32 inputs in float32, not in TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def row_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(out * dout) of [B, S, H, D], float32 [B, H, S]."""
    from torch_impl.kernels.flashmask_triton import delta_kernel

    b, q_len, heads, d = out.shape
    rows, dim = 64, padded_dim(d)
    delta = torch.empty(b, heads, q_len, dtype=torch.float32, device=out.device)
    delta_kernel[(-(-q_len // rows) * b * heads,)](
        descriptor(computed(out), rows, dim), descriptor(computed(dout), rows, dim), delta, q_len, heads,
        M=rows, D=dim, num_warps=4)
    return delta
