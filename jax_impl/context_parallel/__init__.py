"""Context-parallel attention: `attention` on sharded arrays, and the shardings it works on; twin in torch_impl."""

from jax_impl.context_parallel.attention import attend, attention, positions, shard, token_mean, unshard
from jax_impl.context_parallel.plan import Plan, make_mesh, make_plan, plan_of

__all__ = ["Plan", "attend", "attention", "make_mesh", "make_plan", "plan_of", "positions", "shard", "token_mean",
           "unshard"]
