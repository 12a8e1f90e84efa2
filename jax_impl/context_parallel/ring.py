"""Ring P2P: blocks of keys walk the ring, partial results merge; twin in torch_impl.

Liu et al., Ring Attention, 2023. The schedule's steps say which block is computed against and which hop (a
permutation that all ranks make) brings it; hops nobody needs are not in it. A hop is issued before the step that
hides it. The same walk serves usp and, window by window, loongtrain.
"""

import jax
import jax.numpy as jnp

from jax_impl.context_parallel.local import Data, Local, if_seen, last_forward, rounded, row_sums
from workload.signature import Step
from workload.topology import Hop


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype) and lse of all keys; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    if len(data.masks) == 1:  # nothing to merge: the kernel rounds, and once
        return local.forward(q, k, v, data.masks[0], out_dtype=q.dtype)
    running, scale, walk, part = local.running, local.signature.scale, _Walk(local, (k, v)), None

    def attend(part, k, v, operands):
        return running.forward(part, q, k, v, operands, scale=scale)

    def attend_last(part, k, v, operands):
        return last_forward(running, part, q, k, v, operands, scale)

    for t, (operands, seen) in enumerate(zip(data.masks, data.seen, strict=True)):
        last, (k, v) = t + 1 == len(data.masks), walk.enter(t)
        compute = attend_last if last else attend
        keep = (lambda part, *_: rounded(running, part, q)) if last else (lambda part, *_: part)
        part = walk.leave(if_seen(seen, compute, keep, part, k, v, operands))
    return part


def backward(local: Local, saved, dout, data: Data):
    """dq, dk, dv, float32. Every step uses the final out and lse; sums of dk, dv follow their block and go home."""
    q, k, v, out, lse = saved
    running, steps, scale = local.running, local.signature.steps, local.signature.scale
    delta = row_sums(out, dout)
    walk, total, own, moving, carried = _Walk(local, (k, v)), None, [], None, None

    def gradients(total, k, v, operands):
        return running.backward(total, q, k, v, out, lse, dout, operands, scale=scale, delta=delta)

    def nothing(total, k, v, _):
        return total, *(jnp.zeros(x.shape, jnp.float32) for x in (k, v))

    for t, (step, operands, seen) in enumerate(zip(steps, data.masks, data.seen, strict=True)):
        k, v = walk.enter(t)
        if not step.at_home and step.grad_hop is None and moving is not None:  # a later window's sum begins
            carried_hop = next(s.carried_hop for s in steps[t:] if s.carried_hop is not None)
            carried = _send_sums(local, moving, carried_hop)  # it has this whole window to arrive
        arriving = None if step.grad_hop is None else _send_sums(local, moving, step.grad_hop)
        total, *sums = if_seen(seen, gradients, nothing, total, k, v, operands)
        if step.at_home:
            own = sums
        else:
            sums = sums if arriving is None else _add(sums, arriving)
            moving = sums if step.carried_hop is None else _add(sums, carried)
        total, own, moving = walk.leave((total, own, moving))
    if local.signature.home is not None:
        own = _add(own, _send_sums(local, moving, local.signature.home))
    return running.gradient(total, q, scale), *own


class _Walk:
    """The block held at each step, with one hop under way, and a second one from window to window.

    `leave` ties what a step computed to the block that comes next: the hop after it cannot start before, so the
    number of blocks alive does not grow with the ring.
    """

    def __init__(self, local: Local, block):
        self.local, self.steps = local, local.signature.steps
        self.coming, self.next_entry = block, None

    def enter(self, t: int):
        block = self.coming
        if t == 0 or self.steps[t].enters:
            hop = next((s.hop for s in self.steps[t + 1 :] if s.enters), None)
            self.next_entry = _send(self.local, block, hop)
        following = self.steps[t + 1] if t + 1 < len(self.steps) else Step()
        self.coming = self.next_entry if following.enters else _send(self.local, block, following.hop)
        return block

    def leave(self, computed):
        computed, self.coming = jax.lax.optimization_barrier((computed, self.coming))
        return computed


def _send(local: Local, tensors, hop: Hop | None):
    if hop is None:
        return None
    pairs = local.signature.topology.pairs(hop)
    return tuple(jax.lax.ppermute(x, "ring", pairs) for x in tensors)


def _send_sums(local: Local, sums, hop: Hop):
    moved = _send(local, [x.astype(local.signature.travel) for x in sums], hop)
    return [x.astype(jnp.float32) for x in moved]


def _add(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]
