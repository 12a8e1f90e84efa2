"""What one rank computes: its kernel under a step's mask, and the data it does that with; twin in torch_impl."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl import kernels
from jax_impl.context_parallel.merge import merge
from jax_impl.kernels.base import Kernel, Running
from workload.errors import Unsupported
from workload.signature import Signature


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """The arrays of a schedule; inside a shard_map, one rank's part.

    masks: per step the kernel's operands, leaves [world, ...] outside and as the kernel wants them inside.
    seen: per step whether a rank sees a key, bool [world] outside and a scalar inside; None where all ranks do.
    q_positions, kv_positions: int32 [world * length], global positions in rank order, -1 for padding.
    q_order, kv_order: int32 [world * exchanged length], ascending order of each exchanged sequence, or None.
    gathered_order: int32 [world * gathered_rows], which gathered keys each rank is handed, ascending, or None for all
      as they come.
    """

    masks: tuple[Any, ...]
    seen: tuple[jax.Array | None, ...]
    q_positions: jax.Array
    kv_positions: jax.Array
    q_order: jax.Array | None = None
    kv_order: jax.Array | None = None
    gathered_order: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Local:
    """A rank's kernel with everything static: partial results in, float32 parts out.

    groups: head groups that travel and compute in turn (head_groups.py); 1 for all heads at once.
    """

    kernel: str
    signature: Signature
    groups: int = 1

    @property
    def running(self) -> Running:
        """See the function of this name."""
        return running(kernels.get(self.kernel))

    def forward(self, q, k, v, operands, out_dtype=jnp.float32):
        """out [batch, q_rows, q_local, head_dim], lse float32 [batch, q_local, q_rows]."""
        call = _once(kernels.get(self.kernel).forward, "scale", "out_dtype")
        return call(q, k, v, operands, scale=self.signature.scale, out_dtype=jnp.dtype(out_dtype))

    def backward(self, saved, dout, delta, operands):
        """float32 dq, dk, dv of this part, from the final out and lse."""
        backward = kernels.get(self.kernel).backward
        if backward is None:
            raise Unsupported(f"jax kernel {self.kernel}", "does not take pass backward")
        call = _once(backward, "scale", "grad_dtype")
        return call(*saved, dout, operands, scale=self.signature.scale, grad_dtype=jnp.dtype("float32"), delta=delta)


@functools.cache
def _once(function: Callable, *static: str) -> Callable:
    """A kernel's pass, lowered once in a program however many steps or head groups call it with equal shapes."""
    return jax.jit(function, static_argnames=static)


@functools.cache
def running(kernel: Kernel) -> Running:
    """How a kernel adds the keys of one step to those of earlier steps: its own way, or by merging its results."""
    if kernel.running is not None:
        own = kernel.running
        return dataclasses.replace(own, forward=_once(own.forward, "scale", "out_dtype"),
                                   backward=_once(own.backward, "scale"))

    def forward(part, q, k, v, operands, scale, *, out_dtype=jnp.float32):
        new = kernel.forward(q, k, v, operands, scale, out_dtype=jnp.float32)
        out, lse = new if part is None else merge(part, new)
        return out.astype(out_dtype), lse

    def backward(total, q, k, v, out, lse, dout, operands, scale, *, delta):
        if kernel.backward is None:
            raise Unsupported(f"jax kernel {kernel.name}", "does not take pass backward")
        dq, dk, dv = kernel.backward(q, k, v, out, lse, dout, operands, scale, grad_dtype=jnp.float32, delta=delta)
        return dq if total is None else total + dq, dk, dv

    forward, backward = _once(forward, "scale", "out_dtype"), _once(backward, "scale")
    return Running(forward, lambda part, q: part, backward, lambda total, q, scale: total)


def last_forward(running: Running, part, q, k, v, operands, scale):
    """out (q's dtype) and lse of all keys, these being the last; parts before are float32, and it rounds once."""
    return rounded(running, running.forward(part, q, k, v, operands, scale=scale, out_dtype=q.dtype), q)


def rounded(running: Running, part, q):
    """out (q's dtype) and lse of a part."""
    out, lse = running.result(part, q)
    return out.astype(q.dtype), lse


def if_seen(seen, compute: Callable, otherwise: Callable, *operands):
    """compute(*operands), or otherwise(*operands) where this rank sees no key: its kernel is not launched then.

    No collective may stand inside. Closures and operands are arrays and pytrees of them.
    """
    return compute(*operands) if seen is None else jax.lax.cond(seen, compute, otherwise, *operands)


def row_sums(out, dout):
    """delta = rowsum(out * dout), float32 [batch, heads, rows]."""
    return jnp.einsum("bshd,bshd->bhs", out.astype(jnp.float32), dout.astype(jnp.float32), precision="highest")


def take_tokens(x, order, fill: int | None = None):
    """Rows of axis 1 in this order; `order` entries equal to `fill` give zeros; None keeps x."""
    if order is None:
        return x
    if fill is None:
        return jnp.take(x, order, axis=1, mode="clip")
    return jnp.take(x, order, axis=1, mode="fill", fill_value=0)


def inverse(order, length: int):
    """Where each of `length` places went in `order`; len(order) for places that are not in it."""
    out = jnp.full((length,), order.shape[0], jnp.int32)
    return out.at[order].set(jnp.arange(order.shape[0], dtype=jnp.int32))
