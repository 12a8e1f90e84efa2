"""The suite that every kernel of either stack inherits by being in its table.

A case is an attention problem; a kernel is judged on out, lse, dq, dk and dv separately against the
float64 oracle, each with a budget that a naive run of the same stack, in the same dtype, on the same
data sets. A kernel only subtracts: what its capability or this machine does not give is skipped with
the reason that `Kernel.refuse` gives.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from parity.compare import RESULTS, relative_error
from workload import masks
from workload.block_masks import from_bitmap, uniform_block, variable_block
from workload.capability import Capability
from workload.oracle import attention_oracle
from workload.problem import AttentionProblem

BUDGET = 4.0  # times what naive loses; flash kernels round P and dS to the operands' dtype before a product
FLOOR = 4e-7  # a few float32 roundings, for the results on which naive happens to lose nothing

Q_LEN, KV_LEN, BATCH, Q_HEADS, KV_HEADS = 147, 203, 2, 3, 1  # pairwise distinct; two ragged tiles of 128 each way
LENGTHS = (61, 0, 1, 90, 51)  # an empty document, one of one token, and the borders on no tile's edge


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem of the suite.

    Attributes:
      name: shown by pytest.
      mask: (q_len, kv_len, block size) -> mask.
      quick: whether a kernel that runs in an interpreter takes it in the quick suite.
      dtype: "float32" or "bfloat16"; a kernel that lacks it is given the first dtype it takes.
      others: sizes and scale of the problem where they differ from the suite's; block is of uniform masks,
        mask_heads of dynamic ones.
    """

    name: str
    mask: Callable[[int, int, int], object]
    quick: bool = False
    dtype: str = "float32"
    q_len: int = Q_LEN
    kv_len: int = KV_LEN
    batch: int = BATCH
    q_heads: int = Q_HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = 64
    scale: float | None = None
    block: int = 64
    mask_heads: int = 1

    def within(self, takes: Capability) -> "Case":
        """The case moved inside what a capability declares: dtype, head_dim, heads, squareness, block size."""
        alone = self.q_heads if self.mask_heads == 1 else self.mask_heads
        return dataclasses.replace(
            self,
            dtype=self.dtype if self.dtype in takes.dtypes else takes.dtypes[0],
            head_dim=self.head_dim if self.head_dim in (takes.head_dims or (self.head_dim,)) else takes.head_dims[0],
            q_heads=self.q_heads if takes.grouped_heads else alone,
            kv_heads=self.kv_heads if takes.grouped_heads else alone,
            q_len=self.kv_len if takes.square_only else self.q_len,
            block=(takes.block_sizes or (self.block,))[0],
        )

    def widened(self, takes: Capability) -> "Case":
        """The case at twice its block size where a capability, which wants a multiple of its tiles, takes only that."""
        wide = dataclasses.replace(self, block=2 * self.block)
        refuse = functools.partial(takes.refuse, passes=passes_of(takes))
        return wide if refuse(self.problem) and not refuse(wide.problem) else self

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        """The attention problem of the case."""
        mask = self.mask(self.q_len, self.kv_len, self.block)
        return AttentionProblem(
            mask, self.batch, self.q_heads, self.kv_heads, self.head_dim, self.dtype, self.scale
        )


