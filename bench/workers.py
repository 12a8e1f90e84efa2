"""Worker processes: a crash, a hang or a lack of memory costs one row, never the run.

A worker is `python -m bench.worker_main` in a process group of its own. It is asked over a pipe, one JSON line a
request, and answers over another; what it prints goes to a file whose end becomes the reason when it dies. Which
function runs is named by the request, so any binary of the bench uses the same workers.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

MEMORY_WORDS = ("out of memory", "out_of_memory", "resource_exhausted", "bad_alloc", "memoryerror", "cannot allocate")
ENVIRONMENT = {
    "jax": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # the other stack's worker lives on the same card
    # Threads that spin while another process computes cost it 100 times; Inductor would start a process a core.
    "torch": {"OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    "judge": {"OMP_WAIT_POLICY": "PASSIVE", "JAX_PLATFORMS": "cpu"},  # Orbax on the CPU, PyTorch on the GPU
}


class NothingRan(RuntimeError):
    """A failure of work that never reached a device: the worker goes on as it was."""


class Interrupted(RuntimeError):
    """The worker was ended for good: who asked gets no answer, and there is no row of it."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why no answer came: a status of `bench.records.STATUSES` and its reason."""

    status: str
    reason: str


class Worker:
    """One process of a stack ("jax", "torch" or "judge"); started when first asked, again after it died.

    Several threads may ask: one is answered after another.

    Attributes:
      stack: which.
      memory: bytes of private memory it may hold, None for no limit (a GPU's driver reserves far more than it uses).
      environ: variables of its environment besides the stack's.
    """

    def __init__(self, stack: str, memory: int | None = None, environ: Mapping[str, str] | None = None):
        self.stack = stack
        self.memory = memory
        self.environ = dict(environ or {})
        self.starts = 0
        self._asking, self._ended = threading.Lock(), False
        self._process: subprocess.Popen | None = None
        self._ask = self._answer = -1
        self._log: Any = None

    def ask(self, task: str, deadline: float, **arguments: Any) -> Any:
        """What the task returns, or a `Failure`; raises `Interrupted` where the worker was left (`with`) meanwhile.

        Args:
          task: "module:function" of the bench, called with the arguments in the worker.
          deadline: seconds; then the worker and all its children are killed.
          arguments: JSON values.
        """
        with self._asking:
            return self._asked(task, deadline, arguments)

    def _asked(self, task, deadline, arguments) -> Any:
        self._go_on()
        try:
            self._start()
            self._go_on()
            os.write(self._ask, json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
            line = self._read_line(time.monotonic() + deadline)
        except BrokenPipeError:
            line = b""
        if line is None:
            self.kill()
            return Failure("timeout", f"no answer within {deadline:g} s")
        if not line:
            self._go_on()
            return self._died()
        answer = json.loads(line)
        if "failure" in answer:
            if not answer["clean"]:
                self.kill()  # a device error may outlive the call
            return Failure(**answer["failure"])
        return answer["value"]

    def kill(self) -> None:
        """Ends the process and all it started; the next request starts another."""
        if self._process is None:
            return
        _kill(self._process)
        self._process.wait()
        os.close(self._ask)
        os.close(self._answer)
        self._log.close()
        self._process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Ends it for good, also amid what another thread asked: an interrupt waits for no task."""
        self._ended, process = True, self._process
        if process is not None:
            _kill(process)
        with self._asking:
            self.kill()

    def _go_on(self) -> None:
        if self._ended:
            raise Interrupted(f"the {self.stack} worker was ended")

    def _start(self) -> None:
        if self._process is not None:
            return
        to_read, self._ask = os.pipe()
        self._answer, to_write = os.pipe()
        self._log = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "bench.worker_main", str(to_read), str(to_write), str(self.memory or 0)]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True, env=os.environ | ENVIRONMENT[self.stack] | self.environ,
        )
        os.close(to_read)
        os.close(to_write)
        self.starts += 1

    def _read_line(self, until: float) -> bytes | None:
        """One line; b"" when the worker is gone, None when the time is up."""
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answer], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._answer, 1 << 16)
            if not part:
                return b""
            line += part
        return line

    def _died(self) -> Failure:
        assert self._process is not None
        code = self._process.wait()
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        tail = self._log.read().decode(errors="replace").strip()
        last = " | ".join(tail.splitlines()[-4:])
        self.kill()
        how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit status {code}"
        status = "out_of_memory" if any(word in tail.lower() for word in MEMORY_WORDS) else "error"
        return Failure(status, f"the worker died {how}" + (f": {last}" if last else ""))


def _kill(process: subprocess.Popen) -> None:
    """Kills the process group that a worker leads."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
