"""The parity command: both stacks' naive kernels agree, a cell that fails says how to repeat it, a stop is no loss."""

import json
import shlex
import subprocess
import sys

from bench import records
from parity.compare import OF_PASS


def parity(out, *more):
    command = [sys.executable, "-m", "bench.parity", "--kernels=naive", "--masks=shared_question,uniform_block",
               "--shapes=tiny", f"--out={out}", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_naive_agrees_in_both_stacks_and_a_stopped_run_goes_on(tmp_path):
    out = tmp_path / "p.jsonl"
    done = parity(out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = records.read(out)
    assert len(rows) == 4 and {row["status"] for row in rows} == {"ok"}
    for row in rows:
        wanted = set(OF_PASS[row["case"]["pass"]])
        assert all(set(row["errors"][side]) == wanted for side in ("jax", "torch", "cross"))
        assert all(row["errors"]["cross"][name] <= row["budget_cross"][name] for name in wanted)
        assert set(row["sources"]) == {"jax", "torch"}
    lines = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:40])
    assert parity(out, "--resume").returncode == 0
    again = records.read(out)
    assert again[:3] == rows[:3] and [row["key"] for row in again] == [row["key"] for row in rows]


def test_a_failing_cell_fails_the_run_and_repeats_by_its_command(tmp_path, monkeypatch, capsys):
    from absl import flags

    from bench import parity as module

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    monkeypatch.setattr(module, "cross_budget", lambda budget: dict.fromkeys(budget, 1e-12))
    console = module.Console(soft_wrap=True)
    cell = module.cells(["sdpa"], ["causal"], ["tiny"], ["forward"], 3)[0]
    with module.engine.Workers() as workers:
        row = module.run([cell], tmp_path / "p.jsonl", False, 120.0, console, [workers])[0]
    assert row["status"] == "mismatch" and "jax to torch out" in row["reason"]
    assert f"again: {row['repeat']}" in capsys.readouterr().out
    command = shlex.split(row["repeat"].replace("out/again.jsonl", str(tmp_path / "again.jsonl")))
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=200)
    repeated = records.read(tmp_path / "again.jsonl")
    assert done.returncode == 0 and [r["key"] for r in repeated] == [row["key"]], done.stdout + done.stderr
    assert json.dumps(repeated[0]["case"]) == json.dumps(row["case"])
