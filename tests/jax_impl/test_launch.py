"""Several processes as one JAX job: it computes, and it ends when a rank is lost or lags."""

import os
import socket
import sys

import pytest

from jax_impl.launch import RankFailure, join, main, spawn
from tests.two_hosts import run_on_both, two_hosts
from workload import ranks
from workload.ranks import HOSTED

WORKER = [sys.executable, "-m", "tests.jax_impl.gloo_worker"]


@pytest.mark.parametrize("scheme", ["ring", pytest.param("ulysses", marks=pytest.mark.slow),
                                    pytest.param("all_gather", marks=pytest.mark.slow)])
def test_two_processes_attend(scheme):
    said = [s.splitlines()[-1].split() for s in spawn([*WORKER, scheme], 2, deadline_s=80)]  # gloo talks before
    assert [s[:2] for s in said] == [["0", "2"], ["1", "2"]]
    for _, _, *errors in said:
        assert len(errors) == 3 and all(float(e) < 1e-6 for e in errors)


def test_two_hosts_attend(tmp_path):
    """One launcher a host: ranks on both attend as one job, each to the right values."""
    command = [sys.executable, "-m", "jax_impl.launch", "--ranks=1", "--hosts=2", "HOST", "--deadline=80", "--"]
    with two_hosts(tmp_path) as hosts:
        said = [s.splitlines()[-1].split() for s in run_on_both(hosts, [*command, *WORKER, "ring"], 100)]
    assert [s[:2] for s in said] == [["0", "2"], ["1", "2"]]
    for _, _, *errors in said:
        assert len(errors) == 3 and all(float(e) < 1e-6 for e in errors)


def test_a_store_at_the_address_is_let_be():
    """Under torchrun a store of its own listens there."""
    program = """
from jax_impl import launch
with launch.join(launch.detect(), backend="cpu", timeout_s=30) as place:
    print(launch.exchange(f"rank {place.rank}", 30.0))
"""
    with socket.create_server(("127.0.0.1", 0)) as behind:  # so that the port behind is free
        port = behind.getsockname()[1] - 1
    with socket.create_server(("127.0.0.1", port)):
        at, environ = f"127.0.0.1:{port}", os.environ | {HOSTED: "True"}
        said = spawn([sys.executable, "-c", program], 2, deadline_s=60, environ=environ, coordinator=at)
    assert [s.splitlines()[-1] for s in said] == ["['rank 0', 'rank 1']"] * 2


def test_a_lost_rank_ends_the_job():
    with pytest.raises(RankFailure, match="rank 1 of 2 was lost .SIGKILL. at step 'joined', peer 0"):
        spawn([*WORKER, "lost"], 2, deadline_s=80)


def test_a_rank_that_lags_ends_the_job_at_the_deadline():
    """K7: nothing in JAX would end it; the launcher names the rank that the others wait for."""
    with pytest.raises(RankFailure, match="rank 1 of 2 is the furthest behind at the deadline of 8 s at step"):
        spawn([*WORKER, "slow"], 2, deadline_s=8)


def test_command_line(capsys):
    said = [sys.executable, "-c", "import os; print(os.environ['RANK'])"]
    assert main(["--ranks", "2", "--deadline", "30", "--", *said]) == 0
    assert capsys.readouterr().out == "0\n"
    assert main(["--ranks", "1", "--", sys.executable, "-c", "raise SystemExit('the reason')"]) == 1
    assert "the reason" in capsys.readouterr().err
    with pytest.raises(ValueError, match="coordinator"):
        spawn(WORKER, 1, hosts=2, deadline_s=1)
    with pytest.raises(ValueError, match="host: 2 of 2"):
        spawn(WORKER, 1, hosts=2, host=2, coordinator="there:1", deadline_s=1)


EXCHANGE = """
import os
from jax_impl import launch
with launch.join(launch.detect(), timeout_s=60) as place:
    for n in range(3):
        print(launch.exchange(f"{n} of {place.rank}", 60.0))
print(os.environ["XLA_FLAGS"])
"""


def test_ranks_exchange_texts_and_keep_several_collectives_in_flight():
    """Without a device, whoever started them; and the caller's own flags come last, so they count."""
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    with socket.create_server(("127.0.0.1", 0)) as behind:
        at = f"127.0.0.1:{behind.getsockname()[1]}"
    for said in ranks.spawn([sys.executable, "-c", EXCHANGE], 2, at, deadline_s=80, environ=environ):
        *told, flags = [line for line in said.splitlines() if not line.startswith("[Gloo]")]
        assert told == [str([f"{n} of 0", f"{n} of 1"]) for n in range(3)]
        assert "collective_overlap_limit=4" in flags and flags.split()[-1] == environ["XLA_FLAGS"]


def test_a_process_that_is_no_rank_is_told_so():
    with pytest.raises(ValueError, match="place: None, no launcher"), join(None):
        pass
