"""The worker's tasks with a kernel whose out is off by a hundredth."""

import dataclasses
import functools

from bench import attention_task
from bench.attention_task import (  # noqa: F401
    build,
    ceiling,
    clock,
    describe,
    disturbs,
    environment,
    ready,
    reference,
    refuse,
)


def check(case, **arguments):
    """As the real one, on a kernel that is slightly wrong."""
    stack = attention_task.stack_of(case["stack"])
    real = stack.kernel

    def kernel(name):
        found = real(name)

        @functools.wraps(found.forward)
        def forward(*args, **kwargs):
            out, lse = found.forward(*args, **kwargs)
            return out * 1.01, lse
        return dataclasses.replace(found, forward=forward)
    stack.kernel = kernel
    try:
        return attention_task.check(case, **arguments)
    finally:
        stack.kernel = real
