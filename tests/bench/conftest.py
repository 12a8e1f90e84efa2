"""Workers without processes, for tests of what a run does with their answers."""

import collections
import time

import pytest

from bench import engine

ANSWERS = {
    "environment": {"backend": "cuda"}, "refuse": None, "disturbs": False, "build": None, "reference": {},
    "describe": {"flops": 1e12, "bytes": 1}, "check": {"wrong": []},
    "clock": {"seconds": {"median": 1.0, "min": 1.0, "spread": 0.0}},
    "ceiling": {"peak_flops": 1e15, "bandwidth": 1.0}, "ready": None,
}


@pytest.fixture
def answers(monkeypatch):
    """Workers that answer without a process, after a moment; what was asked, when, and what the answers are."""
    spans, special = collections.defaultdict(list), {}

    def ask(worker, task, deadline, **arguments):
        name, began = task.partition(":")[2], time.monotonic()
        time.sleep({"build": 0.02, "check": 0.02, "clock": 0.004, "reference": 0.01}.get(name, 0.0))
        spans[name].append((began, time.monotonic()))
        found = special[name](arguments) if name in special else ANSWERS[name]
        return dict(found) if isinstance(found, dict) else found

    monkeypatch.setattr(engine.Worker, "ask", ask)
    monkeypatch.setattr(engine.Worker, "kill", lambda worker: spans["kill"].append(worker))
    return spans, special
