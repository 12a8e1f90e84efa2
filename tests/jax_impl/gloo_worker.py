"""A rank of the launch tests: one context-parallel case over gloo, or one way to go wrong. Run by `launch.spawn`."""

import os
import signal
import sys
import time

import jax
import numpy as np

from jax_impl import context_parallel as cp
from jax_impl import launch
from tests.conformance import inputs, relative_error
from workload import masks
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem
from workload.topology import make_topology


def attend(scheme: str) -> str:
    """Errors of out, dq (under a plan) and out (of the public call) of a case on all processes."""
    mask = masks.causal_document(37, 37, [9, 0, 28])
    problem = AttentionProblem(mask, 2, 4, 2, 8, "float32")
    mesh = cp.make_mesh(make_topology(scheme, jax.device_count()))
    plan = cp.make_plan(problem, scheme=scheme, mesh=mesh, sharding="zigzag")
    q, k, v, dout = inputs(problem)
    placed = [cp.shard(x, plan, s) for x, s in ((q, "q"), (k, "kv"), (v, "kv"), (dout, "q"))]

    @jax.jit
    def both(q, k, v, dout, plan):
        out, back = jax.vjp(lambda q, k, v: cp.attend(q, k, v, plan), q, k, v)
        return out, back(dout)[0]

    want = attention_oracle(q, k, v, mask, problem.scale, dout)
    got = [np.asarray(cp.unshard(x, plan).addressable_data(0)) for x in both(*placed, plan)]
    call = jax.jit(lambda q, k, v: cp.attention(q, k, v, mask, scheme=scheme, mesh=mesh, sharding="zigzag"))
    got.append(np.asarray(cp.unshard(call(*placed[:3]), plan).addressable_data(0)))
    return " ".join(f"{relative_error(g, w):.1e}" for g, w in zip(got, (want.out, want.dq, want.out), strict=True))


def main(mode: str) -> None:
    progress = launch.Progress()
    with launch.join(launch.detect(), backend="cpu", timeout_s=60) as place:
        progress.at("joined", [1 - place.rank])
        if place.rank == 1 and mode == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        if place.rank == 1 and mode == "slow":
            time.sleep(100)
        progress.at("attention", [1 - place.rank])
        print(place.rank, place.world, attend("ring" if mode in ("lost", "slow") else mode))


if __name__ == "__main__":
    main(sys.argv[1])
