"""bench.sparse: its rows, the speed-up over dense, the selection timed on its own, bad flags named."""

import subprocess
import sys

import pytest

from bench import records, selection_task, sparse
from bench.cases import STACKS, Case, ProblemSpec
from bench.timing import Protocol

SMALL = ["--head_dim=16", "--dtype=float32", "--samples=2", "--seconds=0.01"]


def binary(*flags):
    return subprocess.run([sys.executable, "-m", "bench.sparse", *SMALL, *flags], capture_output=True, text=True,
                          timeout=200, check=False)


def row(kernel, mask, median, which="forward", **settings):
    """A timed row as the engine writes it, of one shape."""
    case = Case("jax", kernel, which, ProblemSpec(mask, 512, q_heads=4, settings=tuple(settings.items()))).record()
    return {"kind": "attention", "status": "ok", "case": case, "seconds": {"median": median}, "rate": 1.0,
            "density": 0.5}


def test_speed_up_is_over_the_fastest_dense_kernel_of_the_same_pass():
    rows = [row("naive", "full", 9.0), row("fa3", "full", 6.0), row("fa3", "full", 15.0, "backward"),
            row("vsa", "uniform_block", 2.0, density=0.5), row("vsa", "uniform_block", 3.0, "backward", density=0.5)]
    assert [gain for _, gain in sparse.speed_ups(rows)] == [3.0, 5.0]
    assert [gain for _, gain in sparse.speed_ups(rows[3:])] == [None, None]
    assert sparse.table(rows).row_count == 2


def test_rows_of_a_run(tmp_path):
    """A dense row and a sparse one, the selection's three, each once though the run is resumed."""
    flags = ("--stack=torch", "--kernels=naive", "--dense=naive", "--seqlens=256", "--heads=4:2", "--blocks=64",
             "--densities=0.5", "--passes=forward", f"--out={tmp_path / 'r.jsonl'}")
    done = binary(*flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "over dense" in done.stdout and " x" in done.stdout
    again = binary(*flags, "--resume")
    rows = records.read(tmp_path / "r.jsonl")
    assert again.returncode == 0 and len(rows) == 6 and {r["status"] for r in rows} == {"ok"}
    found = next(r for r in rows if r["case"].get("mask") == "uniform_block" and r["kind"] == "attention")
    assert found["flops"] == 4 * 16 * 4 * 256 * 128  # half of the key blocks
    assert [r["case"]["step"] for r in rows if r["kind"] == "selection"] == list(selection_task.STEPS)
    assert sparse.selections(rows).row_count == 3 and "pooled_scores" in done.stdout


def test_a_kernel_may_be_given_one_block():
    found = sparse.kernels_of(["vsa:64", "flashinfer:128", "triton_vsa"], ["64", "128", "variable"])
    assert found == {"64": ("vsa", "triton_vsa"), "128": ("flashinfer", "triton_vsa"), "variable": ("triton_vsa",)}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("step", selection_task.STEPS)
def test_selection_is_timed_in_either_stack(stack, step):
    settings = (("density", 0.3), ("sparse_block", 32))
    case = Case(stack, "naive", "forward", ProblemSpec("uniform_block", 160, q_heads=4, kv_heads=2, settings=settings))
    found = selection_task.clock(case.record(), step, selection_task.options_of(Protocol(2, 1, 0.01)))
    assert found["seconds"]["median"] > 0 and found["blocks"] == [2, 5, 5]


@pytest.mark.parametrize("flag, word", [("--blocks=tall", "tall"), ("--blocks=0", "--blocks"), ("--heads=4:3", "4:3"),
                                        ("--densities=1.5", "1.5"), ("--seqlens=12Q", "12Q"),
                                        ("--kernels=vsa:96", "vsa:96"), ("--kernels=vsaa:64", "vsaa")])
def test_bad_flags_are_named(flag, word, tmp_path):
    sizes = {"--heads": "--heads=2:1", "--seqlens": "--seqlens=256"}
    others = [text for name, text in sizes.items() if not flag.startswith(name)]
    done = binary(*others, flag, f"--out={tmp_path / 'r.jsonl'}")
    assert done.returncode == 2 and word in done.stderr and not (tmp_path / "r.jsonl").exists()
