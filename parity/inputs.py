"""The inputs of a problem: the same bits in every process, whatever stack reads them.

A pool of normal draws, of prime length so that no two rows of a tensor are the same values, is read from a different
place for each tensor. Half types are rounded here, to nearest even, and handed on as they are stored: bfloat16 as its
16 bits in a uint16 array.
"""

import dataclasses
import functools
import math

import numpy as np

from workload.problem import AttentionProblem

POOL = 4_194_301  # prime
TENSORS = ("q", "k", "v", "dout")


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """Which inputs: a seed, and the number of the set drawn with it."""

    seed: int = 0
    number: int = 0


@functools.lru_cache(maxsize=2)
def pool(seed: int, dtype: str) -> np.ndarray:
    """The draws that all inputs of a seed are read from, as `stored`."""
    return stored(np.random.Generator(np.random.PCG64([seed, 77])).standard_normal(POOL, np.float32), dtype)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to nearest even, as uint16 bits. NaN stays NaN.

    >>> [hex(n) for n in bfloat16_bits(np.float32([1.0, -2.0, 1.00390625]))]
    ['0x3f80', '0xc000', '0x3f80']
    """
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 as the dtype is stored: bfloat16 as uint16 bits, float16, float32 and float64 as themselves."""
    return bfloat16_bits(x) if dtype == "bfloat16" else np.asarray(x).astype(dtype)


def widened(x: np.ndarray) -> np.ndarray:
    """Stored values as float64: uint16 is read as bfloat16."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.astype(np.float64)


def places(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], spec: InputSpec
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Where in the pool q, k, v and dout begin, and their shapes, [batch, seq, heads, head_dim]."""
    return {
        name: ((place * (POOL // 4) + spec.number * 104_729) % POOL, shape)
        for place, (name, shape) in enumerate(zip(TENSORS, (q_shape, kv_shape, kv_shape, q_shape), strict=True))
    }


def tiled(draws: np.ndarray, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    """The draws from `offset` on, over and over, in a shape."""
    count = math.prod(shape)
    flat = np.resize(np.roll(draws, -offset), count) if count > len(draws) - offset else draws[offset : offset + count]
    return np.array(flat).reshape(shape)  # a copy: callers may hand its memory on


def make_inputs(problem: AttentionProblem, spec: InputSpec) -> dict[str, np.ndarray]:
    """q, k, v, dout in [batch, seq, heads, head_dim], standard normal, as `stored`."""
    draws = pool(spec.seed, problem.dtype)
    return {name: tiled(draws, *place) for name, place in places(problem.q_shape, problem.kv_shape, spec).items()}
