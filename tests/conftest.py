"""Where the tests run: chosen before either stack is first imported."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TRITON_INTERPRET", "1")
