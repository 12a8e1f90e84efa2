"""Kernels of both stacks against each other in one process, interleaved, so that ratios are read at one temperature.

    python -m bench.peers --contenders=jax:flashmask,jax:cudnn,torch:fa3,torch:cudnn_flex,torch:flex \
        --masks=full,causal,causal_document --seqlens=8K,32K --heads=64:8 --out=out/peers.jsonl

A contender is stack:kernel. Each is first held to a float64 reference at some rows and keys; one that is wrong or fails
takes no part, and its row says why. In each round every contender runs once, in an order drawn anew: it first runs
untimed for --warm_up seconds, since the card's clock follows the power that the one before it drew, then for --seconds.
A rate is the pass's exact FLOPs over the median of the rounds; the ratio is to --against. One JSON line a problem and
pass, written as it is made; --resume keeps the lines that --out has.

Block-sparse kernels race under --masks=uniform_block or variable_block, at one --sparse_block and --density:

    python -m bench.peers --contenders=jax:vsa,torch:cudnn_sparse --against=torch:cudnn_sparse --masks=uniform_block \
        --sparse_block=64 --density=0.2 --seqlens=32K --heads=64:64,64:8 --out=out/peers.jsonl

A contender stack:kernel@q_heads:kv_heads runs at heads of its own in place of --heads, so that grouped heads race
beside as many separate ones: --contenders=jax:vsa,jax:vsa@64:8 --against=jax:vsa --heads=64:64.

Compiling takes longer than racing. Several such processes, each with masks and an --out of its own, may share a card
through one --turns file: they compile at any time and judge together, but each races alone.
"""

import contextlib
import dataclasses
import fcntl
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console

from bench import engine, options, program, records
from bench.cases import STACKS, ProblemSpec, differing
from bench.interleave import Contender, contender, interleave, judged, rates_of
from bench.passes import Inputs
from bench.worker_main import failure_of
from parity.reference import Reference, reference_of, spots_of
from workload.capability import DYNAMIC_MASKS
from workload.errors import Unsupported
from workload.problem import ITEM_BYTES, PASSES
from workload.suite import ALL_BUILDERS


