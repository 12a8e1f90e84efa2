"""What rows at shorter lengths say of a row that is not run yet."""

import pytest

from bench.shorter import Shorter


def row(seq_len, seconds=None, status="ok", kernel="naive", **fields):
    case = {"kernel": kernel, "mask": "full", "seq_len": seq_len, "q_len": 0}
    timed = {"seconds": {"median": seconds}} if seconds is not None else {}
    reason = "" if status == "ok" else "x"
    return {"case": case, "status": status, "reason": reason, "flops": seq_len**2} | timed | fields


def test_the_nearest_shorter_row_tells_the_time():
    """1 s at 200 tokens, by FLOPs 4 s at 400; what 100 and 800 tokens took says less."""
    shorter = Shorter(3.0)
    for known in (row(100, 0.01), row(200, 1.0), row(800, 1e-6), row(200, 9.0, kernel="sdpa")):
        shorter.add(known)
    skipped = shorter.skip(row(400))
    assert skipped["status"] == "skipped" and skipped["estimate"] == pytest.approx(4.0)
    assert "a run would take 4 s, going by 1 s at 200 tokens: above 3 s" in skipped["reason"]
    assert Shorter(None).skip(row(400)) is None and shorter.skip(row(300)) is None and shorter.skip(row(50)) is None


def test_what_was_skipped_or_did_not_fit_is_not_tried_longer():
    shorter = Shorter(3.0, [("sdpa", 100)])
    shorter.add(row(400, status="skipped", estimate=4.0))
    assert shorter.skip(row(800))["estimate"] == pytest.approx(16.0)
    shorter.add(row(500, status="out_of_memory"))
    assert shorter.skip(row(800)) == {"status": "out_of_memory", "reason": "not run: at 500 tokens x"}
    assert shorter.skip(row(101, kernel="sdpa"))["reason"] == "longer than the 100 tokens asked of this kernel"
    assert shorter.skip(row(100, kernel="sdpa")) is None
