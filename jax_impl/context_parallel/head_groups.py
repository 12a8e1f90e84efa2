"""Head groups: ulysses and all_gather, some heads at a time, so that one group travels while another computes.

Neither scheme has steps to hide its communication behind, but heads are independent: the exchange (or the gather) of
group i + 1 and the way back of group i - 1 can run beside the kernel of group i. Bytes are the schedule's, in `groups`
times as many collectives. Twin in torch_impl.
"""

import jax
import jax.numpy as jnp

from jax_impl.context_parallel.all_gather import attend, gather, gradients, scatter_sum
from jax_impl.context_parallel.local import Data, Local
from jax_impl.context_parallel.ulysses import exchange_heads, exchange_tokens, from_slots, in_slots

SIDES = {"q": "q", "k": "kv", "v": "kv"}


def forward(local: Local, q, k, v, data: Data):
    """out by token; lse by token, or None; each group's exchanged q, k, v, out, and its lse, for `backward`."""
    signature = local.signature
    sent = {name: in_slots(signature, x, SIDES[name]) for name, x in (("q", q), ("k", k), ("v", v))}

    def arrive(i, sent):
        q, k, v = (exchange_tokens(signature, _group(local, sent[x], i), SIDES[x], data) for x in "qkv")
        return q, k, v, *gather(local, (k, v), data)

    exchanged, lses, back, coming = [], [], [], arrive(0, sent)
    for i in range(local.groups):
        (q, k, v, *whole), coming = coming, arrive(i + 1, sent) if i + 1 < local.groups else None
        (out, lse), coming, sent, back[-1:] = _in_turn(attend(local, q, *whole, data), coming, sent, back[-1:])
        exchanged.append((q, k, v, out))
        lses.append(lse)
        back.append([exchange_heads(signature, out, "q", data)])
        if signature.with_lse:
            back[i].append(exchange_heads(signature, lse.transpose(0, 2, 1)[..., None], "q", data))
    joined = [_joined(local, parts, "q") for parts in zip(*back, strict=True)]
    by_token = joined[1][..., 0].transpose(0, 2, 1) if signature.with_lse else None
    return joined[0], by_token, tuple(exchanged), tuple(lses)


def backward(local: Local, exchanged, lses, dout, data: Data):
    """dq (dout's dtype), dk, dv by token.

    exchanged, lses: of `forward`; without an exchange, q, k, v and out by token.
    """
    signature = local.signature
    if signature.topology.ulysses == 1:
        exchanged = [tuple(_group(local, x, i) for x in exchanged) for i in range(local.groups)]
    sent = in_slots(signature, dout, "q")

    def arrive(i, sent):
        _, k, v, _ = exchanged[i]
        return exchange_tokens(signature, _group(local, sent, i), "q", data), *gather(local, (k, v), data)

    back, coming = [], arrive(0, sent)
    for i in range(local.groups):
        (dout, k, v), coming = coming, arrive(i + 1, sent) if i + 1 < local.groups else None
        q, _, _, out = exchanged[i]
        computed = gradients(local, (q, k, v, out, lses[i]), dout, data)
        (dq, *sums), coming, sent, back[-1:] = _in_turn(computed, coming, sent, back[-1:])
        parts = (dq.astype(dout.dtype), *scatter_sum(local, sums, data))
        back.append([exchange_heads(signature, x, side, data) for x, side in zip(parts, SIDES.values(), strict=True)])
    return tuple(_joined(local, parts, side) for parts, side in zip(zip(*back), SIDES.values(), strict=True))


def _in_turn(computed, coming, sent, back):
    """The same values, tied: what the group before sent back is there when this group has computed, so that it travels
    meanwhile, and what the one after the next sends cannot leave before.
    """
    return jax.lax.optimization_barrier((computed, coming, sent, back))


def _group(local: Local, x, i: int):
    """The i-th group's slots of every rank, [batch, length, slots / groups, d]."""
    batch, length, slots, dim = x.shape
    degree, groups = local.signature.topology.ulysses, local.groups
    return x.reshape(batch, length, degree, groups, -1, dim)[:, :, :, i].reshape(batch, length, slots // groups, dim)


def _joined(local: Local, parts, tensor: str):
    """All groups' [batch, length, slots / groups, d] to [batch, length, heads, d]."""
    batch, length, _, dim = parts[0].shape
    degree = local.signature.topology.ulysses
    x = jnp.stack([p.reshape(batch, length, degree, -1, dim) for p in parts], axis=3)
    return from_slots(local.signature, x.reshape(batch, length, -1, dim), tensor)
