"""The public context-parallel call of the JAX stack; its twin is torch_impl/context_parallel/attention.py."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.context_parallel import head_groups
from jax_impl.context_parallel.plan import Plan, Program, batch_groups, make_plan, place, put
from jax_impl.context_parallel.ulysses import to_heads, to_tokens
from jax_impl.once import once_differentiable
from workload.problem import AttentionProblem, check_kind, check_operands, check_tokens


def attention(q, k, v, mask, *, scheme: str, mesh: Mesh, scale: float | None = None, **options):
    """Attention over tokens that are split among the ranks of a mesh; differentiable, and can be jitted.

    Args:
      q: [batch, world * q_length, q_heads, head_dim]; k, v: [batch, world * kv_length, kv_heads, head_dim]; tokens in
        the order of `shard`, padding included.
      mask: the global `IntervalMask` or `BlockMask`.
      scheme, mesh, options: see `make_plan`. Inside jit, the mask's data become constants of the program: make the
        plan outside, with skip=False, hand it in as an argument and call `attend`, and other documents do not compile
        anew.
      scale: logit scale, head_dim ** -0.5 by default.

    Returns: out as q; with `with_lse`, (out, lse float32 [batch, q_heads, world * q_length]). Padding rows are
    (0, -inf). Gradients flow through out.

    Raises: `Unsupported` where scheme or kernel cannot take the problem, ValueError on shapes that disagree.
    """
    check_operands((jax.Array, np.ndarray), q=q, k=k, v=v)
    groups = batch_groups(mesh, options.get("batch_axes"))
    problem = AttentionProblem(
        mask, max(1, q.shape[0] // groups), q.shape[2], k.shape[2], q.shape[3], str(q.dtype), scale
    )
    plan = make_plan(problem, scheme=scheme, mesh=mesh, on_host=True, **options)
    return attend(q, k, v, _constants(plan) if any(isinstance(x, jax.core.Tracer) for x in (q, k, v)) else place(plan))


def _constants(plan: Plan) -> Plan:
    """A plan `on_host`, its data constants of the program that is traced; the mesh's axes may be explicit."""
    tokens = NamedSharding(plan.program.mesh, PartitionSpec(plan.program.token_axes))
    return Plan(plan.program, jax.tree.map(lambda x: jax.device_put(x, tokens), plan.data))


def attend(q, k, v, plan: Plan):
    """`attention` under a plan."""
    check_kind("plan", plan, Plan)
    _check(q, k, v, plan.program)
    out, lse = _attend(plan.program, q, k, v, plan.data)
    return (out, jax.lax.stop_gradient(lse)) if plan.program.signature.with_lse else out


def shard(x, plan: Plan, side: str = "q"):
    """[batch, total, ...] in token order to [batch, world * length, ...] in rank order, split over the mesh.

    Args:
      side: "q" or "kv": whose sharding (they differ where q_len != kv_len).

    A NumPy array is placed from the host, the same on every process; a JAX array is permuted where it is. Padding
    is zero.
    """
    at, program = _positions(plan, side), plan.program
    check_tokens((jax.Array, np.ndarray), x, _total(plan, side), "the plan's are")
    sharding = NamedSharding(program.mesh, program.spec())
    if not x.shape[1]:  # of no tokens there is padding alone, made of one that no rank holds
        x = (np if isinstance(x, np.ndarray) else jnp).zeros((len(x), 1, *x.shape[2:]), x.dtype)
    if isinstance(x, np.ndarray):
        order = _on_host(at)
        held = (order >= 0).reshape(-1, *[1] * (x.ndim - 2))
        return put(np.where(held, x[:, np.maximum(order, 0)], np.zeros((), x.dtype)), sharding)
    x = jax.device_put(x, NamedSharding(program.mesh, PartitionSpec(program.batch_axes)))
    return _taken(program.mesh, program.spec())(x, at)


