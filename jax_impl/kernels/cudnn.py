"""cudnn: cuDNN's fused attention through JAX, with the masks that it takes natively.

Full, causal, causal window and packed documents; the rest is refused. jax.nn's public call returns lse in the
input dtype and takes no document offsets, so this file calls the layer below it (pinned by constraints.txt).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl.kernels.base import Kernel
from workload.capability import HALF, Capability
from workload.errors import Unsupported
from workload.problem import PASSES, AttentionProblem

MASKS = ("full", "causal", "full_document", "causal_document", "causal_sliding_window")
MAX_OFFSET = 2**31  # JAX hands cuDNN document offsets in elements, as int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What cuDNN is told of the mask.

    Attributes:
      offsets: int32 [documents + 1] of the documents that hold a token, or None where there is one at most.
      document, place: int32 [q_len], each row's document and its place in it, or None.
      mask_type: name of JAX's cuDNN mask type, static.
      window: tokens that a row sees up to itself, or None, static.
    """

    offsets: Any
    document: Any
    place: Any
    mask_type: str = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class CudnnCapability(Capability):
    """The base's checks, and cuDNN's own: causal and packed only on squares, offsets within int32.

    Packed documents are forward only: on an H200 dk came out wrong (relative error 0.10 with grouped heads and 0.43
    without, where out, lse and dq were right), with jax 0.11.2. Under causal and a negative scale out was NaN.
    """

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why cuDNN cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason:
            return reason
        if problem.mask.name != "full" and problem.q_len != problem.kv_len:
            return f"does not take q_len {problem.q_len} with kv_len {problem.kv_len} (its causal is top-left)"
        if min(problem.q_len, problem.kv_len) == 0 or problem.q_len == problem.kv_len == 1:
            return f"does not take q_len {problem.q_len} with kv_len {problem.kv_len}"
        if _documents(problem.mask) is not None and "backward" in passes:
            return f"does not take pass backward under {problem.mask.name}: several documents come out wrong"
        elements = problem.batch * problem.q_len * problem.q_heads * problem.head_dim
        if _documents(problem.mask) is not None and elements >= MAX_OFFSET:
            return f"does not take {elements} elements of q under documents (int32 offsets)"
        return None


def _documents(mask) -> np.ndarray | None:
    """Offsets of the documents that hold a token, or None where one document is all."""
    if mask.regular is None or mask.regular.cu_seqlens_q is None:
        return None
    offsets = np.unique(np.asarray(mask.regular.cu_seqlens_q, np.int32))
    return offsets if len(offsets) > 2 else None


def prepare(problem: AttentionProblem, device=None) -> Operands:
    """cuDNN's mask type, window and document offsets."""
    regular, offsets = problem.mask.regular, _documents(problem.mask)
    kind = "CAUSAL" if regular.causal else "NO_MASK"
    window = regular.window and min(regular.window[0] + 1, problem.kv_len)
    if offsets is None:
        return Operands(None, None, None, kind, window)
    document = np.searchsorted(offsets, np.arange(problem.q_len), side="right").astype(np.int32) - 1
    place = np.arange(problem.q_len, dtype=np.int32) - offsets[document]
    offsets, document, place = (jax.device_put(x, device) for x in (offsets, document, place))
    return Operands(offsets, document, place, "PADDING_CAUSAL" if regular.causal else "PADDING", window)


def available() -> str | None:
    """Why cuDNN cannot run here, or None."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, JAX runs on {jax.default_backend()}"
    try:
        fused.check_cudnn_version()
    except RuntimeError as error:
        return str(error)
    # One floor for all masks; packed documents are what needs it.
    return None if fused.check_compute_capability("9.0") else "needs compute capability 9.0"


def _packed(operands: Operands, batch: int):
    """q_seqlen and q_offsets as JAX's cuDNN layer takes them, [batch, M] and [batch, M + 1]."""
    lengths = jnp.diff(operands.offsets)
    return (jnp.tile(x[None], (batch, 1)).astype(jnp.int32) for x in (lengths, operands.offsets))


def _same_dtype(name: str, asked, dtype) -> None:
    if asked is not None and jnp.dtype(asked) != dtype:
        raise Unsupported("jax kernel cudnn", f"does not take {name} {jnp.dtype(asked)} with inputs of {dtype}")


def forward(q, k, v, operands: Operands, scale: float, *, out_dtype=None):
    """out [B, q_len, q_heads, D] in q.dtype and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    _same_dtype("out_dtype", out_dtype, q.dtype)
    batch, _, heads, _ = q.shape
    packing = {}
    if operands.offsets is not None:
        lengths, offsets = _packed(operands, batch)
        packing = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
    out, stats = fused.dot_product_attention(
        q, k, v, **packing, scale=scale, mask_type=fused.MaskType[operands.mask_type],
        sliding_window_length=operands.window, return_residual=True,
    )
    if operands.offsets is None:
        return out, stats
    # Packed: cuDNN keeps one row of statistics per document, [B * documents, heads, q_len].
    stats = stats.reshape(batch, -1, heads, q.shape[1])
    return out, stats[:, operands.document, :, operands.place].transpose(1, 2, 0)


def backward(q, k, v, out, lse, dout, operands: Operands, scale: float, *, grad_dtype=None, delta=None):
    """dq, dk, dv in q.dtype; out and lse may belong to a larger problem. Raises `Unsupported` under several documents.

    cuDNN computes delta = rowsum(out * dout) itself from what it is handed, so a `delta` of that value is
    honoured by out and dout.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    del delta
    _same_dtype("grad_dtype", grad_dtype, q.dtype)
    if operands.offsets is not None:
        reason = "does not take pass backward under several documents: they come out wrong"
        raise Unsupported("jax kernel cudnn", reason)
    unused = jnp.zeros(0, q.dtype)
    return tuple(fused._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *[unused] * 7, lse, out.astype(q.dtype), dout.astype(q.dtype),
        scale=scale, seed=42, dropout_rate=0.0, variadic_args=(False, False),
        mask_type=fused.MaskType[operands.mask_type], layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=operands.window,
    ))


KERNEL = Kernel(
    "cudnn",
    CudnnCapability(
        MASKS, dtypes=HALF, head_dims=tuple(range(8, 257, 8)), positive_scale=True,
        source=f"cuDNN fused attention through jax {jax.__version__}",
    ),
    prepare,
    forward,
    backward,
    available,
)
