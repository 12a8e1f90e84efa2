"""Context-parallel schemes on the devices of this host (or of several), in both stacks: checked, then timed.

    python -m bench.context_parallel --worlds=2 --schemes=ring,ulysses --masks=causal --seqlens=16K
    python -m bench.context_parallel --worlds=8 --hosts=2 --host=0 --coordinator=10.0.0.1:29500 ...   # on each host

A row is a scheme x mask x sharding x world x stack: errors against the reference, bytes handed to collectives against
the schedule's, seconds of the slowest rank of each iteration, skew, rate, efficiency, peak memory. Ranks are processes,
one a device; a rank that is lost, fails or lags ends its job within --deadline, and the row it was at says so, naming
rank, step and peer; what was left goes on in a new job. Without a GPU, ranks are processes on the CPU over gloo.
"""

import datetime
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from bench import context_parallel_cases as cp
from bench import environment, options, records
from bench.cases import STACKS, ProblemSpec, differing
from bench.workers import ENVIRONMENT, MEMORY_WORDS
from workload.ranks import RankFailure
from workload.sharding import KINDS
from workload.suite import ALL_BUILDERS
from workload.topology import SCHEMES


def define() -> None:
    """Defines the flags."""
    flags.DEFINE_list("stack", ["all"], f"Stacks: all, or some of {', '.join(STACKS)}.")
    flags.DEFINE_list("schemes", ["all"], f"Schemes: all, or some of {', '.join(SCHEMES)}.")
    flags.DEFINE_list("masks", ["full", "causal", "full_document", "causal_document"],
                      f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    flags.DEFINE_list("worlds", ["2"], "Numbers of ranks.")
    flags.DEFINE_list("sharding", ["zigzag"], f"Shardings: all, or some of {', '.join(KINDS)}.")
    flags.DEFINE_list("seqlens", ["16K"], "Lengths of the whole sequence in tokens: 8192, 8K, 1M.")
    flags.DEFINE_integer("granule", 0, "Tokens that a sharding keeps together; 0: a dynamic mask's block, else 1.",
                         lower_bound=0)
    flags.DEFINE_integer("ulysses", 0, "Head exchange degree of usp and loongtrain; 0 for the default.")
    flags.DEFINE_integer("window", 0, "Inner ring of loongtrain; 0 for the default.")
    flags.DEFINE_integer("ranks_per_node", 8, "Ranks of a node.", lower_bound=1)
    flags.DEFINE_integer("head_groups", 1, "Of PyTorch's ulysses and all_gather: groups of heads that travel while "
                         "others compute; whatever has none runs without.", lower_bound=1)
    flags.DEFINE_enum("travel", "float32", ["float32", "own"], "dtype of gradient sums in flight; own: the problem's.")
    flags.DEFINE_string("kernel", "", "Local kernel, by default that of the stack and the device.")
    flags.DEFINE_integer("batch", 1, "Batch entries.", lower_bound=1)
    flags.DEFINE_integer("q_heads", 64, "Query heads.", lower_bound=1)
    flags.DEFINE_integer("kv_heads", 8, "Key and value heads.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "Of q, k, v.")
    flags.DEFINE_string("documents", "auto", "Data set of document lengths.")
    options.define_float("long_share", 0.0, "Share of tokens in long documents.", lower_bound=0, upper_bound=1)
    flags.DEFINE_integer("seed", 0, "Seed of documents and inputs.", lower_bound=0)
    flags.DEFINE_string("check_len", "2K", "Tokens of the problem that is held to the reference; 0 for the row's own.")
    flags.DEFINE_bool("inside", False, "PyTorch: also time each step's local work alone, predict the job from it and "
                      "the links, and trace how much of the communication is hidden.")
    flags.DEFINE_list("links", [], "Also measure links, at these operand bytes: 64K, 64M.")
    flags.DEFINE_integer("samples", 15, "Iterations a pass.", lower_bound=1)
    options.define_float("seconds", 1.0, "Seconds after which a pass takes no further iteration.", lower_bound=0.001)
    options.define_float("deadline", 120.0, "Seconds a rank may wait for another, and a row may take.", lower_bound=1)
    flags.DEFINE_integer("hosts", 1, "Hosts of the job; each runs this command.", lower_bound=1)
    flags.DEFINE_integer("host", 0, "Which host this is.", lower_bound=0)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of host 0, where --hosts > 1.")
    flags.DEFINE_string("out", "out/context_parallel.jsonl", "Record file: one JSON line a row.")
    flags.DEFINE_bool("resume", False, "Keep the rows that --out has and go on.")


def cases_of(values: flags.FlagValues) -> list[cp.Case]:
    """The rows that the flags ask for. ValueError names the flag."""
    settings = differing(documents=values.documents, long_share=values.long_share)
    travel = "float32" if values.travel == "float32" else values.dtype
    out = []
    for stack in options.choose("stack", values.stack, STACKS):
        for length in (options.tokens(n) for n in values.seqlens):
            for mask in options.choose("masks", values.masks, ALL_BUILDERS):
                spec = ProblemSpec(mask, length, 0, values.batch, values.q_heads, values.kv_heads, values.head_dim,
                                   values.dtype, values.seed, settings)
                for world in (options.tokens(w) for w in values.worlds):
                    for scheme in options.choose("schemes", values.schemes, SCHEMES):
                        grid = scheme in ("usp", "loongtrain")
                        for kind in options.choose("sharding", values.sharding, KINDS):
                            out.append(cp.Case(
                                stack, scheme, spec, world, kind, values.ulysses if grid else 0,
                                values.window if scheme == "loongtrain" else 0, values.ranks_per_node, values.kernel,
                                travel, values.head_groups if (stack, scheme) in cp.GROUPED else 1,
                                granule=values.granule))
    return out


def request_of(values: flags.FlagValues) -> dict[str, Any]:
    """What every job of the run is told besides its cases."""
    check_len = 0 if values.check_len == "0" else options.tokens(values.check_len)
    return {
        "protocol": {"samples": values.samples, "least": min(3, values.samples), "seconds": values.seconds},
        "check_len": check_len, "deadline": values.deadline, "links": [options.tokens(n) for n in values.links],
        "inside": values.inside,
    }


class Jobs:
    """Runs cases as jobs of one stack and world; a job that fails costs the row it was at."""

    def __init__(self, out: Path, request: dict[str, Any], deadline: float, hosts: int = 1, host: int = 0,
                 coordinator: str | None = None):
        self.out, self.request, self.deadline = out, request, deadline
        self.hosts, self.host, self.coordinator = hosts, host, coordinator

    def run(self, cases: Sequence[cp.Case]) -> None:
        """Every case whose row the file lacks."""
        by_job: dict[tuple[str, int], list[cp.Case]] = {}
        for case in cases:
            by_job.setdefault((case.stack, case.world), []).append(case)
        for (stack, world), members in by_job.items():
            while left := [c for c in members if c.key not in self._done()]:
                self._job(stack, world, left)
                if self.host:  # rows are written on host 0 alone
                    break

    def _done(self) -> set[str]:
        return {row["key"] for row in records.read(self.out)}

    def _job(self, stack: str, world: int, left: Sequence[cp.Case]) -> None:
        if world % self.hosts:
            raise ValueError(f"--hosts: {self.hosts} does not divide the world {world}")
        launch = _launcher(stack)
        before = self._done()
        with tempfile.TemporaryDirectory(prefix="cases-") as folder:
            request = Path(folder) / "cases.json"
            request.write_text(json.dumps(self.request | {"cases": [c.record() for c in left]}))
            command = [sys.executable, "-m", f"bench.context_parallel_{stack}_worker", str(request), str(self.out)]
            try:
                said = launch.spawn(
                    command, world // self.hosts, deadline_s=self.deadline * (1 + len(left)), hosts=self.hosts,
                    host=self.host, coordinator=self.coordinator, environ=os.environ | ENVIRONMENT[stack])
                print(said[0], end="", flush=True)
            except RankFailure as failure:
                self._blame(left, failure)
                return
        if self.host == 0 and self._done() == before:
            raise RuntimeError(f"a job of {stack} on {world} ranks wrote no row")

    def _blame(self, left: Sequence[cp.Case], failure: RankFailure) -> None:
        """The row of the case that the job was at."""
        done = self._done()
        case = next(c for c in left if c.key not in done)
        text = str(failure)
        status = "out_of_memory" if any(w in text.lower() for w in MEMORY_WORDS) else \
            "timeout" if "deadline" in text or "furthest behind" in text else "error"
        row: dict[str, Any] = {
            "key": case.key, "kind": "context_parallel", "case": case.record(), "status": status,
            "reason": " | ".join(text.splitlines())[:1500], "environment": environment.machine(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        if self.host == 0:
            with records.Writer(self.out) as writer:
                writer.write(row)
        print(f"{case.key}: {status}: {row['reason'][:300]}", flush=True)


def _launcher(stack: str):
    """The stack's launcher: PyTorch's holds the store that ranks meet at, JAX's finds a free port."""
    return importlib.import_module(f"{stack}_impl.launch")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    values = flags.FLAGS
    try:
        cases, request = cases_of(values), request_of(values)
        out = Path(values.out)
        if records.read(out) and not values.resume:
            raise ValueError(f"--out: {out} holds rows; give --resume to go on, or another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        Jobs(out, request, values.deadline, values.hosts, values.host, values.coordinator).run(cases)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    rows = records.read(out)
    bad = [row for row in rows if row["status"] in ("mismatch", "error", "timeout")]
    print(f"{len(rows)} rows, {len(bad)} failed; see them: python -m bench.report {out}")
    return 1 if bad else 0


if __name__ == "__main__":
    define()
    app.run(main)
