"""The part of the page that says which kernel to take for a mask and a length, from the rows at hand."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench import options
from bench.cases import STACKS
from bench.report import aggregate, page, peers, pictures
from bench.report.pictures import length
from bench.report.tables import NAMES, number
from workload.masks import STATIC_MASKS
from workload.problem import PASSES
from workload.suite import ALL_BUILDERS

Row = dict[str, Any]
Place = tuple[str, str, str, int, str]  # shape, dtype, mask, tokens, stack
Seconds = dict[str, dict[str, float]]  # of a pass, by kernel
CLOSE = 0.05
SERIOUS = 1.1
AT_HAND = ("own", "jax", "torch", "cuDNN fused attention through jax", "flash-attn 2 where installed, else")  # sources
TRAINING = PASSES
QUESTIONS = ((TRAINING, "Training: forward and backward"), (PASSES[:1], "Forward alone"))


def seconds(rows: Sequence[Row]) -> dict[Place, Seconds]:
    """What each kernel takes at a place, all from timings of one kind: in turns with its rivals, or cold and alone.

    The two are not to be mixed, for a card that is kept busy runs slower. The kind that timed more kernels counts.
    Rows that are flagged and contenders that swung are left out.
    """
    alone: dict[Place, Seconds] = {}
    for e in aggregate.entries(rows):
        if e.seconds and not e.flags:
            place = e.shape, e.dtype, e.mask, e.seq_len, e.stack
            alone.setdefault(place, {}).setdefault(e.kernel, {})[e.which] = e.seconds
    turns: dict[Place, Seconds] = {}
    for row in peers.rows_of(rows):
        case = row["case"]
        for name, tflops in row["tflops"].items():
            stack, _, kernel = name.partition(":")
            if kernel in options.KERNELS.get(stack, ()) and row["spread"][name] <= peers.STEADY:
                place = aggregate.shape_of(case), case["dtype"], case["mask"], case["seq_len"], stack
                turns.setdefault(place, {}).setdefault(kernel, {})[case["pass"]] = row["flops"] / tflops / 1e12
    return {place: max(turns.get(place, {}), alone.get(place, {}), key=lambda found: (
        len(whole_seconds(found, TRAINING)), len(found))) for place in {**alone, **turns}}


def whole_seconds(kernels: Mapping[str, Mapping[str, float]], passes: Sequence[str]) -> dict[str, float]:
    """What the passes take together, of the kernels that have them all."""
    return {k: sum(times[w] for w in passes) for k, times in kernels.items() if all(w in times for w in passes)}


def fastest(kernels: Mapping[str, Mapping[str, float]], passes: Sequence[str]) -> dict[str, float]:
    """Kernels and their seconds, the fastest first, those within CLOSE of it behind; empty where none has all passes.

    >>> fastest({"a": {"forward": 2.0}, "b": {"forward": 1.0}, "c": {"forward": 1.04}}, ["forward"])
    {'b': 1.0, 'c': 1.04}
    """
    total = whole_seconds(kernels, passes)
    best = min(total.values(), default=0.0)
    return {k: s for k, s in sorted(total.items(), key=lambda x: x[1]) if s <= (1 + CLOSE) * best}


def serious(found: Mapping[Place, Seconds]) -> dict[tuple, set[str]]:
    """Of each shape, mask and stack, the kernels that come near the fastest at the length where most were timed."""
    fullest: dict[tuple, tuple[int, int]] = {}
    out: dict[tuple, set[str]] = {}
    for place, kernels in found.items():
        whole = whole_seconds(kernels, TRAINING)
        if whole and (len(whole), place[3]) > fullest.get(_line(place), (0, 0)):
            fullest[_line(place)] = len(whole), place[3]
            out[_line(place)] = {k for k, s in whole.items() if s <= SERIOUS * min(whole.values())}
    return {_line(place): out.get(_line(place), set()) for place in found}


def _line(place: Place) -> tuple:
    """The place without its length."""
    return (*place[:3], place[4])


def telling(every: Mapping[Place, Seconds]) -> dict[Place, Seconds]:
    """The places of the shape and dtype with most timings whose fastest kernel is known; none if no two were timed.

    A place where a serious contender was not timed has no winner: a slow one would look like it.
    """
    found = {place: kernels for place, kernels in every.items() if len(kernels) > 1}
    timed = Counter((place[0], place[1]) for place, kernels in found.items() for _ in kernels
                    if place[2] in STATIC_MASKS)
    needed = serious(found)
    return {place: kernels for place, kernels in found.items()
            if place[:2] == timed.most_common(1)[0][0]
            and needed[_line(place)] <= set(whole_seconds(kernels, TRAINING))} if timed else {}


def section(rows: Sequence[Row]) -> str:
    """HTML; empty where no two kernels were timed."""
    every = seconds(rows)
    here = telling(every)
    if not here:
        return ""
    shape, dtype, *_ = next(iter(here))
    note = (
        f"<p>The fastest kernel of each stack by mask and length, for {page.esc(shape)}, {page.esc(dtype)}; kernels "
        f"within {CLOSE:.0%} of it are named behind it, for two runs differ by as much. A place is empty where one "
        f"was not timed that elsewhere comes within {SERIOUS:g} times the fastest. Point at a cell for times. What the "
        'names stand for and what each refuses <a href="#capability">is told below</a>.</p>')
    opened, folded = (_tables(here, passes, title) for passes, title in QUESTIONS)
    return (note + opened + f"<details><summary>{QUESTIONS[1][1]}</summary>{folded}</details>"
            + _blocks(every))


def answers(rows: Sequence[Row]) -> list[str]:
    """Which kernels lead most often, a line of text for each stack, and for what a stack has without other packages."""
    here, lines = telling(seconds(rows)), []
    foreign = {(e.stack, e.kernel) for e in aggregate.entries(rows) if e.source and not e.source.startswith(AT_HAND)}
    for stack in STACKS:
        kernels = {place: times for place, times in here.items() if place[4] == stack}
        plain = {place: {k: s for k, s in times.items() if (stack, k) not in foreign}
                 for place, times in kernels.items()}
        some = [(f"Training in {NAMES[stack]} with {', '.join(place[:2])}: ", kernels) for place in list(kernels)[:1]]
        some += [("without further packages ", plain)] if plain != kernels else []
        told = [where + found for where, times in some if (found := _leaders(list(times.values())))]
        lines += ["; ".join(told) + "."] if told else []
    return lines


def _leaders(places: Sequence[Seconds]) -> str:
    """The kernels that are first or close to it most often, in words."""
    leaders = [names for kernels in places if (names := fastest(kernels, TRAINING))]
    count = Counter(kernel for names in leaders for kernel in names).most_common(3)
    if not count:
        return ""
    (first, often), *others = count
    return (f"{first} is fastest or within {CLOSE:.0%} of it at {often} of {len(leaders)} masks and lengths"
            + "".join(f", {kernel} at {n}" for kernel, n in others))


def _tables(here: Mapping[Place, Seconds], passes: Sequence[str], title: str) -> str:
    """A table a stack, masks by lengths."""
    parts = []
    for stack in STACKS:
        cells = {(mask, n): _cell(kernels, passes) for (_, _, mask, n, s), kernels in here.items() if s == stack}
        cells = {place: cell for place, cell in cells.items() if cell}
        lengths, masks = sorted({n for _, n in cells}), [m for m in ALL_BUILDERS if any(m == x for x, _ in cells)]
        body = [[mask, *(cells.get((mask, n), '<td class="none"></td>') for n in lengths)] for mask in masks]
        if body:
            table = page.table(["mask", *map(length, lengths)], body)
            parts.append(f"<div><h3>{title}, {NAMES[stack]}</h3>{table}</div>")
    return f'<div class="pair">{"".join(parts)}</div>'


def _blocks(found: Mapping[Place, Seconds]) -> str:
    """The masks of blocks, a line a setting."""
    lines: dict[tuple, dict[str, str]] = {}
    for (shape, _, mask, n, stack), kernels in sorted(found.items()):
        cell = _cell(kernels, TRAINING, timed=True)
        if mask not in STATIC_MASKS and cell:
            lines.setdefault((mask, n, shape), {})[stack] = cell
    if not lines:
        return ""
    body = [[f"{mask}, {length(n)}, {shape}", *(cells.get(s, '<td class="none"></td>') for s in STACKS)]
            for (mask, n, shape), cells in lines.items()]
    return ("<h3>Masks of blocks: forward and backward</h3><p class='soft'>The fastest of those that take the block "
            "and were timed, also where it is one alone, and the ms of both passes.</p>"
            + page.table(["setting", *NAMES.values()], body))


def _cell(kernels: Mapping[str, Mapping[str, float]], passes: Sequence[str], timed: bool = False) -> str:
    """The fastest kernels; the colour is the first one's. timed: and the time of the first."""
    leaders = fastest(kernels, passes)
    if not leaders:
        return ""
    every = sorted(whole_seconds(kernels, passes).items(), key=lambda x: x[1])
    told = ", ".join(f"{k} {s * 1e3:.3g} ms" for k, s in every)
    colour = pictures.kernel_colour(next(iter(leaders)))
    return (f'<td class="names" style="background: {colour}44" title="{page.esc(told)}">'
            f"{page.esc(', '.join(leaders))}{f' {number(1e3 * next(iter(leaders.values())))}' if timed else ''}</td>")
