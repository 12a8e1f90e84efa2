"""Why a ring falls behind on documents: said with the figures of the rows at hand, and drawn."""

from collections.abc import Sequence

from bench.report import page, pictures, timeline
from bench.report.efficiency import HOW, Row, overall, plan, steps

TELLING_RANKS = 8  # fewer hardly wait for one another, many more cannot be told apart in a picture
DOCUMENTS, DENSE = ("full_document", "causal_document"), ("full", "causal")
OTHERS = ("ulysses", "all_gather", "usp")


def section(found: Sequence[Row]) -> str:
    """HTML: how a ring works, who waits under documents, what helps; empty where no ring ran on documents."""
    good = [row for row in found if row["status"] == "ok" and overall(row) is not None]
    ring = drawn(good) or _best(good, DOCUMENTS)
    if ring is None:
        return ""
    case, balance = ring["case"], plan(ring)
    mask, far = case["spec"]["mask"], _best(good, (case["spec"]["mask"],), stack=case["stack"])
    dense = _like(good, ring, DENSE)
    text = ("<p>In a ring a rank keeps its queries, and the keys go round: at each step it works on its own queries "
            "and the keys of one other rank, and the next step begins when all are done.")
    if dense:
        text += (f" Under {_mask(dense)} every pair of ranks has the same work: ranks work "
                 f"{plan(dense)['step_balance']:.0%} of the time, {_e(dense)}.")
    text += (
        f"</p><p>Under {mask} a query sees its own document alone. Most pairs of ranks share no document and have "
        "nothing to do; some have a lot, at every step others, and all wait for those. Of "
        f"{case['world']} ranks each works <b>{balance['step_balance']:.0%} of the time</b> on average "
        f"({balance['total_balance']:.0%} if they only met at the end): {_e(ring)}.")
    if far and far["case"]["world"] > case["world"]:
        text += (f" Of {far['case']['world']} each works {plan(far)['step_balance']:.0%} of the time, and E is "
                 f"{overall(far):.2f}.")
    text += "</p>" + _dealt(good, ring, far) + _others(good, far or ring)
    shown = [row for row in (dense, ring) if row and timeline.can_draw(row)]
    figures = "".join(_picture(row, 5.9) for row in shown) if drawn(good) else ""
    return (f'<h3 id="ring">Why does a ring fall behind on documents?</h3>{text}<div class="pair">{figures}</div>'
            + (f'<p class="soft">{timeline.LEGEND}</p>' if figures else ""))


def drawn(rows: Sequence[Row]) -> Row | None:
    """The ring under documents that is drawn: of the ranks that tell most, as it ran before what was estimated."""
    here = [row for row in rows if row["case"]["scheme"] == "ring" and row["case"]["spec"]["mask"] in DOCUMENTS
            and timeline.can_draw(row) and row["case"]["world"] <= timeline.MOST_RANKS]
    return min(here, default=None, key=lambda r: (
        abs(r["case"]["world"] - TELLING_RANKS), r["kind"] == "replay_estimate",
        DOCUMENTS.index(r["case"]["spec"]["mask"]), r["case"]["sharding"] != "zigzag", r["case"]["stack"]))


def _best(rows: Sequence[Row], masks: Sequence[str], scheme: str = "ring", stack: str | None = None) -> Row | None:
    """A scheme's row on most ranks: what ran before what was estimated, the best sharding."""
    here = [row for row in rows if row["case"]["scheme"] == scheme and row["case"]["spec"]["mask"] in masks
            and stack in (None, row["case"]["stack"])]
    return max(here, default=None, key=lambda r: (
        r["case"]["world"], r["kind"] != "replay_estimate", r["case"]["spec"]["mask"] == masks[0], overall(r)))


def _like(rows: Sequence[Row], ring: Row, masks: Sequence[str], sharding: str | None = None) -> Row | None:
    """The ring's row under the first of some masks that ran as this one did."""
    wanted = [(ring["case"] | {"sharding": sharding or ring["case"]["sharding"]})[n]
              for n in ("stack", "scheme", "world", "sharding")]
    here = [row for row in rows if row["kind"] == ring["kind"] and row["case"]["spec"]["mask"] in masks
            and [row["case"][n] for n in ("stack", "scheme", "world", "sharding")] == wanted]
    return min(here, default=None, key=lambda r: masks.index(r["case"]["spec"]["mask"]))


def _dealt(rows: Sequence[Row], ring: Row, far: Row | None) -> str:
    """What becomes of it where tokens are dealt out one by one."""
    striped = [row for place in (ring, far) if place and place["case"]["sharding"] != "striped"
               and (row := _like(rows, place, (ring["case"]["spec"]["mask"],), "striped"))]
    if not striped:
        return ""
    told = ", ".join(f"{overall(row):.2f}{_unlinked(row)} on {row['case']['world']}" for row in _distinct(striped))
    most = striped[-1]
    return (f"<p>Dealt out one by one (<em>striped</em>) all work at every step, {plan(most)['step_balance']:.0%} "
            f"of the time on {most['case']['world']}. But each then holds a few tokens of every document: the more "
            "ranks there are, the more of the tiles that it computes is hidden, and the keys of all have to come to "
            f"all: E is {told}.</p>")


def _unlinked(row: Row) -> str:
    """What E would be without links, where a replay tells it."""
    alone = row["efficiency"].get("compute") if timeline.replayed(row) else None
    return f" ({alone['both']:.2f} if links took no time)" if alone else ""


def _distinct(rows: Sequence[Row]) -> list[Row]:
    return list({row["key"]: row for row in rows}.values())


def _others(rows: Sequence[Row], ring: Row) -> str:
    """The best of the schemes that go round less, in the ring's stack."""
    mask, world, stack = ring["case"]["spec"]["mask"], ring["case"]["world"], ring["case"]["stack"]
    there = [row for row in rows if row["case"]["scheme"] in OTHERS and row["case"]["spec"]["mask"] == mask
             and row["case"]["world"] == world and row["kind"] == ring["kind"] and row["case"]["stack"] == stack]
    best = max(there, key=lambda row: overall(row) or 0.0, default=None) or \
        max((r for scheme in OTHERS if (r := _best(rows, (mask,), scheme, stack))), key=lambda r: (
            r["case"]["world"], overall(r)), default=None)
    if best is None:
        return ""
    return (f"<p>What helps is to meet less often: {best['case']['scheme']} has {steps(best)} where the ring has "
            f"{steps(ring)}; on {best['case']['world']} ranks they work {plan(best)['step_balance']:.0%} of the time, "
            f"{_e(best)}.</p>")


def _mask(row: Row) -> str:
    return row["case"]["spec"]["mask"]


def _e(row: Row) -> str:
    return f"E is {overall(row):.2f}, {HOW[row['kind']]}"


def _picture(row: Row, width: float) -> str:
    figure, case, spec = timeline.picture(row, width=width), row["case"], row["case"]["spec"]
    drawing = pictures.svg(figure)
    pictures.plt.close(figure)
    return (f"<div><h4>ring under {page.esc(spec['mask'])}: {case['world']} ranks, {spec['seq_len']:,} tokens, "
            f"{case['sharding']}, {case['stack']}, forward, {HOW[row['kind']]}</h4>{drawing}</div>")
