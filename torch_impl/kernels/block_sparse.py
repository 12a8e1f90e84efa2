"""The host side of our Triton block-sparse kernels, shared by triton_vsa and fa2_sparse.

Forward and dq walk, per tile of queries, the listed key tiles; dk and dv walk, per tile of keys, the transposed
lists, for all heads of the group. All of it is deterministic.
"""

import dataclasses

import torch

from torch_impl.kernels import triton_support as support
from torch_impl.kernels.block_lists import ListWalk, key_walk, query_walk, tile_size
from torch_impl.kernels.walks import Launch
from workload.capability import Capability
from workload.problem import PASSES, AttentionProblem


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of the three passes; `pack` is the rows that the heads of a group may fill together."""

    forward: Launch
    query: Launch
    key: Launch
    pack: int = 128

    def within(self, block: int) -> "Launches":
        """The same with every tile cut to the largest power of two that divides the block."""
        cut = lambda t: dataclasses.replace(  # noqa: E731
            t, rows=tile_size(t.rows, block), cols=tile_size(t.cols, block)
        )
        return dataclasses.replace(self, forward=cut(self.forward), query=cut(self.query), key=cut(self.key))


@dataclasses.dataclass(frozen=True)
class BlockSparseOperands:
    """The walks of the three passes, and how many query heads of a group a program takes as one tile."""

    forward: ListWalk
    query: ListWalk
    key: ListWalk
    forward_pack: int
    query_pack: int


class UniformBlocks(Capability):
    """The base's checks, and that tiles of at least 16 divide the blocks."""

    def refuse(self, problem: AttentionProblem, passes=PASSES) -> str | None:
        """Why the kernel cannot take this problem, naming the argument; None where it can."""
        reason = super().refuse(problem, passes)
        if reason is None and problem.mask.block % 16:
            return f"does not take block size {problem.mask.block} (16 must divide it)"
        return reason


def heads_together(problem: AttentionProblem, rows: int, limit: int) -> int:
    """Query heads of one list that fill a tile of at most `limit` rows together: a power of two that divides them."""
    sharing = problem.group if problem.mask.heads < problem.q_heads else 1
    pack = 1
    while sharing % (2 * pack) == 0 and 2 * pack * rows <= limit:
        pack *= 2
    return pack


def prepare_blocks(name: str, problem: AttentionProblem, device, launches: Launches) -> BlockSparseOperands:
    """Tile lists of the three passes; those by key are transposed on the device.

    Raises: `Unsupported` where a row of head_dim is not whole 16-byte units.
    """
    support.require_head_dim(name, problem.head_dim, getattr(torch, problem.dtype))
    mask, cut = problem.mask, launches.within(problem.mask.block)
    forward, key = query_walk(mask, cut.forward, device), key_walk(mask, cut.key, device)
    same = (cut.query.rows, cut.query.cols) == (cut.forward.rows, cut.forward.cols)
    query = dataclasses.replace(forward, launch=cut.query) if same else query_walk(mask, cut.query, device)
    packs = (heads_together(problem, x.rows, launches.pack) for x in (cut.forward, cut.query))
    return BlockSparseOperands(forward, query, key, *packs)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out [B, q_len, q_heads, D] and lse [B, q_heads, q_len]; see WORKSPACE.md for the contract."""
    from torch_impl.kernels.block_sparse_triton import forward_kernel  # needs triton

    out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if not q.shape[1] or not k.shape[1]:
        return out.zero_(), lse.fill_(-torch.inf)
    if scale <= 0:  # the kernel takes a row's maximum before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    q, k, v = (support.computed(x) for x in (q, k, v))
    call = _Query(q, k, operands.forward, operands.forward_pack)
    forward_kernel[call.grid](
        call.rows(q), call.columns(k), call.columns(v), call.rows(out), lse, *call.sizes(), scale * support.LOG2E,
        **call.options())
    return out, lse


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; lse, out and delta may belong to a larger problem; see WORKSPACE.md for the contract."""
    from torch_impl.kernels.block_sparse_triton import query_gradient_kernel

    dq, dk, dv = (torch.empty(x.shape, dtype=grad_dtype or x.dtype, device=x.device) for x in (q, k, v))
    if not q.shape[1] or not k.shape[1]:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, dout = (support.computed(x) for x in (q, k, v, dout.to(q.dtype)))
    delta = (support.row_delta(out, dout) if delta is None else delta).contiguous()
    lse = lse.contiguous()
    call = _Query(q, k, operands.query, operands.query_pack)
    query_gradient_kernel[call.grid](
        call.rows(q), call.columns(k), call.columns(v), call.rows(dout), call.rows(dq), lse, delta, *call.sizes(),
        scale, scale * support.LOG2E, **call.options())
    _key_gradient(q, k, v, dout, dk, dv, lse, delta, operands.key, scale)
    return dq, dk, dv


class _Query:
    """What the launches of the two query-major passes have in common."""

    def __init__(self, q, k, walk: ListWalk, pack: int):
        (b, self.q_len, self.q_heads, d), (kv_len, kv_heads) = q.shape, k.shape[1:3]
        self.walk, self.pack, self.dim, self.group = walk, pack, support.padded_dim(d), self.q_heads // kv_heads
        groups = support.heads_per_section(b * kv_heads, 2 * kv_len * d * k.element_size())
        self.section = groups * self.group // pack
        self.precision = support.precision(q)
        self.grid = (walk.order.shape[1] * b * self.q_heads // pack,)

    def rows(self, x):
        """Descriptor of x by tiles of rows of `pack` heads."""
        return support.descriptor(x, self.walk.launch.rows, self.dim, self.pack)

    def columns(self, x):
        """Descriptor of x by tiles of columns."""
        return support.descriptor(x, self.walk.launch.cols, self.dim)

    def sizes(self) -> tuple:
        """The lists and sizes in the kernels' order."""
        return *self.walk.arguments(), self.q_len, self.q_heads, self.group, self.section

    def options(self) -> dict:
        """Compile-time arguments."""
        launch = self.walk.launch
        return {"PACK": self.pack, "ROWS": launch.rows, "N": launch.cols, "D": self.dim, "PRECISION": self.precision,
                **launch.options()}


def _key_gradient(q, k, v, dout, dk, dv, lse, delta, walk, scale):
    """Writes dk and dv, key tile by key tile."""
    from torch_impl.kernels.block_sparse_triton import key_gradient_kernel

    launch, dim = walk.launch, support.padded_dim(q.shape[3])
    (b, q_len, q_heads, d), kv_heads = q.shape, k.shape[2]
    rows, columns = ((lambda x, n=n: support.descriptor(x, n, dim)) for n in (launch.rows, launch.cols))
    group = q_heads // kv_heads
    section = support.heads_per_section(b * kv_heads, 2 * group * q_len * d * q.element_size())
    key_gradient_kernel[(walk.order.shape[1] * b * kv_heads,)](
        columns(q), rows(k), rows(v), columns(dout), rows(dk), rows(dv), lse, delta, *walk.arguments(), q_len, q_heads,
        group, section, scale, scale * support.LOG2E, M=launch.cols, N=launch.rows, D=dim,
        PRECISION=support.precision(q), **launch.options())
