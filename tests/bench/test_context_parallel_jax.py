"""What a JAX rank of the context-parallel bench does, without a device."""

import dataclasses
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.context_parallel_jax_worker import Job
from bench.jax_stack import Stack
from bench.timing import MOST_AHEAD


def job(needs, others=False):
    """A job of whose host the device has to wait until the head start is `needs`; others: whether a peer's waits."""
    made = object.__new__(Job)
    taken = []

    def between_events(call, ahead, before):
        before()
        call()
        taken.append(ahead)
        return 1.0 / ahead, ahead < needs

    made.stack = types.SimpleNamespace(on_gpu=True, between_events=between_events)
    made.gather = lambda value: [value, others]
    made.together = lambda: taken.append("meet")
    return made, taken


@pytest.mark.parametrize("needs,others,ahead", [(1, False, 1), (3, False, 4), (1, True, MOST_AHEAD)])
def test_all_ranks_take_the_head_start_that_the_slowest_host_needs(needs, others, ahead):
    """A rank that took a sample again alone would call a collective alone: the head start is settled beforehand."""
    made, taken = job(needs, others)
    sample, estimate = made.sampler(lambda: taken.append("call"))
    before = len(taken)
    assert sample() == estimate == 1.0 / ahead
    assert taken[before:] == ["meet", "call", ahead]


def test_the_whole_problem_of_each_length_has_operands_of_its_own():
    """Masks of one length are made alike in width, so that they share a program; those of two lengths are not."""
    made = object.__new__(Job)
    made.stack, made._operands_alone, made._programs = Stack(), {}, {}
    spec = ProblemSpec("causal", 16, q_heads=2, kv_heads=1, head_dim=8, dtype="float32")
    cases = [Case("jax", scheme, dataclasses.replace(spec, seq_len=n), 2, kernel="naive")
             for scheme in ("ring", "ulysses") for n in (8, 16)]
    with ThreadPoolExecutor(2) as made._threads:
        passes = [future.result() for future in made._build_alone(cases)]
    assert len(passes) == 2 and all(set(x) == {"forward", "backward"} for x in passes)
