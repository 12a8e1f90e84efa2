"""The five schemes on 8 fake devices, each check in a process with a deadline; see worker.py."""

import json
import os
import subprocess
import sys

import pytest

from workload import suite

FLAGS = "--xla_force_host_platform_device_count={} --xla_backend_optimization_level=0"


def records(check, *arguments, deadline=280, devices=8, flags=""):
    """What a check prints; a failure shows the end of its standard error and the case it had reached."""
    command = [sys.executable, "-m", "tests.jax_impl.context_parallel.worker", check, *map(str, arguments)]
    environment = os.environ | {"XLA_FLAGS": f"{FLAGS.format(devices)} {flags}", "JAX_PLATFORMS": "cpu"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline, check=False)
    except subprocess.TimeoutExpired as late:
        reached = (late.stdout or b"").decode().splitlines()[-1:]
        pytest.fail(f"{check}: not done within {deadline} s; last record {reached}")
    assert done.returncode == 0, f"{check}: exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    out = [json.loads(line) for line in done.stdout.splitlines()]
    assert out, f"{check}: no record"
    return out


def assert_right(found):
    wrong = [f"{r['case']}: {'; '.join(r['wrong'])}" for r in found if r["wrong"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", range(2))  # processes, each of which starts JAX
def test_sampled_matrix(part):
    """Every scheme x mask, on one grid each, equals the oracle in both passes and moves the schedule's bytes.

    D1, D2: each gradient on its own, masks that are not causal among them; K6: kinds and bytes as the program has them.
    """
    names = tuple(suite.ALL_BUILDERS)[part::2]
    found = records("sample", *names)
    assert len(found) == 5 * len(names)
    assert_right(found)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_full_matrix(world):
    found = records("matrix", 1, world, deadline=2900)
    assert len(found) >= 14 * 4
    assert_right(found)


def test_head_groups():
    assert_right(records("groups", 4))


@pytest.mark.slow
def test_all_head_groups():
    assert_right(records("groups"))


def test_idle_ranks_launch_nothing():
    found = records("idle")
    assert_right(found)
    assert [r["idle"] > 0 for r in found] == [True, False, True, True]


def test_a_permutation_of_several_cycles():
    """K9, K10."""
    assert_right(records("permutes"))


@pytest.mark.parametrize("travel,limit,schemes", [
    ("float32", 1.5, ("ring", "all_gather")),
    pytest.param("float32", 1.5, ("ulysses",), marks=pytest.mark.slow),
    pytest.param("bfloat16", 4.0, ("ring", "all_gather"), marks=pytest.mark.slow),
])
def test_gradient_error_does_not_grow_with_the_world(travel, limit, schemes):
    for r in records("precision", travel, *schemes):
        for name in ("out", "dq", "dk", "dv"):
            assert 0 < r["eight"][name] <= limit * r["one"][name], (r["case"], name, r)


@pytest.mark.parametrize("ring", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_windows_of_the_double_ring(ring):
    found = records("windows", ring)
    for r in found:
        if r["window"] in (None, 1, ring):
            assert r["equal"], r
        for name in ("out", "dq", "dk", "dv"):
            error = r["errors"][name]
            assert error <= 1.05 * found[0]["errors"][name], r


def test_other_documents_compile_nothing_anew():
    for r in records("recompilation"):
        assert r["traces"] == 1 and r["error"] < 1e-6, r


def test_key_buffers_do_not_grow_with_the_ring():
    for r in records("memory", devices=16):
        growth = r["temporary"]["16"] - r["temporary"]["8"]
        if r["case"] == "all_gather":
            assert growth > 8 * r["block"], r  # it holds all keys: the check can tell
        else:
            assert growth < r["block"], r


def test_remat_and_scan_leave_a_step_beside_each_hop():
    """K5: the two products of a step beside each hop forward, the five beside each hop backward; only home has none."""
    kept = "--xla_disable_hlo_passes=optimization-barrier-expander,cse_barrier_expander"
    [found] = records("overlap", devices=4, flags=kept)
    assert found["barriers"]  # what a step ties the next hops to is in the program, as it is on a GPU
    forward, backward = sorted(found["beside"], key=len)
    assert forward and set(forward) == {2}
    assert set(backward) == {0, 2, 5} and backward.count(0) == 2, backward


@pytest.mark.parametrize("scheme,mask", [
    ("all_gather", "causal_document"),
    *(pytest.param(s, m, marks=pytest.mark.slow) for s, m in (
        ("usp", "global_sliding_window"), ("ring", "causal"), ("ulysses", "uniform_block"), ("usp", "variable_block"))),
])
def test_hopper_kernels_serve_as_local_kernels(scheme, mask):
    assert_right(records("gpu", scheme, mask))


def test_right_values_under_every_scheme():
    """D4, D6, E15, H10, I5: see worker.py."""
    found = records("toys", devices=4)
    assert len(found) == 26
    assert_right(found)


def test_public_call():
    assert_right(records("api"))


def test_loss_is_a_mean_over_tokens():
    assert_right(records("loss"))


def test_shards_of_each_sharding():
    assert len(found := records("shards", devices=4)) == 8
    assert_right(found)


def test_shares_of_a_kv_head_are_summed_in_float32():
    assert_right(records("sums", devices=2))
