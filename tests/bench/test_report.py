"""The report opens from any mix of records, failures among them, without a network; comparisons see beyond noise."""

import csv
import dataclasses
import html.parser
import io
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from bench import compare, engine, parity_kernels, parity_schemes, rates, records
from bench.cases import Case, ProblemSpec
from bench.report import aggregate, choice, page, parity, peers, pictures, tables
from bench.report.write import write_report
from bench.timing import Timing
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

FLOPS, PEAK = 10**9, 1e12


def attention(stack, kernel, mask, seq_len, milliseconds=None, status="ok", reason="", seed=0, **more):
    case = Case(stack, kernel, "forward", ProblemSpec(mask, seq_len, 0, 1, 4, 2, 64, "bfloat16", seed))
    row = engine.new_row(case.key, "attention", case.record(), {"python": "3.12", "device": "<card & co>"})
    row |= {"status": status, "reason": reason, "flops": FLOPS, "bytes": 10**6, "density": 0.5, "area": 5,
            "tiles": {"tile": 128, "visited_area": 7, "waste": 1.4}, "source": "own"}
    if milliseconds:
        row |= {"seconds": Timing((milliseconds / 1e3,) * 3).record(), "warm_seconds": None, "errors": {"out": 1e-3},
                "budget": {"out": 4e-3}, "compile_seconds": 1.0, "prepare_seconds": 0.1, "peak_bytes": 1 << 20}
        row = rates.with_rates(row, PEAK)
    return row | more


def mixed():
    parity = engine.new_row("parity/x", "parity", attention("jax", "naive", "full", 64)["case"], {})
    passed = {"errors": {s: {"out": 1e-3} for s in ("jax", "torch", "cross")}, "budget": {"out": 2e-3},
              "budget_cross": {"out": 4e-3}, "throughput_ratio": 1.25, "seconds": {"jax": 0.8, "torch": 1.0}}
    ceiling = {"peak_flops": PEAK, "bandwidth": 1e11}
    return [
        engine.new_row("ceiling/jax", "ceiling", {"stack": "jax", "dtype": "bfloat16"}, {}) | ceiling,
        attention("jax", "naive", "full", 1024, 2.0), attention("jax", "naive", "full", 2048, 4.0),
        attention("torch", "naive", "full", 1024, 3.0, flags=["1.30 x the same kernel's rate under the full mask"]),
        attention("torch", "flex", "causal", 1024, status="timeout", reason="no answer within 3 s"),
        attention("torch", "fa3", "causal", 1024, status="unsupported", reason="needs <a> Hopper & co"),
        attention("jax", "sdpa", "causal", 1024, status="mismatch", reason="out: error inf > 0.004",
                  errors={"out": "inf"}, budget={"out": 4e-3}),
        attention("jax", "sdpa", "full_document", 1024, status="out_of_memory", reason="RESOURCE_EXHAUSTED"),
        attention("jax", "sdpa", "full_document", 2048, status="error", reason="the worker died by signal 9"),
        parity | passed,
        parity | {"key": "parity/y", "status": "mismatch", "reason": "jax dq: error 1 > 0", "repeat": "python -m x"},
        parity | {"key": "parity/z", "status": "unsupported", "reason": "jax: needs a GPU",
                  "refused": {"jax": "needs a GPU"}},
        engine.new_row("peers/x", "peers", {
            "pass": "forward", "mask": "causal", "seq_len": 8192, "q_heads": 64, "kv_heads": 8, "head_dim": 128,
            "dtype": "bfloat16"}, {}) | {
            "flops": FLOPS, "against": "torch:fa3",
            "tflops": {"jax:fa3": 605.0, "torch:fa3": 636.0, "jax:fa3@64:64": 700.0},
            "spread": {"jax:fa3": 0.02, "torch:fa3": 0.01, "jax:fa3@64:64": 0.01},
            "ratio": {"jax:fa3": 0.951, "torch:fa3": 1.0, "jax:fa3@64:64": 1.1},
            "refused": {"jax:cudnn": "no"}},
        engine.new_row("odd", "some_new_kind", {"scheme": "ring"}, {}),
    ]


class Reader(html.parser.HTMLParser):
    """Tags must close in order, and no address may leave the page."""

    VOID = {"meta", "img", "br", "path", "use", "rect", "line", "circle", "image", "wbr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links = [], set(), set()

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values["id"]} if "id" in values else set()
        self.links |= {v for k, v in values.items() if k in ("src", "href", "xlink:href") and v}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("report")
    write_report(mixed(), target, Console(file=io.StringIO(), width=120))
    return target


