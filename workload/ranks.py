"""Processes as ranks, for either stack: where a process stands in its job, what it is doing, and jobs that end.

A job started by torchrun, SLURM or Open MPI is detected by the variables they set. `spawn` starts the ranks of this
host by itself, under torchrun's variables, and watches them: a rank that is lost, fails or lags ends the whole job
within the deadline, with a message that names the rank, the step it was at, the peers it waited for, and the end of its
stderr.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from workload.scratch import scratch

RECORD_BYTES = 1024
HOSTED = "TORCHELASTIC_USE_AGENT_STORE"  # True: the launcher, torchrun or ours, holds the store
MOST_A_CORE = 16  # ranks that a host is asked to run
LAGGED = 75  # exit status of a rank whose own watch ended it, while it waited for a peer
TAIL_LINES = 15
GUARD = """
import os, signal, sys
for group in [int(line) for line in sys.stdin]:  # until who writes them is gone
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
_living: list[subprocess.Popen] = []  # ranks that this process has started, in whatever thread


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process stands in its job.

    Attributes:
      rank, world: of all hosts.
      local_rank, local_world: on this host; local_rank picks the device, see `own_device`.
      coordinator: "host:port" of rank 0's store.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    coordinator: str


class RankFailure(RuntimeError):
    """A rank was lost, failed or lagged; the message names rank, step, peers and the end of its stderr.

    Attributes:
      rank: the rank that ended the job.
      steps: for each local rank, the step it was last at.
    """

    def __init__(self, rank: int, steps: Mapping[int, str], message: str):
        super().__init__(message)
        self.rank = rank
        self.steps = dict(steps)


# ---- joining -------------------------------------------------------------------------------------


def detect(environ: Mapping[str, str] | None = None) -> Place | None:
    """The place that torchrun, SLURM or Open MPI gave this process, in that order; None outside a job.

    >>> detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    ...         "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}).coordinator
    '10.0.0.1:29500'
    """
    env = os.environ if environ is None else environ
    found = (read(env) for read in (_torchrun, _slurm, _open_mpi))
    return next((place for place in found if place is not None), None)


def require(place: Place | None) -> Place:
    """The place; ValueError where there is none, as in a process that nobody started as a rank.

    >>> require(None)
    Traceback (most recent call last):
    ValueError: place: None, no launcher (torchrun, srun, mpirun, ours) started this process as a rank
    """
    if place is None:
        raise ValueError("place: None, no launcher (torchrun, srun, mpirun, ours) started this process as a rank")
    return place


def own_device(place: Place, environ: Mapping[str, str] | None = None) -> int:
    """Which of the GPUs that a rank's process sees is its own: the local_rank-th, or the only one it is shown.

    >>> place = Place(3, 4, 1, 2, "h:1")  # `srun --gpus-per-task=1` shows each rank its own alone
    >>> [own_device(place, {"CUDA_VISIBLE_DEVICES": shown}) for shown in ("0,1", "5")], own_device(place, {})
    ([1, 0], 1)
    """
    shown = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES", "")
    return 0 if len([x for x in shown.split(",") if x]) == 1 else place.local_rank


def attempts(environ: Mapping[str, str] | None = None) -> int:
    """How often torchrun has started this job's ranks anew (`--max-restarts`)."""
    return int((os.environ if environ is None else environ).get("TORCHELASTIC_RESTART_COUNT", 0))


def _torchrun(env) -> Place | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    world = int(env["WORLD_SIZE"])
    return Place(int(env["RANK"]), world, int(env.get("LOCAL_RANK", env["RANK"])),
                 int(env.get("LOCAL_WORLD_SIZE", world)), _address(env, "127.0.0.1"))


def _slurm(env) -> Place | None:
    if "SLURM_PROCID" not in env or int(env.get("SLURM_NTASKS", 1)) < 2:
        return None
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    port = 61440 + int(env.get("SLURM_JOB_ID", 0)) % 4096  # two jobs of one host must not share a port
    per_node = int(env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_NTASKS"]).split("(")[0].split(",")[0])
    return Place(int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env["SLURM_LOCALID"]), per_node,
                 _address(env, first_host(nodes), port))


def _open_mpi(env) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    # mpirun 4 tells where it runs, "id;tcp://10.96.0.1,10.148.0.1:34911"; mpirun 5 does not: MASTER_ADDR then.
    uri = re.search(r"tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    return Place(int(env["OMPI_COMM_WORLD_RANK"]), int(env["OMPI_COMM_WORLD_SIZE"]),
                 int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env["OMPI_COMM_WORLD_LOCAL_SIZE"]),
                 _address(env, uri.group(1) if uri else "127.0.0.1"))


