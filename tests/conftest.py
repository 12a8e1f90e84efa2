"""Where the tests run: chosen before either stack is first imported."""

import os
import shutil
import signal

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # programs compile longer than they run
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin disturb the tests next to them
    # Each simulated warpgroup blocks a thread of JAX's CPU pool: with a pool of two they starve one another.
    os.environ.setdefault("NPROC", "32")


def pytest_sessionfinish(session):
    """pytest-xdist interrupts a process whose tests are done, amid what JAX cleans up then: that would be printed."""
    if hasattr(session.config, "workerinput"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