def test_the_page_is_whole_and_self_contained(folder):
    text = (folder / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert not reader.open
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= reader.ids
    assert "prefers-color-scheme: dark" in text and "@import" not in text and "url(http" not in text
    assert text.count('<img alt="') == len(ALL_BUILDERS)
    for said in ("needs &lt;a&gt; Hopper &amp; co", "no answer within 3 s", "signal 9", "RESOURCE_EXHAUSTED",
                 "&lt;card &amp; co&gt;</b>where", "1 of 2 cells pass; 1 more are refused", "python -m x", "1.25",
                 "605 (0.95)", "jax<br>fa3@64:64"):
        assert said in text, said


def test_a_browser_opens_the_page(folder):
    names = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no headless browser here")
    shot = folder / "shot.png"
    subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,2400",
         f"--user-data-dir={folder / 'profile'}", f"--screenshot={shot}", (folder / "report.html").as_uri()],
        capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000


@pytest.mark.parametrize("rows", [[], mixed()[:1], mixed()[5:6]])
def test_the_page_opens_from_few_records(rows, tmp_path):
    write_report(rows, tmp_path, Console(file=io.StringIO()))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_terminal_that_fails_costs_no_page(tmp_path):
    """As under `| head`."""
    class Gone(io.StringIO):
        def write(self, _):
            raise OSError

    with pytest.raises(OSError):
        write_report(mixed()[:1], tmp_path, Console(file=Gone()))
    assert (tmp_path / "report.html").exists()


def test_csv_and_markdown_hold_every_row(folder):
    lines = list(csv.DictReader(io.StringIO((folder / "report.csv").read_text())))
    assert len(lines) == len(aggregate.attention_rows(mixed()))
    assert float(lines[0]["milliseconds"]) == 2.0 and float(lines[0]["tflops_per_second"]) == 0.5
    assert lines[3]["status"] == "timeout" and lines[3]["milliseconds"] == ""
    text = (folder / "report.md").read_text()
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in text.split("\n\n")[1].splitlines()}
    assert len(widths) == 1 and "| full |" in text


def test_parity_rows_have_every_error_and_budget_in_a_file_of_their_own(folder):
    lines = list(csv.DictReader(io.StringIO((folder / "parity.csv").read_text())))
    assert [line["status"] for line in lines] == ["ok", "mismatch", "unsupported"]
    assert [lines[0][f"{side}_out"] for side in ("jax", "cross", "budget", "budget_cross")] == [
        "0.001", "0.001", "0.002", "0.004"]
    assert lines[0]["torch_milliseconds"] == "1000.0" and lines[0]["jax_dq"] == "" and lines[0]["tokens"] == "64"
    assert lines[1]["repeat"] == "python -m x"


def test_packs_are_pooled_by_total_time():
    rows = [attention("jax", "naive", "full", 64, ms, seed=n) for n, ms in enumerate((1.0, 3.0))]
    entry, = aggregate.entries(rows)
    assert entry.packs == 2 and entry.rate == pytest.approx(2 * FLOPS / 4e-3)
    assert entry.floor == pytest.approx(FLOPS / PEAK) and entry.bound == "arithmetic"


def test_a_row_that_is_no_case_of_a_kernel_is_refused_by_name():
    row = attention("jax", "naive", "full", 64, 1.0)
    with pytest.raises(ValueError, match=f"^{re.escape(row['key'])}: its case lacks stack, pass$"):
        aggregate.entries([row | {"case": {k: v for k, v in row["case"].items() if k not in ("stack", "pass")}}])


def test_a_pack_that_failed_is_told_beside_those_that_did_not():
    rows = [attention("jax", "naive", "full", 64, 1.0), attention("jax", "naive", "full", 64, status="mismatch",
                                                                  reason="dk: 2 > 1", seed=7)]
    for order in (rows, rows[::-1]):
        entry, = aggregate.entries(order)
        assert entry.status == "ok" and entry.flags == ("seed 7: mismatch: dk: 2 > 1",)
        assert tables.cell(entry, 1e12).endswith("!")


def test_a_floor_may_be_memory():
    rows = [attention("jax", "fa3", "full", 64, 1.0), mixed()[0] | {"bandwidth": 1e8}]
    entry = aggregate.entries(rows)[0]
    assert entry.bound == "memory" and entry.floor == pytest.approx(10**6 / 1e8)
    assert "10 x its floor" not in aggregate.cause(entry) and "tile waste 1.40" in aggregate.cause(entry)
    assert "tile" not in aggregate.cause(dataclasses.replace(entry, kernel="naive"))  # which knows none