def _address(env, host: str, port: int = 29500) -> str:
    return f"{env.get('MASTER_ADDR', host)}:{env.get('MASTER_PORT', port)}"


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("gpu[017-020,033],login1"), first_host("a1,a2")
    ('gpu017', 'a1')
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    if not match:
        raise ValueError(f"nodes: {nodes!r} is no node list")
    return match.group(1) + (match.group(2) or "")


# ---- what a rank is doing ------------------------------------------------------------------------


class Progress:
    """The step a rank is at, kept where its launcher can read it after the rank is gone.

    It lies beside the error file that torchrun (and `spawn`) names for each rank; without one it is kept in memory.
    """

    def __init__(self, environ: Mapping[str, str] | None = None):
        named = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")
        self._count = 0
        if named:
            path = _progress_path(named)
            path.write_bytes(bytes(RECORD_BYTES))
            with open(path, "r+b") as file:
                self._record = mmap.mmap(file.fileno(), RECORD_BYTES)
        else:
            self._record = mmap.mmap(-1, RECORD_BYTES)

    def at(self, step: str, peers: Sequence[int] = ()) -> None:
        """Records that this rank is at a step and exchanges with these ranks of the job."""
        self._count += 1
        text = json.dumps({"count": self._count, "step": step[:700], "peers": list(peers)[:16]}).encode()
        self._record[: len(text) + 1] = text + b"\0"


def _progress_path(error_file: str) -> Path:
    return Path(error_file).with_suffix(".progress")


def _read(record: bytes) -> dict:
    text = record.split(b"\0", 1)[0]
    return json.loads(text) if text else {"count": 0, "step": "start", "peers": []}


def _words(record: bytes) -> str:
    state = _read(record)
    peers = f", peer {', '.join(map(str, state['peers']))}" if state["peers"] else ""
    return f"step '{state['step']}'{peers}"


# ---- starting ------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Child:
    place: Place
    process: subprocess.Popen
    folder: Path

    @property
    def rank(self) -> int:
        return self.place.rank

    def state(self) -> dict:
        path = self.folder / "error.progress"
        return _read(path.read_bytes() if path.exists() else b"")

    def words(self) -> str:
        path = self.folder / "error.progress"
        return _words(path.read_bytes() if path.exists() else b"")

    def tail(self) -> str:
        lines = (self.folder / "stderr").read_text(errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-TAIL_LINES:]) or "  | (stderr is empty)"


def spawn(command: Sequence[str], ranks: int, coordinator: str, *, deadline_s: float,
          environ: Mapping[str, str] | None = None, hosts: int = 1, host: int = 0, show: bool = False) -> list[str]:
    """Runs a command as every rank of this host, under torchrun's variables, and returns each rank's stdout.

    Args:
      command: the program; it calls `detect` and joins.
      ranks: on this host; every host starts as many.
      coordinator: "host:port" at which the ranks meet.
      deadline_s: of the whole job; ranks that still run then are ended.
      environ: of the ranks, this process's by default.
      hosts, host: how many hosts the job has, and which one this is.
      show: print what this host's first rank prints, as it comes.

    Raises: `RankFailure`; no process of this host's ranks outlives the call.
    """
    with scratch("ranks") as folder, _guard() as guarded, contextlib.ExitStack() as shown:
        children: list[_Child] = []
        try:
            for local in range(ranks):
                place = Place(host * ranks + local, hosts * ranks, local, ranks, coordinator)
                children.append(_start(command, place, folder, environ))
                _living.append(children[-1].process)
                guarded(children[-1].process.pid)
            said = shown.enter_context(open(children[0].folder / "stdout", errors="replace")) if show else None
            _watch(children, time.monotonic() + deadline_s, deadline_s, said)
            return [(c.folder / "stdout").read_text(errors="replace") for c in children]
        finally:
            for child in children:
                _end(child.process)
                _living.remove(child.process)


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Yields what takes a rank's process id: should this process be killed, a process beside it ends those ranks.

    They would hold their devices until the job's deadline.
    """
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, text=True,
                               start_new_session=True)
    assert process.stdin is not None

    def guarded(pid: int) -> None:
        print(pid, file=process.stdin, flush=True)

    try:
        yield guarded
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def end_all() -> None:
    """Ends the ranks of every `spawn` of this process, which then raises `RankFailure`: for who is told to end."""
    for process in list(_living):
        _end(process)


def _start(command, place: Place, parent: Path, environ) -> _Child:
    folder = parent / str(place.rank)
    folder.mkdir()
    host, port = place.coordinator.rsplit(":", 1)
    env = dict(os.environ if environ is None else environ)
    env.update(RANK=str(place.rank), WORLD_SIZE=str(place.world), LOCAL_RANK=str(place.local_rank),
               LOCAL_WORLD_SIZE=str(place.local_world), MASTER_ADDR=host, MASTER_PORT=port,
               TORCHELASTIC_ERROR_FILE=str(folder / "error.json"))
    env.setdefault("PYTHONUNBUFFERED", "1")  # what a rank said is there when it is lost
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(list(command), stdout=out, stderr=err, env=env, start_new_session=True)
    return _Child(place, process, folder)


def _watch(children: Sequence[_Child], until: float, deadline_s: float, said: TextIO | None) -> None:
    """Waits for all ranks, printing what comes of `said`; raises `RankFailure` if one fails or the deadline is past."""
    while True:
        status = [c.process.poll() for c in children]
        if said:
            print(said.read(), end="", flush=True)
        if all(s == 0 for s in status):
            return
        if any(status):
            time.sleep(0.2)  # a lost rank drags its peers down: let the cause show beside them
            raise _failure(children)
        if time.monotonic() > until:
            raise _failure(children, deadline_s)
        time.sleep(0.05)


def _failure(children: Sequence[_Child], deadline_s: float | None = None) -> RankFailure:
    """Picks the rank that is the cause: lost by a signal, failed by itself, or else the one furthest behind."""
    status = {c.rank: c.process.poll() for c in children}  # None while it runs, negative: ended by that signal
    count = {c.rank: c.state()["count"] for c in children}
    lost = [c for c in children if (status[c.rank] or 0) < 0]
    failed = [c for c in children if (status[c.rank] or 0) not in (0, LAGGED) and c not in lost]
    running = [c for c in children if status[c.rank] in (None, LAGGED)]
    cause = min(lost or failed or running, key=lambda c: count[c.rank])
    code = status[cause.rank] or 0
    if lost:
        what = f"was lost ({signal.Signals(-code).name})"
    elif failed:
        what = f"failed (exit status {code})"
    else:
        what = "is the furthest behind" + (f" at the deadline of {deadline_s:g} s" if deadline_s else "")
    steps = {c.rank: c.words() for c in children}
    others = "".join(f"\nrank {r} was at {words}" for r, words in steps.items() if r != cause.rank)
    message = f"rank {cause.rank} of {cause.place.world} {what} at {steps[cause.rank]}\n{cause.tail()}{others}"
    return RankFailure(cause.rank, steps, message)


def _end(process: subprocess.Popen) -> None:
    """Ends a rank and what it started; it was started as the leader of its own process group."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)


