"""Tensors that both stacks read: Orbax checkpoints, written and restored with JAX on the CPU.

PyTorch cannot read them, so `raw_buffers` hands their bytes on as NumPy holds them, bfloat16 as its 16 bits in uint16.
Nothing here imports JAX or Orbax before it is called, and no process that holds PyTorch's results needs to: a judge
process does (`bench/workers.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def save(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Writes a checkpoint.

    Args:
      path: a directory that does not exist yet.
      arrays: NumPy arrays as `parity.inputs.stored` makes them, or JAX arrays, sharded ones among them: a sharded
        array is written by shards and may be restored under another sharding.
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(path).absolute(), {name: _typed(x) for name, x in arrays.items()})
        checkpointer.wait_until_finished()


def restore(path: str | Path, shardings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The arrays of a checkpoint as JAX arrays.

    Args:
      shardings: for each array the `jax.sharding.Sharding` to restore it under, whatever it was saved under; without
        them all arrays come to the first local device.
    """
    import jax
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        held = checkpointer.metadata(Path(path).absolute()).item_metadata
        single = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=(shardings or {}).get(name, single))
            for name, x in held.items()
        }
        return checkpointer.restore(Path(path).absolute(), wanted)


def raw_buffers(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint in NumPy, bfloat16 as uint16 bits: what PyTorch is handed."""
    return {name: bits(x) for name, x in restore(path).items()}


def raw_shards(path: str | Path, axes: Mapping[str, int], ranks: int) -> list[dict[str, np.ndarray]]:
    """The arrays of a checkpoint split over ranks, as raw buffers by rank: what each rank of PyTorch is handed.

    Args:
      axes: for each array the axis of tokens, which `ranks` divides; whatever sharding it was saved under.
      ranks: JAX needs as many CPU devices (JAX_NUM_CPU_DEVICES).
    """
    restored = restore(path, {name: _by_rank(axis, ranks) for name, axis in axes.items()})
    out: list[dict[str, np.ndarray]] = [{} for _ in range(ranks)]
    for name, x in restored.items():
        for shard in x.addressable_shards:
            out[(shard.index[axes[name]].start or 0) * ranks // x.shape[axes[name]]][name] = bits(shard.data)
    return out


def save_shards(path: str | Path, shards: Sequence[Mapping[str, np.ndarray]], axes: Mapping[str, int]) -> None:
    """The inverse of `raw_shards`: one sharded checkpoint from the raw buffers of all ranks, in rank order."""
    import jax

    made = {}
    for name, axis in axes.items():
        sharding = _by_rank(axis, len(shards))
        parts = [jax.device_put(_typed(shard[name]), device)
                 for shard, device in zip(shards, sharding.mesh.devices.flat, strict=True)]
        shape = list(parts[0].shape)
        shape[axis] *= len(shards)
        made[name] = jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)
    save(path, made)


def _by_rank(axis: int, ranks: int):
    """Tokens at this axis split over the first `ranks` CPU devices."""
    import jax

    devices = jax.devices("cpu")[:ranks]
    if len(devices) < ranks:
        raise ValueError(f"ranks: {ranks}, and JAX has {len(devices)} CPU devices (JAX_NUM_CPU_DEVICES)")
    mesh = jax.sharding.Mesh(np.array(devices), ("rank",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * axis, "rank"))


def bits(x: Any) -> np.ndarray:
    """An array in NumPy as it is stored: bfloat16 as its 16 bits."""
    x = np.asarray(x)
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def _typed(x):
    import ml_dtypes

    return x.view(ml_dtypes.bfloat16) if isinstance(x, np.ndarray) and x.dtype == np.uint16 else x
