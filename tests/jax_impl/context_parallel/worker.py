"""Runs one named check on 8 fake devices, in a process of its own: python -m ...worker CHECK; prints JSON lines."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import context_parallel as cp
from jax_impl import kernels
from jax_impl.hlo import collective_bytes
from jax_impl.kernels import hopper_kernel, naive
from tests.conformance import BUDGET, FLOOR, inputs, relative_error
from tests.schemes import GROUPED, UNGROUPED, Case, cancelling, matrix, sample
from workload import masks
from workload.errors import Unsupported
from workload.oracle import attention_oracle
from workload.problem import PASSES, AttentionProblem
from workload.schedule import make_schedule
from workload.sharding import KINDS, Sharding, shardings
from workload.topology import make_topology

RESULTS = ("out", "lse", "dq", "dk", "dv")
SIDES = ("q", "kv", "kv", "q")


def plan_of(case: Case, **options):
    """The plan of a case on the first `world` devices."""
    mesh, window = cp.make_mesh(case.topology), dict(case.grid).get("window")
    options = {"sharding": case.sharding, "window": window, "with_lse": True} | dict(case.plan) | options
    return cp.make_plan(case.problem, scheme=case.scheme, mesh=mesh, **options)


def arrays_of(case: Case):
    """q, k, v, dout rounded to the case's dtype."""
    return [np.asarray(jnp.asarray(x, case.dtype)) for x in inputs(case.problem)]


def both_passes(q, k, v, dout, plan):
    """out, lse, dq, dk, dv of sharded operands."""
    (out, lse), back = jax.vjp(lambda q, k, v: cp.attend(q, k, v, plan), q, k, v)
    return out, lse, *back((dout, jnp.zeros_like(lse)))


def collect(plan, results):
    """Whole results in token order by name, float64."""
    out, lse, *grads = jax.block_until_ready(results)  # queued programs of CPU devices may starve each other of threads
    sides = ("q", "q", *SIDES[:3])
    named = zip(RESULTS, (out, jnp.moveaxis(lse, 2, 1), *grads), sides, strict=True)
    whole = {name: np.asarray(cp.unshard(x, plan, side), np.float64) for name, x, side in named}
    return whole | {"lse": np.moveaxis(whole["lse"], 1, 2)}


@functools.lru_cache(maxsize=16)
def _reference(problem):
    q, k, v, dout = (jnp.asarray(x, problem.dtype) for x in inputs(problem))
    operands = naive.KERNEL.prepare(problem)
    out, lse = naive.KERNEL.forward(q, k, v, operands, problem.scale)
    single = (out, lse, *naive.KERNEL.backward(q, k, v, out, lse, dout, operands, problem.scale))
    want = attention_oracle(*(np.asarray(x, np.float64) for x in (q, k, v)), problem.mask, problem.scale,
                            np.asarray(dout, np.float64))
    return want, {n: relative_error(x, getattr(want, n)) for n, x in zip(RESULTS, single, strict=True)}


def run(case: Case, **options):
    """(errors by result, the operand bytes that the compiled program shows, the schedule's)."""
    plan = plan_of(case, **options)
    placed = [cp.shard(x, plan, s) for x, s in zip(arrays_of(case), SIDES, strict=True)]
    compiled = jax.jit(both_passes).lower(*placed, plan).compile()
    got = collect(plan, compiled(*placed, plan))
    want, _ = _reference(case.problem)
    scheduled: dict[str, int] = {}
    for c in (c for p in PASSES for c in plan.program.signature.collectives(p)):
        scheduled[c.kind] = scheduled.get(c.kind, 0) + c.operand_bytes
    errors = {n: relative_error(x, getattr(want, n)) for n, x in got.items()}
    return errors, collective_bytes(compiled.as_text()), scheduled


def judge(case: Case):
    """Runs a case; what is out of budget or miscounted, in words."""
    errors, moved, scheduled = run(case)
    _, naive_errors = _reference(case.problem)
    wrong = [f"{n}: error {e:.3g} > {BUDGET * naive_errors[n] + FLOOR:.3g}" for n, e in errors.items()
             if not e <= BUDGET * naive_errors[n] + FLOOR]
    if moved != scheduled:
        wrong.append(f"the program hands over {moved}, the schedule says {scheduled}")
    return wrong