def check_ranks(ranks: int) -> None:
    """ValueError where so many ranks are none, or more than this host's cores can serve."""
    cores = len(os.sched_getaffinity(0))
    if not 1 <= ranks <= MOST_A_CORE * cores:
        raise ValueError(f"ranks: {ranks}, a host of {cores} cores takes 1 to {MOST_A_CORE * cores}")


def check_hosts(hosts: int, host: int, coordinator: str | None) -> None:
    """ValueError naming which of these is wrong: how many hosts a job has, which one this is, where the ranks meet."""
    if hosts < 1:
        raise ValueError(f"hosts: {hosts} < 1")
    if not 0 <= host < hosts:
        raise ValueError(f"host: {host} of {hosts} hosts, counted from 0")
    if hosts > 1 or coordinator is not None:
        found = re.fullmatch(r".+:(\d{1,5})", coordinator or "")
        if not found or not 0 < int(found[1]) < 1 << 16:
            raise ValueError(f"coordinator: {coordinator!r} is no HOST:PORT, where a job on {hosts} hosts meets")


def command_line(program: str, start: Callable[..., list[str]], arguments: Sequence[str] | None = None) -> int:
    """A stack's launch command: starts this host's ranks by `start`, shows what its first one prints, and any failure.

    Args:
      program: the name it goes by.
      start: the stack's `spawn`.
      arguments: of the command line, this process's by default.

    Returns: exit status, 1 where a rank failed, 130 where it was interrupted.
    """
    parser = argparse.ArgumentParser(prog=program, description="Starts the ranks of this host.")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this host")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--host", type=int, default=0, help="which host this is, from 0")
    parser.add_argument("--coordinator", help="HOST:PORT of host 0, where hosts > 1")
    parser.add_argument("--deadline", type=float, default=3600.0, help="seconds of the whole job; 3600 by default")
    parser.add_argument("command", nargs="+", help="after --")
    a = parser.parse_args(arguments)
    for wrong, message in (
        (not 0 < a.deadline < math.inf, f"--deadline: {a.deadline} is no positive number of seconds"),
        (not shutil.which(a.command[0]), f"command: there is no program {a.command[0]!r}"),
    ):
        if wrong:
            parser.error(message)
    try:
        start(a.command, a.ranks, deadline_s=a.deadline, hosts=a.hosts, host=a.host, coordinator=a.coordinator,
              show=True)
    except ValueError as problem:
        parser.error(f"--{problem}")
    except RankFailure as failure:
        print(f"{shlex.join(a.command)} on {socket.gethostname()}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0
