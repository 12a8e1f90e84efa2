"""Processes as ranks: the variables of three launchers, and jobs that end well, fail or lag."""

import contextlib
import doctest
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from workload import ranks
from workload.ranks import Place, RankFailure, detect, spawn

SCRIPT = """
import os, sys, time
from workload.ranks import Progress
rank, progress = int(os.environ["RANK"]), Progress()
for n in range(3 + rank):
    progress.at(f"step {n}", [(rank + 1) % 3])
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", SCRIPT + body]


def test_doctests():
    assert doctest.testmod(ranks).failed == 0


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
    """K11: a rank is a process of its own, with one device."""
    body = "print(rank, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])"
    said = spawn(script(body), 3, "127.0.0.1:1", deadline_s=30)
    assert [s.split() for s in said] == [[str(r), "3", str(r)] for r in range(3)]


def test_failing_rank_is_named_with_its_step_peer_and_stderr():
    with pytest.raises(RankFailure) as caught:  # on the second of two hosts
        spawn(script("assert rank != 5, 'the reason'\ntime.sleep(60)"), 3, "h:1", deadline_s=30, hosts=2, host=1)
    assert caught.value.rank == 5
    message = str(caught.value)
    assert "rank 5 of 6 failed (exit status 1) at step 'step 7', peer 0" in message
    assert "AssertionError: the reason" in message and "rank 4 was at step 'step 6', peer 2" in message


def test_job_past_its_deadline_names_the_rank_furthest_behind_and_leaves_no_process():
    begin = time.monotonic()
    body = "open(sys.argv[1] + str(rank), 'w').write(str(os.getpid()))\ntime.sleep(60)"
    folder = os.environ.get("TMPDIR", "/tmp") + f"/launch-test-{os.getpid()}-"
    with pytest.raises(RankFailure, match="rank 0 of 3 is the furthest behind at the deadline of 2 s at step 'step 2'"):
        spawn([*script(body), folder], 3, "127.0.0.1:1", deadline_s=2)
    assert time.monotonic() - begin < 15
    for rank in range(3):
        with contextlib.suppress(FileNotFoundError), open(folder + str(rank)) as file:
            pid = int(file.read())
            os.unlink(folder + str(rank))
            assert not os.path.exists(f"/proc/{pid}")


def test_ending_all_ends_every_job_of_the_process():
    with ThreadPoolExecutor() as threads:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        jobs = [threads.submit(spawn, command, 2, "127.0.0.1:1", deadline_s=50) for _ in range(2)]
        until = time.monotonic() + 20
        while len(ranks._living) < 4 and time.monotonic() < until:
            time.sleep(0.02)
        ranks.end_all()
        for job in jobs:
            with pytest.raises(RankFailure, match="was lost .SIGTERM."):
                job.result(timeout=20)
    assert not ranks._living


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    body = f"import pathlib, os, time; pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(60)"
    code = (f"import sys; from workload.ranks import spawn; spawn([sys.executable, '-c', {body!r}], 2, 'h:1', "
            "deadline_s=60)")
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        until = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        started = [path.name for path in tmp_path.iterdir()]
        parent.kill()

    def living():
        states = [Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
                  for name in started if Path("/proc", name).exists()]
        return [s for s in states if s not in "ZX"]

    while living() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(started) == 2 and not living()


@pytest.mark.parametrize("flags, said", [
    ("--ranks 0", "--ranks: 0"), ("--ranks 9999", "--ranks: 9999, a host of "),
    ("--ranks 1 --hosts 0", "--hosts: 0"), ("--ranks 1 --host 3", "--host: 3 of 1"),
    ("--ranks 1 --hosts 2", "--coordinator: None"), ("--ranks 1 --hosts 2 --coordinator h", "--coordinator: 'h'"),
    ("--ranks 1 --coordinator h", "--coordinator: 'h'"), ("--ranks 1 --coordinator h:0", "--coordinator: 'h:0'"),
    ("--ranks 1 --coordinator h:65536", "--coordinator: 'h:65536'"),
    ("--ranks 1 --deadline nan", "--deadline: nan"), ("--ranks 1", "no program 'none-such'")])
def test_bad_flags_of_a_launch_are_named_before_it_starts(flags, said, capsys):
    command = "none-such" if "program" in said else sys.executable

    def start(_, count, *, hosts, host, coordinator, **__):  # as those of both stacks begin
        ranks.check_ranks(count)
        ranks.check_hosts(hosts, host, coordinator)
        pytest.fail("started")

    with pytest.raises(SystemExit):
        ranks.command_line("launch", start, [*flags.split(), "--", command])
    assert said in capsys.readouterr().err


def test_what_the_first_rank_prints_is_shown_as_it_comes(tmp_path):
    body = f"print('begun', rank)\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)\nprint('over')"
    code = ("import sys; from workload.ranks import command_line, spawn\n"
            "def start(command, ranks, coordinator, **options): return spawn(command, ranks, 'h:1', **options)\n"
            f"sys.exit(command_line('launch', start, ['--ranks=2', '--deadline=30', '--', *{script(body)!r}]))")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "begun 0\n"
        (tmp_path / "go").touch()
        assert launcher.stdout.read() == "over\n"
    assert launcher.returncode == 0


def test_an_interrupt_of_the_launcher_is_no_traceback(capsys):
    def start(*_, **__):
        raise KeyboardInterrupt

    assert ranks.command_line("launch", start, ["--ranks=1", "--", sys.executable]) == 130
    assert capsys.readouterr().err == "interrupted\n"
