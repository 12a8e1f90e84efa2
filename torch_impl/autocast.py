"""Attention under `torch.autocast`: in the dtype of its operands, as everywhere."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors whose operations keep their dtypes, also where the caller has autocast on.

    It would round products, and what is by contract float32 (lse, sums), to its own dtype.
    """
    @functools.wraps(function)
    def called(*args):
        device = next(x.device.type for x in args if isinstance(x, torch.Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args)

    return called
