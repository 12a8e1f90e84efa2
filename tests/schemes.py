"""Context-parallel cases of either stack: one problem under one scheme, on a small world."""

import dataclasses
import functools
import itertools

import numpy as np

from workload import masks, suite
from workload.problem import AttentionProblem
from workload.sharding import KINDS
from workload.topology import Topology, make_topology

WORLDS = (1, 2, 3, 4, 8)
GRIDS = (  # scheme, and what make_topology is told besides
    ("ulysses", {}), ("ring", {}), ("all_gather", {}), ("usp", {"ulysses": 2}), ("loongtrain", {"ulysses": 1}),
    ("loongtrain", {"ulysses": 2, "window": 2}), ("all_gather", {"ulysses": 2, "head_first": False}),
)
GROUPED = (  # scheme, grid, world, heads and what make_plan is told: heads that travel while others compute
    ("ulysses", (), 2, (8, 4), {}), ("ulysses", (), 3, (12, 6), {}), ("ulysses", (), 2, (6, 3), {"head_groups": 3}),
    ("all_gather", (), 3, (4, 2), {}), ("all_gather", (), 4, (4, 4), {"head_groups": 4}),
    ("all_gather", (("ulysses", 2),), 4, (8, 4), {}), ("all_gather", (), 2, (4, 2), {"travel": "bfloat16"}),
)
UNGROUPED = (  # scheme, mask, head groups, and why not
    ("ring", "causal", 2, "a ring walk hides its hops"), ("all_gather", "uniform_block", 2, "the mask differs by head"),
    ("ulysses", "causal", 2, "a rank has 1 kv heads"),
)
LENGTHS = ((61, 61), (37, 50))  # q_len, kv_len: neither divides a world; square, and not
HEADS = ((4, 2), (6, 3), (3, 1))  # more ranks than kv heads, and heads that do not divide
SETTINGS = {"window": 9, "block": 5, "sparse_block": 6, "density": 0.4}


def cancelling():
    """(problem, its arrays) whose dv, 2 ** -8, is what two ranks' shares of one kv head, 1 + 2 ** -8 and -1, leave.

    C1: of shares that were rounded to the problem's dtype before they are added, nothing is left.
    """
    problem = AttentionProblem(masks.full(2, 2), 1, 2, 1, 4, "bfloat16")
    q, k, v, dout = (np.zeros(s, np.float32) for s in (problem.q_shape, *[problem.kv_shape] * 2, problem.q_shape))
    dout[:, 0, 0], dout[:, 1, 0], dout[:, :, 1] = 1, 1 + 2**-7, -1
    return problem, (q, k, v, dout)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem under one scheme; `grid` and `plan` are arguments of make_topology and make_plan as items."""

    scheme: str
    mask: str
    world: int
    q_len: int = 61
    kv_len: int = 61
    heads: tuple[int, int] = (4, 2)
    grid: tuple = ()
    sharding: str = "zigzag"
    plan: tuple = ()
    dtype: str = "float32"
    head_dim: int = 8
    batch: int = 2

    @property
    def topology(self) -> Topology:
        """The grid; `Unsupported` where the world has none."""
        return make_topology(self.scheme, self.world, **dict(self.grid))

    @property
    def problem(self) -> AttentionProblem:
        """The global problem."""
        return _problem(self.mask, self.q_len, self.kv_len, self.heads, self.dtype, self.head_dim, self.batch)

    @property
    def label(self) -> str:
        """A short name."""
        grid = "-".join(f"{k}{v}" for k, v in self.grid)
        return f"{self.scheme}{'-' + grid if grid else ''}-{self.mask}-w{self.world}-{self.sharding}-{self.q_len}"


@functools.lru_cache(maxsize=256)
def _problem(name, q_len, kv_len, heads, dtype, head_dim, batch):
    mask_heads = {"uniform_block": heads[1], "variable_block": heads[0]}.get(name, 1)  # per kv head, per query head
    mask = suite.mask_suite(name, kv_len, q_len=q_len, heads=mask_heads,
                            documents=(3, 1, kv_len - 20, 0, 16), **SETTINGS)
    return AttentionProblem(mask, batch, *heads, head_dim, dtype)


def sample(masks, worlds=(2, 3, 4, 8)) -> list[Case]:
    """Of the matrix, every scheme under each of these masks on one grid, grids taken in turn."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in matrix(worlds):
        found.setdefault((case.mask, case.scheme), []).append(case)
    return [cases[n % len(cases)] for n, ((mask, _), cases) in enumerate(found.items()) if mask in masks]


def matrix(worlds=WORLDS) -> list[Case]:
    """Every grid x mask x world where the world has such a grid; shardings, lengths and heads taken in turn."""
    out = []
    for n, (name, world, (scheme, grid)) in enumerate(itertools.product(suite.ALL_BUILDERS, worlds, GRIDS)):
        degree = grid.get("ulysses", 1)
        if world % degree or (world // degree) % grid.get("window", 1):
            continue
        kind = KINDS[(n // 7 + n) % 4]
        out.append(Case(scheme, name, world, *LENGTHS[n % 2], HEADS[n % 3], tuple(grid.items()), kind))
    return out
