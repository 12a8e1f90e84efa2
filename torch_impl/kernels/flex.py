"""flex: torch's FlexAttention under any predicate, with a BlockMask made from tile runs or a strip of tiles at a time.

A static mask is a predicate on its row intervals, whose tiles are known from the runs; a `workload.predicate.Predicate`
of the caller's is evaluated, O(kv_len) memory.

The public function hides the backward's own inputs, so the two operators behind it are traced and handed to
Inductor here, once per shape: nothing can recompile behind our back or fall back to eager, and the backward takes
the out and lse of a larger problem. A CPU has neither a compiled lse nor a backward: there the operator's eager form
serves the forward pass alone. Dong et al., Flex Attention, 2024.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from torch_impl.kernels.base import Kernel
from torch_impl.kernels.naive import unseen
from torch_impl.kernels.triton_support import LOG2E
from torch_impl.kernels.walks import ragged_runs
from workload.capability import ALL_STATIC, Capability
from workload.errors import Unsupported
from workload.masks import IntervalMask, visible
from workload.predicate import Predicate, check_seen, given, heads_of
from workload.problem import PASSES, AttentionProblem

NAME = "flex"
BLOCK = 128
SPAN = 256  # blocks of keys in which a caller's predicate is evaluated at a time
# TRITON: left to itself Inductor takes its decoding template for fewer than 128 rows, which found no launch for 75.
OPTIONS = {"BACKEND": "TRITON", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
           "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}


def _unchanged(score, b, h, i, j):
    """The score modification: none."""
    del b, h, i, j
    return score


@dataclasses.dataclass(frozen=True)
class FlexOperands:
    """A mask as FlexAttention's operators take it.

    Attributes:
      bounds: what the predicate reads: 2R int32 [q_len], starts[0], ends[0], starts[1], ..., of intervals.
      lists: eight int32 tensors: counts [1, heads, blocks] and indices [1, heads, blocks, slots] of partial key
        blocks, full key blocks, partial query blocks and full query blocks; heads is 1 or q_heads.
      seen: the predicate, (b, h, i, j, *bounds) -> visible; hashable.
      score: (score, b, h, i, j) -> score.
      block: size of the blocks, of queries and keys alike.
      tile: side of the forward kernel's tiles, None for its own choice.
      kernel: whose operands these are, for messages.
    """

    bounds: tuple[torch.Tensor, ...]
    lists: tuple[torch.Tensor, ...]
    seen: Callable
    score: Callable = _unchanged
    block: int = BLOCK
    tile: int | None = None
    kernel: str = NAME

    @property
    def form(self) -> "Form":
        """What is compiled in."""
        return Form(len(self.bounds), self.seen, self.score, self.block, self.tile)


@dataclasses.dataclass(frozen=True)
class Form:
    """The part of the operands that a compiled program is bound to: number of bounds, functions, block, tile."""

    bounds: int
    seen: Callable
    score: Callable
    block: int
    tile: int | None

    def mask(self, q_len: int, kv_len: int, lists) -> tuple:
        """The operators' block mask."""
        return (q_len, kv_len, *lists, self.block, self.block, self.seen)

    def options(self) -> dict:
        """The operators' kernel options."""
        return OPTIONS | (dict.fromkeys(("fwd_BLOCK_M", "fwd_BLOCK_N"), self.tile) if self.tile else {})


