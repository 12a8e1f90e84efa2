"""Flags that all binaries share are checked when they are read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from bench import environment, options

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.parametrize("binary, flag", [
    ("fuzz", "seconds"), ("compare", "threshold"), ("replay", "link_outer_latency")])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_float_flag_is_a_finite_number(binary, flag, value):
    command = [sys.executable, "-m", f"bench.{binary}", f"--{flag}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"--{flag} must be a finite number" in done.stderr, done.stderr


def test_every_float_flag_is_one_of_these():
    """All go through `options.define_float`, which alone calls absl's."""
    users = [path.name for path in BENCH.rglob("*.py") if "DEFINE_float" in path.read_text()]
    assert users == ["options.py"]


def refused(binary, *flags):
    command = [sys.executable, "-m", f"bench.{binary}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("binary, flags, said", [
    ("sparse", ["--heads="], "--heads must not be empty"), ("parity", ["--worlds="], "--worlds must not be empty"),
    ("replay", ["--q_heads=4", "--kv_heads=3"], "--kv_heads must divide --q_heads"),
    ("replay", ["--link_outer_bandwidth=0"], "--link_outer_bandwidth: 0.0"),
    ("context_parallel", ["--host=3"], "--host: 3 of 1"),
    ("context_parallel", ["--hosts=2", "--coordinator=here"], "--coordinator: 'here'"),
    ("context_parallel", ["--hosts=2", "--worlds=3", "--coordinator=h:1"], "--hosts: 2 does not divide the world 3"),
    ("dense", ["--again=broken"], "--again: 'broken' is none of failed, all, before:COMMIT"),
    ("peers", ["--again=failed,before:none-such"], "--again: 'none-such' is no commit of this tree"),
    ("peers", ["--against=naive"], "--against: 'naive'"),
    ("peers", ["--contenders=jax:naive"], "--against: 'torch:fa3' is none of --contenders"),
    ("peers", ["--turns=/proc/t"], "--turns must be a file"),
    ("tune_flashmask", ["--tiles=64"], "--tiles: '64'"), ("tune_flashmask", ["--parts=dq"], "--parts: 'dq'"),
    ("dense", ["--seqlens=99999M"], "seq_len: 104856551424 is more than 2147483647 tokens"),
    ("sparse", ["--heads=²:1"], "--heads: '²:1'"),
    ("mask_building", ["--seqlen=8Q"], "--seqlen must be a positive number of tokens"),
])
def test_bad_values_are_named_by_their_flag(binary, flags, said):
    assert said in refused(binary, *flags)


def test_ranks_that_a_host_takes_are_counted_by_host(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert options.worlds(["16", "32"], 2) == [16, 32]
    with pytest.raises(ValueError, match="^--worlds: 17, a host of 1 cores takes 1 to 16"):
        options.worlds(["34"], 2)


def test_files_that_hold_no_records_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"seconds": 1.0}\n')
    for binary in ("compare", "report"):
        assert "rows.jsonl:1: record: lacks key" in refused(binary, *[str(tmp_path / "rows.jsonl")] * 2)


def test_an_out_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    for binary, name in (("fuzz", ""), ("peers", str(tmp_path)), ("parity", str(tmp_path / "file" / "r.jsonl")),
                         ("dense", "/proc/r.jsonl"), ("dense", "/dev/null"), ("parity", "n" * 300)):
        assert "--out must be a file that can be written" in refused(binary, f"--out={name}")
    assert "--folder must be a folder that can be written" in refused("quick", f"--folder={tmp_path / 'file'}")


@pytest.mark.parametrize("binary, shared", [
    ("sparse", ["stack", "workers", "deadline"]), ("parity", ["seconds", "deadline"]),
    ("context_parallel", ["masks", "worlds", "q_heads", "budget"]), ("quick", ["seconds"]), ("compare", ["threshold"])])
def test_help_shows_every_flag_of_a_binary(binary, shared):
    done = subprocess.run([sys.executable, "-m", f"bench.{binary}", "--help"], capture_output=True, text=True)
    assert all(f"--{name}:" in done.stdout for name in shared), done.stdout


def test_rows_of_trees_before_a_commit_are_asked_again(tmp_path, monkeypatch):
    """Also those whose tree nobody knows; a row of a later commit stays, whatever changed since."""
    def git(*command):
        return subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *command],
                              check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    commits = []
    for name in "abc":
        git("commit", "-q", "--allow-empty", "-m", name)
        commits.append(git("rev-parse", "--short", "HEAD"))
    monkeypatch.setattr(environment, "TREE", tmp_path)
    values = flags.FlagValues()
    flags.DEFINE_bool("resume", False, "", flag_values=values)
    flags.DEFINE_list("again", [], "", flag_values=values)
    values(["program", f"--again=failed,before:{commits[1]}"])
    resume, again = options.resumption(values)
    rows = [("ok", commit) for commit in (*commits, "unknown", "0" * 7)] + [("timeout", commits[2])]
    assert resume and [again({"status": status, "environment": {"commit": commit}}) for status, commit in rows] == \
        [True, False, False, True, True, True]
    assert again({"status": "unsupported", "environment": {}})


@pytest.mark.parametrize("given, said", [
    ([], "--seqlens=256,512 --q_heads=8 --kv_heads=2"), (["--seqlens=1K"], "--q_heads=8 --kv_heads=2"),
    (["--q_heads=16"], "--seqlens=256,512"), (["--seqlens=8K", "--q_heads=64", "--kv_heads=8"], "")])
def test_sizes_that_are_not_given_suit_the_machine(monkeypatch, given, said):
    """A GPU's defaults take hours on a CPU; what is given stays."""
    for gpu in (True, False):
        values = flags.FlagValues()
        flags.DEFINE_list("seqlens", ["8K"], "", flag_values=values)
        flags.DEFINE_integer("q_heads", 64, "", flag_values=values)
        flags.DEFINE_integer("kv_heads", 8, "", flag_values=values)
        values(["program", *given])
        before = values.flag_values_dict()
        monkeypatch.setattr(options, "_on_cpu", {"seqlens": ["256", "512"], "q_heads": 8, "kv_heads": 2})
        monkeypatch.setattr(environment, "has_gpu", lambda gpu=gpu: gpu)
        assert options.fit(values) == ("" if gpu else said)
        changed = {name for name, value in values.flag_values_dict().items() if value != before[name]}
        assert changed == {text.partition("=")[0][2:] for text in ("" if gpu else said).split()}


@pytest.mark.parametrize("binary", ["dense", "sparse", "context_parallel", "replay", "peers"])
def test_a_binary_tells_what_it_takes_on_a_cpu(binary):
    told = "no GPU here: --" in refused(binary, "--masks=none" if binary != "sparse" else "--kernels=none")
    assert told != environment.has_gpu()
