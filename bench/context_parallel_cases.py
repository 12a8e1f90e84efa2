"""A case of the context-parallel bench: one scheme on one attention problem over some ranks; its key names it all."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from absl import flags

from bench.cases import STACKS, ProblemSpec
from bench.options import choose, define_list
from workload.errors import Unsupported
from workload.problem import AttentionProblem
from workload.schedule import SHARDINGS, Schedule, schedule_under
from workload.signature import Signature
from workload.topology import SCHEMES, Topology, make_topology

flags.disclaim_key_flags()  # --help of a binary shows what it defines through here

GROUPED = ("ulysses", "all_gather")  # schemes whose heads can travel and compute by groups
DEGREES = {"ulysses": ("usp", "loongtrain"), "window": ("loongtrain",)}  # of a grid: the schemes that leave them open


@dataclasses.dataclass(frozen=True)
class Case:
    """One scheme to measure, forward and backward.

    Attributes:
      stack, scheme: of `STACKS`, `SCHEMES`.
      spec: the global problem.
      world: ranks.
      sharding: of `SHARDINGS`.
      ulysses, window: of the topology, 0 for the scheme's default.
      ranks_per_node: of the topology.
      kernel: the local kernel, "" for the stack's default.
      travel: dtype of gradient sums in flight.
      head_groups: groups of heads that travel while others compute, of `GROUPED` schemes; 1 for none.
      granule: tokens that a sharding keeps together; 0 for a uniform dynamic mask's block, else 1.

    Raises ValueError naming the field that is wrong.
    """

    stack: str
    scheme: str
    spec: ProblemSpec
    world: int
    sharding: str = "zigzag"
    ulysses: int = 0
    window: int = 0
    ranks_per_node: int = 8
    kernel: str = ""
    travel: str = "float32"
    head_groups: int = 1
    granule: int = 0

    def __post_init__(self):
        for name, allowed in (("stack", STACKS), ("scheme", SCHEMES), ("sharding", SHARDINGS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name in ("world", "head_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} < 1")
        if self.head_groups > 1 and self.scheme not in GROUPED:
            raise ValueError(f"head_groups: {self.head_groups} with {self.scheme}, which has none")

    @property
    def key(self) -> str:
        """All fields in one word."""
        grid = "".join(f"/{n}{getattr(self, n)}" for n in ("ulysses", "window") if getattr(self, n))
        extra = f"/{self.kernel}" if self.kernel else ""
        extra += "" if self.travel == "float32" else f"/travel-{self.travel}"
        extra += f"/groups{self.head_groups}" if self.head_groups > 1 else ""
        extra += f"/granule{self.granule}" if self.granule else ""
        return f"{self.stack}/{self.scheme}{grid}/w{self.world}/{self.sharding}{extra}/{self.spec.label}"

    @property
    def any_length(self) -> str:
        """The key of this case and of all that differ from it in length alone."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, seq_len=1)).key

    @property
    def topology(self) -> Topology:
        """The grid; `Unsupported` where there is none."""
        return make_topology(self.scheme, self.world, ulysses=self.ulysses or None, window=self.window or None,
                             ranks_per_node=self.ranks_per_node)

    def schedule(self, problem: AttentionProblem | None = None, *, with_lse: bool = False) -> Schedule:
        """What the ranks execute; with_lse: lse travels back to its tokens as out does."""
        problem, topology = problem or self.spec.problem(), self.topology
        granule = self.granule or getattr(problem.mask, "block", None) or 1
        return schedule_under(self.scheme, problem, topology, self.sharding, granule=granule, travel=self.travel,
                              with_lse=with_lse)

    def record(self) -> dict[str, Any]:
        """The case as it stands in a row."""
        fields = dataclasses.asdict(self)
        return fields | {"spec": fields["spec"] | {"settings": dict(self.spec.settings)}}


