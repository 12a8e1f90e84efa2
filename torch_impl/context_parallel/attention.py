"""The public context-parallel call of the PyTorch stack; its twin is jax_impl/context_parallel/attention.py."""

import importlib

import torch

from torch_impl.autocast import without_autocast
from torch_impl.context_parallel import head_groups
from torch_impl.context_parallel.mesh import Mesh
from torch_impl.context_parallel.plan import Plan, make_plan
from torch_impl.context_parallel.ulysses import to_heads, to_tokens
from torch_impl.once import once_differentiable
from workload.problem import AttentionProblem, check_kind, check_operands, check_tokens


@torch.compiler.disable
def attention(q, k, v, mask, *, scheme: str, mesh: Mesh, scale: float | None = None, **options):
    """Attention over tokens that are split among the ranks of a mesh; differentiable by autograd.

    Args:
      q: [batch, q_length, q_heads, head_dim]; k, v: [batch, kv_length, kv_heads, head_dim]: this rank's tokens as
        `shard` gives them, padding included.
      mask: the global `IntervalMask` or `BlockMask`, the same on every rank.
      scheme, mesh, options: see `make_plan`. Making a plan costs host time and depends on the mask alone: where several
        layers share a mask, make it once and call `attend`.
      scale: logit scale, head_dim ** -0.5 by default.

    Returns: out as q; with `with_lse`, (out, lse float32 [batch, q_heads, q_length]). Padding rows are (0, -inf).
    Gradients flow through out. `torch.compile` leaves the call as it is.

    Raises: `Unsupported` where scheme or kernel cannot take the problem, ValueError on shapes that disagree.
    """
    check_operands((torch.Tensor,), q=q, k=k, v=v)
    dtype = str(q.dtype).removeprefix("torch.")
    problem = AttentionProblem(mask, q.shape[0], q.shape[2], k.shape[2], q.shape[3], dtype, scale)
    return attend(q, k, v, make_plan(problem, scheme=scheme, mesh=mesh, **options))


@torch.compiler.disable
def attend(q, k, v, plan: Plan):
    """`attention` under a plan; all ranks of its mesh call it."""
    check_kind("plan", plan, Plan)
    _check(q, k, v, plan)
    out, lse = _Attend.apply(plan, q, k, v)
    return (out, lse) if plan.local.signature.with_lse else out


@torch.compiler.disable
def shard(x: torch.Tensor, plan: Plan, side: str = "q") -> torch.Tensor:
    """[batch, total, ...] in token order, the same on every rank, to this rank's [batch, length, ...]; padding is zero.

    Args:
      side: "q" or "kv": whose sharding (they differ where q_len != kv_len).
    """
    at, total = positions(plan, side), _total(plan, side)
    check_tokens((torch.Tensor,), x, total, "the plan's are")
    if not x.shape[1]:  # of no tokens there is padding alone, made of one that no rank holds
        x = x.new_zeros((len(x), 1, *x.shape[2:]))
    held = (at >= 0).reshape(-1, *[1] * (x.ndim - 2)).to(x.device)
    return x.index_select(1, at.clamp(min=0).to(x.device)).masked_fill(~held, 0)


@torch.compiler.disable
def unshard(x: torch.Tensor, plan: Plan, side: str = "q") -> torch.Tensor:
    """The inverse of `shard`: every rank's [batch, length, ...] to [batch, total, ...] on every rank; no gradient."""
    check_tokens((torch.Tensor,), x, len(positions(plan, side)), "the plan's rank holds")
    with torch.no_grad():
        world = plan.local.mesh.world
        at = world.all_gather(positions(plan, side), "unshard: positions").wait().flatten()
        got = world.all_gather(x.contiguous(), "unshard").wait().transpose(0, 1).flatten(1, 2)
        order = torch.argsort(torch.where(at < 0, at.numel(), at), stable=True)[: _total(plan, side)]
        return got.index_select(1, order)


