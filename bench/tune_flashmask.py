"""Sweeps the launch shapes of torch's flashmask, part by part: what `launches_for` in its file was chosen from.

    python -m bench.tune_flashmask --masks=causal,causal_document --seqlens=8K --out=out/tuning.jsonl
    python -m bench.tune_flashmask --parts=order --masks=all --seqlens=8K,16K,32K,64K --out=out/orders.jsonl

Each candidate is a tile (rows owned, columns visited), warps, stages and a limit on registers (0 is none). A candidate
that does not compile or launch is a row with its reason; one whose result differs from the default's is a row too.
The part `order` races the orders in which the key pass takes its tiles, heads side by side against as many tiles as
can (`walks.head_by_head`) head after head; they must agree to the bit.
"""

import dataclasses
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

from bench import options, program
from bench.interleave import Contender, interleave
from bench.timing import Protocol, measure
from workload.masks import STATIC_MASKS
from workload.problem import ITEM_BYTES, AttentionProblem
from workload.suite import mask_suite

MASKS = options.define_list("masks", ["full", "causal", "causal_document", "global_sliding_window"],
                            f"Masks: all, or some of {', '.join(STATIC_MASKS)}.")
SEQLENS = options.define_list("seqlens", ["8K"], "Sequence lengths in tokens: 8192, 8K, 1M.")
Q_HEADS, KV_HEADS = options.define_heads()
HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(ITEM_BYTES), "Of q, k, v.")
PARTS = options.define_list("parts", ["forward", "key", "query"],
                            "Parts: forward, key (dk and dv), query (dq), order (of the key pass).")
TILES = options.define_list("tiles", ["64x32", "64x64", "128x64", "128x128"], "Tiles, rows x columns.")
WARPS = options.define_list("warps", ["4", "8"], "Warps.")
STAGES = options.define_list("stages", ["2", "3"], "Stages of the software pipeline.")
REGISTERS = options.define_list("registers", ["0"], "Limits on the registers of a thread; 0 is none.")
OUT = options.define_out("out/flashmask_tuning.jsonl", "Rows, one JSON object a line; added to.")
ROUNDS, ROUND_SECONDS = 5, 0.04  # of a race of orders, for each of them
PRODUCTS = {"forward": 2, "key": 4, "query": 3, "order": 4}  # of matrices; each costs 2 * area * heads * head_dim
TOLERANCE = 2e-2  # relative difference from the default launch's result; other tiles only round elsewhere


def shapes() -> list[tuple[int, int, int, int, int | None]]:
    """The arguments of every launch of the flags' product. ValueError names the flag."""
    tiles = [options.numbers("tiles", text.split("x")) for text in TILES.value]
    for text, tile in zip(TILES.value, tiles, strict=True):
        if len(tile) != 2:
            raise ValueError(f"--tiles: {text!r} is no rows x columns, as 128x64")
    warps, stages = options.numbers("warps", WARPS.value), options.numbers("stages", STAGES.value)
    limits = [None if text == "0" else options.numbers("registers", [text])[0] for text in REGISTERS.value]
    return [(*tile, *others) for tile, *others in itertools.product(tiles, warps, stages, limits)]


def part_of(name, problem, device, tensors, launches):
    """call() -> results of one part of flashmask under some launches."""
    import torch

    from torch_impl.kernels import flashmask

    q, k, v, dout, lse, delta = tensors
    operands = flashmask.prepare(problem, device, launches=launches)
    if name == "forward":
        return lambda: flashmask.forward(q, k, v, operands, problem.scale)[:1]
    if name == "query":
        dq = torch.empty_like(q)
        work = functools.partial(flashmask.query_gradient, q, k, v, dout, dq, lse, delta, operands.query, problem.scale)
        return lambda: (work(), dq)[1:]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    work = functools.partial(flashmask.key_gradient, q, k, v, dout, dk, dv, lse, delta, operands.key,
                             operands.key_heavy, problem.scale)
    return lambda: (work(), dk, dv)[1:]


