"""What a Chrome trace of a GPU shows: when links were busy, when kernels were, and how much of the one the other hid.

Both stacks' profilers write such traces (torch.profiler, jax.profiler); times in them are microseconds.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Span = tuple[float, float]
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # torch.profiler's categories


def device_events(seen: dict[str, Any]) -> list[dict[str, Any]]:
    """The events that ran on a GPU: by torch.profiler's categories, or on a stream of one of jax.profiler's devices."""
    devices, streams = set(), set()
    for event in seen["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "process_name" and "/device:GPU" in event["args"]["name"]:
            devices.add(event["pid"])
    for event in seen["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "thread_name" and event["args"]["name"].startswith("Stream"):
            streams.add((event["pid"], event["tid"]))
    return [event for event in seen["traceEvents"] if event.get("ph") == "X" and (
        event.get("cat") in DEVICE_WORK or (event["pid"] in devices and (event["pid"], event["tid"]) in streams))]


def last_call(seen: dict[str, Any], calls: int) -> dict[str, Any]:
    """The trace of the last of equal calls that were traced back to back: the first ones bring the ranks together.

    Of a name that does not occur equally often in each, what is first is none of a call's (a profiler's own work).
    Raises ValueError where nothing occurs in all of them.
    """
    names: dict[str, list[dict[str, Any]]] = {}
    for event in sorted(device_events(seen), key=lambda e: float(e["ts"])):
        names.setdefault(event["name"], []).append(event)
    last = [event for same in names.values() for event in same[len(same) - len(same) // calls :]]
    if names and not last:
        raise ValueError(f"no device event occurs in all of {calls} equal calls: {', '.join(names)}")
    begin = min((float(e["ts"]) for e in last), default=0.0)
    told = [e for e in seen["traceEvents"] if e.get("ph") != "X" or float(e["ts"]) >= begin]
    return seen | {"traceEvents": told}


def overlap(seen: dict[str, Any]) -> dict[str, Any]:
    """Seconds that links were busy, of those with a kernel beside them, and that kernels ran; and when, from the first.

    Returns: link_seconds, hidden_seconds, work_seconds; links, work: disjoint ascending (begin, end) in seconds.
    """
    spans: dict[bool, list[Span]] = {True: [], False: []}
    events = device_events(seen)
    first = min((float(e["ts"]) for e in events), default=0.0)
    for event in events:
        begin = (float(event["ts"]) - first) / 1e6
        spans["nccl" in event["name"].lower()].append((begin, begin + float(event["dur"]) / 1e6))
    links, work = union(spans[True]), union(spans[False])
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in links for b in work)
    return {"link_seconds": length(links), "hidden_seconds": hidden, "work_seconds": length(work), "links": links,
            "work": work}


def union(spans: Sequence[Span]) -> list[Span]:
    """Disjoint ascending intervals that cover the same.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(end, out[-1][1])
        else:
            out.append((begin, end))
    return out


def length(spans: Sequence[Span]) -> float:
    """What disjoint intervals cover."""
    return float(sum(end - begin for begin, end in spans))


def path_of(folder: Path, name: str) -> Path:
    """A file of a name that may hold slashes."""
    return folder / ("".join(c if c.isalnum() or c in "-_." else "_" for c in name) + ".trace.json.gz")


def write(seen: dict[str, Any], path: Path) -> None:
    """A trace, compressed: chrome://tracing and Perfetto open it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        json.dump(seen, file)