def define() -> None:
    """Defines the flags; once, before `app.run`."""
    options.define_list("contenders", ["jax:flashmask", "jax:fa3", "jax:cudnn", "torch:fa3"], "stack:kernel pairs, or "
                        "stack:kernel@q_heads:kv_heads for one at other heads than --heads.")
    flags.DEFINE_string("against", "torch:fa3", "The contender that ratios are to.")
    options.define_list("masks", ["full", "causal"], f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    options.define_seqlens(["8K"])
    options.define_shapes_of_heads(["64:8"])
    options.define_list("passes", list(PASSES), "Passes: all, or some of forward, backward.")
    options.define_blocks()
    flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", list(ITEM_BYTES), "Of all tensors.")
    flags.DEFINE_integer("seed", 0, "Of documents, mask parameters and inputs.", lower_bound=0)
    flags.DEFINE_integer("rounds", 7, "Rounds of a problem and pass.", lower_bound=1)
    options.define_float("seconds", 0.1, "Timed seconds of a contender in a round.", lower_bound=0)
    options.define_float("warm_up", 0.1, "Untimed seconds before them.", lower_bound=0)
    flags.DEFINE_string("turns", "", "File that processes lock in turn to have the machine alone.")
    flags.register_validator("turns", lambda name: not name or options.writable(name),
                             message="--turns must be a file that can be written")
    options.define_out("out/peers.jsonl")
    options.define_resume()


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A contender as it is asked for.

    Attributes:
      stack, kernel: names.
      heads: q_heads and kv_heads of its own in place of a row's; None to run at those.
    """

    stack: str
    kernel: str
    heads: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """stack:kernel, or stack:kernel@q_heads:kv_heads."""
        return f"{self.stack}:{self.kernel}" + (f"@{self.heads[0]}:{self.heads[1]}" if self.heads else "")

    def spec(self, row: ProblemSpec) -> ProblemSpec:
        """Its problem in a row."""
        return dataclasses.replace(row, q_heads=self.heads[0], kv_heads=self.heads[1]) if self.heads else row


def entrant_of(label: str, text: str) -> Entrant:
    """The one that an entry of the flag `label` asks for. ValueError names the flag."""
    name, at, heads = text.partition("@")
    stack, _, kernel = name.partition(":")
    if stack not in STACKS or kernel not in options.KERNELS[stack]:
        raise ValueError(f"--{label}: {text!r} is no stack:kernel of {', '.join(STACKS)}")
    return Entrant(stack, kernel, options.heads_of(heads, label) if at else None)


def entrants_of(values: flags.FlagValues) -> list[Entrant]:
    """Each of --contenders, once; --against is one of them. ValueError names the flag that is wrong."""
    against = entrant_of("against", values.against)
    entrants = [entrant_of("contenders", text) for text in dict.fromkeys(values.contenders)]
    if against not in entrants:
        raise ValueError(f"--against: {values.against!r} is none of --contenders")
    return entrants


def specs_of(values: flags.FlagValues) -> list[ProblemSpec]:
    """The problems that the flags ask for. ValueError names the flag."""
    masks, blocks = options.choose("masks", values.masks, ALL_BUILDERS), differing(**options.blocks_of(values))
    return [
        ProblemSpec(mask, n, 0, 1, *options.heads_of(heads), values.head_dim, values.dtype, values.seed,
                    blocks if mask in DYNAMIC_MASKS else ())
        for n in options.numbers("seqlens", values.seqlens) for heads in values.heads for mask in masks
    ]


class Race:
    """The stacks of one process and what their contenders share: inputs, references.

    Args:
      entrants: the contenders; against: name of the one that ratios are to.
      turns: file to lock while contenders run, or empty where no other process races.
    """

    def __init__(self, entrants: Sequence[Entrant], against: str, rounds: int, seconds: float, warm_up: float,
                 turns: str = ""):
        # Both stacks live in this process: JAX must not take the card's memory for itself.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self._entrants, self._against, self._timing = entrants, against, (rounds, seconds, warm_up)
        self._turns = turns
        modules = {name: importlib.import_module(f"bench.{name}_stack") for name in sorted({e.stack for e in entrants})}
        self._stacks = {name: module.Stack() for name, module in modules.items()}
        self._inputs = {name: Inputs(stack) for name, stack in self._stacks.items()}
        self._references: dict[str, Reference] = {}

    def key(self, spec: ProblemSpec, which: str) -> str:
        """Unique name of a row."""
        return f"peers/{which}/{spec.label}/{'+'.join(e.name for e in self._entrants)}"

    def row(self, spec: ProblemSpec, which: str) -> dict[str, Any]:
        """Judges and races all contenders that take a problem; the status is the worst that befell one of them."""
        if self._turns:
            self._build(spec, which)
        with self._card(fcntl.LOCK_SH):
            row, ready, flops = self._judge(spec, which)
        with self._card(fcntl.LOCK_EX):
            found = interleave(ready, *self._timing)
        return row | rates_of(flops, found, self._against)

    def _build(self, spec: ProblemSpec, which: str) -> None:
        """Compiles what can be compiled without the card; what fails here fails again, and is told, in the race."""
        passes = ("forward",) if which == "forward" else PASSES
        for entrant in self._entrants:
            stack, problem = self._stacks[entrant.stack], entrant.spec(spec).problem()
            kernel = stack.kernel(entrant.kernel)
            if kernel.refuse(problem, passes) is None:
                with contextlib.suppress(Exception):
                    stack.build(kernel, problem, passes)

    @contextlib.contextmanager
    def _card(self, lock: int):
        """The card, among others that judge (LOCK_SH) or alone (LOCK_EX): processes of the same --turns file."""
        if not self._turns:
            yield
            return
        Path(self._turns).parent.mkdir(parents=True, exist_ok=True)
        with open(self._turns, "a") as file:
            fcntl.flock(file, lock)  # until the file is closed
            yield

    def _judge(self, spec: ProblemSpec, which: str) -> tuple[dict[str, Any], list[Contender], dict[str, int]]:
        """A row so far, the contenders that are right, and the FLOPs of each."""
        ready, flops, specs = [], {}, [e.spec(spec) for e in self._entrants]
        self._references = {s.label: self._references[s.label] for s in specs if s.label in self._references}
        case: dict[str, Any] = {"pass": which, "contenders": [e.name for e in self._entrants]}
        case |= {n: getattr(spec, n) for n in ("mask", "seq_len", "q_heads", "kv_heads", "head_dim", "dtype", "seed")}
        case["settings"] = dict(spec.settings)
        environment = {"stacks": {name: stack.environment() for name, stack in self._stacks.items()}}
        row = engine.new_row(self.key(spec, which), "peers", case, engine.environment.machine() | environment)
        row |= {"flops": spec.problem().flops(which), "refused": {}, "failed": {}, "errors": {}}
        for entrant, own in zip(self._entrants, specs, strict=True):
            name, problem = entrant.name, own.problem()
            try:
                made, found = self._judged(entrant, own, problem, which)
            except Unsupported as reason:
                row["refused"][name] = str(reason)
                continue
            except Exception as fault:  # one contender's fault is told in the row, and the others race
                failure = failure_of(fault)
                row["failed"][name], row["status"] = failure["reason"], failure["status"]
                continue
            row["errors"][name] = found["errors"]
            if found["wrong"]:
                row["failed"][name], row["status"] = "; ".join(found["wrong"]), "mismatch"
            else:
                ready.append(dataclasses.replace(made, name=name))
                flops[name] = problem.flops(which)
        reasons = row["failed"]
        if not (ready or reasons):
            row["status"], reasons = "unsupported", row["refused"]
        row["reason"] = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        return row, ready, flops

    def _judged(self, entrant: Entrant, spec: ProblemSpec, problem, which: str):
        stack, sample = self._stacks[entrant.stack], spots_of(problem)
        tensors = self._inputs[entrant.stack].of(problem, spec.inputs())
        made = contender(stack, entrant.kernel, problem, which, tensors)
        if spec.label not in self._references:
            self._references[spec.label] = reference_of(problem, spec.inputs(), sample)
        return made, judged(made, stack, problem, sample, self._references[spec.label])


def told(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    rates = ", ".join(f"{name} {x:.4g}" for name, x in sorted(row["tflops"].items(), key=lambda x: -x[1]))
    raced = f"{rates} TFLOP/s" if rates else "no contender ran"
    wrong = f"; {row['status']}: {row['reason']}" if row["reason"] else ""
    return f"{row['key'].rpartition('/')[0]}: {raced}{wrong}"


def main() -> int:
    """Runs the contenders that the flags name in turns; 1 where a row is not ok, 2 for bad flags."""
    values = flags.FLAGS
    entrants, specs = entrants_of(values), specs_of(values)
    passes = options.choose("passes", values.passes, PASSES)
    console = Console(highlight=False, soft_wrap=True)
    with engine.open_records(engine.Options(Path(values.out), *options.resumption(values))) as writer:
        race = Race(entrants, values.against, values.rounds, values.seconds, values.warm_up, values.turns)
        for spec in specs:
            for which in passes:
                if race.key(spec, which) not in writer.keys:
                    row = race.row(spec, which)
                    writer.write(row)
                    console.print(told(row), markup=False)
    return 1 if any(row["status"] != "ok" for row in records.read(values.out)) else 0


if __name__ == "__main__":
    define()
    program.run(main)
