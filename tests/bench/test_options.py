"""Flags that all binaries share are checked when they are read."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("binary, flag", [
    ("fuzz", "seconds"), ("compare", "threshold"), ("replay", "link_outer_latency")])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_float_flag_is_a_finite_number(binary, flag, value):
    command = [sys.executable, "-m", f"bench.{binary}", f"--{flag}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"--{flag} must be a finite number" in done.stderr, done.stderr


def test_every_float_flag_is_one_of_these():
    """All go through `options.define_float`, which alone calls absl's."""
    users = [path.name for path in BENCH.rglob("*.py") if "DEFINE_float" in path.read_text()]
    assert users == ["options.py"]
