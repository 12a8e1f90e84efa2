"""What machine and what versions a row was made with."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TREE = Path(__file__).parents[1]


@functools.cache
def machine() -> dict[str, Any]:
    """Host, Python, driver and the commit of this tree; the stack adds its own (`Stack.environment`)."""
    found = {
        "python": sys.version.split()[0], "numpy": np.__version__, "system": platform.platform(terse=True),
        "processor": _processor(), "cores": len(os.sched_getaffinity(0)), "commit": _commit(),
    }
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found | ({"driver": driver.splitlines()[0]} if driver else {})


def has_gpu() -> bool:
    """Whether this process may find a GPU of NVIDIA's."""
    return "driver" in machine() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] \
        if info.exists() else []
    return names[0] if names else platform.machine()


def _commit() -> str:
    return _git("rev-parse", "--short", "HEAD") or "unknown"


@functools.cache
def came_of(commit: str, ancestor: str) -> bool:
    """Whether a commit is `ancestor` or came of it; False for one that this tree does not know.

    Raises ValueError where the tree does not know `ancestor`.
    """
    found = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ancestor}^{{commit}}")
    if not found:
        raise ValueError(f"{ancestor!r} is no commit of this tree")
    return _git("merge-base", found, commit) == found


def _git(*command: str) -> str:
    return _output("git", "-C", str(TREE), *command)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