def scattered(q_len: int, kv_len: int, intervals: int = 2, seed: int = 11) -> masks.IntervalMask:
    """Random intervals for each row, a third of them empty: no named pattern, and whole rows see nothing."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, kv_len, (intervals, q_len))
    ends = np.where(rng.random(starts.shape) < 1 / 3, starts, rng.integers(starts, kv_len + 1))
    return masks.from_intervals(starts, ends, kv_len)


def tail(q_len: int, kv_len: int, lengths: Sequence[int]) -> masks.IntervalMask:
    """Causal documents on a square, and behind them tokens that see nothing and that nothing sees."""
    used = sum(lengths)
    inside = masks.causal_document(used, used, lengths)
    pad = ((0, 0), (0, q_len - used))
    return masks.from_intervals(np.pad(inside.starts, pad), np.pad(inside.ends, pad), kv_len)


def _static(name: str, *args) -> Callable:
    return lambda q_len, kv_len, _: masks.STATIC_MASKS[name](q_len, kv_len, *args)


SMALL = {"quick": True, "q_len": 75, "kv_len": 139, "batch": 2, "q_heads": 2, "kv_heads": 1}

CASES = (
    Case("small_documents", _static("causal_document", (0, 61, 1, 77)), **SMALL),
    Case("small_two_intervals", _static("global_sliding_window", 70, 19), **SMALL),
    Case("small_empty_rows", _static("causal"), **SMALL | {"q_len": 139, "kv_len": 75}),
    # A12: 16 tokens, documents of 5 and 7; the tail belongs to none, neither as rows nor as keys.
    Case("small_tail", lambda q, k, _: tail(q, k, (5, 7)), **SMALL | {"q_len": 16, "kv_len": 16}),
    # D17: a kv head's gradients are sums over its group, and their memory is fresh. Heads of 128 have their own tiles.
    Case("small_group_of_four", _static("full_sliding_window", 37), **SMALL | {"q_heads": 4, "head_dim": 128}),
    Case("small_drawn_blocks", lambda q, k, _: variable_block(q, k, 2, 30, 7, 0.6, causal=True, seed=7), **SMALL),
    # A1: the first rows of the first block see no key, the others do.
    Case("small_blocks", lambda q, k, b: uniform_block(q, k, 1, b, 0.7, causal=True, seed=2),
         **SMALL | {"q_len": 161, "kv_len": 139, "head_dim": 128}),
    Case("full", _static("full")),
    Case("causal", _static("causal")),
    Case("full_document", _static("full_document", LENGTHS)),
    Case("causal_document", _static("causal_document", LENGTHS)),
    Case("full_sliding_window", _static("full_sliding_window", 37)),
    Case("causal_sliding_window", _static("causal_sliding_window", 37)),
    Case("shared_question", _static("shared_question", [(40, 31, 23), (50, 0, 59)])),
    Case("global_sliding_window", _static("global_sliding_window", 70, 19)),
    Case("causal_blockwise", _static("causal_blockwise", LENGTHS)),
    Case("prefix_lm_causal", _static("prefix_lm_causal", 93)),
    Case("prefix_lm_document", _static("prefix_lm_document", LENGTHS, (20, 0, 1, 90, 7))),
    Case("block_causal_document", _static("block_causal_document", LENGTHS, 24)),
    Case("scattered", lambda q, k, _: scattered(q, k)),
    Case("uniform_block", lambda q, k, b: uniform_block(q, k, 1, b, 0.5, seed=1)),
    Case("uniform_block_causal", lambda q, k, b: uniform_block(q, k, 3, b, 0.7, causal=True, seed=2),
         q_heads=6, kv_heads=3, batch=1, mask_heads=3, head_dim=128),
    Case("uniform_block_top_p", lambda q, k, b: uniform_block(q, k, 1, b, top_p=0.8, selection="importance", seed=3)),
    Case("variable_block", lambda q, k, b: variable_block(q, k, 3, 40, 9, 0.5, seed=4), q_heads=6, kv_heads=3,
         batch=1, mask_heads=3),
    Case("variable_block_causal", lambda q, k, b: variable_block(q, k, 4, 40, 9, 0.6, causal=True, seed=5),
         q_heads=4, kv_heads=2, batch=1, mask_heads=4, head_dim=128),
    Case("rows_before_the_first_key", _static("causal"), q_len=203, kv_len=147),
    Case("scale_and_padded_head_dim", _static("causal"), head_dim=80, scale=0.37, q_heads=2, kv_heads=2, batch=1),
    # D16, E10: lengths that are no multiple of anything, both passes.
    Case("one_token", _static("causal"), q_len=1, kv_len=1),
    Case("one_past_a_tile", _static("causal"), q_len=65, kv_len=129),
    Case("lengths_127_193", _static("causal_sliding_window", 90), q_len=127, kv_len=193),
    Case("lengths_128_200", _static("full"), q_len=128, kv_len=200),
    Case("lengths_193_65", _static("full"), q_len=193, kv_len=65),
    Case("half_precision", _static("causal_document", LENGTHS), dtype="bfloat16"),
)


def inputs(problem: AttentionProblem, seed: int = 0) -> list[np.ndarray]:
    """q, k, v, dout, float32 and standard normal; the stack rounds them to the problem's dtype."""
    rng = np.random.default_rng(seed)
    shapes = (problem.q_shape, problem.kv_shape, problem.kv_shape, problem.q_shape)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@functools.lru_cache(maxsize=64)
