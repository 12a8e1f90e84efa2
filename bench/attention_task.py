"""What a worker does for an attention row: build, check against the reference, time.

All functions here run inside a worker of one stack and return plain JSON values; `bench/engine.py` asks for them.
"""

import dataclasses
import functools
import importlib
import time
from typing import Any

import numpy as np

from bench import cases
from bench.passes import Inputs, passes_of
from bench.timing import Protocol, Timing, measure
from bench.workers import NothingRan
from parity.compare import OF_PASS, errors, over_budget
from parity.inputs import TENSORS, make_inputs
from parity.reference import Reference, sample_of
from workload.block_masks import BlockMask
from workload.errors import Unsupported
from workload.problem import FLOPS_FORMULA

TILE = 128  # side of the tiles whose waste a row tells
SETS_BYTES = 1 << 30  # further input sets are made while they stay below this
SETS = 2
FASTEST = 5e14  # FLOP/s of the fastest kernels
LONG = 0.1  # a pass of so many seconds needs no warm-up after its first run, and does not feel the cache


@functools.cache
def stack_of(name: str):
    """The stack's adapter; importing it imports the stack."""
    module = importlib.import_module(f"bench.{name}_stack")
    module.set_threads()
    return module.Stack()


def ready(stack: str) -> None:
    """Imports what the worker will need."""
    if stack == "judge":
        importlib.import_module("torch")
    else:
        stack_of(stack)


def environment(stack: str) -> dict[str, Any]:
    """Versions and device of a stack."""
    return stack_of(stack).environment()


def devices() -> int:
    """Devices that JAX sees."""
    return importlib.import_module("jax").device_count()


def refuse(case: dict[str, Any]) -> str | None:
    """Why the kernel cannot run the case here, None where it can."""
    chosen = cases.from_record(case)
    kernel = _kernel(chosen)
    return kernel if isinstance(kernel, str) else kernel.refuse(_problem(chosen.spec), _passes(chosen.which))


def _kernel(case):
    try:
        return stack_of(case.stack).kernel(case.kernel)
    except ValueError:
        return f"the {case.stack} stack has no kernel of this name"


def _passes(which):
    return ("forward",) if which == "forward" else ("forward", "backward")


@functools.lru_cache(maxsize=2)
def _problem(spec):
    return spec.problem()


def describe(case: dict[str, Any]) -> dict[str, Any]:
    """What is known of a case without running it: FLOPs, bytes, area, tile waste."""
    chosen = cases.from_record(case)
    problem, which = _problem(chosen.spec), chosen.which
    mask = problem.mask
    found = {
        "flops": problem.flops(which), "flops_formula": FLOPS_FORMULA[which], "bytes": problem.bytes(which),
        "area": mask.area, "density": mask.density,
    }
    if not isinstance(mask, BlockMask):
        visited = mask.tile_runs(TILE, TILE).visited_area
        found["tiles"] = {"tile": TILE, "visited_area": visited, "waste": visited / max(1, mask.area)}
    return found


def programs(of: list[dict[str, Any]]) -> list[int]:
    """For each of some cases of JAX the number of the first one that compiles to the same programs."""
    known: dict[Any, int] = {}
    return [known.setdefault(_program(cases.from_record(case)), n) for n, case in enumerate(of)]


def _program(case: cases.Case):
    kernel, problem = _kernel(case), _problem(case.spec)
    if isinstance(kernel, str) or kernel.refuse(problem, _passes(case.which)):
        return "refused"
    return stack_of(case.stack).program(kernel, problem)


def disturbs(case: dict[str, Any]) -> bool:
    """Whether `build` may not run beside a timing."""
    chosen = cases.from_record(case)
    stack = stack_of(chosen.stack)
    return stack.disturbs(stack.kernel(chosen.kernel))


def build(case: dict[str, Any]) -> None:
    """Compiles ahead what the stack can compile without running the case; raises `Unsupported` where it cannot run."""
    chosen = cases.from_record(case)
    stack, problem = stack_of(chosen.stack), _problem(chosen.spec)
    kernel = stack.kernel(chosen.kernel)
    kernel.require(problem, _passes(chosen.which))
    try:
        stack.build(kernel, problem, _passes(chosen.which))
    except (MemoryError, Unsupported):
        raise
    except Exception as fault:  # a compiler's: the first call may do better, and says its own if not
        raise NothingRan(f"{type(fault).__name__}: {fault}") from fault


@dataclasses.dataclass
class _Ready:
    """A case built in a worker.

    Attributes:
      compiled: its pass; arguments: those of each input set; first: its result on the first, until it is judged.
      prepare_seconds, compile_seconds: what building cost; source: of the kernel.
      output_moves: whether the second input set gave another result.
    """

    compiled: Any
    arguments: list[tuple]
    first: Any
    prepare_seconds: float
    compile_seconds: float
    source: str
    output_moves: bool

    def call(self, n: int) -> Any:
        """Runs the pass on input set n, modulo the sets there are; does not wait."""
        return self.compiled(*self.arguments[n % len(self.arguments)])


