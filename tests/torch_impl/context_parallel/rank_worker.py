"""A rank of the tests over processes: runs collectives and cases, and prints what is wrong as JSON.

Over NCCL where every rank of the host has a GPU, else over gloo. The number of ranks is even.
"""

import json
import sys
import traceback

import torch

from tests.schemes import Case, matrix
from tests.torch_impl.context_parallel import cases
from torch_impl import context_parallel, kernels, launch
from torch_impl.context_parallel.communicator import Communicator


def run_matrix(job, stride: int, worlds) -> tuple[int, list[str]]:
    """Every case of these worlds; (how many, what is out of budget)."""
    chosen, wrong = matrix(worlds)[::stride], []
    for case in chosen:
        wrong += cases.judge(case, cases.run_rank(case, job, job.rank))
    return len(chosen), wrong


def strided_operand(job, everyone: Communicator) -> None:
    """G3: refused by name, on every rank alike, before anything is sent."""
    x = torch.zeros(everyone.size, 6, device=job.device)
    calls = (everyone.all_to_all, x[:, ::2]), (everyone.all_gather, x.T), (everyone.reduce_scatter, x[:, 1:])
    for call, operand in calls:
        try:
            call(operand, "strided")
        except ValueError as error:
            assert "not contiguous" in str(error) and "strided" in str(error)
        else:
            raise AssertionError("a strided operand was sent")


def many_operands(job, everyone: Communicator) -> None:
    """More point-to-point operations than a batch takes."""
    sent = [torch.full((3,), 1000.0 * job.rank + n, device=job.device) for n in range(150)]
    source = (job.rank - 1) % everyone.size
    for n, x in enumerate(everyone.rotate(sent, 1, "many").wait()):
        assert (x == 1000.0 * source + n).all()


def two_groups_in_flight(job, everyone: Communicator) -> None:
    """K1: a ring and a pair, started in one order, waited for in another."""
    pair = job.communicator(job.rank, [(r, r + 1) for r in range(0, everyone.size, 2)], "pair")
    for n in range(20):
        x = torch.full((4,), float(job.rank + n), device=job.device)
        first, second = everyone.rotate([x], 1, "ring in flight"), pair.rotate([x], 1, "pair in flight")
        assert (second.wait()[0] == (job.rank ^ 1) + n).all()
        assert (first.wait()[0] == (job.rank - 1) % everyone.size + n).all()


def memory_under_pressure(job, everyone: Communicator) -> None:
    """K4: what is in flight survives the allocator handing out and poisoning memory, 50 times."""
    for n in range(50):
        pending = everyone.rotate([torch.full((1000,), float(job.rank * 100 + n), device=job.device)], 1, "pressure")
        for _ in range(4):
            torch.empty(1000, device=job.device).fill_(torch.nan)
        assert (pending.wait()[0] == (job.rank - 1) % everyone.size * 100 + n).all()


def permutation_of_two_cycles(job, everyone: Communicator) -> None:
    """K9: a rotation by half of the ranks is several rings at once; every rank gets its peer's value."""
    half = everyone.size // 2
    got = everyone.rotate([torch.tensor([float(job.rank)], device=job.device)], half, "several cycles").wait()[0]
    assert got.item() == (job.rank + half) % everyone.size


def counted_bytes(job, everyone: Communicator) -> None:
    """Bytes are those of the operands handed over."""
    everyone.forget()
    size, here = everyone.size, {"device": job.device}
    everyone.all_gather(torch.zeros(5, **here), "a").wait()
    everyone.all_to_all(torch.zeros(size, 3, dtype=torch.bfloat16, **here), "b").wait()
    everyone.reduce_scatter(torch.zeros(size, 2, **here), "c").wait()
    everyone.rotate([torch.zeros(7, **here), torch.zeros(2, **here)], size - 1, "d").wait()
    assert everyone.bytes == {"all_gather": 20, "all_to_all": 6 * size, "reduce_scatter": 8 * size, "permute": 36}


def other_local_kernels(job, everyone: Communicator) -> None:
    """Any local kernel that takes the mask: Triton's in its interpreter, and one of PyTorch's own."""
    takes = [("sdpa", "variable_block"), ("sdpa", "prefix_lm_causal")]
    takes += [("flashmask", "global_sliding_window")] if kernels.get("flashmask").available() is None else []
    for kernel, mask in takes:
        case = Case("usp", mask, everyone.size, 61, 61, (4, 2), (("ulysses", 2),), "zigzag", (("kernel", kernel),),
                    head_dim=16)
        wrong = cases.judge(case, cases.run_rank(case, job, job.rank))
        assert not wrong, wrong


def repeats(job, everyone: Communicator) -> None:
    """A10, D11: a case twenty times is bit-identical."""
    case = Case("loongtrain", "causal_document", everyone.size, grid=(("ulysses", 1), ("window", everyone.size // 2)))
    first = cases.run_rank(case, job, job.rank)
    for _ in range(20):
        again = cases.run_rank(case, job, job.rank)
        assert all((first[n] == again[n]).all() for n in first)


CHECKS = (strided_operand, many_operands, two_groups_in_flight, memory_under_pressure, permutation_of_two_cycles,
          counted_bytes, other_local_kernels, repeats)


def run_checks(job) -> tuple[int, list[str]]:
    """Every check; (how many, what went wrong)."""
    everyone = job.communicator(job.rank, [tuple(range(job.world))], "main")
    for done, check in enumerate(CHECKS):
        try:
            check(job, everyone)
        except Exception:
            return done, [f"rank {job.rank} {check.__name__}: {traceback.format_exc()}"]
    return len(CHECKS), []


def main(mode: str, stride: int, worlds: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    here = launch.detect()
    gpus = torch.cuda.device_count() >= here.local_world
    with launch.join(here, backend="nccl" if gpus else "gloo", timeout_s=120) as place:
        job = context_parallel.Job(torch.device("cuda", place.local_rank) if gpus else "cpu", deadline_s=60)
        count, wrong = run_checks(job) if mode == "all" else (0, [])
        if not wrong:
            more, wrong = run_matrix(job, stride, worlds)
            count += more
        print(json.dumps({"rank": place.rank, "count": count, "wrong": wrong}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), tuple(map(int, sys.argv[3].split(","))))
