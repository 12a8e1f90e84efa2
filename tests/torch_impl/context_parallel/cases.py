"""What a rank does with a case of tests/schemes.py, and how its results are judged; for threads and processes."""

import functools

import numpy as np
import torch

from tests.conformance import BUDGET, FLOOR, inputs, relative_error
from tests.schemes import Case
from tests.torch_impl.context_parallel.threads import ThreadRanks
from torch_impl import context_parallel, kernels
from workload.block_masks import BlockMask
from workload.oracle import attention_oracle
from workload.problem import PASSES, AttentionProblem


def arrays(case: Case) -> list[torch.Tensor]:
    """q, k, v, dout of the whole problem."""
    return [torch.tensor(x, dtype=getattr(torch, case.dtype)) for x in inputs(case.problem)]


def run_rank(case: Case, ranks, rank: int, values=None) -> dict[str, np.ndarray]:
    """This rank's part of a case; the whole out, lse, dq, dk, dv in token order, equal on every rank of its world.

    A rank of the job that is not among them only makes the mesh, and gets nothing.

    Bytes handed to the collectives must equal the schedule's, kind by kind, in each pass.
    """
    mesh = context_parallel.make_mesh(case.topology, ranks, rank)
    if mesh is None:
        return {}
    options = dict(case.plan)
    if mesh.device.type == "cuda" and isinstance(case.problem.mask, BlockMask):
        options.setdefault("kernel", "naive")  # blocks of these sizes are below a GPU kernel's tiles
    plan = context_parallel.make_plan(case.problem, scheme=case.scheme, mesh=mesh, sharding=case.sharding,
                                      with_lse=True, **options)
    mesh, (*operands, dout) = plan.local.mesh, [x.to(mesh.device) for x in values or arrays(case)]
    sides = ("q", "kv", "kv")
    q, k, v = (context_parallel.shard(x, plan, s).requires_grad_() for x, s in zip(operands, sides))
    mesh.forget()
    out, lse = context_parallel.attend(q, k, v, plan)
    moved = [mesh.bytes]
    mesh.forget()
    out.backward(context_parallel.shard(dout, plan))
    moved.append(mesh.bytes)
    for which, got in zip(PASSES, moved):
        want: dict[str, int] = {}
        for c in plan.local.signature.collectives(which):
            want[c.kind] = want.get(c.kind, 0) + c.operand_bytes
        assert got == want, f"{which}: handed over {got}, the schedule says {want}"
    whole = {"out": context_parallel.unshard(out.detach(), plan),
             "lse": context_parallel.unshard(lse.transpose(1, 2), plan).transpose(1, 2)}
    whole |= {f"d{n}": context_parallel.unshard(x.grad, plan, s) for n, x, s in zip("qkv", (q, k, v), sides)}
    return {name: x.double().cpu().numpy() for name, x in whole.items()}


@functools.lru_cache(maxsize=8)
def _reference(problem: AttentionProblem, kernel: str):
    q, k, v, dout = (torch.tensor(x, dtype=getattr(torch, problem.dtype)) for x in inputs(problem))
    chosen = kernels.get(kernel)
    operands = chosen.prepare(problem, "cpu")
    out, lse = chosen.forward(q, k, v, operands, problem.scale)
    grads = chosen.backward(q, k, v, out, lse, dout, operands, problem.scale)
    want = attention_oracle(*(x.double().numpy() for x in (q, k, v)), problem.mask, problem.scale,
                            dout.double().numpy())
    single = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads)))
    errors = {name: relative_error(x.double().numpy(), getattr(want, name)) for name, x in single.items()}
    return want, errors


def oracle(case: Case):
    """The float64 results of a case, and what a naive single-device run in its dtype loses on each."""
    return _reference(case.problem, "naive")


def errors(case: Case, got) -> dict[str, float]:
    """Relative error of each result."""
    want, _ = oracle(case)
    return {name: relative_error(x, getattr(want, name)) for name, x in got.items()}


def judge(case: Case, got) -> list[str]:
    """What is out of budget, in words."""
    _, naive = oracle(case)
    return [f"{case.label} {name}: error {e:.3g} > {BUDGET * naive[name] + FLOOR:.3g}"
            for name, e in errors(case, got).items() if not e <= BUDGET * naive[name] + FLOOR]


def run_threads(case: Case, values=None) -> list[dict[str, np.ndarray]]:
    """A case on threads: the results by rank."""
    ranks = ThreadRanks(case.world, timeout_s=30)
    return ranks.run(lambda rank: run_rank(case, ranks, rank, values))
