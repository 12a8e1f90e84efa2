"""The absl flags that the binaries share, and what they mean: cases, options of a run. Bad values are named."""

import math
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

import jax_impl.kernels
import torch_impl.kernels
from bench import environment
from bench.cases import DRAWN_MASKS, STACKS, Case, ProblemSpec, differing
from bench.engine import Options
from bench.timing import Protocol
from workload.documents import DATASETS
from workload.masks import STATIC_MASKS
from workload.problem import ITEM_BYTES, PASSES
from workload.ranks import check_ranks
from workload.suite import ALL_BUILDERS

KERNELS = {"jax": jax_impl.kernels.NAMES, "torch": torch_impl.kernels.NAMES}
ALL_KERNELS = tuple(dict.fromkeys(name for names in KERNELS.values() for name in names))
HEADS = ("q_heads", "kv_heads")
CPU_LENGTHS, CPU_HEADS = ["256", "512"], (8, 2)
_on_cpu: dict[str, Any] = {}
AGAIN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "failed": lambda row: row["status"] not in ("ok", "unsupported"), "all": lambda row: True}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

flags.disclaim_key_flags()  # --help of a binary shows what it defines through here


def tokens(text: str) -> int:
    """A number of tokens: 8192, 8K or 1M (binary units). ValueError names what is none.

    >>> tokens("8K"), tokens("100")
    (8192, 100)
    """
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if not found or not int(found[1]):
        raise ValueError(f"{text!r} is no positive number (8192, 8K, 1M)")
    return int(found[1]) * UNITS[found[2].lower()]


def define_float(name: str, default: float, text: str, lower_bound: float | None = None,
                 upper_bound: float | None = None) -> flags.FlagHolder[float]:
    """A float flag that is a finite number: no comparison with a bound or a clock means anything with NaN."""
    held = flags.DEFINE_float(name, default, text, lower_bound, upper_bound)
    flags.register_validator(name, math.isfinite, message=f"--{name} must be a finite number")
    return held


def define_list(name: str, default: Sequence[str], text: str) -> flags.FlagHolder[list[str]]:
    """A list flag that is not empty: a run of nothing is no run."""
    held = flags.DEFINE_list(name, list(default), text)
    flags.register_validator(name, bool, message=f"--{name} must not be empty")
    return held


def define_tokens(name: str, default: str, text: str) -> flags.FlagHolder[str]:
    """A number of tokens, read as `tokens` reads it."""
    held = flags.DEFINE_string(name, default, text + ": 8192, 8K, 1M.")
    flags.register_validator(name, _is_tokens, message=f"--{name} must be a positive number of tokens (8192, 8K, 1M)")
    return held


def _is_tokens(text: str) -> bool:
    try:
        return bool(tokens(text))
    except ValueError:
        return False


def define_out(default: str, text: str = "Record file: one JSON line a row.") -> flags.FlagHolder[str]:
    """The flag --out: a file that is `writable`."""
    held = flags.DEFINE_string("out", default, text)
    flags.register_validator("out", writable, message="--out must be a file that can be written")
    return held


def define_folder(default: str, text: str) -> flags.FlagHolder[str]:
    """The flag --folder: a folder that is there or can be made."""
    held = flags.DEFINE_string("folder", default, text)
    flags.register_validator("folder", lambda name: writable(Path(name) / "file"),
                             message="--folder must be a folder that can be written")
    return held


def writable(name: str | Path) -> bool:
    """Whether it is a file that can be written, or made with its folder, as far as can be seen without making it."""
    path = Path(name).absolute()
    try:
        nearest = next(x for x in (path, *path.parents) if x.exists())
        if nearest == path or not name:
            return path.is_file() and os.access(path, os.W_OK)
        with tempfile.TemporaryFile(dir=nearest):  # some folders take no file whatever their permissions say
            return True
    except OSError:
        return False


