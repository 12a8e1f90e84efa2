"""Temporary folders: gone with their owner, however that ends."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workload.scratch import LOCK, scratch

OWNER = """
import time
from workload.scratch import scratch
with scratch("a") as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_it_is_gone_at_the_end_and_after_a_failure(temporary):
    with scratch("a") as one, scratch("a") as other:
        (one / "x").write_text("")
        assert one != other and one.parent == temporary
    with pytest.raises(ZeroDivisionError), scratch("a"):
        raise ZeroDivisionError
    assert not list(temporary.iterdir())


def test_what_a_killed_owner_left_is_cleared_and_nothing_else(temporary):
    """Exit status 137 left gigabytes of references behind, run after run."""
    (temporary / "attention-bench-of-others").mkdir()
    with scratch("b") as ours, subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        theirs = owner.stdout.readline().decode().strip()
        with scratch("a"):
            assert (ours / LOCK).exists() and (temporary / theirs / LOCK).exists()
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        assert (temporary / theirs / LOCK).exists()
        with scratch("b"):
            assert not (temporary / theirs).exists() and (ours / LOCK).exists()
    assert [x.name for x in temporary.iterdir()] == ["attention-bench-of-others"]


def test_who_loses_its_new_folder_to_a_clearing_takes_another(temporary, monkeypatch):
    touch, lost = Path.touch, []

    def cleared(path):
        if lost:
            return touch(path)
        lost.append(path)  # cleared by another before it could be held

    monkeypatch.setattr(Path, "touch", cleared)
    with scratch("a") as folder:
        assert lost and lost[0].parent != folder and (folder / LOCK).exists()
