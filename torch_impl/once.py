"""Gradients that are not differentiated again; twin of jax_impl/once.py."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from workload.errors import Unsupported


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass whose gradients are `Unsupported` to differentiate, whatever they are differentiated by.

    Torch's own decorator refuses where the incoming gradients ask for it, and takes dq, dk, dv for constants of q, k, v
    where those are constants, as under a sum of out.
    """
    @functools.wraps(backward)
    def once(ctx, *dout):
        again = torch.is_grad_enabled()  # under create_graph=True alone
        with torch.no_grad():
            gradients = backward(ctx, *dout)
        if not again:
            return gradients
        of = (*ctx.saved_tensors, *dout)
        return tuple(x if x is None else _Refused.apply(x.detach().requires_grad_(), *of) for x in gradients)

    return once


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradient, *of):
        del ctx, of
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx, _):
        raise Unsupported("attention", "its gradients are not differentiated again")
