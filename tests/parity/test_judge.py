"""The judge itself: NaN fails, budgets come from data, both oracles are equal, bits survive the exchange."""

import numpy as np
import pytest

from bench import attention_task
from bench.cases import ProblemSpec
from parity.budgets import FLOOR, MULTIPLE, budgets, cross_budget
from parity.compare import RESULTS, errors, over_budget, relative_error
from parity.inputs import InputSpec, bfloat16_bits, make_inputs, stored, tiled, widened
from parity.reference import Reference, chunked, reference_of, sample_of

SPECS = [
    ProblemSpec("global_sliding_window", 90, 70, 2, 6, 2, 16, "float32", 1, (("window", 9), ("global_share", 0.2))),
    ProblemSpec("causal", 50, 80, 1, 2, 1, 24, "float32", 2),  # the first thirty rows are empty
    ProblemSpec("variable_block", 90, 90, 2, 6, 2, 16, "float32", 3, (("sparse_block", 16), ("sparse_causal", True))),
]


@pytest.mark.parametrize("got, want", [
    ([1.0, np.nan], [1.0, 2.0]), ([1.0, 2.0], [1.0, np.nan]), ([np.nan], [np.nan]), ([np.inf, 1.0], [2.0, 1.0]),
    ([1.0, 1.0], [-np.inf, 1.0]), ([np.inf], [-np.inf])])
def test_nan_and_strange_infinities_fail(got, want):
    """A5: a test passed because the reference was NaN too."""
    assert relative_error(got, want) == np.inf
    assert over_budget({"out": relative_error(got, want)}, {"out": 1e9})


def test_relative_error_is_of_the_whole():
    assert relative_error([-np.inf, 3.0, 4.0], [-np.inf, 0.0, 5.0]) == pytest.approx(np.sqrt(10) / 5)
    assert relative_error([0.0, 0.0], [0.0, 0.0]) == 0 and relative_error([3.0], [0.0]) == 3.0
    with pytest.raises(ValueError, match="shape"):
        relative_error([1.0], [1.0, 2.0])
    assert over_budget({"dq": float("nan")}, {"dq": 1.0}) and not over_budget({"dq": 1.0}, {"dq": 1.0})


def test_budgets_are_multiples_of_a_naive_loss():
    allowed = budgets({"out": np.array([1.01, 1.0])}, {"out": np.array([1.0, 1.0])})
    assert allowed["out"] == pytest.approx(MULTIPLE * 0.01 / np.sqrt(2) + FLOOR)
    assert cross_budget(allowed)["out"] == 2 * allowed["out"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.mask)
def test_the_chunked_float64_equals_the_oracle(spec, monkeypatch):
    monkeypatch.setattr("parity.reference.ROWS", 32)
    problem = spec.problem()
    exact = reference_of(problem, spec.inputs())
    assert exact.oracle == "NumPy float64, all heads"
    made = make_inputs(problem, spec.inputs())
    heads = [h * problem.mask.heads // problem.q_heads for h in range(problem.q_heads)]
    found = chunked(made, problem.mask, heads, problem.scale, "float64")
    assert max(errors(found, exact.results).values()) < 1e-13


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.mask)
def test_a_sample_is_that_part_of_the_whole(spec, monkeypatch):
    problem = spec.problem()
    whole = reference_of(problem, spec.inputs())
    monkeypatch.setattr("parity.reference.NUMPY_CELLS", 1)
    sample, part = sample_of(problem), reference_of(problem, spec.inputs())
    assert part.oracle.startswith("chunked float64, batch 0")
    taken = {name: sample.take(name, x, problem.group) for name, x in whole.results.items()}
    assert max(errors(part.results, taken).values()) < 1e-13


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.mask)
def test_spots_are_those_rows_and_keys_of_the_whole(spec, monkeypatch):
    problem = spec.problem()
    whole = reference_of(problem, spec.inputs())
    for name, value in (("NUMPY_CELLS", 1), ("WHOLE_CELLS", 1), ("SPOT_ROWS", 9), ("SPOT_KEYS", 5)):
        monkeypatch.setattr(f"parity.reference.{name}", value)
    monkeypatch.setattr("parity.spots.ROWS", 32)
    for most, heads in ((1 << 33, 2), (1, 1)):
        monkeypatch.setattr("parity.reference.BOTH_HEADS_CELLS", most)
        sample, part = sample_of(problem), reference_of(problem, spec.inputs())
        assert len(sample.kv_heads) == min(heads, problem.kv_heads) and 2 < len(sample.rows) < problem.q_len
        for places, length in ((sample.rows, problem.q_len), (sample.keys, problem.kv_len)):
            assert (places[0], places[-1]) == (0, length - 1)
        taken = {name: sample.take(name, x, problem.group) for name, x in whole.results.items()}
        assert max(errors(part.results, taken).values()) < 1e-13
        assert part.oracle == (f"float64, batch 0, kv heads {', '.join(map(str, sample.kv_heads))}, "
                               f"{len(sample.rows)} rows, {len(sample.keys)} keys")


