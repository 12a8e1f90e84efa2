"""Records survive being cut short, and no key is there twice."""

import json
import math
import resource

import pytest

from bench import program, records


def row(key, status="ok", **more):
    return {"key": key, "kind": "attention", "case": {"mask": "full"}, "status": status,
            "reason": "" if status == "ok" else "why", "environment": {}, **more}


def test_rows_come_back_with_what_json_cannot_say(tmp_path):
    with records.Writer(tmp_path / "new" / "r.jsonl") as writer:
        writer.write(row("a", error=float("nan"), big=[float("inf"), -float("inf")]))
        back = records.read(writer.path)[0]  # on disk before the file is closed
        assert math.isnan(back["error"]) and back["big"] == [float("inf"), -float("inf")]
        assert "NaN" not in writer.path.read_text() and "Infinity" not in writer.path.read_text()
    assert records.read(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("cut", [1, 20])
def test_a_torn_last_line_is_measured_anew(tmp_path, cut):
    path = tmp_path / "r.jsonl"
    with records.Writer(path) as writer:
        writer.write(row("a"))
        writer.write(row("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r["key"] for r in records.read(path)] == ["a"]
    with records.Writer(path) as writer:
        assert writer.keys == {"a"}
        writer.write(row("b"))
    assert [r["key"] for r in records.read(path)] == ["a", "b"]


def test_a_key_is_taken_once(tmp_path):
    with records.Writer(tmp_path / "r.jsonl") as writer:
        writer.write(row("a"))
        with pytest.raises(ValueError, match="key: 'a'"):
            writer.write(row("a"))


@pytest.mark.parametrize("bad, said", [
    ({"status": "fine"}, "status: 'fine'"), ({"status": "timeout"}, "reason"), ({"key": None}, "lacks key"),
    ({"key": 3}, "key: 3 is no str"), ({"case": ["full"]}, "case: .* is no dict")])
def test_what_is_no_record_is_named(bad, said):
    broken = {k: v for k, v in (row("a") | bad).items() if v is not None}
    with pytest.raises(ValueError, match=said):
        records.validate(broken)


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "r.jsonl"
    for broken, said in (("{", ""), ("null", "record: NoneType"), ("[1]", "record: list"), ("", "")):
        path.write_text(f"{json.dumps(row('a'))}\n{broken}\n{json.dumps(row('b'))}\n")
        with pytest.raises(ValueError, match=f"r.jsonl:2: {said}"):
            records.read(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "r.jsonl"):
        with pytest.raises(ValueError, match=str(path)):
            records.Writer(path)


def test_two_runs_do_not_write_one_file(tmp_path):
    """Each would write the rows that it does not see of the other; a job's ranks add theirs to a run's file."""
    with records.Writer(tmp_path / "r.jsonl", alone=True):
        with pytest.raises(ValueError, match="r.jsonl: another run writes it"):
            records.Writer(tmp_path / "r.jsonl", alone=True)
        with records.Writer(tmp_path / "r.jsonl") as rank:
            rank.write(row("a"))
    with records.Writer(tmp_path / "r.jsonl", alone=True) as again:
        assert again.keys == {"a"}


def test_a_row_that_is_asked_again_stays_until_there_is_a_new_one(tmp_path):
    """A run that is killed leaves the old row in its place, and nothing for the next one to ask again."""
    path, killed = tmp_path / "r.jsonl", tmp_path / "killed.jsonl"
    with records.Writer(path) as writer:
        for key in "abc":
            writer.write(row(key, "ok" if key == "b" else "error"))
    whole = path.read_bytes()
    failed = {"alone": True, "again": lambda r: r["status"] == "error"}
    with records.Writer(path, **failed) as writer:
        assert writer.keys == records.keys(path) == {"b"} and len(records.read(path)) == 3
        with pytest.raises(ValueError, match="key: 'b'"):
            writer.write(row("b"))
        with records.Writer(path) as rank:
            rank.write(row("a", n=1))
        assert records.keys(path) == {"a", "b"}
        killed.write_bytes(path.read_bytes())
    for left in (path, killed):
        assert [(r["key"], r["status"], r.get("n")) for r in records.read(left)] == \
            [("a", "ok", 1), ("b", "ok", None), ("c", "error", None)]
    assert path.read_bytes().splitlines()[1:] == whole.splitlines()[1:] and len(killed.read_bytes().splitlines()) == 5
    with records.Writer(killed, alone=True) as writer:
        assert writer.keys == records.keys(killed) == {"a", "b", "c"}
    assert killed.read_bytes() == path.read_bytes() and sorted(tmp_path.iterdir()) == [killed, path]


@pytest.mark.parametrize("room", [0, 30])
def test_a_file_that_cannot_grow_keeps_whole_rows(tmp_path, room):
    """As on a full disk: told in words, and the file goes on when there is space again."""
    path, limits = tmp_path / "r.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with records.Writer(path) as writer:
        writer.write(row("a"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        try:
            with pytest.raises(ValueError, match="r.jsonl: (File too large|No space left)"):
                writer.write(row("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        writer.write(row("c"))
    assert [r["key"] for r in records.read(path)] == ["a", "c"]


@pytest.mark.parametrize("status, code", [("unsupported", 0), ("skipped", 0), ("mismatch", 1), ("timeout", 1)])
def test_a_run_ends_with_what_its_file_holds(tmp_path, capsys, status, code):
    path = tmp_path / "r.jsonl"
    with records.Writer(path) as writer:
        writer.write(row("a"))
        writer.write(row("b", status))
    assert program.ended(path) == code
    assert capsys.readouterr().out == f"2 rows, {code} failed; see them: python -m bench.report {path}\n"
