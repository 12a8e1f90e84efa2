"""Ranks over gloo: jobs that end well, lose a rank or wait for one, and a job on two hosts."""

import socket
import subprocess
import sys

import pytest

from tests.two_hosts import run_on_both, two_hosts
from torch_impl.launch import RankFailure, join, main, spawn

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


@pytest.mark.parametrize("hosts, said", [
    ({"hosts": 2}, "coordinator: None"), ({"hosts": 2, "coordinator": "there"}, "coordinator: 'there'"),
    ({"hosts": 2, "host": 2, "coordinator": "there:1"}, "host: 2 of 2")])
def test_hosts_that_do_not_go_together_are_refused(hosts, said):
    with pytest.raises(ValueError, match=said):
        spawn(WORKER, 1, deadline_s=1, **hosts)


def test_a_port_that_is_taken_is_named(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(SystemExit):
            main(["--ranks=1", f"--coordinator=127.0.0.1:{taken.getsockname()[1]}", "--", sys.executable])
    assert "--coordinator: " in (said := capsys.readouterr().err) and "already in use" in said


def test_two_hosts_make_one_ring(tmp_path):
    """One launcher a host: every rank hands its value along the ring."""
    command = [sys.executable, "-m", "torch_impl.launch", "--ranks=1", "--hosts=2", "HOST", "--deadline=60", "--"]
    with two_hosts(tmp_path) as hosts:
        assert run_on_both(hosts, [*command, *WORKER, "well", "3"], 90) == ["0 of 2: 1\n", "1 of 2: 0\n"]


def test_torchrun_starts_lost_ranks_again():
    """Its store, at which they meet, still has the keys of those that were lost."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1",
               "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.1"]
    done = subprocess.run([*command, "-m", "tests.torch_impl.gloo_worker", "once", "3"], capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 1", "1 of 2: 0"]


def test_a_process_that_is_no_rank_is_told_so():
    with pytest.raises(ValueError, match="place: None, no launcher"), join(None):
        pass
