"""The two passes of a kernel as functions of tensors alone."""

from collections.abc import Callable


def passes_of(kernel, scale: float) -> tuple[Callable, Callable]:
    """(forward(q, k, v, operands), backward(q, k, v, out, lse, dout, operands)) of a kernel of either stack."""
    def forward(q, k, v, operands):
        return kernel.forward(q, k, v, operands, scale)

    def backward(q, k, v, out, lse, dout, operands):
        return kernel.backward(q, k, v, out, lse, dout, operands, scale)

    return forward, backward
