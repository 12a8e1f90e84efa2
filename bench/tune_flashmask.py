"""Sweeps the launch shapes of torch's flashmask, part by part: what `launches_for` in its file was chosen from.

    python -m bench.tune_flashmask --masks=causal,causal_document --seqlen=8K --out=out/tuning.jsonl

Each candidate is a tile (rows owned, columns visited), warps, stages and a limit on registers (0 is none). A candidate
that does not compile or launch is a row with its reason; one whose result differs from the default's is a row too.
"""

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.table import Table

from bench import options
from bench.timing import Protocol, measure
from workload.masks import STATIC_MASKS
from workload.problem import ITEM_BYTES, AttentionProblem
from workload.suite import mask_suite

MASKS = options.define_list("masks", ["full", "causal", "causal_document", "global_sliding_window"],
                            f"Masks: all, or some of {', '.join(STATIC_MASKS)}.")
SEQLEN = options.define_tokens("seqlen", "8K", "Sequence length in tokens")
Q_HEADS, KV_HEADS = options.define_heads()
HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(ITEM_BYTES), "Of q, k, v.")
PARTS = options.define_list("parts", ["forward", "key", "query"], "Parts: forward, key (dk and dv), query (dq).")
TILES = options.define_list("tiles", ["64x32", "64x64", "128x64", "128x128"], "Tiles, rows x columns.")
WARPS = options.define_list("warps", ["4", "8"], "Warps.")
STAGES = options.define_list("stages", ["2", "3"], "Stages of the software pipeline.")
REGISTERS = options.define_list("registers", ["0"], "Limits on the registers of a thread; 0 is none.")
OUT = options.define_out("out/flashmask_tuning.jsonl", "Rows, one JSON object a line; added to.")
PRODUCTS = {"forward": 2, "key": 4, "query": 3}  # matrix products of a part; each costs 2 * area * heads * head_dim
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


def sweep(mask: str, parts: Sequence[str], candidates: Sequence[tuple]):
    """Yields a row for every part and candidate (of `shapes`) under a mask."""
    from triton import TritonError

    from bench.torch_stack import Stack
    from torch_impl.kernels import flashmask
    from torch_impl.kernels import triton_support as support
    from torch_impl.kernels.walks import Launch

    stack = Stack()
    whole = mask_suite(mask, options.tokens(SEQLEN.value))
    problem = AttentionProblem(whole, 1, Q_HEADS.value, KV_HEADS.value, HEAD_DIM.value, DTYPE.value)
    q, k, v, dout = stack.random(problem)
    default = flashmask.launches_for(problem.head_dim, q.dtype, support.arch(q.device))
    operands = flashmask.prepare(problem, q.device, launches=default)
    out, lse = flashmask.forward(q, k, v, operands, problem.scale)
    tensors = q, k, v, dout, lse, support.row_delta(out, dout)
    for part in parts:
        want = [x.clone() for x in part_of(part, problem, q.device, tensors, default)()]
        for launch in itertools.starmap(Launch, candidates):
            row = {"mask": mask, "part": part, "seq_len": q.shape[1], "head_dim": problem.head_dim,
                   "rows": launch.rows, "cols": launch.cols, "warps": launch.warps, "stages": launch.stages,
                   "registers": launch.registers}
            try:
                call = part_of(part, problem, q.device, tensors, replaced(default, part, launch))
                apart = difference(call(), want)
                if not apart <= TOLERANCE:
                    yield row | {"status": "mismatch", "reason": f"differs from the default by {apart:.3g}"}
                    continue
                seconds = measure(stack.sampler(lambda n, call=call: call(), True), Protocol(samples=7)).median
            except (TritonError, RuntimeError, ValueError) as error:  # a launch that cannot be is a row, not the end
                yield row | {"status": "error", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            flops = 2 * PRODUCTS[part] * problem.cells * problem.head_dim
            yield row | {"status": "ok", "seconds": seconds, "tflops": flops / seconds / 1e12}


def replaced(launches, part: str, launch):
    """The launches with one part's replaced, and no sharing of a kv head, so that a tile is compared with a tile."""
    return dataclasses.replace(launches, **{part: launch}, key_splits=1)


def main(argv):
    """Times the candidates and prints the best; 2 for bad flags or without a GPU."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        masks = options.choose("masks", MASKS.value, tuple(STATIC_MASKS))
        parts, candidates = options.choose("parts", PARTS.value, tuple(PRODUCTS)), shapes()
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("flashmask is tuned on a CUDA GPU, and there is none", file=sys.stderr)
        return 2
    path = Path(OUT.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with path.open("a") as file:
        for row in itertools.chain.from_iterable(sweep(mask, parts, candidates) for mask in masks):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
    table = Table("mask", "part", "tile", "warps", "stages", "registers", "ms", "TFLOP/s")
    good = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: (r["mask"], r["part"], r["seconds"]))
    for _, group in itertools.groupby(good, key=lambda r: (r["mask"], r["part"])):
        for r in itertools.islice(group, 3):
            table.add_row(r["mask"], r["part"], f"{r['rows']}x{r['cols']}", *(str(r[n]) for n in (
                "warps", "stages", "registers")), f"{1e3 * r['seconds']:.3f}", f"{r['tflops']:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    app.run(main)
