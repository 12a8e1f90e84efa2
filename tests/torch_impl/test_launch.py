"""Starting and joining: the variables of three launchers, and jobs that end well, fail, lose or wait for a rank."""

import contextlib
import doctest
import os
import shutil
import subprocess
import sys
import time

import pytest

from torch_impl import launch
from torch_impl.launch import Place, RankFailure, detect, spawn

WORKER = [sys.executable, "-m", "tests.torch_impl.gloo_worker"]
SCRIPT = """
import os, sys, time
from torch_impl.launch import Progress
rank, progress = int(os.environ["RANK"]), Progress()
for n in range(3 + rank):
    progress.at(f"step {n}", [(rank + 1) % 3])
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT + body]


def test_doctests():
    assert doctest.testmod(launch).failed == 0


def test_detects_torchrun():
    env = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h",
           "MASTER_PORT": "5"}
    assert detect(env) == Place(9, 16, 1, 8, "h:5")


def test_detects_slurm():
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
           "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_JOB_ID": "4097"}
    assert detect(env) == Place(5, 6, 2, 3, "gpu007:61441")


def test_detects_open_mpi():
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.96.0.1,10.148.0.1:34911"}
    assert detect(env) == Place(3, 4, 1, 2, "10.96.0.1:29500")


def test_detects_nothing_outside_a_job():
    assert detect({"PATH": "/bin"}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None


def test_each_rank_returns_its_stdout_and_sees_its_place():
    said = spawn(script("print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])"), 3, deadline_s=30)
    assert [s.split() for s in said] == [[str(r), "3", str(r)] for r in range(3)]


def test_failing_rank_is_named_with_its_step_peer_and_stderr():
    with pytest.raises(RankFailure) as caught:
        spawn(script("assert rank != 2, 'the reason'\ntime.sleep(60)"), 3, deadline_s=30)
    assert caught.value.rank == 2
    message = str(caught.value)
    assert "rank 2 of 3 failed (exit status 1) at step 'step 4', peer 0" in message
    assert "AssertionError: the reason" in message and "rank 1 was at step 'step 3', peer 2" in message


def test_job_past_its_deadline_names_the_rank_furthest_behind_and_leaves_no_process():
    begin = time.monotonic()
    body = "open(sys.argv[1] + str(rank), 'w').write(str(os.getpid()))\ntime.sleep(60)"
    folder = os.environ.get("TMPDIR", "/tmp") + f"/launch-test-{os.getpid()}-"
    with pytest.raises(RankFailure, match="rank 0 of 3 is the furthest behind at the deadline of 2 s at step 'step 2'"):
        spawn([*script(body), folder], 3, deadline_s=2)
    assert time.monotonic() - begin < 15
    for rank in range(3):
        with contextlib.suppress(FileNotFoundError), open(folder + str(rank)) as file:
            pid = int(file.read())
            os.unlink(folder + str(rank))
            assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 8))])
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
