"""Context-parallel attention: `attention` on sharded tensors, and the shardings it works on; twin in jax_impl."""

from torch_impl.context_parallel.attention import attend, attention, positions, shard, token_mean, unshard
from torch_impl.context_parallel.mesh import Job, Mesh, make_mesh
from torch_impl.context_parallel.plan import Plan, make_plan, plan_of

__all__ = ["Job", "Mesh", "Plan", "attend", "attention", "make_mesh", "make_plan", "plan_of", "positions", "shard",
           "token_mean", "unshard"]
