"""A crash, a hang, a lack of memory: one answer each, and the worker serves on."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.workers import Failure, Interrupted, Worker

TASKS = "tests.bench.faulty_tasks"


@pytest.fixture(scope="module")
def worker():
    with Worker("torch", memory=1 << 30) as held:
        yield held


def alive(group):
    """Processes of a group that still run; one that is dead may wait to be collected."""
    stats = [p.read_text().rpartition(")")[2].split() for p in Path("/proc").glob("[0-9]*/stat")]
    return [s for s in stats if int(s[2]) == group and s[0] not in "ZX"]


def test_answers_from_another_process_and_stays(worker):
    first = worker.ask(f"{TASKS}:echo", 60, value=[1, "two"])
    assert first["value"] == [1, "two"] and first["process"] != os.getpid()
    assert worker.ask(f"{TASKS}:echo", 60, value=0)["process"] == first["process"]


@pytest.mark.parametrize("task, status, said", [
    ("killed", "error", "signal 9"),
    ("exhaust", "out_of_memory", "MemoryError"),
    ("abort", "out_of_memory", "bad_alloc"),
    ("wrong", "error", "nothing fits"),
    ("absent", "error", "absent"),
])
def test_a_failure_is_an_answer_and_the_next_request_is_served(worker, task, status, said):
    failure = worker.ask(f"{TASKS}:{task}", 60)
    assert isinstance(failure, Failure) and failure.status == status and said in failure.reason
    assert worker.ask(f"{TASKS}:echo", 60, value=3)["value"] == 3


def test_a_hang_ends_at_the_deadline_with_its_children(worker):
    process = worker.ask(f"{TASKS}:echo", 60, value=0)["process"]
    began = time.monotonic()
    assert worker.ask(f"{TASKS}:hang", 1.0).status == "timeout"
    assert time.monotonic() - began < 10
    assert not alive(process)


def test_leaving_a_worker_ends_what_another_thread_asked():
    """An interrupt waits for no task, and makes no row of it."""
    with ThreadPoolExecutor() as threads:
        with Worker("torch") as ours:
            process = ours.ask(f"{TASKS}:echo", 60, value=0)["process"]
            asked = threads.submit(ours.ask, f"{TASKS}:hang", 60)
            until = time.monotonic() + 30
            while len(alive(process)) < 2 and time.monotonic() < until:
                time.sleep(0.05)
        with pytest.raises(Interrupted):
            asked.result(timeout=10)
    assert not alive(process)
    with pytest.raises(Interrupted):
        ours.ask(f"{TASKS}:echo", 60, value=0)


def test_a_worker_and_its_children_end_with_a_parent_that_is_killed():
    """Amid a task: else it holds the device's memory and disturbs what runs next."""
    code = (f"from bench.workers import Worker; worker = Worker('torch'); print(worker.ask('{TASKS}:echo', 60, value=0)"
            f"['process'], flush=True); worker.ask('{TASKS}:hang', 60)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        process = int(parent.stdout.readline())
        until = time.monotonic() + 30
        while len(alive(process)) < 2 and time.monotonic() < until:
            time.sleep(0.05)  # the child that the task starts
        assert len(alive(process)) == 2
        parent.kill()
    while alive(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(process)


def test_a_refusal_does_not_cost_the_process(worker):
    process = worker.ask(f"{TASKS}:echo", 60, value=0)["process"]
    refusal = worker.ask(f"{TASKS}:refuse", 60)
    assert refusal == Failure("unsupported", "jax kernel toy: does not take mask full")
    assert worker.ask(f"{TASKS}:echo", 60, value=0)["process"] == process


def test_no_stack_is_imported_before_a_worker_needs_it(worker):
    worker.kill()
    assert worker.ask(f"{TASKS}:modules", 60) == []
    code = (
        "import sys, bench.engine, bench.options, bench.report.write, parity.reference, parity.checkpoints, "
        "parity.matrix, bench.compare; sys.exit(' '.join({'jax', 'torch', 'orbax'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