def check_matrix(stride: str = "1", *worlds: str):
    """Every stride-th case of the matrix, on these worlds or all."""
    cases = matrix(tuple(map(int, worlds))) if worlds else matrix()
    for case in cases[:: int(stride)]:
        yield {"case": case.label, "wrong": judge(case)}


def check_sample(*names: str):
    """Every scheme under each of these masks, on one grid."""
    for case in sample(names):
        yield {"case": case.label, "wrong": judge(case)}


def check_precision(travel: str, *schemes: str):
    """C1: gradients at world 8 against world 1, bfloat16; with sums in float32 in flight, or in bfloat16."""
    base = Case("ring", "causal", 1, 192, 192, (8, 8), dtype="bfloat16", head_dim=32, batch=1)
    one = run(base)[0]
    for scheme in schemes:
        case = dataclasses.replace(base, scheme=scheme, world=8, plan=(("travel", travel),))
        yield {"case": f"{scheme}-{travel}", "one": one, "eight": run(case)[0]}


def check_windows(world: str):
    """Windows 1 and ring equal the flat ring bit for bit; others are as exact (C6)."""
    ring, want = int(world), None
    windows = [w for w in range(1, ring + 1) if ring % w == 0]
    base = Case("ring", "global_sliding_window", ring, dtype="bfloat16")
    others = (dataclasses.replace(base, scheme="loongtrain", grid=(("ulysses", 1), ("window", w))) for w in windows)
    for case in (base, *others):
        plan = plan_of(case)
        placed = [cp.shard(x, plan, s) for x, s in zip(arrays_of(case), SIDES, strict=True)]
        got = collect(plan, jax.jit(both_passes)(*placed, plan))
        want = want or got
        oracle, _ = _reference(case.problem)
        yield {"case": case.label, "window": dict(case.grid).get("window"),
               "equal": all(np.array_equal(got[n], want[n]) for n in RESULTS),
               "errors": {n: relative_error(got[n], getattr(oracle, n)) for n in RESULTS}}


def check_groups(stride: str = "1"):
    """Some heads at a time: the results and the bytes are those of all heads at once; what cannot be is refused."""
    for scheme, grid, world, heads, plan in GROUPED[:: int(stride)]:
        for mask in ("causal_document", "global_sliding_window"):
            plan = {"head_groups": 2} | plan
            dtype = plan.get("travel", "float32")
            case = Case(scheme, mask, world, 37, 50, heads, grid, "zigzag", tuple(plan.items()), dtype)
            if dtype == "float32":
                yield {"case": case.label, "wrong": judge(case)}
                continue
            errors, moved, _ = run(case)  # 16-bit collectives are widened on a CPU, in groups as at once
            whole, once, _ = run(dataclasses.replace(case, plan=(("travel", dtype),)))
            rounding = {"lse": 1e-7}  # it is exact but for that
            worse = [n for n in RESULTS if not errors[n] <= 1.05 * whole[n] + rounding.get(n, 0.0)]
            wrong = worse + ([] if moved == once else [str(moved)])
            yield {"case": case.label, "wrong": wrong}
    for scheme, mask, groups, why in UNGROUPED:
        try:
            plan_of(Case(scheme, mask, 2, plan=(("head_groups", groups),)))
            yield {"case": why, "wrong": ["accepted"]}
        except Unsupported as error:
            yield {"case": why, "wrong": [] if f"head_groups {groups}: {why}" in str(error) else [str(error)]}


