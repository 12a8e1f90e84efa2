"""The parity matrix: shapes that catch what one shape hides, for a CPU and for a GPU."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a parity problem: rows differ from keys, batch above one, ragged tails, grouped and plain heads.

    Attributes:
      masks: those that it is crossed with; none named, all of them. timed: on a GPU, kernels are timed on it.
    """

    seq_len: int
    q_len: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int
    block: int
    sparse_block: int = 64
    timed: bool = False
    masks: tuple[str, ...] = ()


SHAPES = {
    "tiny": Shape(203, 147, 2, 3, 1, 64, "float32", 37, 24),
    "tiny_half": Shape(193, 193, 1, 4, 2, 64, "bfloat16", 31, 40),
    "ragged": Shape(1000, 777, 2, 6, 2, 128, "bfloat16", 129, 100),
    "plain_heads": Shape(1536, 1536, 1, 4, 4, 64, "bfloat16", 200, 192),
    "float16": Shape(1100, 900, 1, 4, 2, 128, "float16", 130, 128, 128),
    "float32": Shape(900, 700, 1, 2, 1, 64, "float32", 100, 96),
    "long": Shape(8192, 8192, 1, 16, 4, 128, "bfloat16", 1024, 1024, 128, True,
                  ("causal", "uniform_block", "causal_document")),
    "long_plain": Shape(8192, 8192, 1, 16, 16, 128, "bfloat16", 1024, 1024, 64, True, ("uniform_block",)),
    "ranks": Shape(203, 147, 2, 6, 3, 16, "bfloat16", 37, 24, 16),
    "ranks_long": Shape(8192, 8192, 1, 16, 4, 128, "bfloat16", 1024, 1024, 128, True),
}
RANK_SHAPES = ("ranks", "ranks_long")  # of schemes: on a CPU, on GPUs; the others are of kernels
KERNEL_SHAPES = tuple(name for name in SHAPES if name not in RANK_SHAPES)
CPU_SHAPES = ("tiny", "tiny_half")
GPU_SHAPES = ("ragged", "plain_heads", "float16", "float32", "long", "long_plain")
