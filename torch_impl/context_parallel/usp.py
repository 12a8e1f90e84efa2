"""USP: a head exchange inside groups of `ulysses` ranks, a ring over the groups; twin in jax_impl.

Fang and Zhao, USP, 2024. The exchange (ulysses.py) hands this file the group's tokens of the rank's heads; the walk is
the ring's, on `ulysses` times the tokens and ring - 1 hops for world - 1.
"""

from torch_impl.context_parallel import ring
from torch_impl.context_parallel.local import Data, Local


def forward(local: Local, q, k, v, data: Data):
    """out, lse on the exchanged tensors."""
    return ring.forward(local, q, k, v, data)


def backward(local: Local, saved, dout, data: Data):
    """Yields dq, dk, dv, float32, on the exchanged tensors by name."""
    return ring.backward(local, saved, dout, data)
