"""The clock of a predicted job, on schedules small enough to play by hand."""

import dataclasses

import numpy as np
import pytest

from bench.link_model import Links, collective_seconds, level_of_hop, links_of, predict
from workload import masks
from workload.problem import AttentionProblem
from workload.schedule import make_schedule
from workload.sharding import shardings
from workload.topology import Hop, make_topology

FREE = Links(0.0, 1e30, 0.0, 1e30, 1e30)


def signature_of(scheme, world, **grid):
    problem = AttentionProblem(masks.full(96, 96), 1, 8, 4, 16)
    topology = make_topology(scheme, world, **grid)
    return make_schedule(scheme, problem, topology, *shardings("contiguous", problem.mask, topology)).signature


@pytest.mark.parametrize("scheme,world,grid", [
    ("ring", 4, {}), ("loongtrain", 8, {"ulysses": 2, "window": 2}), ("ulysses", 4, {}), ("all_gather", 3, {})])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_links_that_cost_nothing_leave_the_local_work(scheme, world, grid, which):
    signature = signature_of(scheme, world, **grid)
    compute = np.arange(1.0, len(signature.steps) + 1).tolist()
    found = predict(signature, which, compute, FREE)
    assert found.total == pytest.approx(sum(compute)) and found.exposed == pytest.approx(0)


def test_a_ring_hides_what_is_shorter_than_a_step_and_shows_the_rest():
    """Four steps of 1 s, two tensors a hop: hops of 0.6 s hide behind steps, of 1.5 s each of three adds 0.5 s."""
    signature = signature_of("ring", 4)
    hidden = Links(0.3, 1e30, 0.3, 1e30)
    assert predict(signature, "forward", [1.0] * 4, hidden).total == pytest.approx(4.0)
    shown = Links(0.75, 1e30, 0.75, 1e30)
    assert predict(signature, "forward", [1.0] * 4, shown).total == pytest.approx(4 + 3 * 0.5)


def test_backward_shows_the_way_home():
    """Sums leave one step behind and wait for the keys' hop; the last hop home is hidden by nothing."""
    signature = signature_of("ring", 2)
    links = Links(0.25, 1e30, 0.25, 1e30)
    assert predict(signature, "backward", [1.0, 1.0], links).total == pytest.approx(2 + 0.5)


def test_a_double_ring_has_a_window_to_hide_a_slow_link():
    """2 windows of 4 on 2 nodes: the slow hop of 2 s hides behind a window of 4 s; a flat ring waits at each step."""
    links = Links(0.0, 1e30, 1.0, 1e30)
    double = predict(signature_of("loongtrain", 8, ulysses=1, window=4, ranks_per_node=4), "forward", [1.0] * 8, links)
    flat = predict(signature_of("ring", 8, ranks_per_node=4), "forward", [1.0] * 8, links)
    assert double.total == pytest.approx(8.0) and flat.total == pytest.approx(8 + 7.0)


def test_a_link_carries_one_message_at_a_time():
    """A second window of two ranks: its block leaves with the first hop, and waits until that has left the link."""
    signature = signature_of("loongtrain", 4, ulysses=1, window=2)
    links = Links(1.0, 1e30, 1.0, 1e30)  # two tensors a hop: 2 s each
    alone = predict(signature_of("ring", 2), "forward", [0.0] * 2, links)
    assert alone.total == pytest.approx(2.0)
    assert predict(signature, "forward", [0.0] * 4, links).total == pytest.approx(2 + 2 + 2)


def test_levels_follow_the_nodes():
    signature = signature_of("usp", 8, ulysses=2, ranks_per_node=4)
    assert level_of_hop(signature, Hop(0, 1)) == "outer"
    assert level_of_hop(dataclasses.replace(signature, topology=dataclasses.replace(
        signature.topology, ranks_per_node=8)), Hop(0, 1)) == "inner"