_held: dict[str, _Ready] = {}  # the last case built; parity asks for it again and again
_saved: dict[Any, Any] = {}  # out and lse of the last forward pass judged: a backward pass of it may come next
_prepared: dict[Any, Any] = {}  # the operands of the last mask, and how long they took


def _build(case: cases.Case, inputs: str | None = None) -> _Ready:
    if case.key in _held:
        return _held[case.key]
    _held.clear()
    stack, problem = stack_of(case.stack), _problem(case.spec)
    kernel = stack.kernel(case.kernel)
    kernel.require(problem, _passes(case.which))
    origin = (case.stack, case.kernel, case.spec, inputs)
    saved = _saved.get(origin)
    _saved.clear()
    stack.release()
    operands, prepare_seconds = _operands(stack, kernel, case)
    sets = SETS if problem.bytes("backward") <= SETS_BYTES else 1
    tensors = [_inputs(case.stack).of(problem, case.spec.inputs(n)) for n in range(sets)]
    if inputs:
        restored = _restored(inputs)
        tensors[0] = tuple(stack.put(restored[name]) for name in TENSORS)
    forward, backward = passes_of(kernel, problem.scale)
    arguments: list[tuple] = [(q, k, v, operands) for q, k, v, _ in tensors]
    if case.which == "forward" or saved is None:
        name = (case.kernel, "forward", problem.scale)
        compiled, compile_seconds, first = stack.compile(name, forward, *arguments[0])
        saved = [first, *(compiled(*a) for a in arguments[1:])]
    if case.which == "backward":
        arguments = [
            (q, k, v, *out_lse, dout, operands)
            for (q, k, v, dout), out_lse in zip(tensors, saved, strict=True)
        ]
        name = (case.kernel, "backward", problem.scale)
        compiled, compile_seconds, first = stack.compile(name, backward, *arguments[0])
        other = compiled(*arguments[-1]) if sets > 1 else first
    else:
        _saved[origin], other = saved, saved[-1]
    some = ((stack.take(x[:, :, :1]), stack.take(y[:, :, :1])) for x, y in zip(first, other, strict=True))
    moves = sets == 1 or not problem.cells or not all(np.array_equal(*pair) for pair in some)
    ready = _Ready(
        compiled, arguments, first, prepare_seconds, compile_seconds, kernel.capability.source, moves)
    _held[case.key] = ready
    return ready


def _operands(stack, kernel, case: cases.Case) -> tuple[Any, float]:
    """The kernel's operands under the case's mask, and the seconds to make them."""
    key = (case.stack, case.kernel, case.spec)
    if key not in _prepared:
        first = not any(known[:2] == key[:2] for known in _prepared)
        _prepared.clear()
        problem = _problem(case.spec)
        if first:
            stack.prepare(kernel, problem)  # also imports and compiles
        began = time.perf_counter()
        _prepared[key] = stack.prepare(kernel, problem), time.perf_counter() - began
    return _prepared[key]


@functools.cache
def _inputs(stack_name: str) -> Inputs:
    return Inputs(stack_of(stack_name))


def _restored(path: str) -> dict[str, np.ndarray]:
    """Inputs from raw buffers (.npz), or from an Orbax checkpoint, which only the JAX stack's worker reads."""
    if path.endswith(".npz"):
        with np.load(path) as held:
            return {name: held[name] for name in held.files}
    from parity.checkpoints import raw_buffers

    return raw_buffers(path)


def exchange(spec: dict[str, Any], checkpoint: str, buffers: str) -> None:
    """In the judge: makes a problem's inputs, stores them as an Orbax checkpoint, hands PyTorch its raw buffers."""
    from parity import checkpoints

    chosen = cases.from_record(spec).spec
    checkpoints.save(checkpoint, make_inputs(chosen.problem(), chosen.inputs()))
    np.savez(buffers, **checkpoints.raw_buffers(checkpoint))


