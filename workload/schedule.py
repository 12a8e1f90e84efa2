"""Each context-parallel scheme as a pure value: who holds, sends and computes what at each step, and its price.

`Signature` (workload/signature.py) is the static part, hashable, for which a stack compiles; `Schedule` adds the data:
positions, local masks, areas. Nothing here touches an accelerator, and a schedule of 1,024 ranks takes seconds.
"""

import dataclasses
import math
from functools import cached_property

import numpy as np

from workload.areas import area_matrix, keys_needed, tiles_seen
from workload.block_masks import BlockMask
from workload.errors import Unsupported
from workload.local_masks import pad_mask, select_heads
from workload.problem import ITEM_BYTES, AttentionProblem
from workload.sharding import KINDS, Sharding, shardings
from workload.signature import Signature, Step
from workload.topology import Hop, Topology, head_layout, make_topology

EMPTY, PARTIAL, FULL = 0, 1, 2
SHARDINGS = (*KINDS, "best")
KEY_TILE = 128  # of kernels: what is left out of gathered keys, and what "best" keeps together, are whole tiles


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A signature with its data.

    Attributes:
      signature: the static part.
      problem: the global problem.
      q_sharding, kv_sharding: tokens of each rank.
    """

    signature: Signature
    problem: AttentionProblem
    q_sharding: Sharding
    kv_sharding: Sharding

    @property
    def topology(self) -> Topology:
        """The grid."""
        return self.signature.topology

    @cached_property
    def q_groups(self) -> list[np.ndarray]:
        """Ascending query positions of each ring index: what its ranks hold after the exchange."""
        return _groups(self.q_sharding, self.topology)

    @cached_property
    def kv_groups(self) -> list[np.ndarray]:
        """Ascending key positions of each ring index."""
        return _groups(self.kv_sharding, self.topology)

    def q_order(self, ring_index: int) -> np.ndarray:
        """Ascending order of an exchanged sequence, padding last: int64 [q_rows], places in rank order."""
        return _order(self.q_sharding, self.topology.group("ulysses", self.topology.rank(ring_index, 0)))

    def kv_order(self, ring_index: int) -> np.ndarray:
        """The same for keys, int64 [kv_block]."""
        return _order(self.kv_sharding, self.topology.group("ulysses", self.topology.rank(ring_index, 0)))

    @cached_property
    def gathered_places(self) -> np.ndarray:
        """Where each key lies in the gathered blocks (each ascending): int64 [kv_total]."""
        out = np.empty(self.kv_sharding.total, np.int64)
        for r, tokens in enumerate(self.kv_groups):
            out[tokens] = r * self.signature.kv_block + np.arange(len(tokens))
        return out

    def gathered_order(self, ring_index: int) -> np.ndarray:
        """Places in the gathered blocks of the keys that a kernel is handed, ascending: int64 [gathered_rows]."""
        return self.gathered_places[self.keys(0, ring_index)]

    def gathered_keys(self, ring_index: int) -> np.ndarray:
        """Ascending positions of the gathered keys that a kernel is handed: int64 [gathered_rows].

        All, or the tiles of which some row of ring_index sees a key and as many others as make the number up.
        """
        rows, total = self.signature.gathered_rows, self.kv_sharding.total
        if rows == total:
            return np.arange(total)
        tile = _key_tile(total)
        chosen = np.repeat(tiles_seen(self.problem.mask, self.q_groups[ring_index], tile), tile)[:total]
        chosen[np.flatnonzero(~chosen)[: rows - chosen.sum()]] = True
        return np.flatnonzero(chosen)

    def source(self, step: int, ring_index):
        """The ring index whose keys ring_index computes against."""
        s = self.signature.steps[step]
        return self.topology.source(ring_index, s.outer, s.inner)

    def keys(self, step: int, ring_index: int) -> np.ndarray:
        """Ascending positions of the keys that ring_index computes against."""
        if self.signature.gathers:
            return self.gathered_keys(ring_index)
        return self.kv_groups[self.source(step, ring_index)]

    @cached_property
    def pair_area(self) -> np.ndarray:
        """Visible cells of one mask head (the sum of all heads of a per-head mask): int64 [ring, ring] by (q, kv)."""
        return area_matrix(self.problem.mask, self.q_groups, self.kv_groups)

    @cached_property
    def cells(self) -> np.ndarray:
        """Visible cells of each rank's query heads, padding ones too, at each step: int64 [steps, world]."""
        ring, degree, heads = self.topology.ring, self.topology.ulysses, self.signature.heads
        mask, out = self.problem.mask, np.zeros((len(self.signature.steps), self.topology.world), np.int64)
        index, areas = np.arange(ring), dict[tuple[int, ...], np.ndarray]()  # by the mask's heads, of which ranks share
        for u in range(degree):
            chosen = heads.mask_heads(u, mask.heads)
            some = () if chosen is None else tuple(chosen)
            if some not in areas:
                areas[some] = self.pair_area if chosen is None else \
                    area_matrix(mask, self.q_groups, self.kv_groups, chosen)
            area = areas[some] * (heads.q_local // max(1, len(some)))
            ranks = [self.topology.rank(r, u) for r in index]
            for t in range(len(out)):
                part = area.sum(axis=1) if self.signature.gathers else area[index, self.source(t, index)]
                out[t, ranks] = part
        return out * self.signature.batch

    def mask_class(self, step: int, ring_index: int) -> int:
        """EMPTY, PARTIAL or FULL: the local mask of a step."""
        whole = len(self.q_groups[ring_index]) * len(self.keys(step, ring_index)) * self.problem.mask.heads
        area = self.pair_area[ring_index]
        area = area.sum() if self.signature.gathers else area[self.source(step, ring_index)]
        return EMPTY if area == 0 else FULL if area == whole else PARTIAL

    def local_mask(self, step: int, rank: int):
        """What a rank computes under at a step: its rows, the step's keys, its heads, padded to [q_rows, kv_rows].

        Padding rows see nothing and padding keys are seen by nobody.
        """
        ring_index, u = self.topology.place(rank)
        mask = select_heads(self.problem.mask, self.signature.heads.mask_heads(u, self.problem.mask.heads))
        mask = mask.restrict(self.q_groups[ring_index], self.keys(step, ring_index))
        return pad_mask(mask, self.signature.q_rows, self.signature.kv_rows)

    def local_key(self, step: int, rank: int) -> tuple[int, ...]:
        """Steps and ranks with equal keys have one and the same local mask."""
        ring_index, u = self.topology.place(rank)
        return step, ring_index, 0 if self.problem.mask.heads == 1 else u

    def local_problem(self, step: int, rank: int, head_groups: int = 1) -> AttentionProblem:
        """The local problem of a rank at a step (or of one of its head groups), padded to the signature's shapes."""
        heads = self.signature.heads
        return dataclasses.replace(
            self.problem, mask=self.local_mask(step, rank), q_heads=heads.q_local // head_groups,
            kv_heads=heads.kv_local // head_groups,
        )

    def check_head_groups(self, groups: int) -> None:
        """Raises `Unsupported` where heads cannot travel and compute in so many groups."""
        signature = self.signature
        reasons = (
            (groups == 1 or signature.gathers, "a ring walk hides its hops behind its steps already"),
            (groups == 1 or self.problem.mask.heads == 1, "the mask differs by head"),
            (signature.heads.kv_local % groups == 0, f"a rank has {signature.heads.kv_local} kv heads"),
        )
        for good, why in reasons:
            if not good:
                raise Unsupported(signature.scheme, f"head_groups {groups}: {why}")

    # ---- what it costs ----

    def needed_bytes(self) -> int:
        """V*: the least that all ranks together must receive in a forward pass, keys that only they see at home.

        2 * head_dim * item bytes for each (kv head, key) that a rank does not hold and one of its rows sees.
        """
        mask, kv_heads = self.problem.mask, self.problem.kv_heads
        per = max(1, mask.heads // kv_heads)
        count = 0
        for rows, own in zip(self.q_sharding.positions, self.kv_sharding.positions, strict=True):
            for h in range(0, mask.heads, per):
                count += keys_needed(mask, rows, own, range(h, h + per))
        if mask.heads == 1:
            count *= kv_heads
        return 2 * count * self.problem.batch * self.problem.head_dim * ITEM_BYTES[self.problem.dtype]

    def redundancy(self) -> float:
        """Bytes on the wire in a forward pass over V*; 1 where neither moves anything, inf where V* is 0."""
        moved, needed = self.signature.wire_bytes("forward") * self.topology.world, self.needed_bytes()
        return moved / needed if needed else math.inf if moved else 1.0

    @property
    def rotations_left_out(self) -> int:
        """Blocks of other ring indices that no rank needs and that no rank is sent, of ring - 1."""
        return 0 if self.signature.gathers else self.topology.ring - 1 - len(self.signature.remote)

    @property
    def idle_deliveries(self) -> float:
        """Share of the delivered blocks that their receiver does not need."""
        remote = list(self.signature.remote)
        return float((self.cells[remote] == 0).mean()) if remote else 0.0

    @property
    def step_imbalance(self) -> np.ndarray:
        """Largest over mean area of the ranks, per step: float64 [steps]; 1 where a step is empty."""
        mean = self.cells.mean(axis=1)
        return np.where(mean > 0, self.cells.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)

    @property
    def total_balance(self) -> float:
        """Mean over largest total area of a rank."""
        total = self.cells.sum(axis=0)
        return float(total.mean() / total.max()) if total.max() else 1.0

    @property
    def step_balance(self) -> float:
        """Total area over world times the sum of each step's largest: the balance where each step ends in a barrier."""
        slowest = self.cells.max(axis=1).sum()
        return float(self.cells.sum() / (self.topology.world * slowest)) if slowest else 1.0

    @property
    def efficiency_bound(self) -> float:
        """`step_balance` less the share of padding heads: E of kernels whose rate does not depend on the tile."""
        heads = self.signature.heads
        return self.step_balance * heads.q_heads / len(heads.q_slots)


def make_schedule(
    scheme: str, problem: AttentionProblem, topology: Topology, q_sharding: Sharding,
    kv_sharding: Sharding | None = None, *, skip: bool = True, travel: str = "float32", with_lse: bool = False,
) -> Schedule:
    """The schedule of a scheme.

    Args:
      scheme: one of `SCHEMES`.
      problem: the global problem; any of the fourteen masks.
      topology: of `make_topology`.
      q_sharding, kv_sharding: of `shardings`; one serves both where q_len == kv_len.
      skip: leave out rotations that bring no rank a key it needs, and of gathered keys those that no row of a rank
        sees (which makes steps and shapes depend on the mask); False keeps all, so that one compiled program serves
        every mask.
      travel: dtype of gradient sums in flight: "float32", or the problem's dtype at half the bytes and less precision.
      with_lse: return lse in token order as well.

    Raises ValueError naming the argument that disagrees with another, `Unsupported` where the scheme has another grid.
    """
    make_topology(scheme, topology.world, ulysses=topology.ulysses)  # raises where the scheme has no such grid
    kv_sharding = q_sharding if kv_sharding is None else kv_sharding
    for label, sharding, n in (
        ("q_sharding", q_sharding, problem.q_len), ("kv_sharding", kv_sharding, problem.kv_len)
    ):
        if not isinstance(sharding, Sharding):
            raise TypeError(f"{label}: {type(sharding).__name__} is no Sharding")
        if sharding.total != n or sharding.world != topology.world:
            raise ValueError(f"{label}: {sharding.total} tokens on {sharding.world} ranks, not {n} on {topology.world}")
    if travel not in ("float32", problem.dtype):
        raise ValueError(f"travel: {travel!r} is neither float32 nor the problem's {problem.dtype}")
    gathers = scheme in ("ulysses", "all_gather")
    orders = [_sorted(s, topology) for s in (q_sharding, kv_sharding)]
    signature = Signature(
        scheme, topology, head_layout(problem.q_heads, problem.kv_heads, topology.ulysses), problem.batch,
        problem.head_dim, problem.dtype, problem.scale, q_sharding.length, kv_sharding.length,
        q_sharding.total, kv_sharding.total, (Step(),), None, gathers, not orders[0], not orders[1], False,
        kv_sharding.total, travel, with_lse,
    )
    schedule = Schedule(signature, problem, q_sharding, kv_sharding)
    if gathers:
        rows = _gathered_rows(schedule) if skip else kv_sharding.total
        sorts = not np.array_equal(schedule.gathered_places, np.arange(rows))
        signature = dataclasses.replace(signature, sorts_gathered=sorts, gathered_rows=rows)
    else:
        shift = np.ones((topology.windows, topology.window), bool)
        if skip:
            shift = _needed(schedule.pair_area > 0, topology)
        steps, home = _walk(shift, topology)
        signature = dataclasses.replace(signature, steps=steps, home=home)
    made = Schedule(signature, problem, q_sharding, kv_sharding)
    known = ("pair_area", "q_groups", "kv_groups", "gathered_places")
    made.__dict__.update({n: x for n, x in schedule.__dict__.items() if n in known})
    return made


def schedule_under(
    scheme: str, problem: AttentionProblem, topology: Topology, sharding: str | tuple[Sharding, Sharding], *,
    granule: int = 1, **options,
) -> Schedule:
    """The schedule of a scheme under a kind of sharding.

    Args:
      sharding: one of `SHARDINGS`, or (query, key) shardings. "balanced" evens what ranks have to do in total; "best"
        is that of zigzag, stripes and balanced chunks whose steps are most even (`step_balance`), the first of equals:
        a ring's ranks end each step together. Its stripes and chunks are whole tiles of a kernel: single tokens
        balance best of all, and cut documents into pieces far below one.
      granule: see `make_sharding`.
      options: of `make_schedule`.
    """
    if isinstance(sharding, tuple):
        return make_schedule(scheme, problem, topology, *sharding, **options)
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding: {sharding!r} is none of {', '.join(SHARDINGS)}")
    if sharding != "best":
        held = shardings(sharding, problem.mask, topology, granule=granule)
        return make_schedule(scheme, problem, topology, *held, **options)
    whole = math.lcm(granule, KEY_TILE)
    tried = [schedule_under(scheme, problem, topology, kind, granule=size, **options)
             for kind, size in (("zigzag", granule), ("striped", whole), ("balanced", whole))]
    return max(tried, key=lambda s: round(s.step_balance, 3))


def _key_tile(total: int) -> int:
    """Keys that are left out together; fewer where there are few."""
    return max(1, min(KEY_TILE, total // 16))


def _gathered_rows(schedule: Schedule) -> int:
    """All keys, halved as often as what the rows of any one ring index see still fits, in whole tiles: few shapes.

    All keys under a dynamic mask, of which the rows and heads of a rank together list nearly every block.
    """
    mask, total = schedule.problem.mask, schedule.kv_sharding.total
    if schedule.topology.ring == 1 or isinstance(mask, BlockMask):
        return total
    tile, rows = _key_tile(total), total
    most = max(int(tiles_seen(mask, held, tile).sum()) for held in schedule.q_groups) * tile
    while (half := -(-rows // (2 * tile)) * tile) < rows and half >= most:
        rows = half
    return rows


def _needed(seen: np.ndarray, topology: Topology) -> np.ndarray:
    """Which shifts bring some rank a key it sees: bool [windows, window] from bool [ring, ring]."""
    q, kv = np.nonzero(seen)
    out = np.zeros((topology.windows, topology.window), bool)
    out[(q // topology.window - kv // topology.window) % topology.windows, (q - kv) % topology.window] = True
    return out


def _walk(needed: np.ndarray, topology: Topology) -> tuple[tuple[Step, ...], Hop | None]:
    """The steps that visit the needed shifts window by window, and the hop home.

    A window is entered by a hop from the block that the last window was entered with, which can travel while that
    window computes. dk, dv of a window are summed along its own steps; what earlier windows summed joins at its last
    step and has the whole window to arrive. A rank's part of its own block stays at home.
    """
    needed = needed.copy()
    needed[0, 0] = True
    steps: list[Step] = []
    entry, last = (0, 0), None
    for a in np.flatnonzero(needed.any(axis=1)).tolist():
        inner = np.flatnonzero(needed[a]).tolist()
        before = None
        for n, b in enumerate(inner):
            hop = grad = carried = None
            if n:
                hop = Hop(0, b - inner[n - 1])
            elif (a, b) != (0, 0):
                hop = _between(entry, (a, b), topology, from_entry=True)
            if (a, b) != (0, 0):
                grad = None if before is None else Hop(0, b - before)
                before = b
                carried = _between(last, (a, b), topology) if last is not None and b == inner[-1] else None
            steps.append(Step(a, b, hop, grad, carried))
        entry = (a, inner[0])
        last = last if before is None else (a, inner[-1])
    return tuple(steps), None if last is None else _between(last, (0, 0), topology)


def _between(a: tuple[int, int], b: tuple[int, int], topology: Topology, from_entry: bool = False) -> Hop:
    return Hop((b[0] - a[0]) % topology.windows, (b[1] - a[1]) % topology.window, from_entry)


def _groups(sharding: Sharding, topology: Topology) -> list[np.ndarray]:
    return [
        np.sort(np.concatenate([sharding.positions[x] for x in topology.group("ulysses", topology.rank(r, 0))]),
                kind="stable")  # mostly in order already
        for r in range(topology.ring)
    ]


def _order(sharding: Sharding, ranks: tuple[int, ...]) -> np.ndarray:
    tokens = sharding.table[list(ranks)].reshape(-1)
    return np.argsort(np.where(tokens < 0, sharding.total, tokens), kind="stable")


def _sorted(sharding: Sharding, topology: Topology) -> bool:
    """Whether every exchanged sequence comes out ascending, padding last."""
    for r in range(topology.ring):
        order = _order(sharding, topology.group("ulysses", topology.rank(r, 0)))
        if not np.array_equal(order, np.arange(len(order))):
            return False
    return True