def check_idle():
    """A rank that sees no key of a step launches no kernel there; a mask that all see something of asks nothing."""
    launched = []

    def counted(label, work):
        def count(*arguments, **options):
            jax.debug.callback(lambda: launched.append(label))
            return work(*arguments, **options)
        return count

    kernel = naive.KERNEL
    spied = dataclasses.replace(kernel, forward=counted("forward", kernel.forward),
                                backward=counted("backward", kernel.backward))
    cases = (Case("ring", "causal_document", 4, 61, 61, sharding="contiguous"), Case("ring", "full", 4, 61, 61),
             Case("all_gather", "causal", 4, 3, 50, sharding="contiguous"),
             Case("loongtrain", "causal", 8, 61, 61, grid=(("ulysses", 2), ("window", 2)), sharding="contiguous"))
    for case in cases:
        with mock.patch.object(kernels, "get", lambda name: spied):
            plan = plan_of(case)
            placed = [cp.shard(x, plan, s) for x, s in zip(arrays_of(case), SIDES, strict=True)]
            launched.clear()
            lowered = jax.jit(both_passes).lower(*placed, plan)
            got = collect(plan, lowered.compile()(*placed, plan))
            jax.effects_barrier()
        want, naive_errors = _reference(case.problem)
        wrong = [n for n, x in got.items()
                 if not relative_error(x, getattr(want, n)) <= BUDGET * naive_errors[n] + FLOOR]
        held = shardings(case.sharding, case.problem.mask, case.topology)
        cells = make_schedule(case.scheme, case.problem, case.topology, *held).cells
        busy = int((cells > 0).sum())
        if [launched.count("forward"), launched.count("backward")] != [busy, busy]:
            wrong.append(f"{len(launched)} launches, {busy} a pass of {cells.size} see something")
        if ("stablehlo.case" in lowered.as_text()) != (busy < cells.size):
            wrong.append(f"conditions: {lowered.as_text().count('stablehlo.case')}")
        yield {"case": case.label, "idle": cells.size - busy, "wrong": wrong}


def check_permutes():
    """K9: a permutation of several cycles gives every rank its peer's value. K10: partial ones in a row end, too."""
    for axes, pairs in (((4, 1), [(0, 1), (1, 0), (2, 3), (3, 2)]), ((8, 1), [(r, (r + 2) % 8) for r in range(8)]),
                        ((4, 2), [(r, (r + 1) % 4) for r in range(4)]), ((2, 4), [(0, 1), (1, 0)])):
        n = axes[0] * axes[1]
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]).reshape(axes), ("ring", "ulysses"))
        spec = jax.sharding.PartitionSpec(("ring", "ulysses"))
        send = functools.partial(jax.lax.ppermute, axis_name="ring", perm=pairs)
        send = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
        got = np.asarray(send(jnp.arange(n, dtype=jnp.float32) + 1))
        want = np.zeros(n)
        for a, b in pairs:
            for u in range(axes[1]):
                want[b * axes[1] + u] = a * axes[1] + u + 1
        yield {"case": f"{axes}", "wrong": [] if np.array_equal(got, want) else [f"{got} for {want}"]}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ring",))

    def partial(x):
        for pair in ((0, 1), (2, 3), (1, 2)):
            x = x + 10 * jax.lax.ppermute(x, "ring", [pair])
        return x

    ring = jax.sharding.PartitionSpec("ring")
    got = np.asarray(jax.jit(jax.shard_map(partial, mesh=mesh, in_specs=ring, out_specs=ring))(jnp.arange(1.0, 5.0)))
    yield {"case": "partial", "wrong": [] if got.tolist() == [1, 12, 123, 34] else [f"{got}"]}


def check_recompilation():
    """Other documents with the same signature compile nothing anew; the mask is data."""
    traces = []

    @jax.jit
    def step(q, k, v, dout, plan):
        traces.append(plan.program.signature.scheme)
        return both_passes(q, k, v, dout, plan)

    for scheme, grid in (("usp", {"ulysses": 2}), ("all_gather", {})):
        mesh = cp.make_mesh(make_topology(scheme, 4, **grid))
        before = len(traces)
        for lengths in ((20, 41), (5, 6, 50), (61,)):
            mask = masks.causal_document(61, 61, lengths)
            problem = AttentionProblem(mask, 2, 4, 2, 8, "float32")
            plan = cp.make_plan(problem, scheme=scheme, mesh=mesh, sharding="zigzag", skip=False, with_lse=True)
            arrays = inputs(problem)
            results = step(*(cp.shard(x, plan, s) for x, s in zip(arrays, SIDES, strict=True)), plan)
            got = np.asarray(cp.unshard(results[0], plan), np.float64)
            want = attention_oracle(*arrays[:3], mask, problem.scale)
            error = relative_error(got, want.out)
            yield {"case": f"{scheme}-{lengths}", "traces": len(traces) - before, "error": error}