def test_all_to_all_uses_both_levels_at_once():
    """Group of 4 on two nodes of 2: one peer inside, two outside; each piece a quarter of the operand."""
    signature = signature_of("ulysses", 4, ranks_per_node=2)
    collective = signature.collectives("forward")[0]
    piece = collective.operand_bytes / 4
    links = Links(0.0, 10.0, 0.0, 5.0)
    assert collective_seconds(signature, collective, links) == pytest.approx(2 * piece / 5)


def test_copies_of_an_exchange_and_of_keys_out_of_order():
    """An exchange reads and writes its operand once more; gathered keys out of order are put in order."""
    exchange = signature_of("ulysses", 4)
    links = Links(0.0, 1e30, 0.0, 1e30, 10.0)
    moved = sum(c.operand_bytes for c in exchange.collectives("forward"))
    assert predict(exchange, "forward", [1.0], links).total == pytest.approx(1 + 2 * moved / 10)
    gathered = signature_of("all_gather", 4)
    assert predict(gathered, "forward", [1.0], links).total == pytest.approx(1)
    zigzag = dataclasses.replace(gathered, sorts_gathered=True)
    moved = 4 * sum(c.operand_bytes for c in zigzag.collectives("forward"))
    assert predict(zigzag, "forward", [1.0], links).total == pytest.approx(1 + 2 * moved / 10)
    half = dataclasses.replace(zigzag, gathered_rows=zigzag.kv_total // 2)  # and its sums, into all places
    assert predict(half, "forward", [1.0], links).total == pytest.approx(1 + moved / 10)
    sums = sum(c.operand_bytes for c in half.collectives("backward") if c.kind == "reduce_scatter")
    assert predict(half, "backward", [1.0], links).total == pytest.approx(1 + moved / 10 + 1.5 * sums / 10)
    assert predict(signature_of("ring", 4), "forward", [1.0] * 4, links).total == pytest.approx(4)


@pytest.mark.parametrize("name,value", [("inner_bandwidth", 0.0), ("outer_latency", -1.0)])
def test_impossible_links_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Links(**{name: value})


def test_compute_needs_a_time_for_each_step():
    with pytest.raises(ValueError, match="steps"):
        predict(signature_of("ring", 4), "forward", [1.0], FREE)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("scheme,world", [("ulysses", 4), ("all_gather", 3)])
def test_head_groups_hide_all_but_the_first_and_the_last_part(scheme, world, which):
    """Long compute: of what is needed and made 1 / groups shows. Links that cost nothing, or one group: as without."""
    signature = signature_of(scheme, world)
    links = Links(0.0, 1e6, 0.0, 1e6)
    plain = predict(signature, which, [10.0], links)
    for groups in (2, 4):
        grouped = predict(signature, which, [10.0], links, groups)
        assert grouped.exposed == pytest.approx(plain.exposed / groups)
        assert predict(signature, which, [3.0], FREE, groups).total == pytest.approx(3.0)


def test_head_groups_of_a_ring():
    with pytest.raises(ValueError, match="head_groups: 2 with ring"):
        predict(signature_of("ring", 2), "forward", [1.0, 1.0], FREE, 2)


def test_measured_links_give_back_what_was_measured():
    """Straight lines between the points of a kind, beyond the last its rate; other groups by the model."""
    measured = {kind: [{"operand_bytes": size, "seconds": factor * seconds, "bandwidth": size / (factor * seconds)}
                       for size, seconds in ((100, 1.0), (300, 2.0))]
                for factor, kind in enumerate(("permute", "all_to_all", "all_gather", "reduce_scatter"), 1)}
    links = links_of(measured, 2)
    assert links.hop("inner", 200) == pytest.approx(1.5) and links.hop("outer", 600) == pytest.approx(4.0)
    assert links.collective("reduce_scatter", 2, 300) == pytest.approx(8.0)
    assert links.collective("all_gather", 3, 300) is None and Links().collective("all_gather", 2, 300) is None
    assert links.inner_latency == 1.0 and links.inner_bandwidth == 150.0