def positions(plan: Plan, side: str = "q") -> torch.Tensor:
    """Global positions of this rank's tokens, int64 [length], -1 for padding.

    What rotary embeddings are to be computed from: a rank's tokens do not start at 0.
    """
    check_kind("plan", plan, Plan)
    if side not in ("q", "kv"):
        raise ValueError(f"side: {side!r} is neither q nor kv")
    return plan.data.q_positions if side == "q" else plan.data.kv_positions


@torch.compiler.disable
def token_mean(values: torch.Tensor, plan: Plan, side: str = "q") -> torch.Tensor:
    """The mean over the real tokens of the mesh's ranks, differentiable: a loss must not be averaged per rank.

    Ranks may hold unequal numbers of tokens, and padding counts for nothing. Each rank's gradient is its own share of
    the global mean's: summing parameter gradients over the ranks (not averaging) gives the gradient of the mean.

    Args:
      values: [batch, length], a loss per token.
    """
    held = positions(plan, side) >= 0
    check_kind("values", values, torch.Tensor)
    if tuple(values.shape[1:]) != tuple(held.shape):
        raise ValueError(f"values: shape {tuple(values.shape)} is not [batch, {len(held)}]")
    mine = torch.where(held, values.float(), 0.0).sum()
    parts = torch.stack([mine.detach(), held.sum() * float(len(values))])
    total, count = plan.local.mesh.world.all_gather(parts, "token_mean").wait().sum(dim=0)
    return mine / count + (total - mine.detach()) / count  # the value of the whole, the gradient of this rank's part


class _Attend(torch.autograd.Function):
    @staticmethod
    @without_autocast
    def forward(ctx, plan, q, k, v):
        (out, lse), saved = forward(plan, q, k, v)
        ctx.plan = plan
        ctx.save_for_backward(*saved)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx, dout, _):
        return None, *backward(ctx.plan, ctx.saved_tensors, dout)


def forward(plan: Plan, q, k, v):
    """((out, lse or None) in token order, what `backward` needs: the exchanged q, k, v, out and their lse)."""
    local, data = plan.local, plan.data
    if local.groups > 1:
        return head_groups.forward(plan, q, k, v)
    coming = [to_heads(local, x.contiguous(), name, data) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    q, k, v = (wait() for wait in coming)
    out, lse = _scheme(local).forward(local, q, k, v, data)
    result = to_tokens(local, out, "out", data)
    by_token = None
    if local.signature.with_lse:
        by_token = to_tokens(local, lse.transpose(1, 2)[..., None].contiguous(), "lse", data)()
        by_token = by_token[..., 0].transpose(1, 2).contiguous()
    return (result(), by_token), (q, k, v, out, lse)


def backward(plan: Plan, saved, dout):
    """dq, dk, dv in token order and the problem's dtype, from what `forward` saved."""
    if plan.local.groups > 1:
        return head_groups.backward(plan, saved, dout)
    local, data, dtype = plan.local, plan.data, saved[0].dtype
    dout = to_heads(local, dout.contiguous(), "dout", data)()
    coming = {name: to_tokens(local, x.to(dtype) if name == "dq" else x, name, data)
              for name, x in _scheme(local).backward(local, saved, dout, data)}
    return tuple(coming[name]().to(dtype) for name in ("dq", "dk", "dv"))


def _scheme(local):
    return importlib.import_module(f"torch_impl.context_parallel.{local.signature.scheme}")


def _total(plan: Plan, side: str) -> int:
    signature = plan.local.signature
    return signature.q_total if side == "q" else signature.kv_total


def _check(q, k, v, plan: Plan) -> None:
    check_operands((torch.Tensor,), q=q, k=k, v=v)
    signature, heads = plan.local.signature, plan.local.signature.heads
    rows = (signature.batch, signature.q_length, heads.q_heads, signature.head_dim)
    keys = (signature.batch, signature.kv_length, heads.kv_heads, signature.head_dim)
    for name, x, want in (("q", q, rows), ("k", k, keys), ("v", v, keys)):
        if tuple(x.shape) != want:
            raise ValueError(f"{name}: shape {tuple(x.shape)}, the plan's is {want}")
        if str(x.dtype) != f"torch.{signature.dtype}":
            raise ValueError(f"{name}: dtype {x.dtype}, the plan's is {signature.dtype}")