def block_lists(begin: np.ndarray, end: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(counts [rows], indices [rows, width]) of the tiles in each row's runs [begin, end), ascending.

    >>> block_lists(np.array([[0, 3]]), np.array([[1, 5]]), 6)[1].tolist()
    [[0, 3, 4, 0, 0, 0]]
    """
    length = (end - begin).ravel()
    row = np.repeat(np.repeat(np.arange(len(begin)), begin.shape[1]), length)
    tile = np.repeat(begin.ravel() - (np.cumsum(length) - length), length) + np.arange(length.sum())
    counts = np.bincount(row, minlength=len(begin))
    slot = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    indices = np.zeros((len(begin), width), np.int32)
    indices[row, slot] = tile
    return counts.astype(np.int32), indices


def lists_of(mask: IntervalMask, device) -> list[torch.Tensor]:
    """Counts and indices of the partial, then of the full column blocks of each row block, int32 on the device."""
    runs = ragged_runs(mask, BLOCK, BLOCK)
    arrays = (*block_lists(runs.partial_begin, runs.partial_end, runs.k_tiles),
              *block_lists(runs.full_begin, runs.full_end, runs.k_tiles))
    return [torch.as_tensor(x, device=device)[None, None] for x in arrays]


@dataclasses.dataclass(frozen=True)
class Given:
    """A caller's mask_mod; the first `queries` of the bounds hold a value for each query, the others for each key."""

    mask_mod: Callable
    queries: int

    def __call__(self, b, h, i, j, *bounds):
        """Whether query i of head h sees key j."""
        of_queries, of_keys = bounds[: self.queries], bounds[self.queries :]
        return self.mask_mod(b, h, i, j, tuple(x[i] for x in of_queries), tuple(x[j] for x in of_keys))


def classes_of(seen: Callable, bounds, lengths: tuple[int, int], heads: Sequence[tuple], device=None) -> np.ndarray:
    """int8 [query blocks, key blocks]: 0 empty, 1 partial, 2 full, over all (batch, q_head) in `heads`.

    Blocks that a length cuts are never full. Evaluated `SPAN` blocks at a time.
    """
    q_len, kv_len = lengths
    found = np.zeros((-(-q_len // BLOCK), -(-kv_len // BLOCK)), np.int8)
    for row in range(found.shape[0]):
        i = torch.arange(row * BLOCK, min((row + 1) * BLOCK, q_len), device=device)[:, None]
        for first in range(0, found.shape[1], SPAN):
            j = torch.arange(first * BLOCK, min((first + SPAN) * BLOCK, kv_len), device=device)[None]
            cells = torch.zeros(-(-j.shape[1] // BLOCK) * BLOCK, dtype=torch.int64, device=device)
            for b, h in heads:
                here = seen(b, h, i, j, *bounds)
                check_seen(here)
                cells[: j.shape[1]] += torch.as_tensor(here, device=device).broadcast_to(len(i), j.shape[1]).sum(dim=0)
            total = cells.view(-1, BLOCK).sum(dim=1)
            whole = total == len(heads) * BLOCK * BLOCK
            found[row, first : first + SPAN] = ((total > 0).to(torch.int8) + whole).cpu().numpy()
    return found


def _chosen(tiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(counts [rows], indices [rows, columns]) of the tiles that are true in each row, ascending, 0 behind them."""
    counts = tiles.sum(axis=1, dtype=np.int32)
    indices = np.argsort(~tiles, axis=1, kind="stable").astype(np.int32)
    return counts, np.where(np.arange(tiles.shape[1]) < counts[:, None], indices, 0)


def check_constant(score_mod: Callable, device) -> None:
    """ValueError where a score_mod reads a tensor that asks for a gradient: it gets none."""
    score, index = torch.zeros((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    with torch.enable_grad():
        if getattr(score_mod(score, *[index] * 4), "requires_grad", False):
            raise ValueError("score_mod: reads a tensor that requires a gradient, and gets none; detach it")


def prepare(problem: AttentionProblem, device=None, *, predicate: Predicate | None = None,
            per_head: bool = False) -> FlexOperands:
    """What the predicate reads and the block lists on the device: O(blocks^2) memory, as the operator wants it.

    Args:
      predicate: replaces the mask where it has a mask_mod; its score_mod applies in any case. TypeError or ValueError
        as of `workload.predicate.given` and `check_constant`.
      per_head: whether the mask_mod reads batch or q_head (ValueError where it does without); a tile is visited if any
        of them sees a cell of it.
    """
    used, mask = given(predicate, problem), problem.mask
    score = used.score_mod or _unchanged
    if used.score_mod:
        check_constant(score, device)
    if used.mask_mod is None:
        rows = [x[r] for r in range(mask.intervals) for x in (mask.starts, mask.ends)]
        bounds = tuple(torch.as_tensor(np.ascontiguousarray(x), device=device) for x in rows)
        lists = (*lists_of(mask, device), *lists_of(mask.transpose(), device))
        return FlexOperands(bounds, lists, _seen, score)
    arrays = (*used.q_arrays, *used.kv_arrays)
    bounds = tuple(torch.as_tensor(np.ascontiguousarray(x, np.int32), device=device) for x in arrays)
    seen = Given(used.mask_mod, len(used.q_arrays))
    heads = [tuple(torch.tensor(x, device=device) for x in pair) if per_head else pair
             for pair in heads_of(problem, per_head)]  # tensors, as the operator gives them
    classes = classes_of(seen, bounds, (problem.q_len, problem.kv_len), heads, device)
    found = (x for tiles in (classes, classes.T) for which in (1, 2) for x in _chosen(tiles == which))
    return FlexOperands(bounds, tuple(torch.as_tensor(x, device=device)[None, None] for x in found), seen, score)


def _seen(b, h, i, j, *bounds):
    """The predicate: row i sees key j."""
    del b, h
    return visible(bounds[0::2], bounds[1::2], i, j)


def _traced_forward(scale, form, q, k, v, *tensors):
    """out and base-2 lse; tensors are the bounds and the eight lists."""
    from torch._higher_order_ops.flex_attention import flex_attention

    bounds, lists = tensors[: form.bounds], tensors[form.bounds :]
    blocks = form.mask(q.shape[2], k.shape[2], lists)
    return flex_attention(q, k, v, form.score, blocks, scale, form.options(), (), bounds)[:2]


def _traced_backward(scale, form, q, k, v, out, lse, dout, *tensors):
    """dq, dk, dv; lse is base 2."""
    from torch._higher_order_ops.flex_attention import create_fw_bw_graph, flex_attention_backward

    bounds, lists = tensors[: form.bounds], tensors[form.bounds :]
    example = (q.new_zeros((), requires_grad=True), *(q.new_zeros((), dtype=torch.int) for _ in range(4)))
    with torch.enable_grad():  # without, a score_mod's gradient comes out as None
        graphs = create_fw_bw_graph(form.score, example, ())
    blocks = form.mask(q.shape[2], k.shape[2], lists)
    options = form.options()
    return flex_attention_backward(q, k, v, out, lse, dout, None, *graphs, blocks, scale, options, (), bounds)[:3]


@functools.cache
def _compiled(run, scale, form, signature):
    """Inductor's code for a traced function at a signature of (shape, stride, dtype, device) per tensor."""
    from torch import _inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    example = [torch.empty_strided(*layout, dtype=dtype, device=device) for *layout, dtype, device in signature]
    with torch.no_grad():
        graph = make_fx(functools.partial(run, scale, form), tracing_mode="fake")(*example)
        return _inductor.compile(graph, example)


def _run(traced, scale, operands, *tensors):
    """Runs a traced function through Inductor."""
    tensors = (*tensors, *operands.bounds, *operands.lists)
    return _compiled(traced, scale, operands.form, _signature(tensors, tensors[0].device))(*tensors)


def _signature(tensors, device) -> tuple:
    """What a program is compiled for: shape, stride and dtype of each tensor, and the device."""
    return tuple((tuple(x.shape), x.stride(), x.dtype, device) for x in tensors)


def compile_ahead(problem: AttentionProblem, device: torch.device, passes=PASSES) -> None:
    """Compiles the programs of a problem's passes for a GPU, named with its index; launches nothing."""
    compile_operands(prepare(problem), problem, device, passes)


def compile_operands(operands: FlexOperands, problem: AttentionProblem, device: torch.device, passes) -> None:
    """As `compile_ahead`, for operands on the host: what counts is their shapes."""
    if not problem.q_len or not problem.kv_len:
        return
    dtype = getattr(torch, problem.dtype)
    q, k, v = (torch.empty(s, dtype=dtype, device="meta").transpose(1, 2)
               for s in (problem.q_shape, problem.kv_shape, problem.kv_shape))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    tensors = {"forward": (q, k, v), "backward": (q, k, v, q, lse, q)}
    for which in passes:
        traced = {"forward": _traced_forward, "backward": _traced_backward}[which]
        signature = _signature((*tensors[which], *operands.bounds, *operands.lists), device)
        _compiled(traced, problem.scale, operands.form, signature)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().transpose(1, 2)


def forward(q, k, v, operands, scale, *, out_dtype=None):
    """out and lse; see WORKSPACE.md for the contract. Raises `Unsupported` on an out_dtype other than q's."""
    if out_dtype not in (None, q.dtype):
        raise Unsupported(f"torch kernel {operands.kernel}", f"out_dtype {out_dtype}: results are {q.dtype}")
    if not q.shape[1] or not k.shape[1]:
        return unseen(q)
    tensors = [_heads_first(x) for x in (q, k, v)]
    if q.is_cuda:
        out, lse = _run(_traced_forward, scale, operands, *tensors)
    else:
        out, lse = _traced_forward(scale, operands.form, *tensors, *operands.bounds, *operands.lists)
    return out.transpose(1, 2), lse.float() / LOG2E


def backward(q, k, v, out, lse, dout, operands, scale, *, grad_dtype=None, delta=None):
    """dq, dk, dv; out and lse may belong to a larger problem, delta is recomputed from out and dout.

    Raises `Unsupported` on a grad_dtype other than q's, on blocks that `BLOCK` does not divide, and on a CPU.
    """
    del delta  # rowsum(out * dout) by contract: the operator makes it from the two
    if grad_dtype not in (None, q.dtype):
        raise Unsupported(f"torch kernel {operands.kernel}", f"grad_dtype {grad_dtype}: results are {q.dtype}")
    if operands.block % BLOCK:
        reason = f"does not take pass backward at block size {operands.block} ({BLOCK} must divide it)"
        raise Unsupported(f"torch kernel {operands.kernel}", reason)
    if not q.is_cuda:
        raise Unsupported(f"torch kernel {operands.kernel}", "backward on a CPU: FlexAttention has none")
    if not q.shape[1] or not k.shape[1]:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    q, k, v, out, dout = (_heads_first(x) for x in (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
    grads = _run(_traced_backward, scale, operands, q, k, v, out, (lse * LOG2E).contiguous(), dout)
    return tuple(x.transpose(1, 2) for x in grads)


ON_GPU = torch.cuda.is_available()
KERNEL = Kernel(
    NAME,
    Capability(
        ALL_STATIC,
        passes=PASSES if ON_GPU else ("forward",),
        source=f"torch {torch.__version__} FlexAttention: {'Inductor, Triton template' if ON_GPU else 'eager'}",
    ),
    prepare,
    forward,
    backward,
    compile_ahead=compile_ahead,
)
