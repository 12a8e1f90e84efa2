"""The worker's side: reads requests, calls the named function, answers; see `bench/workers.py`."""

import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import sys
import threading
import traceback

from bench.workers import MEMORY_WORDS, NothingRan
from workload.errors import Unsupported


def failure_of(problem: BaseException) -> dict[str, str]:
    """Status and reason of an exception: unsupported, out_of_memory or error."""
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, Unsupported):
        return {"status": "unsupported", "reason": str(problem)}
    short = " | ".join(line for line in text.splitlines() if line.strip())[:600]
    if isinstance(problem, MemoryError) or any(word in text.lower() for word in MEMORY_WORDS):
        return {"status": "out_of_memory", "reason": short}
    return {"status": "error", "reason": short}


def answer(line: str) -> dict:
    """The answer to one request: {"value": ...} or {"failure": {"status": ..., "reason": ...}, "clean": ...}.

    A failure is clean where nothing of it outlives the call: a refusal, or an allocation that did not come about.
    """
    request = json.loads(line)
    module, _, name = request["task"].partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(**request["arguments"])}
    except Exception as problem:  # whatever a kernel raises is a row, and the traceback is in the worker's log
        traceback.print_exc()
        harmless = isinstance(problem, Unsupported | MemoryError | NothingRan)
        clean = harmless or type(problem).__name__ == "OutOfMemoryError"
        return {"failure": failure_of(problem), "clean": clean}


def listen(read_from: int, requests: queue.SimpleQueue) -> None:
    """Hands requests on until the parent closes its end or dies: then the worker ends amid whatever it is at.

    It would hold the device's memory and disturb what is timed next; what it started goes with it.
    """
    with os.fdopen(read_from) as lines:
        for line in lines:
            requests.put(line)
    with contextlib.suppress(ProcessLookupError):  # where it leads no process group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def main(read_from: int, write_to: int, memory: int) -> None:
    """Serves while the parent lives."""
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where the machine's memory runs out, the worker goes, not its parent
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=listen, args=(read_from, requests), daemon=True).start()
    with os.fdopen(write_to, "w") as answers:
        while True:
            answers.write(json.dumps(answer(requests.get())) + "\n")
            answers.flush()


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:]))
