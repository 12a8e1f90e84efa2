"""Ring all-gather: every ring index gathers all keys and computes its rows in one local call; twin in jax_impl.

The context parallelism of Llama 3 (Grattafiori et al., 2024, section 3.3.2). Keys are put in ascending order, so one
kernel call takes the mask as it is and nothing is merged; keys that no row of a rank sees are left out of its call.
Backward: keys are gathered again; dk, dv of all keys are summed over the ring by a float32 reduce-scatter, or travel in
the problem's dtype by an all-to-all of pieces that are summed in float32 at home, each contribution rounded once.
"""

from collections.abc import Callable, Sequence

import torch

from torch_impl.context_parallel.local import Data, Local, put_tokens, row_sums, take_tokens
from torch_impl.context_parallel.merge import empty


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    return attend(local, q, *gather(local, (k, v), data, "forward")(), data)


def backward(local: Local, saved, dout, data: Data):
    """Yields ("dq", ..), ("dk", ..), ("dv", ..), float32, each as soon as it is made.

    dk, dv [batch, kv_block, kv heads, d] are summed over the ring, and travel while dq is made; after a head exchange,
    where there are no sums, dq travels while dk, dv are made.
    """
    q, k, v, out, lse = saved
    k, v = gather(local, (k, v), data, "backward")()
    query, keys = _gradient_parts(local, (q, k, v, out, lse), dout, data)
    home = scatter_sum(local, keys(), data) if local.signature.topology.ring > 1 else None
    yield "dq", query()
    yield from zip(("dk", "dv"), (home or scatter_sum(local, keys(), data))(), strict=True)


def attend(local: Local, q, k, v, data: Data):
    """out (q's dtype), lse of gathered keys."""
    if data.masks[0] is None:
        out, lse = empty(q)
        return out.to(q.dtype), lse
    return local.forward(q, k, v, data.masks[0], out_dtype=q.dtype)


def gradients(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32, of this rank's rows, for gathered keys."""
    query, keys = _gradient_parts(local, saved, dout, data)
    return query(), *keys()


def _gradient_parts(local: Local, saved, dout, data: Data):
    """(query, keys): query() gives dq, keys() dk, dv, float32; see `Local.backward_parts`."""
    q, k, v, out, _ = saved
    running, scale = local.running, local.signature.scale
    if data.masks[0] is None:
        zeros = [torch.zeros_like(x, dtype=torch.float32) for x in (k, v)]
        return lambda: running.gradient(None, q, scale), lambda: zeros
    query, keys = local.backward_parts(None, saved, dout, row_sums(out, dout), data.masks[0])
    return lambda: running.gradient(query(), q, scale), keys


def gather(local: Local, tensors, data: Data, name: str) -> Callable[[], Sequence[torch.Tensor]]:
    """Starts gathering blocks of k, v; returns a function that waits: the keys its kernel is handed."""
    signature = local.signature
    coming = []
    if signature.topology.ring > 1:
        coming = [local.mesh.ring.all_gather(x.contiguous(), f"all_gather {name}: {label}")
                  for label, x in zip("kv", tensors)]

    def finish():
        whole = [x.wait().transpose(0, 1).flatten(1, 2) for x in coming] or tensors
        if data.gathered_order is None:
            return [x[:, : signature.kv_total].contiguous() for x in whole]
        return [take_tokens(x, data.gathered_order) for x in whole]

    return finish


def scatter_sum(local: Local, tensors, data: Data) -> Callable[[], Sequence[torch.Tensor]]:
    """Starts [batch, gathered_rows, ..] of every ring index to this one's block, summed over the ring."""
    signature = local.signature
    ring, block = signature.topology.ring, signature.kv_block
    tensors = [put_tokens(x, data.gathered_order, ring * block) for x in tensors]
    if ring == 1:
        return lambda: tensors
    pieces = [x.unflatten(1, (ring, block)).transpose(0, 1).to(local.travel).contiguous() for x in tensors]
    summed = signature.travel == "float32"
    start = local.mesh.ring.reduce_scatter if summed else local.mesh.ring.all_to_all
    coming = [start(x, f"all_gather backward: d{label}") for label, x in zip("kv", pieces)]
    return lambda: [x.wait() if summed else x.wait().float().sum(dim=0) for x in coming]
