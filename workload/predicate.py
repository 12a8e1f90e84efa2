"""A mask and a change of logits as functions of indices: what the kernels `flex` and `flex_sparse` trace.

    mask_mod(batch, q_head, i, j, q_values, kv_values) -> bool
    score_mod(score, batch, q_head, i, j) -> score

Both are elementwise functions of the stack's own arrays. i, j are indices of queries and keys, q_values and kv_values
the elements of `q_arrays` and `kv_arrays` at i and j: one integer of 32 bits for each query or key, such as document
numbers. JAX's hold no other arrays, not even of one number: what differs by head is a chain of `jnp.where` there.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workload.errors import MOST
from workload.problem import AttentionProblem, check_kind

ARGUMENTS = {
    "mask_mod": ("batch", "q_head", "i", "j", "q_values", "kv_values"),
    "score_mod": ("score", "batch", "q_head", "i", "j"),
}


def _takes(function: Any, arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:  # also where it is no function
        return False
    except ValueError:  # a built-in one that does not tell
        return True
    return True


def check_seen(seen: Any) -> None:
    """TypeError where a mask_mod gave anything but booleans: a number's bits would be read as one."""
    kind = str(getattr(seen, "dtype", type(seen).__name__)).removeprefix("torch.")
    if kind != "bool":
        raise TypeError(f"mask_mod: gives {kind}, not bool")


@dataclasses.dataclass(frozen=True)
class Predicate:
    """A mask_mod and the arrays that it reads, a score_mod (either may be None); see the module's text.

    Raises TypeError naming the function that cannot be called so, ValueError where there are arrays and no mask_mod.
    """

    mask_mod: Callable | None = None
    score_mod: Callable | None = None
    q_arrays: tuple[np.ndarray, ...] = ()
    kv_arrays: tuple[np.ndarray, ...] = ()

    def __post_init__(self):
        for name, arguments in ARGUMENTS.items():
            function = getattr(self, name)
            if function is not None and not _takes(function, arguments):
                raise TypeError(f"{name}: {function!r} is no function of ({', '.join(arguments)})")
        if self.mask_mod is None and (self.q_arrays or self.kv_arrays):
            raise ValueError("q_arrays, kv_arrays: a mask_mod reads them, and there is none")


def _read(*_: Any, **__: Any) -> Any:
    raise ValueError("per_head: False, and the mask_mod reads batch or q_head")


_USES = ("eq ne lt le gt ge bool int float index hash invert neg abs pos round format getitem len iter getattr array " +
         " ".join(f"{x} r{x}" for x in "add sub mul truediv floordiv mod divmod pow and or xor lshift rshift".split()))
_Unread = type("_Unread", (), {f"__{name}__": _read for name in _USES.split()} |
               {"__torch_function__": classmethod(_read)})


def heads_of(problem: AttentionProblem, per_head: bool) -> list[tuple[Any, Any]]:
    """The (batch, q_head) that a mask_mod is asked under to find the tiles it sees: all that there are where per_head,
    else one pair that stands for them, of which any use is a ValueError."""
    if per_head:
        return [(b, h) for b in range(problem.batch) for h in range(problem.q_heads)]
    return [(_Unread(), _Unread())]


def given(predicate: Predicate | None, problem: AttentionProblem) -> Predicate:
    """A caller's predicate for a problem, an empty one for None.

    TypeError on what is no predicate, ValueError naming the arrays of which one does not hold an integer of 32 bits for
    each query, or key.
    """
    if predicate is None:
        return Predicate()
    check_kind("predicate", predicate, Predicate)
    for label, n in (("q_arrays", problem.q_len), ("kv_arrays", problem.kv_len)):
        for x in map(np.asarray, getattr(predicate, label)):
            if x.shape != (n,) or x.dtype.kind not in "iub":
                raise ValueError(f"{label}: {x.dtype} {x.shape} among them, not {n} integers")
            if x.size and not -MOST - 1 <= int(x.min()) <= int(x.max()) <= MOST:
                raise ValueError(f"{label}: {x.min()} to {x.max()} among them, kernels read 32 bits")
    return predicate