def _reference(run: Callable, case: Case):
    """The oracle's results on the inputs as the stack rounds them, and the budget of each."""
    problem = case.problem
    rounded, naive = run("naive", problem, inputs(problem))
    want = attention_oracle(*rounded[:3], problem.mask, problem.scale, rounded[3])
    budget = {name: BUDGET * relative_error(naive[name], getattr(want, name)) + FLOOR for name in RESULTS}
    if problem.q_len == problem.kv_len == 1:  # dq and dk are 0, but for roundings of the products that cancel in them
        q, k, v, dout = (np.linalg.norm(x, axis=3).max() for x in rounded)
        want = dataclasses.replace(want, dq=np.zeros_like(want.dq), dk=np.zeros_like(want.dk))
        budget |= dict.fromkeys(("dq", "dk"), FLOOR * problem.scale * dout * v * max(q, k))
    return want, budget


def untouched(problem: AttentionProblem) -> tuple[np.ndarray, np.ndarray]:
    """Rows that see no key under any head's mask, and keys that no row sees, as indices."""
    dense = np.any([problem.mask.dense_rows(0, problem.q_len, head) for head in range(problem.mask.heads)], axis=0)
    return np.flatnonzero(~dense.any(axis=1)), np.flatnonzero(~dense.any(axis=0))


def check(run: Callable, case: Case, kernel: str) -> None:
    """Runs a kernel and judges each of its results on its own (D1), by a budget from data (C2).

    What no row sees and what sees no key has gradients that are 0 exactly, whatever lay in memory (A12).

    Args:
      run: (kernel name, problem, arrays) -> (the arrays as the stack rounds them, results by name), float64 NumPy.
      case: already within the kernel's capability.
    """
    want, budget = _reference(run, case)
    got = run(kernel, case.problem, inputs(case.problem))[1]
    wrong = []
    for name, value in got.items():
        error = relative_error(value, getattr(want, name))
        if not error <= budget[name]:
            wrong.append(f"{name}: error {error:.3g} > {budget[name]:.3g}")
    rows, keys = untouched(case.problem)
    for name, places in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        if name in got and got[name][:, places].any():
            wrong.append(f"{name}: not 0 where the mask shows nothing")
    assert not wrong, f"{kernel} on {case.name}: " + "; ".join(wrong)


def check_rows_without_keys(run: Callable, kernel: str, takes: Capability) -> None:
    """A6: emptying some rows leaves out, lse and dq of the others bit for bit as they were."""
    results = []
    emptied = np.zeros(SMALL["q_len"], bool)
    emptied[[3, 4, 5, 40, 74]] = True
    for rows in (emptied, np.zeros_like(emptied)):
        mask = lambda q, k, _, rows=rows: masks.from_intervals([np.zeros(q)], [np.where(rows, 0, k)], k)  # noqa: E731
        results.append(run(kernel, Case("rows", mask, **SMALL).within(takes).problem, inputs(CASES[0].problem))[1])
    some, all_rows = results
    for name in ("out", "dq"):
        np.testing.assert_array_equal(some[name][:, ~emptied], all_rows[name][:, ~emptied])
        assert not some[name][:, emptied].any()
    np.testing.assert_array_equal(some["lse"][..., ~emptied], all_rows["lse"][..., ~emptied])
    assert np.isneginf(some["lse"][..., emptied]).all()


def passes_of(takes: Capability) -> tuple[str, ...]:
    """The passes to ask for: backward only where the kernel declares one."""
    return tuple(p for p in ("forward", "backward") if p in takes.passes)


def _toy(name: str, mask: Callable, logits=0.0, *, v=None, right: Callable, scale: float = 1.0, **sizes) -> "Toy":
    q_len, kv_len = sizes.pop("q_len", 8), sizes.pop("kv_len", 8)
    case = Case(name, mask, q_len=q_len, kv_len=kv_len, scale=scale, **{"q_heads": 2, "kv_heads": 1} | sizes)
    return Toy(case, logits, v, right)


def check_refuses_no_problem(kernel) -> None:
    """What is no problem is refused by name; once it was an AttributeError of something inside."""
    for ask in (kernel.refuse, kernel.require, kernel.prepare):
        for other, said in ((None, "NoneType"), (masks.full(2, 2), "IntervalMask")):
            with pytest.raises(TypeError, match=f"^problem: .*{said} is no .*AttentionProblem"):
                ask(other)