def test_a_race_tells_who_was_refused_who_was_wrong_and_who_was_not_in_it():
    race = next(row for row in mixed() if row["kind"] == "peers")
    other = race | {"key": "peers/y", "tflops": {"torch:flex": 3.0}, "spread": {"torch:flex": 0.0}, "ratio": {},
                    "against": "torch:flex", "refused": {"torch:fa3": "no <b>"}, "failed": {"jax:fa3": "error 1"}}
    text = peers.section([race, other])
    for said in ('"none" title="no &lt;b&gt;">–</td>', '"bad" title="error 1">WRONG</td>', '"none" title=""></td>'):
        assert said in text, said
    assert "| WRONG | – |" in peers.markdown([race, other])


def test_ratios_of_both_passes_stand_in_a_line_and_those_of_schemes_by_mask():
    """Beside the FLOPs' time at the peak, and what each rank runs; a line of block masks names its blocks."""
    kernels = parity_kernels.cells(["flashmask"], ["causal"], ["long"], PASSES, 0)
    schemes = parity_schemes.cells(["usp"], ["full", "variable_block"], [2], ["zigzag"], "ranks_long", 0)
    rows = [engine.new_row(cell.key, "parity", cell.of("jax") | {"shape": cell.shape}, {})
            | {"seconds": {"jax": 1e-3, "torch": 1e-3 * n}, "throughput_ratio": float(n)}
            | {"errors": {"jax": {"out": 0.1}}, "budget": {"out": 1.0}}
            for n, cell in enumerate([*kernels, *schemes], 1)]
    rows[2] |= {"kernels": {"jax": "flashmask", "torch": "flashmask"}, "rounds": {"jax": [4.0, 5.0, 4.0]}}
    rows[3] |= {"kernels": {"jax": "flashinfer", "torch": "sdpa"}, "rounds": {"jax": [1.0, 1.05], "torch": [4.0]}}
    rows[3] |= {"flags": ["jax: it may have <waited>"]}
    peak = 14 * 8192**2 * 16 * 128 / 2 / 1e-3  # both passes under full, on two ranks, in a millisecond
    ceiling = engine.new_row("ceiling/jax", "ceiling", {"stack": "jax", "dtype": "bfloat16"}, {})
    text = parity.section([*rows, ceiling | {"peak_flops": peak, "bandwidth": 1e12}])
    assert "<td>1.00 (1, 1)</td><td>2.00 (1, 2)</td></tr>" in text
    assert '<td class="text">full</td><td>flashmask</td><td>1.00</td><td>3.00 (1.00, 3.00) ±25%</td></tr>' in text
    blocks = '<td class="text">variable_block, blocks of 128, density 0.5</td><td>flashinfer / sdpa</td><td>0.5'
    assert blocks in text and "<td>4.00 (1.00, 4.00)!</td></tr>" in text and "may have &lt;waited&gt;</td>" in text
    assert "4 agree, 1,626 not run" in text
    assert 'full</td><td>flashmask</td><td></td><td>3.00' in parity.section(rows)


def test_what_a_walks_ends_cost_is_told_where_it_tells_the_times():
    """Times made of walks of some tiles, each with ends that cost as much as three."""
    order = {walk: attention("jax", "flashmask", "causal", 128 * walk, 1.0) for walk in (2, 4, 8, 16, 32)}
    found = [dataclasses.replace(e, waste=1.0, density=1.0, floor=1.0, bound="arithmetic", seconds=1.1 * (1 + 3 / walk))
             for walk, e in zip(order, aggregate.entries(list(order.values())), strict=True)]
    assert [e.walk for e in found] == list(order)
    assert aggregate.walk_cost(found) == pytest.approx(3) and aggregate.walk_cost(found[1:]) is None
    same = [dataclasses.replace(e, seconds=1.0 + n % 2) for n, e in enumerate(found)]
    assert aggregate.walk_cost(same) is None  # nothing that a walk tells
    assert [aggregate.cause(e).endswith(f"; walks of {e.walk:.1f} tiles") for e in found] == [True] * 3 + [False] * 2


