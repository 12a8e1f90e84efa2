"""What one rank computes: its kernel under a step's mask, and the data it does that with; twin in jax_impl."""

import dataclasses
import functools
from typing import Any

import torch

from torch_impl import kernels
from torch_impl.context_parallel.merge import merge
from torch_impl.context_parallel.mesh import Mesh
from torch_impl.kernels.base import Kernel, Running
from torch_impl.kernels.triton_support import row_delta
from workload.signature import Signature


@dataclasses.dataclass(frozen=True)
class Data:
    """The tensors of a schedule that one rank reads.

    masks: per step the kernel's operands, or None where this rank sees no key of the step.
    q_positions, kv_positions: int64 [length], global positions of its tokens, -1 for padding.
    q_order, kv_order: int64 [exchanged length], ascending order of its exchanged sequence, or None where it is so.
    gathered_order: int64 [gathered_rows], which gathered keys it is handed, ascending, or None for all as they come.
    """

    masks: tuple[Any, ...]
    q_positions: torch.Tensor
    kv_positions: torch.Tensor
    q_order: torch.Tensor | None = None
    kv_order: torch.Tensor | None = None
    gathered_order: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Local:
    """A rank's kernel and communicators with everything static: partial results in, float32 parts out.

    groups: head groups that travel and compute in turn (head_groups.py); 1 for all heads at once.
    """

    kernel: str
    signature: Signature
    mesh: Mesh
    groups: int = 1

    @property
    def running(self) -> Running:
        """See the function of this name."""
        return running(kernels.get(self.kernel))

    def forward(self, q, k, v, operands, out_dtype=torch.float32):
        """out [batch, q_rows, q_local, head_dim], lse float32 [batch, q_local, q_rows]."""
        return kernels.get(self.kernel).forward(q, k, v, operands, self.signature.scale, out_dtype=out_dtype)

    def backward(self, saved, dout, delta, operands):
        """float32 dq, dk, dv of this part, from the final out and lse."""
        backward = kernels.get(self.kernel).backward
        assert backward is not None  # the plan has asked for it
        return backward(
            *saved, dout, operands, self.signature.scale, grad_dtype=torch.float32, delta=delta
        )

    def backward_parts(self, total, saved, dout, delta, operands):
        """(query, keys), called in either order: query() the sum of dq, see `Running.backward`, keys() dk, dv, float32.

        Where the kernel makes them apart, what the first call made can travel while the other is at work.
        """
        running, arguments = self.running, (total, *saved, dout, operands, self.signature.scale)
        if running.parts is not None:
            return running.parts(*arguments, delta=delta)
        made = functools.cache(lambda: running.backward(*arguments, delta=delta))
        return lambda: made()[0], lambda: made()[1:]

    @property
    def travel(self) -> torch.dtype:
        """dtype of gradient sums in flight."""
        return getattr(torch, self.signature.travel)


@functools.cache
def running(kernel: Kernel) -> Running:
    """How a kernel adds the keys of one step to those of earlier steps: its own way, or by merging its results."""
    def forward(part, q, k, v, operands, scale, *, out_dtype=torch.float32):
        results = kernel.forward(q, k, v, operands, scale, out_dtype=out_dtype if part is None else torch.float32)
        new = tuple(x.contiguous() for x in results)  # as the merge reads them, and as they travel
        if part is None:
            return new
        out, lse = merge(part, new, in_place=True)
        return out.to(out_dtype), lse

    def backward(total, q, k, v, out, lse, dout, operands, scale, *, delta):
        assert kernel.backward is not None  # the plan has asked for it
        dq, dk, dv = kernel.backward(q, k, v, out, lse, dout, operands, scale, grad_dtype=torch.float32, delta=delta)
        return dq if total is None else total.add_(dq), dk, dv

    return kernel.running or Running(forward, backward)


def last_forward(running: Running, part, q, k, v, operands, scale):
    """out (q's dtype) and lse of all keys, these being the last; parts before are float32, and it rounds once."""
    return running.forward(part, q, k, v, operands, scale, out_dtype=q.dtype)


def row_sums(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """delta = rowsum(out * dout), float32 [batch, heads, rows]; in one pass over memory on a GPU."""
    if out.is_cuda:
        return row_delta(out, dout)
    return (out.float() * dout.float()).sum(dim=-1).transpose(1, 2).contiguous()


def take_tokens(x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows of axis 1 in this order; None keeps x."""
    return x if order is None else x.index_select(1, order)


def put_tokens(x: torch.Tensor, order: torch.Tensor | None, length: int) -> torch.Tensor:
    """The inverse of `take_tokens`: row n of x to place order[n] (or n) of `length` places, zeros elsewhere."""
    if order is None and x.shape[1] == length:
        return x
    filled = order is not None and len(order) == length  # every place: nothing is to be cleared
    out = (x.new_empty if filled else x.new_zeros)((x.shape[0], length, *x.shape[2:]))
    if order is None:
        out[:, : x.shape[1]] = x
    else:
        out.index_copy_(1, order, x)
    return out


def words(x: torch.Tensor) -> torch.Tensor:
    """x as words of 16 bytes where its rows are whole ones: copies that change the order of axes move those."""
    per = 16 // x.element_size()
    whole = x.stride(-1) == 1 and all(n % per == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.complex128) if whole else x
