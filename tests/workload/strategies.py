"""Hypothesis strategies: the twelve patterns at random parameters and shapes, and masks of no pattern."""

import inspect

import numpy as np
from hypothesis import strategies as st

from workload import block_masks, masks


@st.composite
def lengths_of(draw, total):
    """Document lengths that sum to `total`, empty documents among them."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    bounds = [0, *cuts, total]
    return [b - a for a, b in zip(bounds, bounds[1:])]


@st.composite
def pattern(draw, name=None, longest=34):
    """(name, q_len, kv_len, parameters) of a static pattern."""
    name = name or draw(st.sampled_from(list(masks.STATIC_MASKS)))
    kv_len = draw(st.integers(1, longest))
    q_len = draw(st.one_of(st.just(kv_len), st.integers(1, longest)))
    lengths = draw(lengths_of(kv_len))
    small = st.integers(0, longest + 5)
    values = {
        "lengths": lambda: lengths,
        "blocks": lambda: lengths,
        "groups": lambda: draw(groups_of(lengths)),
        "prefixes": lambda: [draw(st.integers(0, n)) for n in lengths],
        "prefix": lambda: draw(small),
        "global_tokens": lambda: draw(small),
        "window": lambda: draw(small),
        "block": lambda: draw(st.integers(1, 9)),
    }
    wanted = list(inspect.signature(masks.STATIC_MASKS[name]).parameters)[2:]
    return name, q_len, kv_len, {parameter: values[parameter]() for parameter in wanted}


@st.composite
def groups_of(draw, lengths):
    """Lengths dealt into groups of a question and answers."""
    groups, left = [], list(lengths)
    while left:
        size = draw(st.integers(1, len(left)))
        groups.append(tuple(left[:size]))
        left = left[size:]
    return groups


@st.composite
def static_mask(draw, longest=34):
    """A static mask: a pattern, or raw intervals that overlap, touch, lie outside or are empty."""
    if draw(st.integers(0, 3)):
        name, q_len, kv_len, parameters = draw(pattern(longest=longest))
        return masks.STATIC_MASKS[name](q_len, kv_len, **parameters)
    kv_len, q_len, count = (draw(st.integers(1, n)) for n in (longest, longest, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    starts, ends = rng.integers(-3, kv_len + 4, (2, count, q_len))
    return masks.from_intervals(starts, ends, kv_len)


@st.composite
def subset(draw, total):
    """Ascending positions of a shard: any of total, none among them."""
    picked = draw(st.lists(st.booleans(), min_size=total, max_size=total))
    return np.flatnonzero(picked)


@st.composite
def block_mask(draw, longest=34):
    """A dynamic mask of up to three heads: uniform or variable, random or importance, top-k or top-p, causal or not."""
    q_len, kv_len = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    keep = draw(st.sampled_from([{"density": 0.3}, {"density": 1.0}, {"top_p": 0.6}]))
    shared = {
        "heads": draw(st.integers(1, 3)),
        "causal": draw(st.booleans()),
        "selection": draw(st.sampled_from(["random", "importance"])),
        "seed": draw(st.integers(0, 2**32)),
    } | keep
    if draw(st.booleans()):
        return block_masks.uniform_block(q_len, kv_len, block=draw(st.integers(1, 12)), **shared)
    minimum = draw(st.integers(1, min(q_len, kv_len, 6)))
    return block_masks.variable_block(q_len, kv_len, mean=minimum + draw(st.integers(0, 6)), minimum=minimum, **shared)