def check_toys():
    """D4, D6, E15, H10, I5: a tail that no document owns, rising and falling logits, a border document, a window.

    One program a scheme serves them all, since masks are data. E1's kind: one token, which the last rank holds.
    """
    n, ramp = 16, np.arange(16.0)
    documents = masks.full_document(n, n, [1, 13, 1, 1])  # one over three ranks, neighbours of one token
    tail = masks.from_intervals([np.where(ramp < 13, 0, n)], [np.minimum(ramp + 1, 13).astype(int)], n)
    toys = {"documents": (documents, 0 * ramp), "window": (masks.causal_sliding_window(n, n, 1), 0 * ramp),
            "rising": (masks.full(n, n), ramp), "falling": (masks.full(n, n), ramp[::-1]), "tail": (tail, ramp)}
    step = jax.jit(both_passes)
    for scheme, grid in (("ulysses", {}), ("ring", {}), ("all_gather", {}), ("usp", {"ulysses": 2}),
                         ("loongtrain", {"ulysses": 1, "window": 2})):
        mesh = cp.make_mesh(make_topology(scheme, 4, **grid))
        here = toys | ({"one token": (masks.full(1, 1), ramp[:1])} if scheme == "all_gather" else {})
        for name, (mask, logits) in here.items():
            problem = AttentionProblem(mask, 1, 4, 4, 1, "float32", 1.0)
            v, dout = (inputs(problem)[i] for i in (2, 3))
            q, k = np.ones_like(v), np.broadcast_to(logits[:, None, None], v.shape).astype(np.float32)
            options = {"window": grid["window"]} if "window" in grid else {}
            plan = cp.make_plan(problem, scheme=scheme, mesh=mesh, with_lse=True, skip=False,
                                sharding="contiguous" if name == "one token" else "zigzag", **options)
            got = collect(plan, step(*(cp.shard(x, plan, s) for x, s in zip((q, k, v, dout), SIDES)), plan))
            want = attention_oracle(q, k, v, mask, problem.scale, dout)
            wrong = [f"{r}: {error:.2g}" for r in RESULTS
                     if not (error := relative_error(got[r], getattr(want, r))) <= 1e-5]
            if name == "tail" and any(got[r][:, 13:].any() for r in RESULTS if r != "lse"):
                wrong.append("the tail's results are not 0")
            yield {"case": f"{scheme}-{name}", "wrong": wrong}


def check_memory():
    """Key buffers of a ring do not grow with the ring: temporary bytes at equal local size, on 8 and 16 ranks."""
    for scheme, grid in (("ring", ()), ("loongtrain", (("ulysses", 1), ("window", 4))), ("all_gather", ())):
        temporary = {}
        for world in (8, 16):
            case = Case(scheme, "full", world, 64 * world, 64 * world, (1, 1), grid, head_dim=256, batch=1)
            plan = plan_of(case, sharding="contiguous")
            placed = [cp.shard(x, plan, s) for x, s in zip(arrays_of(case), SIDES, strict=True)]
            passes = both_passes if scheme != "loongtrain" else lambda q, k, v, dout, plan: cp.attend(q, k, v, plan)
            compiled = jax.jit(passes).lower(*placed, plan).compile()
            temporary[world] = compiled.memory_analysis().temp_size_in_bytes
        yield {"case": scheme, "temporary": temporary, "block": 64 * 256 * 4}