@dataclasses.dataclass(frozen=True, eq=False)
class Toy:
    """A case with a right value known without any oracle.

    q is 1 in its first component, k the logits there, v[j] is j (or given) in all components, so that the
    logit of key j is scale * logits[j]. `right` maps nothing to (out [q_len], lse [q_len]).
    """

    case: Case
    logits: object
    v: object
    right: Callable

    def within(self, takes: Capability) -> "Toy":
        """The toy with its case moved inside what a capability declares, as of `Case.within`."""
        return dataclasses.replace(self, case=self.case.within(takes))

    def check(self, run: Callable, kernel: str) -> None:
        """Runs the kernel and compares out and lse with the right values, and every result with NaN."""
        case = self.case
        q, k, v, dout = (np.zeros_like(x) for x in inputs(case.problem))
        q[..., 0], dout[:] = 1, 1
        k[..., 0] = np.broadcast_to(self.logits, (case.kv_len,))[:, None]
        v[:] = np.broadcast_to(np.arange(case.kv_len) if self.v is None else self.v, (case.kv_len,))[:, None, None]
        got = run(kernel, case.problem, [q, k, v, dout])[1]
        out, lse = (np.asarray(x, float) for x in self.right())
        loose = 2e-5 if case.dtype == "float32" else 2e-2
        np.testing.assert_allclose(got["out"], np.broadcast_to(out[:, None, None], got["out"].shape), loose, loose)
        np.testing.assert_allclose(got["lse"], np.broadcast_to(lse, got["lse"].shape), loose, loose)
        empty = np.isneginf(lse)
        assert not any(np.isnan(x).any() for x in got.values())
        assert not got["out"][:, empty].any() and ("dq" not in got or not got["dq"][:, empty].any())


LN3 = float(np.log(3))
TOYS = (
    # B1, D18: lse is the natural logarithm of the number of visible keys; row 3 -> 1.5
    _toy("causal_means", _static("causal"), right=lambda: (np.arange(8) / 2, np.log(np.arange(1, 9)))),
    # B3: logits of 3 on 4 keys -> 4.3863
    _toy("lse_of_equal_logits", _static("full"), 3.0, q_len=2, kv_len=4, right=lambda: ([1.5] * 2, [4.38629] * 2)),
    # B6: the scale is the caller's
    _toy("scale", _static("full"), [0, 2 * LN3], scale=0.5, q_len=3, kv_len=2,
         right=lambda: ([0.75] * 3, [np.log(4)] * 3)),
    # B6's kind: a negative scale, under which a hidden key's -inf must not become inf
    _toy("negative_scale", _static("causal"), [0, -2 * LN3], scale=-0.5, q_len=2, kv_len=2,
         right=lambda: ([0, 0.75], [0, np.log(4)])),
    # I1: windows are inclusive; F1 in small: a row that sees itself alone gives its V
    _toy("window", _static("causal_sliding_window", 2), kv_len=4, q_len=4,
         right=lambda: ([0, 0.5, 1, 2], np.log([1, 2, 3, 3]))),
    _toy("itself_alone", _static("full_sliding_window", 0), q_len=5, kv_len=9,
         right=lambda: ([4, 5, 6, 7, 8], [0.0] * 5)),
    # H9: documents keep to themselves
    _toy("documents", _static("full_document", (3, 0, 5)), v=[0] * 3 + [1] * 5,
         right=lambda: ([0] * 3 + [1] * 5, np.log([3] * 3 + [5] * 5))),
    # A1: rows before the first key
    _toy("rows_without_keys", _static("causal"), q_len=6, kv_len=4,
         right=lambda: ([0, 0, 0, 0.5, 1, 1.5], [-np.inf, -np.inf, *np.log([1, 2, 3, 4])])),
    # A1, A6: an empty row between others
    _toy("empty_row_inside", lambda q, k, _: masks.from_intervals([[0, 3, 0]], [[4, 3, 2]], k), q_len=3, kv_len=5,
         right=lambda: ([1.5, 0, 0.5], [np.log(4), -np.inf, np.log(2)])),
    # D14: every query block selects key block 0
    _toy("one_block_for_all", lambda q, k, b: from_bitmap([[[1, 0]] * 3], [[0, b, 2 * b, q]], [[0, b, k]], block=b),
         q_len=150, kv_len=100, v=[5] * 64 + [9] * 36, right=lambda: ([5] * 150, [np.log(64)] * 150)),
)