def define(worlds: Sequence[str]) -> None:
    """Defines the flags of schemes, shared by the binaries that have them."""
    define_list("schemes", ["all"], f"Schemes: all, or some of {', '.join(SCHEMES)}.")
    define_list("worlds", list(worlds), "Numbers of ranks.")
    define_list("sharding", ["zigzag"], f"Shardings: all, or some of {', '.join(SHARDINGS)}: best is the one of "
                "zigzag, striped and balanced whose steps are most even.")
    flags.DEFINE_integer("granule", 0, "Tokens that a sharding keeps together; 0: a dynamic mask's block, else 1.",
                         lower_bound=0)
    flags.DEFINE_integer("ulysses", 0, "Head exchange degree of usp and loongtrain; 0 for the default.", lower_bound=0)
    flags.DEFINE_integer("window", 0, "Inner ring of loongtrain; 0 for the default.", lower_bound=0)
    flags.DEFINE_integer("ranks_per_node", 8, "Ranks of a node.", lower_bound=1)
    flags.DEFINE_string("kernel", "", "Local kernel, by default that of the stack and the device.")


def cases_of(values: flags.FlagValues, stack: str, spec: ProblemSpec, world: int) -> list[Case]:
    """A problem under the schemes and shardings of the flags. ValueError names the flag."""
    found, schemes = [], choose("schemes", values.schemes, SCHEMES)
    for name, takers in DEGREES.items():
        if getattr(values, name) and not set(takers) & set(schemes):
            raise ValueError(f"--{name}: only {' and '.join(takers)} take one")
    for scheme in schemes:
        ulysses, window = (getattr(values, name) if scheme in takers else 0 for name, takers in DEGREES.items())
        found += [Case(stack, scheme, spec, world, kind, ulysses, window, values.ranks_per_node, values.kernel,
                       granule=values.granule) for kind in choose("sharding", values.sharding, SHARDINGS)]
    return found


def from_record(fields: dict[str, Any]) -> Case:
    """The inverse of `Case.record`."""
    return Case(**fields | {"spec": ProblemSpec(**fields["spec"])})


def is_among(case: Case, wanted: Sequence[Sequence[str]]) -> bool:
    """Whether a case has one of these (scheme, mask) or (scheme, mask, sharding)."""
    place = [case.scheme, case.spec.mask, case.sharding]
    return any(place[: len(some)] == list(some) for some in wanted)


def trace_key(case: Case) -> str:
    """The key of the row that tells of a case's trace."""
    return f"trace/{case.key}"


def check_head_groups(case: Case) -> None:
    """ValueError where the heads of a case cannot travel and compute in its groups; a refused topology is a row's."""
    try:
        schedule = dataclasses.replace(case, sharding="contiguous").schedule()
    except Unsupported:
        return
    try:
        schedule.check_head_groups(case.head_groups)
    except Unsupported as problem:
        raise ValueError(f"--head_groups: {problem}, on {case.world} ranks") from problem


def work_of(case: Case, schedule: Schedule) -> Hashable:
    """Equal for cases of which ranks execute one and the same: a head exchange restores the order of any sharding, and
    usp without an exchange is the ring.
    """
    signature = schedule.signature
    if signature.scheme == "usp" and signature.topology.ulysses == 1:
        signature = dataclasses.replace(signature, scheme="ring")
    held = tuple(p.tobytes() for s in (schedule.q_sharding, schedule.kv_sharding) for p in s.positions)
    return case.stack, case.kernel, case.head_groups, case.spec.label, signature, hash(held)


def operand_bytes(signature: Signature, which: str) -> dict[str, int]:
    """Bytes that a rank hands to collectives in a pass, by kind."""
    found: dict[str, int] = {}
    for c in signature.collectives(which):
        found[c.kind] = found.get(c.kind, 0) + c.operand_bytes
    return found


def plan_of_schedule(schedule: Schedule) -> dict[str, Any]:
    """What a row tells of its schedule: steps, bytes of each pass, balance.

    worst_step: largest over mean area of the ranks, at the step where it is largest.
    """
    signature = schedule.signature
    return {
        "sharding": schedule.q_sharding.kind, "steps": len(signature.steps),
        "operand_bytes": {which: operand_bytes(signature, which) for which in ("forward", "backward")},
        "wire_bytes": {which: signature.wire_bytes(which) for which in ("forward", "backward")},
        "total_balance": schedule.total_balance, "step_balance": schedule.step_balance,
        "redundancy": schedule.redundancy(), "rotations_left_out": schedule.rotations_left_out,
        "idle_deliveries": schedule.idle_deliveries, "worst_step": float(schedule.step_imbalance.max()),
    }