def check_overlap():
    """What could run beside each hop of a ring of 4 whose layers are scanned and rematerialised."""
    case = Case("ring", "causal", 4, 64, 64, (1, 1), head_dim=16, batch=1)
    plan = plan_of(case, with_lse=False)
    x, dout = (cp.shard(a, plan) for a in arrays_of(case)[::3])

    def loss(x):
        layer = jax.checkpoint(lambda x, _: (x + cp.attend(x, x, x, plan), None))
        return (jax.lax.scan(layer, x, None, length=2)[0] * dout).sum()

    text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
    yield {"case": case.label, "barriers": text.count(" opt-barrier("), "beside": products_beside_hops(text)}


def products_beside_hops(text):
    """For each hop of a program, by computation: the matrix products that neither feed it nor wait for it.

    A product inside a loop, a conditional or a fusion counts as the instruction that holds it.
    """
    bodies = re.findall(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    lines = {name: re.findall(r"^\s+(?:ROOT )?%([\w.\-]+) = .*? ([a-z][a-z\-]*)\((.*)$", body, re.MULTILINE)
             for name, body in bodies}

    @functools.cache
    def multiplies(operation, rest):
        called = [name for name in re.findall(r"%([\w.\-]+)", rest) if name in lines]
        return operation == "dot" or any(multiplies(*line[1:]) for name in called for line in lines[name])

    found = []
    for instructions in lines.values():
        behind = {}  # by instruction, all that it waits for; operands stand before their users
        for name, _, rest in instructions:
            operands = [o for o in re.findall(r"%([\w.\-]+)", rest) if o in behind]
            behind[name] = set(operands).union(*(behind[o] for o in operands))
        products = [name for name, operation, rest in instructions if multiplies(operation, rest)]
        hops = [name for name, operation, _ in instructions if re.fullmatch("collective-permute(-start)?", operation)]
        if hops:
            found.append([sum(p not in behind[hop] and hop not in behind[p] for p in products) for hop in hops])
    return found


def check_api():
    """The public call inside a training step, with a batch axis; sharding under jit; what is refused."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "ring", "ulysses"))
    mask = masks.causal_document(29, 29, [9, 20])
    problem = AttentionProblem(mask, 2, 4, 2, 8, "float32")
    q, k, v, dout = (np.concatenate([x, 2 * x]) for x in inputs(problem))
    plan = cp.make_plan(problem, scheme="usp", mesh=mesh, sharding="zigzag", batch_axes="data")
    want = attention_oracle(q, k, v, mask, problem.scale, dout)

    def loss(q, k, v, mesh, plan):
        q, k, v = (cp.shard(x, plan, s) for x, s in ((q, "q"), (k, "kv"), (v, "kv")))
        out = cp.attention(q, k, v, mask, scheme="usp", mesh=mesh, sharding="zigzag", batch_axes="data")
        return (cp.unshard(out, plan) * dout).sum()

    explicit = jax.make_mesh((2, 2, 2), mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    for case, at, around in (("grad", mesh, None), ("explicit axes", explicit, None), ("set_mesh", explicit, explicit)):
        options = {"scheme": "usp", "mesh": at, "sharding": "zigzag", "batch_axes": "data"}
        with jax.set_mesh(around) if around else contextlib.nullcontext():
            here = cp.make_plan(problem, **options)
            grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(jnp.asarray(q), k, v, at, here)
            split = (cp.shard(x, here, s) for x, s in ((q, "q"), (jnp.asarray(k), "kv"), (v, "kv")))
            got = *grads, cp.unshard(cp.attention(*split, mask, **options), here)
        errors = [relative_error(g, w) for g, w in zip(got, (want.dq, want.dk, want.dv, want.out), strict=True)]
        yield {"case": case, "wrong": [f"{e}" for e in errors if not e < 1e-6]}
    nothing = dataclasses.replace(problem, mask=masks.full(0, 3))
    here = cp.make_plan(nothing, scheme="usp", mesh=mesh, batch_axes="data")
    shapes = [cp.unshard(cp.shard(x, here), here).shape for x in (q[:, :0], jnp.asarray(q[:, :0]))]
    yield {"case": "no tokens", "wrong": [] if shapes == [(4, 0, 4, 8)] * 2 else [str(shapes)]}
    at = np.asarray(cp.positions(plan))
    yield {"case": "positions", "wrong": [] if sorted(at[at >= 0]) == list(range(29)) else [str(at)]}
    for name, call in (
        ("shape", lambda: cp.attend(q[:, :5], k, v, plan)),
        ("k: shape", lambda: cp.attention(q, k[0], v, mask, scheme="usp", mesh=mesh)),
        ("mesh", lambda: cp.make_plan(problem, scheme="ring", mesh=jax.sharding.Mesh(np.array(jax.devices()), ("x",)))),
        ("ulysses", lambda: cp.make_plan(problem, scheme="ulysses", mesh=mesh)),
        ("window", lambda: cp.make_plan(problem, scheme="usp", mesh=mesh, window=2)),
        ("kernel", lambda: cp.make_plan(problem, scheme="usp", mesh=mesh, kernel="fa3")),
        ("side", lambda: cp.positions(plan, "k")),
        ("x: 5 tokens", lambda: cp.shard(q[:, :5], plan)),
        ("x: 5 tokens", lambda: cp.unshard(q[:, :5], plan)),
        ("x: shape", lambda: cp.shard(q[0, :, 0, 0], plan)),
        ("x: builtins.list", lambda: cp.shard([1.0], plan)),
        ("topology: builtins.NoneType is no", lambda: cp.make_mesh(None)),
        ("problem: builtins.NoneType is no", lambda: cp.make_plan(None, scheme="usp", mesh=mesh)),
        ("schedule: jax_impl.context_parallel.plan.Plan is no", lambda: cp.plan_of(plan, mesh, "naive")),
        ("plan: builtins.NoneType is no", lambda: cp.attend(q, k, v, None)),
        ("plan: builtins.NoneType is no", lambda: cp.shard(q, None)),
        ("plan: builtins.NoneType is no", lambda: cp.unshard(q, None)),
        ("plan: jax_impl.context_parallel.local.Data is no", lambda: cp.token_mean(q[..., 0, 0], plan.data)),
        ("q: builtins.list", lambda: cp.attend([1.0], k, v, plan)),
        ("values: builtins.list", lambda: cp.token_mean([1.0], plan)),
        *((f"head_groups: {n!r} is not an integer >= 1",
           lambda n=n: cp.make_plan(problem, scheme="usp", mesh=mesh, head_groups=n)) for n in (0, "2", 1.5, None)),
        ("attention: its gradients are not differentiated again",
         lambda: jax.grad(lambda q: (jax.grad(loss)(q, k, v, mesh, plan) * q).sum())(jnp.asarray(q))),
        ("sharding: None", lambda: cp.make_plan(problem, scheme="usp", mesh=mesh, sharding=None)),
        ("mesh: builtins.NoneType", lambda: cp.attention(q, k, v, mask, scheme="usp", mesh=None)),
        ("batch_axes: 'rows'", lambda: cp.attention(q, k, v, mask, scheme="usp", mesh=mesh, batch_axes="rows")),
        ("sharding: 'none'", lambda: cp.make_plan(problem, scheme="usp", mesh=mesh, sharding="none")),
        ("q_sharding: str", lambda: cp.make_plan(problem, scheme="usp", mesh=mesh, sharding=("zigzag", "zigzag"))),
    ):
        try:
            call()
            yield {"case": name, "wrong": ["accepted"]}
        except (TypeError, ValueError) as error:
            yield {"case": name, "wrong": [] if name in str(error) else [str(error)]}


def check_loss():
    """J2: token counts [3, 1], losses [1, 5]: 2, not 3; the gradient is one quarter a token, none for padding."""
    uneven = Sharding((np.arange(3), np.arange(3, 4)), 4)
    plan = cp.make_plan(AttentionProblem(masks.full(4, 4), 1, 1, 1, 1, "float32"), scheme="ring",
                        mesh=cp.make_mesh(make_topology("ring", 2)), sharding=(uneven, uneven))
    values = jnp.asarray([[1.0, 1, 1, 5, 5, 5]])
    loss, gradient = jax.jit(jax.value_and_grad(lambda x: cp.token_mean(x, plan)))(values)
    yield {"case": "mean", "wrong": [] if loss == 2 else [str(loss)]}
    yield {"case": "gradient", "wrong": [] if gradient.tolist() == [[0.25] * 4 + [0, 0]] else [str(gradient)]}
    try:
        cp.token_mean(values[:, :4], plan)
        yield {"case": "shape", "wrong": ["accepted"]}
    except ValueError as error:
        yield {"case": "shape", "wrong": [] if "values: shape (1, 4) is not [batch, 6]" in str(error) else [str(error)]}


def check_sums():
    """C1's kind: shares of a kv head are summed in float32 where Ulysses goes beyond the kv heads; see `cancelling`."""
    problem, arrays = cancelling()
    plan = cp.make_plan(problem, scheme="ulysses", mesh=cp.make_mesh(make_topology("ulysses", 2)), with_lse=True)
    placed = [cp.shard(x.astype(jnp.bfloat16), plan, s) for x, s in zip(arrays, SIDES, strict=True)]
    dv = np.asarray(collect(plan, jax.jit(both_passes)(*placed, plan))["dv"], np.float32)
    yield {"case": "ulysses", "wrong": [] if (dv == 2**-8).all() else [str(dv)]}


def check_shards():
    """J3: unshard(shard(x)) = x under each sharding, traced or not; positions say which token stands where, if any."""
    mesh = cp.make_mesh(make_topology("ring", 4))
    for kind, tokens in itertools.product(KINDS, (21, 0)):
        problem = AttentionProblem(masks.causal(tokens, tokens), 1, 2, 2, 1, "float32")
        plan = cp.make_plan(problem, scheme="ring", mesh=mesh, sharding=kind)
        x = np.arange(1.0, tokens + 1, dtype=np.float32)[None, :, None]
        at = np.asarray(cp.positions(plan))
        wrong = [] if sorted(at[at >= 0]) == list(range(tokens)) else [str(at)]
        for shard in (cp.shard, jax.jit(cp.shard)):
            mine = shard(x, plan)
            right = np.array_equal(np.asarray(mine)[0, :, 0], np.where(at < 0, 0, at + 1))
            wrong += [] if right and np.array_equal(cp.unshard(mine, plan), x) else [str(mine)]
        yield {"case": f"{kind}-{tokens}", "wrong": wrong}


def check_gpu(scheme: str, mask: str):
    """Both passes with the Hopper kernels as local ones lower for CUDA, unseen by any GPU, collectives as scheduled."""
    with mock.patch.object(hopper_kernel, "missing_hardware", lambda: None):
        case = Case(scheme, mask, 4, 1000, 1000, (4, 2), dtype="bfloat16", head_dim=64, batch=1)
        dynamic = mask in ("uniform_block", "variable_block")
        plan = plan_of(case, kernel="flashinfer" if dynamic else "flashmask")
        placed = [cp.shard(x, plan, s) for x, s in zip(arrays_of(case), SIDES, strict=True)]
        lowered = jax.jit(both_passes).trace(*placed, plan).lower(lowering_platforms=("cuda",)).as_text()
    kinds = {"all_to_all": "stablehlo.all_to_all", "permute": "stablehlo.collective_permute",
             "all_gather": "stablehlo.all_gather", "reduce_scatter": "stablehlo.reduce_scatter"}
    wanted = [c.kind for p in PASSES for c in plan.program.signature.collectives(p)]
    wrong = [f"{kind}: {lowered.count(text)} in the program, {wanted.count(kind)} scheduled"
             for kind, text in kinds.items() if lowered.count(f'"{text}"') != wanted.count(kind)]
    calls = lowered.count("@mosaic_gpu")
    yield {"case": f"{scheme}-{mask}", "calls": calls, "wrong": wrong if calls else [*wrong, "no Hopper kernel in it"]}


def main(name: str, *arguments: str):
    """Prints the records of a check as they come."""
    for record in globals()[f"check_{name}"](*arguments):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
