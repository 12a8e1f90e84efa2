"""Head groups: ulysses and all_gather, some heads at a time, so that one group travels while another computes.

Neither scheme has steps to hide its communication behind, but heads are independent: the exchange (or the gather) of
group i + 1 and the way back of group i - 1 run beside the kernel of group i. Bytes are the schedule's, in `groups`
times as many collectives.
"""

import torch

from torch_impl.context_parallel.all_gather import attend, gather, gradients, scatter_sum
from torch_impl.context_parallel.local import Local, words
from torch_impl.context_parallel.plan import Plan
from torch_impl.context_parallel.ulysses import exchange_heads, exchange_tokens, from_slots, in_slots


def forward(plan: Plan, q, k, v):
    """As `attention.forward`; what is saved are the five tensors of each group, one group after the other."""
    local, data = plan.local, plan.data
    sent = {name: _grouped(local, in_slots(local, x, name)) for name, x in (("q", q), ("k", k), ("v", v))}

    def begin(i):
        q, k, v = (exchange_tokens(local, sent[name][:, :, :, i], name, data) for name in "qkv")
        keys = _begin_keys(plan, k, v, "forward")
        return lambda: (q(), *keys())

    saved, back = [], []
    coming = begin(0)
    for i in range(local.groups):
        held, coming = coming, begin(i + 1) if i + 1 < local.groups else None
        q, (k, v), whole = held()
        out, lse = attend(local, q, *whole(), data)
        saved += [q, k, v, out, lse]
        back.append([exchange_heads(local, out, "out", data)])
        if local.signature.with_lse:
            back[i].append(exchange_heads(local, lse.transpose(1, 2)[..., None].contiguous(), "lse", data))
    out = _joined(local, [b[0]() for b in back], "out")
    by_token = None
    if local.signature.with_lse:
        by_token = _joined(local, [b[1]() for b in back], "lse")[..., 0].transpose(1, 2).contiguous()
    return (out, by_token), saved


def backward(plan: Plan, saved, dout):
    """As `attention.backward`, from what `forward` saved."""
    local, data, dtype = plan.local, plan.data, saved[0].dtype
    sent = _grouped(local, in_slots(local, dout, "dout"))

    def begin(i):
        dout = exchange_tokens(local, sent[:, :, :, i], "dout", data)
        q, k, v, out, lse = saved[5 * i : 5 * i + 5]
        whole = gather(local, (k, v), data, "backward")
        return lambda: ((q, *whole(), out, lse), dout())

    back = []
    coming = begin(0)
    for i in range(local.groups):
        held, coming = coming, begin(i + 1) if i + 1 < local.groups else None
        dq, *sums = gradients(local, *held(), data)
        back.append([exchange_heads(local, dq.to(dtype), "dq", data), _begin_sums(plan, sums)])
    parts = [(dq(), *sums()) for dq, sums in back]
    return tuple(_joined(local, list(x), name).to(dtype) for name, x in zip(("dq", "dk", "dv"), zip(*parts)))


def _begin_keys(plan: Plan, k, v, name: str):
    """Starts the gather of exchanged keys: at once where nothing was exchanged, else when they are asked for."""
    def finish():
        tensors = k(), v()
        return tensors, gather(plan.local, tensors, plan.data, name)

    if plan.local.signature.topology.ulysses > 1:
        return finish
    begun = finish()
    return lambda: begun


def _begin_sums(plan: Plan, sums):
    """Starts the sums of a group's dk, dv on their way home; the function returns them by token and slot."""
    local, data = plan.local, plan.data
    home = scatter_sum(local, sums, data)

    def finish():
        return [exchange_heads(local, x, name, data) for x, name in zip(home(), ("dk", "dv"))]

    if local.signature.topology.ring > 1:
        return lambda: [wait() for wait in finish()]
    begun = finish()
    return lambda: [wait() for wait in begun]


def _grouped(local: Local, x: torch.Tensor) -> torch.Tensor:
    """[batch, length, slots, d] to [batch, length, degree, groups, slots of a group, d]."""
    return x.unflatten(2, (local.signature.topology.ulysses, local.groups, -1))


def _joined(local: Local, parts: list[torch.Tensor], tensor: str) -> torch.Tensor:
    """Groups [batch, length, degree, slots of a group, d] to [batch, length, heads, d]."""
    joined = torch.stack([words(x) for x in parts], dim=3).flatten(2, 4)
    return from_slots(local, joined.view(parts[0].dtype), tensor)
