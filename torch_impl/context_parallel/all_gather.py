"""Ring all-gather: every ring index gathers all keys and computes its rows in one local call; twin in jax_impl.

The context parallelism of Llama 3 (Grattafiori et al., 2024, section 3.3.2). Keys are put in ascending order, so one
kernel call takes the mask as it is and nothing is merged. Backward: keys are gathered again; dk, dv of all keys are
summed over the ring by a float32 reduce-scatter, or travel in the problem's dtype by an all-to-all of pieces that are
summed in float32 at home, each contribution rounded once.
"""

import torch

from torch_impl.context_parallel.local import Data, Local, put_tokens, row_sums, take_tokens
from torch_impl.context_parallel.merge import empty


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    k, v = _gather(local, (k, v), data, "forward")
    if data.masks[0] is None:
        out, lse = empty(q)
        return out.to(q.dtype), lse
    return local.forward(q, k, v, data.masks[0], out_dtype=q.dtype)


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32; dk, dv [batch, kv_block, kv heads, d] summed over the ring."""
    q, k, v, out, lse = saved
    k, v = _gather(local, (k, v), data, "backward")
    if data.masks[0] is None:
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    else:
        dq, dk, dv = local.backward((q, k, v, out, lse), dout, row_sums(out, dout), data.masks[0])
    return dq, *_scatter_sum(local, (dk, dv), data)


def _gather(local: Local, tensors, data: Data, name: str):
    """All keys in ascending order, without padding."""
    signature = local.signature
    if signature.topology.ring > 1:
        coming = [local.mesh.ring.all_gather(x.contiguous(), f"all_gather {name}: {label}")
                  for label, x in zip("kv", tensors)]
        tensors = [x.wait().transpose(0, 1).flatten(1, 2) for x in coming]
    if data.gathered_order is None:
        return [x[:, : signature.kv_total].contiguous() for x in tensors]
    return [take_tokens(x, data.gathered_order) for x in tensors]


def _scatter_sum(local: Local, tensors, data: Data):
    """[batch, kv_total, ..] of every ring index to this one's block, summed over the ring."""
    signature = local.signature
    ring, block = signature.topology.ring, signature.kv_block
    tensors = [put_tokens(x, data.gathered_order, ring * block) for x in tensors]
    if ring == 1:
        return tensors
    pieces = [x.unflatten(1, (ring, block)).transpose(0, 1).to(local.travel).contiguous() for x in tensors]
    summed = signature.travel == "float32"
    start = local.mesh.ring.reduce_scatter if summed else local.mesh.ring.all_to_all
    coming = [start(x, f"all_gather backward: d{label}") for label, x in zip("kv", pieces)]
    return [x.wait() if summed else x.wait().float().sum(dim=0) for x in coming]