def test_budgets_of_spots_are_those_of_whole_heads(monkeypatch):
    """The naive run at some rows and keys loses what the naive run of all of them loses."""
    problem = ProblemSpec("causal_document", 300, 300, 1, 4, 2, 64, "bfloat16", 3).problem()
    monkeypatch.setattr("parity.reference.NUMPY_CELLS", 1)
    whole = reference_of(problem, InputSpec())
    monkeypatch.setattr("parity.reference.WHOLE_CELLS", 1)
    spots = reference_of(problem, InputSpec())
    for name in RESULTS:
        assert 0.5 < spots.budget[name] / whole.budget[name] < 2, name


def test_a_half_type_has_a_larger_budget(tmp_path):
    problem = ProblemSpec("causal", 60, 60, 1, 2, 1, 32, "bfloat16").problem()
    half = reference_of(problem, InputSpec())
    assert all(5e-4 < half.budget[name] < 3e-2 for name in ("out", "dq", "dk", "dv")) and half.budget["lse"] < 1e-5
    half.save(str(tmp_path / "r.npz"))
    back = Reference.load(str(tmp_path / "r.npz"))
    assert back.budget == half.budget and back.oracle == half.oracle
    assert all(np.array_equal(back.results[name], half.results[name]) for name in RESULTS)


def test_inputs_are_reproducible_distinct_and_normal():
    problem = ProblemSpec("full", 300, 300, 2, 4, 2, 32, "float32", 7).problem()
    one, two, other = (make_inputs(problem, InputSpec(7, n)) for n in (0, 0, 1))
    for name in ("q", "k", "v", "dout"):
        assert np.array_equal(one[name], two[name]) and not np.array_equal(one[name], other[name])
        assert abs(one[name].mean()) < 0.02 and abs(one[name].std() - 1) < 0.02
        assert one[name].flags.writeable and one[name].flags.c_contiguous
    assert len(np.unique(one["k"][0, :, 0], axis=0)) == 300
    one["q"][:] = 0  # a kernel that writes into its inputs spoils no later problem
    assert np.array_equal(make_inputs(problem, InputSpec(7, 0))["q"], two["q"])


def test_large_tensors_repeat_no_row():
    problem = ProblemSpec("full", 20_000, 16, 1, 2, 2, 128, "bfloat16").problem()
    keys = make_inputs(problem, InputSpec())["k"]
    assert keys.size > 4_194_301 and len(np.unique(keys[0, :, 0, :8], axis=0)) == len(keys[0])


def test_bfloat16_rounds_to_nearest_even():
    x = np.float32([1.0, 1.00390625, 1.01171875, -3.14159, 3.4e38, np.inf, np.nan, 1e-40])
    import ml_dtypes

    assert np.array_equal(bfloat16_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(widened(stored(x[:4], "bfloat16")), x[:4].astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("stack_name", ["jax", "torch"])
def test_inputs_made_on_a_device_are_those_made_on_the_host(stack_name):
    stack, draws = attention_task.stack_of(stack_name), stored(np.arange(1, 12, dtype=np.float32), "bfloat16")
    for offset, shape in ((0, (2, 3)), (7, (3, 5)), (10, (1, 40))):
        made = stack.tiled(stack.put(draws), offset, shape)
        assert np.array_equal(stack.take(made), widened(tiled(draws, offset, shape)))
