"""A rank of the launch tests: a few collectives over gloo, and one way to go wrong. Run by `launch.spawn`."""

import os
import signal
import sys
import time

import torch

from torch_impl import launch
from torch_impl.context_parallel.communicator import GroupCommunicator
from workload.ranks import attempts


def main(mode: str, rounds: int) -> None:
    torch.set_num_threads(1)
    with launch.join(launch.detect(), backend="gloo", timeout_s=30) as place:
        communicator = GroupCommunicator(deadline_s=2)
        communicator.warm_up(torch.device("cpu"))
        if place.rank == 1 and (mode == "lost" or mode == "once" and not attempts()):
            communicator.watch.progress.at("local attention")
            os.kill(os.getpid(), signal.SIGKILL)
        if place.rank == 1 and mode == "slow":
            communicator.watch.progress.at("local attention")
            time.sleep(60)
        x = torch.full((2, 3), float(place.rank))
        for n in range(rounds):
            x = communicator.rotate([x], 1, f"rotate {n}").wait()[0]
        print(f"{place.rank} of {place.world}: {x[0, 0]:g}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
