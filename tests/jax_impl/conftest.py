"""On a machine without a GPU the Hopper kernels run in the interpreter of Mosaic GPU kernels."""

import jax
import pytest

from tests.jax_impl.interpret_patch import interpreted

HOPPER = ("fa3", "flashmask", "flex", "vsa", "flashinfer", "flex_sparse")


@pytest.fixture(autouse=True)
def hopper_interpreter(request):
    """Wraps a test whose parameter `name` is a Hopper kernel."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if jax.default_backend() == "gpu" or parameters.get("name") not in HOPPER:
        yield
        return
    with interpreted():
        yield
