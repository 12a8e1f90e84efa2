"""Checkpoints carry the bits, sharded ones among them, to either stack."""

import subprocess
import sys

import numpy as np

from parity import checkpoints

SHARDED = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=6"
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from parity import checkpoints
path = sys.argv[1]
whole = np.arange(2 * 24 * 3, dtype=np.float32).reshape(2, 24, 3)
def sharding(ranks, axis):
    return NamedSharding(Mesh(np.array(jax.devices()[:ranks]), ("rank",)), P(*[None] * axis, "rank"))
checkpoints.save(path, {"k": jax.device_put(whole, sharding(4, 1))})
back = checkpoints.restore(path, {"k": sharding(3, 2)})["k"]
assert len(back.sharding.device_set) == 3 and back.addressable_shards[0].data.shape == (2, 24, 1)
assert np.array_equal(np.asarray(back), whole)
assert np.array_equal(checkpoints.raw_buffers(path)["k"], whole)
shards = checkpoints.raw_shards(path, {"k": 1}, 6)
assert [np.array_equal(s["k"], whole[:, 4 * n : 4 * n + 4]) for n, s in enumerate(shards)] == [True] * 6
half = [{"k": np.arange(6, dtype=np.uint16).reshape(2, 1, 3) + 10 * n} for n in range(5)]  # of bfloat16
checkpoints.save_shards(path + "s", half, {"k": 1})
back = checkpoints.restore(path + "s", {"k": sharding(1, 1)})["k"]
assert back.dtype.name == "bfloat16" and back.shape == (2, 5, 3)
assert np.array_equal(checkpoints.bits(back), np.concatenate([s["k"] for s in half], axis=1))
"""


def test_bits_survive(tmp_path):
    arrays = {
        "q": np.arange(65536, dtype=np.uint16).reshape(2, -1),  # every bfloat16 there is, NaNs among them
        "k": np.float32([[1.0, -0.0, np.inf]]), "v": np.float16([3.14159]),
    }
    checkpoints.save(tmp_path / "c", arrays)
    back = checkpoints.raw_buffers(tmp_path / "c")
    assert set(back) == set(arrays)
    for name, x in arrays.items():
        assert back[name].dtype == x.dtype and np.array_equal(back[name].view(np.uint8), x.view(np.uint8))
    assert checkpoints.restore(tmp_path / "c")["q"].dtype.name == "bfloat16"


def test_a_sharded_checkpoint_is_restored_under_another_sharding(tmp_path):
    done = subprocess.run([sys.executable, "-c", SHARDED, str(tmp_path / "c")], capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
