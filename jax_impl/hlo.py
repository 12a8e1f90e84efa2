"""What a compiled program hands to its collectives, read from its HLO text."""

import re

BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16, "f32": 32, "s32": 32, "u32": 32,
        "f64": 64, "s64": 64, "u64": 64}
KINDS = {"all-to-all": "all_to_all", "all-gather": "all_gather", "collective-permute": "permute",
         "reduce-scatter": "reduce_scatter", "all-reduce": "all_reduce"}

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)", re.MULTILINE)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def collective_bytes(text: str) -> dict[str, int]:
    """Operand bytes per rank of each kind of collective: {"all_to_all": .., "permute": .., ..}, absent kinds left out.

    Args:
      text: `compiled.as_text()` of one program for all ranks. An asynchronous collective counts once, at its start.

    >>> collective_bytes("%a = f32[2,3]{1,0} parameter(0)\\n%p = f32[2,3]{1,0} collective-permute(%a), channel_id=1")
    {'permute': 24}
    """
    found = _INSTRUCTION.findall(text)
    sizes = {name: _bytes(shape) for name, shape, _, _ in found}
    out: dict[str, int] = {}
    for _, _, operation, operands in found:
        kind = KINDS.get(operation.removesuffix("-start"))
        if kind is None:
            continue
        names = re.findall(r"%?([\w.\-]+)(?=\s*(?:,|$))", operands)
        out[kind] = out.get(kind, 0) + sum(sizes[n] for n in names if n in sizes)
    return out


def _bytes(shape: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        size = BITS.get(kind, 0)
        for n in filter(None, dims.split(",")):
            size *= int(n)
        total += size // 8
    return total
