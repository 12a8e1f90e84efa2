"""A bench case: one kernel of one stack on one attention problem, one pass. Its key names all of it."""

import dataclasses
import itertools
import json
from typing import Any

from parity.inputs import InputSpec
from workload.errors import length
from workload.masks import STATIC_MASKS
from workload.problem import PASSES, AttentionProblem
from workload.suite import ALL_BUILDERS, SuiteSettings, mask_suite

STACKS = ("jax", "torch")
DRAWN_MASKS = tuple(  # those whose shape depends on the seed
    name for name in ALL_BUILDERS if name not in ("full", "causal", "full_sliding_window", "causal_sliding_window")
)


@dataclasses.dataclass(frozen=True)
class ProblemSpec:
    """An attention problem by name: what is needed to build it again in another process.

    Attributes:
      mask: a pattern's name; seq_len: keys; q_len: rows, seq_len when 0.
      batch, q_heads, kv_heads, head_dim, dtype: as in `AttentionProblem`.
      seed: of the documents and the drawn parameters (one pack a seed) and of the inputs.
      settings: (name, value) pairs of `SuiteSettings` that differ from its defaults, sorted.
      mask_heads: masks of a dynamic pattern, 1, kv_heads or q_heads; kv_heads when 0.

    Raises ValueError naming the field that is wrong.
    """

    mask: str
    seq_len: int
    q_len: int = 0
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    dtype: str = "bfloat16"
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()
    mask_heads: int = 0

    def __post_init__(self):
        if self.mask not in ALL_BUILDERS:
            raise ValueError(f"mask: {self.mask!r} is none of {', '.join(ALL_BUILDERS)}")
        for name in ("seq_len", "q_len"):
            length(name, getattr(self, name))
        if self.mask_heads not in ((0,) if self.mask in STATIC_MASKS else (0, 1, self.kv_heads, self.q_heads)):
            raise ValueError(f"mask_heads: {self.mask_heads} of {self.mask} with {self.q_heads}:{self.kv_heads} heads")
        object.__setattr__(self, "settings", _frozen(self.settings))
        SuiteSettings(**dict(self.settings))

    def problem(self) -> AttentionProblem:
        """The problem."""
        heads = 1 if self.mask in STATIC_MASKS else self.mask_heads or self.kv_heads
        mask = mask_suite(
            self.mask, self.seq_len, seed=self.seed, q_len=self.q_len or None, heads=heads, **dict(self.settings)
        )
        return AttentionProblem(mask, self.batch, self.q_heads, self.kv_heads, self.head_dim, self.dtype)

    def at_length(self, seq_len: int) -> "ProblemSpec":
        """The problem at another length; given document lengths keep their shares of it.

        >>> ProblemSpec("causal", 64, settings=(("documents", (40, 24)),)).at_length(16).settings
        (('documents', (10, 6)),)
        """
        settings = dict(self.settings)
        if isinstance(settings.get("documents"), tuple):
            ends = [end * seq_len // self.seq_len for end in itertools.accumulate(settings["documents"], initial=0)]
            settings["documents"] = tuple(b - a for a, b in itertools.pairwise(ends))
        return dataclasses.replace(self, seq_len=seq_len, settings=_frozen(settings))

    def inputs(self, number: int = 0) -> InputSpec:
        """What fills its tensors; `number` counts further input sets of the same problem."""
        return InputSpec(self.seed, number)

    @property
    def label(self) -> str:
        """All fields in one word."""
        q = f"x{self.q_len}" if self.q_len else ""
        masks = f"m{self.mask_heads}" if self.mask_heads else ""
        size = f"{self.seq_len}{q}/b{self.batch}h{self.q_heads}:{self.kv_heads}{masks}d{self.head_dim}"
        extra = ",".join(f"{k}={json.dumps(v, separators=(',', ':'))}" for k, v in self.settings)
        return f"{self.mask}/{size}/{self.dtype}/seed{self.seed}" + (f"/{extra}" if extra else "")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure: stack, kernel, problem, pass."""

    stack: str
    kernel: str
    which: str
    spec: ProblemSpec

    def __post_init__(self):
        if self.stack not in STACKS:
            raise ValueError(f"stack: {self.stack!r} is none of {', '.join(STACKS)}")
        if self.which not in PASSES:
            raise ValueError(f"pass: {self.which!r} is none of {', '.join(PASSES)}")

    @property
    def key(self) -> str:
        """Unique name of the row."""
        return f"{self.stack}/{self.kernel}/{self.which}/{self.spec.label}"

    def record(self) -> dict[str, Any]:
        """The case as it stands in a row."""
        fields = dataclasses.asdict(self.spec)
        fields["settings"] = dict(self.spec.settings)
        return {"stack": self.stack, "kernel": self.kernel, "pass": self.which, **fields}


def from_record(case: dict[str, Any]) -> Case:
    """The case that `Case.record` wrote."""
    fields = dict(case)
    stack, kernel, which = (fields.pop(name) for name in ("stack", "kernel", "pass"))
    known = {f.name for f in dataclasses.fields(ProblemSpec)}
    return Case(stack, kernel, which, ProblemSpec(**{k: v for k, v in fields.items() if k in known}))


def _frozen(settings) -> tuple[tuple[str, Any], ...]:
    pairs = settings.items() if isinstance(settings, dict) else settings
    return tuple(sorted((str(k), tuple(v) if isinstance(v, list) else v) for k, v in pairs))


def differing(**settings: Any) -> tuple[tuple[str, Any], ...]:
    """The settings that differ from `SuiteSettings`' defaults, as `ProblemSpec` wants them."""
    plain = SuiteSettings()
    return _frozen({k: v for k, v in settings.items() if getattr(plain, k) != v})