def unshard(x, plan: Plan, side: str = "q"):
    """The inverse of `shard`: [batch, world * length, ...] to [batch, total, ...], on every device."""
    at, program = _positions(plan, side), plan.program
    check_tokens((jax.Array, np.ndarray), x, len(at), "the plan's ranks hold")
    x = jax.device_put(x, NamedSharding(program.mesh, program.spec()))
    return _put_back(_total(plan, side), program.mesh, program.spec())(x, at)


def positions(plan: Plan, side: str = "q") -> jax.Array:
    """Global positions of the tokens each rank holds, int32 [world * length] split over the mesh, -1 for padding.

    What rotary embeddings are to be computed from: a rank's tokens do not start at 0.
    """
    return _positions(plan, side)


def token_mean(values, plan: Plan, side: str = "q") -> jax.Array:
    """The mean over the real tokens of all ranks, differentiable: a loss must not be averaged per rank.

    Ranks may hold unequal numbers of tokens, and padding counts for nothing. The array is the global one.

    Args:
      values: [batch, world * length], a loss per token, in the order of `shard`.
    """
    held = positions(plan, side) >= 0
    check_kind("values", values, jax.Array, np.ndarray)
    if tuple(values.shape[1:]) != held.shape:
        raise ValueError(f"values: shape {tuple(values.shape)} is not [batch, {len(held)}]")
    total = jnp.where(held, values.astype(jnp.float32), 0.0).sum()
    return total / (held.sum() * float(len(values)))


# Both below are a rank's own work: where a mesh's axes are explicit, JAX refuses to split them by itself. Each is made
# once: a function made anew for each call would be compiled anew.


@functools.cache
def _taken(mesh: Mesh, spec: PartitionSpec):
    """(whole tokens, their places in rank order) -> tokens split so."""
    batch_axes, token_axes = spec

    def take(x, at):
        return jnp.take(x, jnp.where(at < 0, x.shape[1], at), axis=1, mode="fill", fill_value=0)

    return _ranks(take, mesh, (PartitionSpec(batch_axes), PartitionSpec(token_axes)), spec)


@functools.cache
def _put_back(total: int, mesh: Mesh, spec: PartitionSpec):
    """(tokens split so, their places) -> whole tokens on every device."""
    batch_axes, token_axes = spec

    def put_back(x, at):
        x, at = (jax.lax.all_gather(y, token_axes, axis=n, tiled=True) for n, y in ((1, x), (0, at)))
        out = jnp.zeros((x.shape[0], total, *x.shape[2:]), x.dtype)
        out = out.at[:, jnp.where(at < 0, total, at)].set(x, mode="drop")
        return jax.lax.all_gather(out, batch_axes, axis=0, tiled=True) if batch_axes else out

    return _ranks(put_back, mesh, (spec, PartitionSpec(token_axes)), PartitionSpec())


def _ranks(function, mesh: Mesh, in_specs, out_specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def _positions(plan: Plan, side: str):
    check_kind("plan", plan, Plan)
    if side not in ("q", "kv"):
        raise ValueError(f"side: {side!r} is neither q nor kv")
    return plan.data.q_positions if side == "q" else plan.data.kv_positions


def _total(plan: Plan, side: str) -> int:
    signature = plan.program.signature
    return signature.q_total if side == "q" else signature.kv_total


def _on_host(x) -> np.ndarray:
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())
    return np.asarray(jax.jit(lambda y: y, out_shardings=whole)(x).addressable_data(0))


def _check(q, k, v, program: Program) -> None:
    check_operands((jax.Array, np.ndarray), q=q, k=k, v=v)
    signature = program.signature
    world, heads = signature.topology.world, signature.heads
    batch = signature.batch * batch_groups(program.mesh, program.batch_axes)
    rows = (batch, world * signature.q_length, heads.q_heads, signature.head_dim)
    keys = (batch, world * signature.kv_length, heads.kv_heads, signature.head_dim)
    for name, x, want in (("q", q, rows), ("k", k, keys), ("v", v, keys)):
        if tuple(x.shape) != want:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, the plan's is {want}")
        if str(x.dtype) != signature.dtype:
            raise ValueError(f"{name}: dtype {x.dtype}, the plan's is {signature.dtype}")


