"""Examples in docstrings hold, and every binary's help can be read without a stack."""

import doctest
import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", [
    "bench.timing", "bench.options", "bench.records", "bench.trace", "bench.report.aggregate", "parity.inputs",
    "parity.compare"])
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
