"""LoongTrain: a head exchange, then a double ring of windows; twin in jax_impl.

Gu et al., LoongTrain, 2024. On entering a window, a rank's block leaves for the next window and has all inner steps to
arrive; the schedule's steps carry that order (`Hop.from_entry`, `Step.carried_hop`), so the walk is the ring's. Hops
between windows have a channel of their own (`Mesh.outer`). A window of 1 or of the whole ring is the flat ring, bit
for bit.
"""

from torch_impl.context_parallel import ring
from torch_impl.context_parallel.local import Data, Local


def forward(local: Local, q, k, v, data: Data):
    """out, lse on the exchanged tensors."""
    return ring.forward(local, q, k, v, data)


def backward(local: Local, saved, dout, data: Data):
    """Yields dq, dk, dv, float32, on the exchanged tensors by name."""
    return ring.backward(local, saved, dout, data)