def forward(plan: Plan, q, k, v):
    """((out, lse or None) in token order, what `backward` needs: the exchanged q, k, v, out and their lse)."""
    program, data = plan.program, plan.data
    signature = program.signature
    scheme = importlib.import_module(f"jax_impl.context_parallel.{signature.scheme}")
    local, seq, rows = program.local, program.spec(), program.spec(2)

    def rank(q, k, v, data):
        data = _rank_data(data)
        if local.groups > 1:
            result, by_token, exchanged, lse = head_groups.forward(local, q, k, v, data)
            return (result, by_token), None if signature.topology.ulysses == 1 else exchanged, lse
        q, k, v = (to_heads(signature, x, side, data) for x, side in ((q, "q"), (k, "kv"), (v, "kv")))
        out, lse = scheme.forward(local, q, k, v, data)
        result = to_tokens(signature, out, "q", data)
        by_token = None
        if signature.with_lse:
            by_token = to_tokens(signature, lse.transpose(0, 2, 1)[..., None], "q", data)[..., 0].transpose(0, 2, 1)
        exchanged = None if signature.topology.ulysses == 1 else (q, k, v, out)
        return (result, by_token), exchanged, lse

    call = _sharded(program, rank, (seq, seq, seq, _data_specs(program, data)), ((seq, rows), seq, rows))
    result, exchanged, lse = call(q, k, v, data)
    return result, (*(exchanged or (q, k, v, result[0])), lse)


def backward(plan: Plan, saved, dout):
    """dq, dk, dv in token order and the problem's dtype, from what `forward` saved."""
    program, data = plan.program, plan.data
    signature = program.signature
    scheme = importlib.import_module(f"jax_impl.context_parallel.{signature.scheme}")
    local, seq, rows = program.local, program.spec(), program.spec(2)
    *exchanged, lse = saved

    def rank(exchanged, lse, dout, data):
        data = _rank_data(data)
        # Else the compiler keeps every block that the forward pass received, instead of moving it again.
        exchanged, dout = jax.lax.optimization_barrier((exchanged, dout))
        if local.groups > 1:
            return tuple(x.astype(signature.dtype) for x in head_groups.backward(local, exchanged, lse, dout, data))
        dout = to_heads(signature, dout, "q", data)
        dq, *sums = scheme.backward(local, (*exchanged, lse), dout, data)
        dq = to_tokens(signature, dq.astype(signature.dtype), "q", data)
        dk, dv = (to_tokens(signature, x, "kv", data).astype(signature.dtype) for x in sums)
        return dq, dk, dv

    call = _sharded(program, rank, (seq, rows, seq, _data_specs(program, data)), (seq, seq, seq))
    return call(tuple(exchanged), lse, dout, data)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(program: Program, q, k, v, data):
    return forward(Plan(program, data), q, k, v)[0]


def _attend_forward(program: Program, q, k, v, data):
    result, saved = forward(Plan(program, data), q, k, v)
    return result, (saved, data)


def _attend_backward(program: Program, residuals, cotangents):
    saved, data = residuals
    saved, dout = once_differentiable((saved, cotangents[0]))
    return *backward(Plan(program, data), saved, dout), None


_attend.defvjp(_attend_forward, _attend_backward)


def _sharded(program: Program, function, in_specs, out_specs):
    return jax.shard_map(function, mesh=program.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _data_specs(program: Program, data):
    by_rank = PartitionSpec(program.token_axes)
    return jax.tree.map(lambda _: by_rank, data)


def _rank_data(data):
    """A rank's own operands: the rank axis of the stacked ones is of length 1 here."""
    masks, seen = jax.tree.map(lambda x: x[0], (data.masks, data.seen))
    return data.__class__(**{**vars(data), "masks": masks, "seen": seen})
