"""Ring P2P: blocks of keys walk the ring, partial results merge; twin in jax_impl.

Liu et al., Ring Attention, 2023. The schedule's steps say which block is computed against and which hop (a
permutation that all ranks make) brings it; hops nobody needs are not in it. A hop is issued before the step that hides
it. The same walk serves usp and, window by window, loongtrain.
"""

import functools

import torch

from torch_impl.context_parallel.communicator import Pending
from torch_impl.context_parallel.local import Data, Local, last_forward, row_sums
from workload.topology import Hop


def forward(local: Local, q, k, v, data: Data):
    """out (q's dtype) and lse of all keys; q [batch, q_rows, heads, d], k, v [batch, kv_block, kv heads, d]."""
    running, scale, walk, part = local.running, local.signature.scale, _Walk(local, "forward", (k, v)), None
    last = max((t for t, operands in enumerate(data.masks) if operands is not None), default=None)
    for t, operands in enumerate(data.masks):
        k, v = walk.enter(t)
        if operands is not None:
            step = functools.partial(last_forward, running) if t == last else running.forward
            part = step(part, q, k, v, operands, scale)
    out, lse = running.result(part, q)
    return out.to(q.dtype), lse


def backward(local: Local, saved, dout, data: Data):
    """Yields ("dq", ..), ("dk", ..), ("dv", ..), float32. Every step uses the final out and lse; sums of dk, dv follow
    their block and go home, the last ones while dq of the last step is made.
    """
    q, k, v, out, lse = saved
    steps, delta, last = local.signature.steps, row_sums(out, dout), len(data.masks) - 1
    walk, total, own, moving, carried, going = _Walk(local, "backward", (k, v)), None, None, None, None, None
    for t, (step, operands) in enumerate(zip(steps, data.masks, strict=True)):
        k, v = walk.enter(t)
        if not step.at_home and step.grad_hop is None and moving is not None:
            hop = next(s.carried_hop for s in steps[t:] if s.carried_hop is not None)
            carried = _send_sums(local, moving, hop, t)  # it has this whole window to arrive
        arriving = None if step.grad_hop is None else _send_sums(local, moving, step.grad_hop, t)
        sums = query = None
        if operands is not None:
            query, keys = local.backward_parts(total, (q, k, v, out, lse), dout, delta, operands)
            if t < last:
                total, query = query(), None
            sums = keys()
        if step.at_home:
            own = sums
        else:
            moving = _add(sums, arriving, k)
            moving = moving if step.carried_hop is None else _add(moving, carried, k)
        if t == last and local.signature.home is not None:
            going = _send_sums(local, moving, local.signature.home, len(steps))
        total = total if query is None else query()
    yield "dq", local.running.gradient(total, q, local.signature.scale)
    yield from zip(("dk", "dv"), _add(own, going, k), strict=True)


class _Walk:
    """The block held at each step, with one hop under way, and a second one from window to window."""

    def __init__(self, local: Local, name: str, block):
        self.local, self.name, self.steps = local, name, local.signature.steps
        self.coming: Pending | None = None
        self.next_entry: Pending | None = None
        self.block = block

    def enter(self, t: int):
        """The k, v of step t; what step t + 1 (and the next window) needs has left its rank when this returns."""
        if self.coming is not None:
            self.block = self.coming.wait()
        if t == 0 or self._enters_window(t):
            later = (s.hop for s in self.steps[t + 1 :] if s.hop is not None and s.hop.from_entry)
            hop = next(later, None)
            self.next_entry = None if hop is None else self._send(hop, t)
        following = self.steps[t + 1].hop if t + 1 < len(self.steps) else None
        if following is None:
            self.coming = None
        else:
            self.coming = self.next_entry if following.from_entry else self._send(following, t)
        return self.block

    def _enters_window(self, t: int) -> bool:
        hop = self.steps[t].hop
        return hop is not None and hop.from_entry

    def _send(self, hop: Hop, t: int) -> Pending:
        return self.local.mesh.send(self.block, hop, f"ring {self.name} step {t}: keys to the next step")


def _send_sums(local: Local, sums, hop: Hop, t: int) -> Pending:
    return local.mesh.send([x.to(local.travel) for x in sums], hop, f"ring backward step {t}: sums of dk, dv")


def _add(sums, arriving: Pending | None, like: torch.Tensor):
    """sums + what arrives, float32; None is zero."""
    got = None if arriving is None else [x.float() for x in arriving.wait()]
    if sums is None and got is None:
        return [torch.zeros_like(like, dtype=torch.float32) for _ in range(2)]
    if sums is None or got is None:
        return got if sums is None else sums
    return [x.add_(y) for x, y in zip(sums, got, strict=True)]
