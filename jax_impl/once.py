"""Gradients that are not differentiated again; twin of torch_impl/once.py."""

import jax

from workload.errors import Unsupported


@jax.custom_jvp
def once_differentiable(saved):
    """What a backward pass computes from, as it is; `Unsupported` where its results are differentiated.

    Second derivatives would be wrong: lse, which a backward pass reads, is a constant to differentiation.
    """
    return saved


@once_differentiable.defjvp
def _again(primals, tangents):
    raise Unsupported("attention", "its gradients are not differentiated again")
