"""Ranks over gloo: jobs that end well, lose a rank or wait for one, and a job on two hosts."""

import os
import shutil
import subprocess
import sys

import pytest

from torch_impl.launch import RankFailure, spawn

WORKER = [sys.executable, "-m", "tests.torch_impl.gloo_worker"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ring_of_any_size_ends(ranks):
    """K1, K3: a ring of one, of an even and of an odd number of ranks goes round."""
    said = spawn([*WORKER, "well", "4"], ranks, deadline_s=60)
    assert said == [f"{r} of {ranks}: {(r - 4) % ranks}\n" for r in range(ranks)]


def test_lost_rank_ends_the_job():
    """K7: its peers' own errors do not hide who was lost, at which step."""
    with pytest.raises(RankFailure, match="rank 1 of 2 was lost .SIGKILL. at step 'local attention'"):
        spawn([*WORKER, "lost", "1"], 2, deadline_s=60)


def test_rank_that_lags_is_named_by_the_one_that_waits():
    """K1: the waiting rank's watch ends it, the launcher names the rank that it waited for."""
    with pytest.raises(RankFailure) as caught:
        spawn([*WORKER, "slow", "1"], 2, deadline_s=60)
    assert caught.value.rank == 1
    assert "rank 1 of 2 is the furthest behind at step 'local attention'" in str(caught.value)
    assert caught.value.steps[0] == "step 'rotate 0', peer 1"


# ---- two hosts -----------------------------------------------------------------------------------


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a pair of interfaces, as two hosts: [(prefix of a command, address)]."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need `ip` and root")
    tag = f"{os.getpid() % 10000}"
    names = [f"host{n}t{tag}" for n in range(2)]
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", f"v0t{tag}", "type", "veth", "peer", "name", f"v1t{tag}")
            for n, name in enumerate(names):
                _ip("link", "set", f"v{n}t{tag}", "netns", name)
                _ip("-n", name, "addr", "add", f"10.213.7.{n + 1}/24", "dev", f"v{n}t{tag}")
                _ip("-n", name, "link", "set", f"v{n}t{tag}", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces: {error.stderr.decode().strip()}")
        yield [(["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=v{n}t{tag}"], f"10.213.7.{n + 1}")
               for n, name in enumerate(names)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def test_two_hosts_make_one_ring(two_hosts):
    """One launcher a host: every rank hands its value along the ring."""
    coordinator = f"{two_hosts[0][1]}:29511"
    launchers = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "torch_impl.launch", "--ranks", "1", "--hosts", "2", "--host", str(n),
             "--coordinator", coordinator, "--deadline", "60", "--", *WORKER, "well", "3"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n, (prefix, _) in enumerate(two_hosts)
    ]
    try:
        answers = [process.communicate(timeout=90) for process in launchers]
    finally:
        for process in launchers:
            process.kill()
    assert [said for said, _ in answers] == ["0 of 2: 1\n", "1 of 2: 0\n"], answers