def test_a_row_of_both_stacks_ran_on_the_machine_that_each_tells():
    """Once a column of no device held a dict as it prints."""
    row = mixed()[0] | {"environment": {"cores": 4, "stacks": {"jax": {"device": "H200", "jax": "1.2"},
                                                               "torch": {"device": "H200", "torch": "3.4"}}}}
    refused = row | {"key": "x", "status": "unsupported", "environment": {"cores": 4}}
    text = page.build([row, refused])
    section = text[text.index('<section id="machine">') :]
    assert ">H200<br>2 rows</th>" in section and '<td class="text">3.4</td>' in section and "{" not in section


def test_an_inlined_picture_has_text_and_short_numbers():
    """Once its letters were outlines, 60 % of the picture."""
    figure = next(iter(pictures.heat_maps(aggregate.entries(mixed())).values()))
    text = pictures.svg(figure)
    assert ">WRONG</text>" in text and "currentColor" in text and not re.search(r'd="[^"]*\.\d{3}', text)
    pictures.plt.close("all")


def test_a_heat_map_shows_failures_by_name():
    found = aggregate.entries(mixed())
    shown = {t.get_text() for figure in pictures.heat_maps(found).values() for t in figure.axes[0].texts}
    assert {"timeout", "WRONG", "memory", "–"} <= shown
    pictures.plt.close("all")


def test_worst_share_knows_a_nan():
    row = {"errors": {"jax": {"out": "nan", "lse": 1e-9}}, "budget": {"out": 1.0, "lse": 1.0}}
    assert tables.share(row, "jax") == "nan out"


def test_a_capability_cell_has_its_reason():
    _, columns, cells = aggregate.capability(aggregate.entries(mixed()))
    assert "fa3 torch" in columns and cells["causal", "fa3 torch"][0] == "unsupported"
    assert cells["full", "naive jax"][0] == "forward"


@pytest.mark.parametrize("new_ms, spread, verdict", [
    (2.02, 0.0, "same"), (2.3, 0.0, "slower"), (1.7, 0.0, "faster"), (2.3, 0.2, "same")])
def test_compare_sees_beyond_noise(new_ms, spread, verdict):
    old, new = attention("jax", "naive", "full", 64, 2.0), attention("jax", "naive", "full", 64, new_ms)
    new["seconds"]["spread"] = spread
    assert compare.compare([old], [new])[0].verdict == verdict


@pytest.mark.parametrize("kind, timed", [
    ("context_parallel", lambda ms: {"seconds": {"forward": {"samples": [2.0]}, "backward": {"samples": [ms, ms]}}}),
    ("replay", lambda ms: {"forward": {"predicted": 2.0}, "backward": {"predicted": ms}}),
    ("peers", lambda ms: {"flops": FLOPS, "tflops": {"torch:fa3": 5.0, "backward": 1 / ms},
                          "spread": {"torch:fa3": 0.0, "backward": 0.0}}),
    ("parity", lambda ms: {"rounds": {"jax": [2.0] * 3, "backward": [ms] * 3}})])
def test_compare_sees_each_pass_of_rows_that_time_several(kind, timed):
    old, new = (engine.new_row("x", kind, {}, {}) | timed(ms) for ms in (5.0, 7.0))
    verdicts = {c.key: c.verdict for c in compare.compare([old], [new])}
    assert len(verdicts) == 2 and verdicts.pop("x backward") == "slower" and set(verdicts.values()) == {"same"}


def test_compare_sees_what_broke_and_what_went():
    good, bad = attention("jax", "naive", "full", 64, 2.0), attention("jax", "naive", "full", 64, status="error",
                                                                     reason="x")
    assert compare.compare([good], [bad])[0].verdict == "broken"
    assert compare.compare([bad], [good])[0].verdict == "mended"
    assert compare.compare([good], [])[0].verdict == "missing" and compare.compare([], [good])[0].verdict == "new"
    assert page.build([good]).count("<section") > 3


@pytest.mark.parametrize("old, new, status, said", [("ab", "a", 1, "1 missing"), ("a", "ab", 0, "1 new")])
def test_compare_fails_where_a_row_is_gone(tmp_path, old, new, status, said):
    made = {name: attention("jax", name, "full", 64, 2.0) for name in "ab"}
    for path, names in ((tmp_path / "old", old), (tmp_path / "new", new)):
        with records.Writer(path) as writer:
            for name in names:
                writer.write(made[name])
    done = subprocess.run([sys.executable, "-m", "bench.compare", tmp_path / "old", tmp_path / "new"],
                          capture_output=True, text=True, check=False)
    assert done.returncode == status and said in done.stdout, done.stderr


