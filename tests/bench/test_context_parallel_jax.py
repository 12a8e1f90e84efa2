"""What a JAX rank of the context-parallel bench does, without a device."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

from bench.cases import ProblemSpec
from bench.context_parallel_cases import Case
from bench.context_parallel_jax_worker import Job
from bench.jax_stack import Stack


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
