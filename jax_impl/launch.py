"""One process a rank: join a job that a launcher started, or start this host's ranks; twin of torch_impl/launch.py.

A job started by torchrun, SLURM or Open MPI is detected by the variables they set (workload/ranks.py). `spawn` starts
ranks by itself and watches them. One process a device is the default, since several devices of one process order their
collectives by themselves.

    python -m jax_impl.launch --ranks 8 -- python -m MODULE ...
    python -m jax_impl.launch --ranks 8 --hosts 2 --host 0 --coordinator 10.0.0.1:29500 -- python -m MODULE ...
"""

import contextlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax._src import distributed

from workload import ranks as processes
from workload.ranks import Place, Progress, RankFailure, detect

# By default XLA keeps one collective in flight: of a hop's keys and values one would wait for the other, unhidden. And
# a program that one process compiles alone must not wait for others to tune their share of it.
XLA_FLAGS = "--xla_gpu_experimental_parallel_collective_overlap_limit=4 --xla_gpu_shard_autotuning=false"

__all__ = ["XLA_FLAGS", "Place", "Progress", "RankFailure", "detect", "exchange", "join", "main", "spawn"]

_exchanges = itertools.count()


@contextlib.contextmanager
def join(place: Place | None, *, backend: str | None = None, timeout_s: float = 300.0) -> Iterator[Place]:
    """The job's devices as this process's `jax.devices()`, for the time of a `with` block.

    Call it before anything touches a device. From then on the variable XLA_FLAGS begins with `XLA_FLAGS`; the caller's
    own come behind, and win.

    Args:
      place: from `detect`; ValueError where that found none.
      backend: "gpu" (the local_rank-th GPU, or the only one in sight) or "cpu" (one device a process, gloo collectives,
        for which a host's own name must resolve to an address that the other hosts reach); by default "gpu" where JAX
        can see one.
      timeout_s: longest wait for the others at the start, and after which a silent process counts as lost.
    """
    place = processes.require(place)
    backend = backend or ("gpu" if _sees_gpu() else "cpu")
    if backend == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:  # a rank's CPU works for that rank alone, and gloo would look for a name service
        jax.config.update("jax_cpu_collectives_implementation", None)
    os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
    wait = max(1, round(timeout_s))
    own = [processes.own_device(place)] if backend == "gpu" else None
    jax.distributed.initialize(
        _coordinator(place), place.world, place.rank, local_device_ids=own, initialization_timeout=wait,
        heartbeat_timeout_seconds=max(10, wait),
    )
    try:
        yield place
    finally:
        jax.distributed.shutdown()


def _coordinator(place: Place) -> str:
    """Where rank 0 listens: at torchrun's own address a store does, so at a port behind it, another each attempt."""
    host, port = place.coordinator.rsplit(":", 1)
    hosted = os.environ.get(processes.HOSTED) == "True"
    return f"{host}:{int(port) + 1 + processes.attempts()}" if hosted else place.coordinator


def exchange(text: str, timeout_s: float) -> list[str]:
    """Every process's text, by process, over the job's coordinator: no device takes part, none is held up.

    All processes of a job call it, in one order. JAX has no public name for this.
    """
    client, number, mine = distributed.global_state.client, next(_exchanges), jax.process_index()
    if client is None:
        return [text]
    client.key_value_set(f"exchange/{number}/{mine}", text)
    got = [client.blocking_key_value_get(f"exchange/{number}/{process}", round(1e3 * timeout_s))
           for process in range(jax.process_count())]
    if number:  # whoever has answered this one has read the one before
        client.key_value_delete(f"exchange/{number - 1}/{mine}")
    return got


def _sees_gpu() -> bool:
    """Whether a CUDA device file is there; asking JAX would start the backend before the job is joined."""
    return os.path.exists("/dev/nvidia0") and os.environ.get("JAX_PLATFORMS", "cuda") != "cpu"


def spawn(command: Sequence[str], ranks: int, *, deadline_s: float, environ: Mapping[str, str] | None = None,
          hosts: int = 1, host: int = 0, coordinator: str | None = None, show: bool = False) -> list[str]:
    """Runs a command as every rank of this host, under torchrun's variables, and returns each rank's stdout.

    Args:
      command: the program; it calls `detect` and `join`.
      ranks: on this host; every host starts as many.
      deadline_s: of the whole job; ranks that still run then are ended.
      environ: of the ranks, this process's by default.
      hosts, host, coordinator: of a job on several hosts: how many, which one this is, and "host:port" of host 0.
      show: print what this host's first rank prints, as it comes.

    Raises: `RankFailure`, and no process of this host's ranks outlives the call; ValueError naming ranks, hosts, host
      or coordinator.
    """
    processes.check_ranks(ranks)
    processes.check_hosts(hosts, host, coordinator)
    coordinator = coordinator or f"127.0.0.1:{_free_port()}"
    return processes.spawn(command, ranks, coordinator, deadline_s=deadline_s, environ=environ, hosts=hosts, host=host,
                           show=show)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: starts this host's ranks, shows what its first one prints, and any failure."""
    return processes.command_line("jax_impl.launch", spawn, arguments)


if __name__ == "__main__":
    sys.exit(main())