def check(
    case: dict[str, Any], reference: str, keep: str | None = None, inputs: str | None = None,
    whole_cells: int | None = None,
) -> dict[str, Any]:
    """Builds and runs a case once and judges each result.

    Args:
      case: as `Case.record` wrote it; reference: path of a saved `Reference`.
      keep: path to write the sampled results to (.npz, float64), for a comparison of the stacks.
      inputs: path of the inputs, see `exchange`; made anew from the seed where there is none.
      whole_cells: as the reference was made with.

    Returns: errors, budget, oracle, wrong (lines, empty where all is well), flags, and what building cost.
    """
    chosen = cases.from_record(case)
    ready, problem = _build(chosen, inputs), _problem(chosen.spec)
    stack, sample = stack_of(chosen.stack), sample_of(problem, whole_cells)
    judged = Reference.load(reference, OF_PASS[chosen.which])
    results = dict(zip(OF_PASS[chosen.which], ready.first or ready.call(0), strict=True))
    ready.first = None
    got = {name: stack.take(sample.take(name, x, problem.group)) for name, x in results.items()}
    if keep:
        np.savez(keep, **got)
    measured = errors(got, judged.results)
    wrong = over_budget(measured, judged.budget)
    if not ready.output_moves:
        wrong.append(f"{', '.join(got)}: the same for different inputs")
    return {
        "errors": measured, "budget": judged.budget, "oracle": judged.oracle, "wrong": wrong, "source": ready.source,
        "prepare_seconds": ready.prepare_seconds, "compile_seconds": ready.compile_seconds,
        "flags": stack.handicaps(ready.compiled),
    }


def clock(case: dict[str, Any], protocol: dict[str, Any], brief: bool = False) -> dict[str, Any]:
    """Times a case that `check` has built: cold cache on a GPU, wall time on a CPU.

    Unless it is to be brief, also with a warm cache, where that can differ, and measures the peak memory.
    """
    chosen = cases.from_record(case)
    ready, stack = _build(chosen), stack_of(chosen.stack)
    ready.first, limits = None, Protocol(**protocol)
    estimate = _problem(chosen.spec).flops(chosen.which) / FASTEST
    if estimate <= LONG or not stack.on_gpu:  # else it has just run, and lasts as long as that
        began = time.perf_counter()
        stack.finish(ready.call(0))
        estimate = time.perf_counter() - began
    if estimate > LONG and stack.on_gpu:
        limits = dataclasses.replace(limits, samples=min(2, limits.samples), least=1, warmups=0)
    sample = stack.sampler(ready.call, True)
    told = stack.watch_memory()
    cold = measure(sample, limits)
    if brief:
        return {"seconds": cold.record()}
    waited = getattr(sample, "waited", 0)
    return {
        "flags": [*stack.handicaps(ready.compiled),
                  *([f"the device may have waited for the host in {waited} samples"] if waited else [])],
        "timer": stack.timer, "cache": "cold" if stack.on_gpu else "as it is", "seconds": cold.record(),
        "peak_bytes": told(ready.compiled, ready.arguments[0]), "peak_method": stack.memory_method,
        "warm_seconds": _warm(stack, ready, limits).record() if stack.on_gpu and cold.median < LONG else None,
        "input_sets": len(ready.arguments),
    }


def _warm(stack, ready, limits: Protocol) -> Timing:
    """The warm pass comes behind the cold one: no more warm-up is needed, and few samples tell."""
    sample = stack.sampler(lambda n: ready.call(0), False)
    return measure(sample, dataclasses.replace(limits, samples=min(3, limits.samples), least=1, warmups=0))


def reference(spec: dict[str, Any], path: str, whole_cells: int | None = None) -> dict[str, Any]:
    """In the judge: computes and saves the reference of a problem; returns its oracle and budget.

    Args:
      whole_cells: logits of a head above which some rows and keys are judged; see `parity.reference.sample_of`.
    """
    from parity.reference import reference_of

    chosen = cases.from_record(spec).spec
    problem = chosen.problem()
    found = reference_of(problem, chosen.inputs(), sample_of(problem, whole_cells))
    found.save(path)
    return {"oracle": found.oracle, "budget": found.budget}


def ceiling(stack: str, dtype: str, protocol: dict[str, Any]) -> dict[str, Any]:
    """The matrix peak (FLOP/s) and the copy bandwidth (bytes/s) that a stack reaches on this machine.

    On a GPU both come from the median, as a row's rate does. On a CPU they come from the fastest sample, since whatever
    else runs there only takes time away, and the peak is the better of the dtype's and float32's: half types may be
    emulated.
    """
    chosen, limits = stack_of(stack), Protocol(**protocol)

    def taken(timing: Timing) -> float:
        return timing.median if chosen.on_gpu else timing.minimum

    size, copied = (8192, 1 << 30) if chosen.on_gpu else (1024, 1 << 27)
    peak, kinds = 0.0, {dtype} if chosen.on_gpu else {dtype, "float32"}
    for kind in sorted(kinds):
        call, flops = chosen.matmul(size, kind)
        timing = measure(chosen.sampler(call, False), limits)
        peak = max(peak, flops / taken(timing))
    call, moved = chosen.copy(copied)
    timing = measure(chosen.sampler(call, False), limits)
    return {
        "peak_flops": peak, "matmul": f"{size}^3", "bandwidth": moved / taken(timing), "copy_bytes": moved,
        "timer": chosen.timer,
    }
