"""AttentionProblem and Capability: FLOPs, bytes, refusals."""

import numpy as np
import pytest

from workload import masks
from workload.block_masks import uniform_block, variable_block
from workload.capability import ALL_MASKS, ALL_STATIC, DYNAMIC_MASKS, REGULAR, Capability
from workload.problem import AttentionProblem
from workload.topology import Topology


def test_causal_flops():
    """M1: 4 tokens, one head of one: 10 cells, 40 FLOPs forward and 100 backward."""
    problem = AttentionProblem(masks.causal(4, 4), head_dim=1)
    assert (problem.flops("forward"), problem.flops("backward")) == (40, 100)


def test_flops_of_a_rectangle_with_grouped_heads():
    """M5: cells of the mask, query heads, head width; q_len < kv_len; kv_heads do not enter."""
    mask = masks.causal_document(6, 9, [4, 5])
    problem = AttentionProblem(mask, batch=3, q_heads=8, kv_heads=2, head_dim=16)
    assert mask.row_area.tolist() == [4, 1, 2, 3, 4, 5]
    assert problem.flops("forward") == 4 * 19 * 3 * 8 * 16
    assert problem.flops("backward") * 2 == problem.flops("forward") * 5
    assert type(problem.flops("backward")) is int


def test_flops_beyond_64_bits_stay_exact():
    problem = AttentionProblem(masks.causal(1 << 20, 1 << 20), batch=64, q_heads=128, head_dim=256)
    assert problem.flops("backward") == 10 * (1 << 19) * ((1 << 20) + 1) * 64 * 128 * 256 > 2**62


def test_fewest_bytes():
    problem = AttentionProblem(masks.full(5, 7), batch=2, q_heads=6, kv_heads=3, head_dim=8, dtype="bfloat16")
    q, kv, lse = 2 * 5 * 6 * 8 * 2, 2 * 7 * 3 * 8 * 2, 4 * 2 * 6 * 5
    assert problem.bytes("forward") == 2 * q + 2 * kv + lse
    assert problem.bytes("backward") == 4 * q + 4 * kv + lse


def test_default_scale_is_of_the_head_width():
    """B7, B8: 80 wide is 80 ** -0.5 whatever it is padded to; 8 heads of 16 have 0.25."""
    assert AttentionProblem(masks.full(2, 3), head_dim=80).scale == pytest.approx(0.1118, abs=1e-4)
    assert AttentionProblem(masks.full(2, 3), q_heads=8, kv_heads=8, head_dim=16).scale == 0.25
    assert AttentionProblem(masks.full(2, 3), scale=0.0).scale == 0.0


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"batch": 0}, "batch: 0 is not an integer >= 1"),
        ({"q_heads": 6, "kv_heads": 4}, "kv_heads: 4 does not divide q_heads 6"),
        ({"dtype": "int8"}, "dtype: 'int8' is none of"),
        ({"scale": float("nan")}, "scale: nan is not a finite number of Python or NumPy"),
        ({"scale": "0.5"}, "scale: '0.5' is not a finite number"),
        ({"mask": None}, "mask: NoneType is neither an IntervalMask nor a BlockMask"),
        ({"mask": masks.full(2, 3).dense()}, "mask: ndarray is neither"),
        ({"head_dim": 2.5}, "head_dim: 2.5"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionProblem(**{"mask": masks.causal(4, 5)} | settings)


def test_sizes_become_integers():
    """4.0 is an integer, and NumPy's are; what is made of them is Python's."""
    problem = AttentionProblem(masks.full(2, 3), 2.0, np.int64(4), 2.0, np.int32(8))
    assert [type(n) for n in (*problem.q_shape, *problem.kv_shape, problem.flops("forward"))] == [int] * 9
    assert [type(AttentionProblem(masks.full(2, 3), scale=x).scale) for x in (np.float32(0.5), 1)] == [float] * 2
    assert repr(Topology(4.0, np.int64(2))) == repr(Topology(4, 2))


def test_mask_heads_must_fit():
    with pytest.raises(ValueError, match="mask: holds 2 heads, neither 1 nor kv_heads nor q_heads"):
        AttentionProblem(uniform_block(8, 8, 2, 4, 0.5), q_heads=8, kv_heads=4)


def refuse(problem, passes=("forward", "backward"), **settings):
    return Capability(**{"masks": ALL_MASKS} | settings).refuse(problem, passes)


def test_capability_answers_before_any_launch():
    """E16: a yes, or the argument that it cannot honour."""
    problem = AttentionProblem(masks.causal(6, 9), q_heads=4, kv_heads=2, head_dim=96)
    assert refuse(problem) is None
    assert refuse(problem, masks=("full",)) == "does not take mask causal"
    assert refuse(problem, dtypes=("float16",)) == "does not take dtype bfloat16"
    assert refuse(problem, head_dims=(64, 128)) == "does not take head_dim 96"
    assert refuse(problem, grouped_heads=False) == "does not take q_heads 4 with kv_heads 2"
    assert refuse(problem, square_only=True) == "does not take q_len 6 with kv_len 9"
    for scale in (0.0, -0.5):
        scaled = AttentionProblem(masks.causal(6, 9), scale=scale)
        assert refuse(scaled) is None and refuse(scaled, positive_scale=True) == f"does not take scale {scale}"
    assert Capability(ALL_MASKS, passes=("forward",)).refuse(problem) == "does not take pass backward"
    assert Capability(ALL_MASKS, passes=("forward",)).refuse(problem, ("forward",)) is None


def test_masks_of_no_name_need_all_static_patterns():
    local = AttentionProblem(masks.causal(6, 9).restrict([1, 3], [0, 2, 5]))
    assert local.mask.name == "custom"
    assert refuse(local, masks=ALL_STATIC) is None
    assert refuse(local, masks=REGULAR) == "does not take mask custom"
    assert refuse(local, masks=DYNAMIC_MASKS) == "does not take mask custom"


def test_block_sizes():
    uniform = AttentionProblem(uniform_block(200, 300, 1, 64, 0.5))
    variable = AttentionProblem(variable_block(200, 300, 1, 64, 16, 0.5))
    assert refuse(uniform, block_sizes=(64,)) is None
    assert refuse(uniform, block_sizes=(128,)) == "does not take block size 64"
    assert refuse(variable, block_sizes=(64,)) == "does not take block size None"
    assert refuse(variable) is None