def choose_one(label: str, value: str, allowed: Sequence[str]) -> str:
    """The value. ValueError names what is none of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"--{label}: {value!r} is none of {', '.join(allowed)}")
    return value


def choose(label: str, values: Sequence[str], allowed: Sequence[str]) -> tuple[str, ...]:
    """The values, "all" standing for all allowed ones. ValueError names the first that is not allowed."""
    if list(values) == ["all"]:
        return tuple(allowed)
    for value in values:
        choose_one(label, value, allowed)
    if not values:
        raise ValueError(f"--{label}: empty")
    return tuple(dict.fromkeys(values))


def define(*, masks: Sequence[str] = tuple(STATIC_MASKS), seqlens: Sequence[str] = ("1K", "2K", "4K", "8K"),
           out: str = "out/dense.jsonl") -> None:
    """Defines the shared flags; a binary calls this once, before `program.run`."""
    define_run(out)
    define_problems(masks, seqlens)
    define_list("kernels", ["all"], f"Kernels to run: all, or some of {', '.join(ALL_KERNELS)}.")
    flags.DEFINE_integer("packs", 1, "Packs of documents and draws of mask parameters: seeds --seed and on.",
                         lower_bound=1)
    define_float("document_cap", 0.25, "Longest document as a share of the sequence.", lower_bound=0,
                       upper_bound=1)
    flags.DEFINE_integer("window", 1024, "Window of the sliding masks in tokens, inclusive.", lower_bound=0)
    define_float("window_share", 0.0, "The window as a share of the sequence instead; 0 for --window.", lower_bound=0,
                 upper_bound=1)
    flags.DEFINE_integer("block", 1024, "Block of block_causal_document in tokens.", lower_bound=1)
    define_blocks()


def define_blocks() -> None:
    """Defines the flags of the dynamic masks; see `blocks_of`."""
    flags.DEFINE_integer("sparse_block", 128, "Block of the dynamic masks in tokens.", lower_bound=1)
    define_float("density", 0.25, "Share of key blocks that a dynamic mask keeps.", lower_bound=0, upper_bound=1)


def blocks_of(values: flags.FlagValues) -> dict[str, Any]:
    """Settings of the dynamic masks, from the flags of `define_blocks`. ValueError names the flag."""
    if not values.density:
        raise ValueError("--density: 0 keeps no block")
    return {"sparse_block": values.sparse_block, "density": values.density}


def define_problems(masks: Sequence[str], seqlens: Sequence[str] | None) -> None:
    """Defines the flags of masks, lengths and heads; without --seqlens where there are none."""
    define_list("masks", list(masks), f"Masks: all, or some of {', '.join(ALL_BUILDERS)}.")
    if seqlens is not None:
        define_seqlens(seqlens)
    define_heads()
    flags.DEFINE_string(
        "documents", "auto",
        "Where document lengths come from: auto (Pile to 8K, ProLong-64K to 64K, ProLong-512K above), pile, "
        "prolong64k, prolong512k, or lengths that sum to the one sequence length, as 3000+1000+96.")
    define_float("long_share", 0.0, "Share of tokens in documents of 8K to 30K tokens (the paper mixes 0.6).",
                       lower_bound=0, upper_bound=1)


def define_seqlens(default: Sequence[str]) -> None:
    """Defines the flag --seqlens."""
    define_list("seqlens", default, "Sequence lengths in tokens: 8192, 8K, 1M.")
    on_cpu(seqlens=CPU_LENGTHS)


def define_heads() -> tuple[flags.FlagHolder[int], flags.FlagHolder[int]]:
    """The flags --q_heads and --kv_heads, the second dividing the first."""
    held = (flags.DEFINE_integer("q_heads", 64, "Query heads.", lower_bound=1),
            flags.DEFINE_integer("kv_heads", 8, "Key and value heads; divides --q_heads.", lower_bound=1))
    flags.register_multi_flags_validator(
        ["q_heads", "kv_heads"], lambda values: values["q_heads"] % values["kv_heads"] == 0,
        message="--kv_heads must divide --q_heads")
    on_cpu(q_heads=CPU_HEADS[0], kv_heads=CPU_HEADS[1])
    return held


def define_shapes_of_heads(default: Sequence[str]) -> None:
    """Defines the flag --heads; see `heads_of`."""
    define_list("heads", default, "Query heads : key and value heads.")
    on_cpu(heads=[":".join(map(str, CPU_HEADS))])


def define_run(out: str, deadline: float = 180.0) -> None:
    """Defines the flags that every binary of kernels has: stacks, sizes, passes, and how a run goes."""
    define_measuring(out, deadline)
    define_list("passes", list(PASSES), "Passes: all, or some of forward, backward.")
    define_float("memory_gib", 0.0, "Private memory a worker may hold on a CPU; 0 for no limit.", lower_bound=0)
    flags.DEFINE_integer("samples", 15, "Samples a row.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Processes of each stack, which build and check side by side and time alone.",
                         lower_bound=1)
    define_float("patience", 0.0, "Seconds that one run of a pass may take, by the estimate from the same row at a "
                 "shorter length; a row above is skipped and says so. 0 for no limit.", lower_bound=0)
    flags.DEFINE_list("longest", [], "kernel:tokens pairs, as naive:8K; longer rows of the kernel are skipped and say "
                      "so.")
    define_float("budget", 0.0, "Seconds after which no further row is begun; 0 for no limit.", lower_bound=0)


def define_measuring(out: str, deadline: float) -> None:
    """Defines the flags of every binary that writes rows about tensors: stacks, sizes, time, the record file."""
    define_list("stack", ["all"], f"Stacks to run: all, or some of {', '.join(STACKS)}.")
    flags.DEFINE_integer("batch", 1, "Batch entries.", lower_bound=1)
    flags.DEFINE_integer("head_dim", 128, "Size of a head.", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", list(ITEM_BYTES), "Of q, k, v, out and the gradients.")
    flags.DEFINE_integer("seed", 0, "First seed of documents, mask parameters and inputs.", lower_bound=0)
    define_out(out)
    define_resume()
    define_float("deadline", deadline, "Seconds a row may take, compilation included.", lower_bound=1)
    define_float("seconds", 1.0, "Seconds after which a row takes no further sample.", lower_bound=0.001)


def define_resume() -> None:
    """Defines the flags of a run that goes on with a record file; see `resumption`."""
    flags.DEFINE_bool("resume", False, "Keep the rows that --out has and go on.")
    flags.DEFINE_list("again", [], "Go on, and of the rows that this run is to make also make those anew that --out "
                      "has and that are: failed (neither ok nor unsupported), before:COMMIT (made by a tree without "
                      "that commit), or all. An old row stays until there is a new one.")


def resumption(values: flags.FlagValues) -> tuple[bool, Callable[[dict[str, Any]], bool] | None]:
    """`resume` and `again` of `engine.Options`, from the flags of `define_resume`. ValueError names the flag."""
    asked = [_again(text) for text in values.again]
    return values.resume or bool(asked), (lambda row: any(one(row) for one in asked)) if asked else None


def _again(text: str) -> Callable[[dict[str, Any]], bool]:
    if text in AGAIN:
        return AGAIN[text]
    kind, _, commit = text.partition(":")
    if kind != "before":
        raise ValueError(f"--again: {text!r} is none of {', '.join(AGAIN)}, before:COMMIT")
    try:
        environment.came_of(commit, commit)
    except ValueError as problem:
        raise ValueError(f"--again: {problem}") from problem
    return lambda row: not environment.came_of(row["environment"].get("commit", "unknown"), commit)


def on_cpu(**sizes: Any) -> None:
    """Defaults of flags where there is no GPU, if other ones; see `fit`."""
    _on_cpu.update(sizes)


def fit(values: flags.FlagValues) -> str:
    """Where there is no GPU: gives flags that were not given what `on_cpu` says, and returns it as a command line."""
    if not _on_cpu or environment.has_gpu():
        return ""
    left = {name: size for name, size in _on_cpu.items() if values[name].using_default_value}
    if not left.keys() >= {*HEADS}:  # one divides the other
        left = {name: size for name, size in left.items() if name not in HEADS}
    for name, size in left.items():
        values.set_default(name, size)
    return " ".join(f"--{name}={','.join(size) if isinstance(size, list) else size}" for name, size in left.items())


def numbers(label: str, texts: Sequence[str]) -> list[int]:
    """The numbers of a list flag, read as `tokens` reads one. ValueError names the flag."""
    try:
        return [tokens(text) for text in texts]
    except ValueError as problem:
        raise ValueError(f"--{label}: {problem}") from problem


def worlds(texts: Sequence[str], hosts: int = 1) -> list[int]:
    """The numbers of --worlds, of jobs whose ranks are processes of so many hosts. ValueError names the flag."""
    found = numbers("worlds", texts)
    for world in found:
        if world % hosts:
            raise ValueError(f"--hosts: {hosts} does not divide the world {world}")
        try:
            check_ranks(world // hosts)
        except ValueError as problem:
            raise ValueError(f"--worlds: {str(problem).removeprefix('ranks: ')}") from problem
    return found


def heads_of(text: str, label: str = "heads") -> tuple[int, int]:
    """(q_heads, kv_heads) of an entry q_heads:kv_heads of the flag `label`, which a ValueError names.

    >>> heads_of("64:8")
    (64, 8)
    """
    q, _, kv = text.partition(":")
    if not (q.isdecimal() and kv.isdecimal() and int(kv)) or not int(q) or int(q) % int(kv):
        raise ValueError(f"--{label}: {text!r} is no q_heads:kv_heads, the second dividing the first")
    return int(q), int(kv)


def cases(values: flags.FlagValues) -> list[Case]:
    """The rows that the flags ask for, each built once to see that it is one. ValueError names the flag."""
    stacks = choose("stack", values.stack, STACKS)
    kernels = choose("kernels", values.kernels, ALL_KERNELS)
    masks = choose("masks", values.masks, ALL_BUILDERS)
    passes = choose("passes", values.passes, PASSES)
    seqlens = numbers("seqlens", values.seqlens)
    if not values.document_cap:
        raise ValueError("--document_cap: 0 leaves no document")
    settings = differing(
        documents=documents(values.documents, seqlens), cap=values.document_cap, long_share=values.long_share,
        window=values.window, window_share=values.window_share or None, block=values.block,
        **blocks_of(values))
    specs = [
        ProblemSpec(mask, n, 0, values.batch, values.q_heads, values.kv_heads, values.head_dim, values.dtype, seed,
                    settings)
        for n in seqlens for mask in masks
        for seed in range(values.seed, values.seed + (values.packs if mask in DRAWN_MASKS else 1))
    ]
    return [
        Case(stack, kernel, which, spec)
        for spec in specs for stack in stacks for kernel in kernels if kernel in KERNELS[stack] for which in passes
    ]


def documents(text: str, seqlens: Sequence[int]) -> str | tuple[int, ...]:
    """What --documents says: a data set, or lengths that sum to each of `seqlens`. ValueError names the flag."""
    if text in ("auto", *DATASETS):
        return text
    try:
        lengths = tuple(int(x) for x in text.split("+"))
    except ValueError as problem:
        raise ValueError(f"--documents: {text!r} is neither auto, {', '.join(DATASETS)} nor "
                         "lengths as 3000+1000") from problem
    if min(lengths) < 1:
        raise ValueError(f"--documents: {text} has a document of {min(lengths)} tokens")
    for n in seqlens:
        if sum(lengths) != n:
            raise ValueError(f"--documents: {text} sums to {sum(lengths)}, the sequence has {n}")
    return lengths


def options(values: flags.FlagValues) -> Options:
    """How the run goes, from the flags."""
    return Options(
        Path(values.out), *resumption(values), values.deadline, int(values.memory_gib * 2**30) or None,
        Protocol(samples=values.samples, least=min(3, values.samples), seconds=values.seconds),
        seconds=values.budget or math.inf, workers=values.workers, patience=values.patience or None,
        longest=tuple(_longest(text) for text in values.longest))


def _longest(text: str) -> tuple[str, int]:
    kernel, _, length = text.partition(":")
    return choose_one("longest", kernel, ALL_KERNELS), numbers("longest", [length])[0]