def difference(got, want) -> float:
    """Largest relative L2 difference of pairs; NaN where a result holds one."""
    pairs = zip(got, want, strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A problem under a mask, its inputs and statistics on the device, and what flashmask does by default.

    Attributes:
      stack: the bench's view of PyTorch; tensors: q, k, v, dout, lse, delta.
      launches, operands: the default ones.
    """

    stack: Any
    problem: AttentionProblem
    tensors: tuple
    launches: Any
    operands: Any

    def row(self, part: str) -> dict[str, Any]:
        """What all rows of a part have."""
        return {"mask": self.problem.mask.name, "part": part, "seq_len": self.problem.kv_len,
                "head_dim": self.problem.head_dim}

    def result(self, part: str, seconds: float) -> dict[str, Any]:
        """What a row of a part has that was timed."""
        flops = 2 * PRODUCTS[part] * self.problem.cells * self.problem.head_dim
        return {"status": "ok", "seconds": seconds, "tflops": flops / seconds / 1e12}


def setting(mask: str, seq_len: int) -> Setting:
    """The flags' problem under a mask at a length; its forward pass has run."""
    from bench.torch_stack import Stack
    from torch_impl.kernels import flashmask
    from torch_impl.kernels import triton_support as support

    stack = Stack()
    whole = mask_suite(mask, seq_len)
    problem = AttentionProblem(whole, 1, Q_HEADS.value, KV_HEADS.value, HEAD_DIM.value, DTYPE.value)
    q, k, v, dout = stack.random(problem)
    launches = flashmask.launches_for(problem.head_dim, q.dtype, support.arch(q.device))
    operands = flashmask.prepare(problem, q.device, launches=launches)
    out, lse = flashmask.forward(q, k, v, operands, problem.scale)
    return Setting(stack, problem, (q, k, v, dout, lse, support.row_delta(out, dout)), launches, operands)


def sweep(at: Setting, parts: Sequence[str], candidates: Sequence[tuple]):
    """Yields a row for every part and candidate (of `shapes`) in a setting."""
    from triton import TritonError

    from torch_impl.kernels.walks import Launch

    device = at.tensors[0].device
    for part in parts:
        want = [x.clone() for x in part_of(part, at.problem, device, at.tensors, at.launches)()]
        for launch in itertools.starmap(Launch, candidates):
            row = at.row(part) | dataclasses.asdict(launch)
            try:
                call = part_of(part, at.problem, device, at.tensors, replaced(at.launches, part, launch))
                apart = difference(call(), want)
                if not apart <= TOLERANCE:
                    yield row | {"status": "mismatch", "reason": f"differs from the default by {apart:.3g}"}
                    continue
                seconds = measure(at.stack.sampler(lambda n, call=call: call(), True), Protocol(samples=7)).median
            except (TritonError, RuntimeError, ValueError) as error:  # a launch that cannot be is a row, not the end
                yield row | {"status": "error", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            yield row | at.result(part, seconds)


def orders(at: Setting):
    """Yields a row for every order of the key pass's tiles in a setting; they run in turns."""
    from torch_impl.kernels import flashmask
    from torch_impl.kernels.walks import head_by_head

    q, k, v, dout, lse, delta = at.tensors
    operands, made = at.operands, {}
    heads = at.problem.batch * at.problem.kv_heads * operands.key_splits
    most = head_by_head(operands.key.loads, heads, flashmask.slots(q.device))
    for heavy in dict.fromkeys((0, most)):
        work = flashmask.gradient_parts(
            None, q, k, v, None, lse, dout, dataclasses.replace(operands, key_heavy=heavy), at.problem.scale,
            grad_dtype=q.dtype, delta=delta)
        made[str(heavy)] = Contender(str(heavy), work[1], at.stack.finish)
    first, *others = (contender.call() for contender in made.values())
    same = all(a.equal(b) for other in others for a, b in zip(first, other, strict=True))
    del first, others
    found = interleave(list(made.values()), ROUNDS, ROUND_SECONDS, ROUND_SECONDS) if same else {}
    for name in made:
        row = at.row("order") | {"heavy": int(name), "tiles": len(operands.key.loads), "splits": operands.key_splits,
                                 "default": int(name) == operands.key_heavy}
        if same:
            yield row | at.result("order", statistics.median(found[name])) | {"samples": found[name]}
        else:
            yield row | {"status": "mismatch", "reason": "the orders do not agree to the bit"}


def replaced(launches, part: str, launch):
    """The launches with one part's replaced, and no sharing of a kv head, so that a tile is compared with a tile."""
    return dataclasses.replace(launches, **{part: launch}, key_splits=1)


def kind(row: dict[str, Any]) -> tuple:
    """What the rows of a race have in common."""
    return row["mask"], row["seq_len"], row["part"]


def told(row: dict[str, Any]) -> str:
    """A row's candidate in words."""
    if row["part"] == "order":
        return f"{row['heavy']} of {row['tiles']} tiles head after head" + (", the default" if row["default"] else "")
    limit = f", {row['registers']} registers" if row["registers"] else ""
    return f"{row['rows']}x{row['cols']}, {row['warps']} warps, {row['stages']} stages{limit}"


def main() -> int:
    """Times the candidates and prints the best; 2 for bad flags or without a GPU."""
    masks = options.choose("masks", MASKS.value, tuple(STATIC_MASKS))
    parts, candidates = options.choose("parts", PARTS.value, tuple(PRODUCTS)), shapes()
    lengths = options.numbers("seqlens", SEQLENS.value)
    import torch

    if not torch.cuda.is_available():
        print("flashmask is tuned on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    path = Path(OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with path.open("a") as file:
        for seq_len, mask in itertools.product(lengths, masks):
            at = setting(mask, seq_len)
            swept = sweep(at, [part for part in parts if part != "order"], candidates)
            for row in itertools.chain(swept, orders(at) if "order" in parts else ()):
                file.write(json.dumps(row) + "\n")
                file.flush()
                rows.append(row)
    table = Table("mask", "tokens", "part", "launch", "ms", "TFLOP/s")
    good = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: (*kind(r), r["seconds"]))
    for _, group in itertools.groupby(good, key=kind):
        for r in itertools.islice(group, 3):
            table.add_row(r["mask"], str(r["seq_len"]), r["part"], told(r), f"{1e3 * r['seconds']:.3f}",
                          f"{r['tflops']:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    program.run(main)
