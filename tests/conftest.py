"""Where the tests run: chosen before either stack is first imported."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Each simulated warpgroup blocks a thread of JAX's CPU pool: with a pool of two they starve one another.
    os.environ.setdefault("NPROC", "32")
