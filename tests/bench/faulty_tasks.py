"""Tasks that a worker is asked for in tests: each fails in a way of its own."""

import os
import signal
import sys
import time

from workload.errors import Unsupported


def echo(value):
    """The value and the process that answers."""
    return {"value": value, "process": os.getpid()}


def right():
    """Finds nothing wrong."""
    return {"wrong": []}


def killed():
    """Ends as if the kernel had shot it."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    """Never answers, and leaves a child behind."""
    if os.fork() == 0:
        time.sleep(600)
    time.sleep(600)


def exhaust():
    """Asks for more memory than the worker may hold."""
    held = []
    while True:
        held.append(bytearray(512 << 20))


def abort():
    """Dies in a library that could not allocate."""
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
    os.abort()


def refuse():
    """Cannot honour an argument."""
    raise Unsupported("jax kernel toy", "does not take mask full")


def wrong():
    """Raises."""
    raise RuntimeError("nothing fits")


def modules():
    """Which stacks the worker has imported."""
    return sorted({"jax", "torch"} & set(sys.modules))