def both(stack, kernel, mask, seq_len, milliseconds):
    """A kernel's two passes, the backward one twice as long."""
    forward = attention(stack, kernel, mask, seq_len, milliseconds)
    backward = attention(stack, kernel, mask, seq_len, 2 * milliseconds)
    case = forward["case"] | {"pass": "backward"}
    return [forward, backward | {"key": backward["key"] + "/backward", "case": case}]


def test_what_a_kernel_runs_and_why_not():
    refused = attention("torch", "fa3", "full", 1024, status="unsupported", reason="needs x")
    rows = [*both("jax", "fa1", "full", 1024, 1.0), attention("jax", "fa1", "causal", 1024, 1.0), refused]
    masks, columns, cells = aggregate.capability(aggregate.entries(rows))
    assert masks == ["full", "causal"] and set(columns) == {"fa1 jax", "fa3 torch"}
    assert cells == {("full", "fa1 jax"): ("both", ""), ("causal", "fa1 jax"): ("forward", ""),
                     ("full", "fa3 torch"): ("unsupported", "forward 1024: needs x")}


def test_parity_is_told_where_there_is_some():
    told = []
    for rows in (mixed(), mixed()[:2]):
        console = Console(file=io.StringIO(), width=160)
        tables.parity_table(rows, console)
        told.append(console.file.getvalue())
    assert "Parity: worst error" in told[0] and "1.25" in told[0] and not told[1]


def test_the_richest_setting_comes_first():
    """A shape with most rows, its longest length that has nearly as many as any, the forward pass."""
    rows = [row for n, masks in ((1024, "full causal prefix_lm_causal"), (2048, "full causal prefix_lm_causal"),
                                 (4096, "full")) for mask in masks.split() for row in both("jax", "fa1", mask, n, 1.0)]
    few = attention("jax", "fa1", "full", 8192, 1.0)
    few |= {"key": "few", "case": few["case"] | {"q_heads": 2}}
    order = [(which, n, shape) for which, n, shape, _ in aggregate.settings(aggregate.entries([few, *rows]))]
    shape, other = order[0][2], order[-1][2]
    assert order == [(which, n, shape) for n in (2048, 1024, 4096) for which in ("forward", "backward")] + [
        ("forward", 8192, other)] and shape != other


def test_the_page_names_the_fastest_kernel_of_a_mask_where_most_were_timed():
    rows = both("torch", "naive", "causal", 1024, 9.0) + both("torch", "fa1", "causal", 1024, 1.03)
    rows += both("torch", "flashmask", "causal", 1024, 1.0) + both("torch", "naive", "causal", 2048, 30.0)
    rows += both("torch", "fa1", "causal", 2048, 4.0)  # without flashmask, which leads at 1K, nothing leads here
    text = choice.section(rows)
    assert ">flashmask, fa1</td>" in text and "naive 27 ms" in text and ">2K<" not in text
    assert choice.answers(rows) == ["Training in PyTorch with 4:2 heads of 64, bfloat16: flashmask is fastest or "
                                    "within 5% of it at 1 of 1 masks and lengths, fa1 at 1."]
    assert choice.section(rows[:2]) == ""
    rows += both("jax", "flex_sparse", "uniform_block", 1024, 2.0) + both("jax", "vsa", "uniform_block", 1024, 1.0)
    blocks = "Masks of blocks: forward and backward"
    assert blocks not in text and blocks in choice.section(rows)
    assert re.search(r'uniform_block, 1K[^/]*</td><td [^>]*>vsa 3.00</td><td class="none">', choice.section(rows))


def test_timings_in_turns_and_timings_alone_are_not_mixed():
    rows = both("torch", "fa3", "causal", 8192, 1.0) + both("torch", "naive", "causal", 8192, 0.1)
    case = {"mask": "causal", "seq_len": 8192, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    rates = {"torch:fa3": 1.0, "torch:flashmask": 0.5, "torch:flex": 9.0, "torch:flashmask plain": 9.0}
    for which in ("forward", "backward"):
        rows.append(engine.new_row(f"peers/{which}", "peers", case | {"pass": which}, {}) | {
            "flops": FLOPS, "against": "torch:fa3", "tflops": rates, "ratio": {},
            "spread": dict.fromkeys(rates, 0.01) | {"torch:flex": 0.5}})
    place = "4:2 heads of 64", "bfloat16", "causal", 8192, "torch"
    found = choice.seconds(rows)[place]
    assert found["fa3"]["forward"] == pytest.approx(FLOPS / 1e12) and set(found) == {"fa3", "flashmask"}
    assert list(choice.fastest(found, ("forward", "backward"))) == ["fa3"]
