"""One process a rank: join a job that a launcher started, or start this host's ranks; twin of jax_impl/launch.py.

A job started by torchrun, SLURM or Open MPI is detected by the variables they set (workload/ranks.py). `spawn` starts
ranks by itself and watches them.

    python -m torch_impl.launch --ranks 8 -- python -m MODULE ...
    python -m torch_impl.launch --ranks 8 --hosts 2 --host 0 --coordinator 10.0.0.1:29500 -- python -m MODULE ...
"""

import contextlib
import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from workload import ranks as processes
from workload.ranks import HOSTED, LAGGED, Place, Progress, RankFailure, detect

__all__ = ["HOSTED", "LAGGED", "Place", "Progress", "RankFailure", "detect", "join", "main", "spawn"]


@contextlib.contextmanager
def join(place: Place | None, *, backend: str | None = None, timeout_s: float = 300.0) -> Iterator[Place]:
    """The process group of the job, for the time of a `with` block; NCCL where a GPU is seen, else gloo.

    Args:
      place: from `detect`; ValueError where that found none.
      backend: "nccl" or "gloo".
      timeout_s: longest wait for a peer, at the start and in a collective; torch.distributed ends a
        process that waited longer.
    """
    place = processes.require(place)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = None
    if backend == "nccl":
        device = torch.device("cuda", processes.own_device(place))
        torch.cuda.set_device(device)
    host, port = place.coordinator.rsplit(":", 1)
    wait = datetime.timedelta(seconds=timeout_s)
    hosted = os.environ.get(HOSTED) == "True"
    store = dist.TCPStore(host, int(port), place.world, place.rank == 0 and not hosted, timeout=wait)
    # A store that the launcher holds outlives ranks that torchrun starts again, and has their keys still.
    store = dist.PrefixStore(f"attempt {processes.attempts()}", store)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=wait,
                            device_id=device)
    try:
        yield place
    finally:
        dist.destroy_process_group()


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
    address, port = (coordinator or "127.0.0.1:0").rsplit(":", 1)
    if host == 0:  # the launcher holds the store, so that its port is free for certain
        try:
            store = dist.TCPStore("0.0.0.0", int(port), ranks * hosts, True, wait_for_workers=False,
                                  timeout=datetime.timedelta(seconds=deadline_s))
        except dist.DistNetworkError as problem:
            raise ValueError(f"coordinator: {problem}") from problem
        port = str(store.port)
    environ = dict(os.environ if environ is None else environ) | {HOSTED: "True"}
    return processes.spawn(command, ranks, f"{address}:{port}", deadline_s=deadline_s, environ=environ, hosts=hosts,
                           host=host, show=show)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: starts this host's ranks, shows what its first one prints, and any failure."""
    return processes.command_line("torch_impl.launch", spawn, arguments)


if __name__ == "__main__":
    sys.exit(main())
