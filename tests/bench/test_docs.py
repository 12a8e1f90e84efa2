"""Examples in docstrings hold, and every binary's help can be read without a stack."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", [
    "bench.cases", "bench.timing", "bench.options", "bench.records", "bench.trace", "bench.report.aggregate",
    "parity.inputs", "parity.compare"])
def test_examples(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("name, flag", [
    ("dense", "--seqlens"), ("peers", "--against"), ("parity", "--shapes"), ("quick", "--folder"),
    ("fuzz", "--seconds"),
    ("report", "--folder"), ("compare", "--threshold")])
def test_help_is_readable(name, flag):
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", "--help"], capture_output=True, text=True)
    assert f"python -m bench.{name}" in done.stdout or "make bench" in done.stdout
    assert flag in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("stack, launcher, judge", [
    ("jax", [], "abs(value / jnp.square(attention(*map(jnp.asarray, (q, k, v)), mask)[0]).mean() - 1) < 0.02"),
    ("torch", ["-m", "torch_impl.launch", "--ranks=2", "--", sys.executable],
     "abs(value / attention(q, k, v, mask)[0].float().square().mean() - 1) < 0.02"),
])
def test_programs_of_the_readme(stack, launcher, judge, tmp_path):
    """Each runs as it stands on two ranks, with the loss of one device."""
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    [program] = [text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if f"from {stack}_impl" in text]
    path = tmp_path / "program.py"
    path.write_text(f"{program}\nfrom {stack}_impl.attention import attention\nassert {judge}, value\nprint('right')")
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                                "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *launcher, str(path)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "right" in done.stdout, done.stderr
