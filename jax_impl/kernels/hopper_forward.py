"""The forward pass on Hopper: wgmma, TMA, a producer and two consumer warpgroups, any mask policy.

FlashAttention-3's schedule (Shah et al., 2024, section 3.2): the logits of step n are issued together with the product
of step n - 1, so that a warpgroup's softmax runs while the tensor cores work on its own previous step. A thread block
takes several items, row tiles of a head, one after the other; the loads of the next run under the products of the last.
Written for Pallas Mosaic GPU.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_impl.kernels.hopper_masks import ROW, TILE, Head, Place, Policy
from jax_impl.kernels.hopper_order import blocks_of, item_number, items_of_block

LOG2E = math.log2(math.e)
COMPILER = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0)


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """Tile sizes and the schedule of the forward kernel.

    Attributes:
      rows: query rows of one consumer warpgroup, a multiple of 64.
      consumers: consumer warpgroups of a thread block; its row tile is rows * consumers.
      columns: keys of a tile.
      stages: depth of the key and value rings.
      registers: of a consumer and of the producer thread; (consumers, 1) weighted sum at most 512.
      l2_bytes: keys and values of the heads that run side by side should fit in this much cache (fewer heads do, where
        a policy orders items and they have work for all processors).
      q_registers: whether consumers hold their queries in registers, which halves what a product of logits reads.
      items: row tiles of a thread block, at least, where there are enough of them for all processors.
      processors: of the GPU.
    """

    rows: int = 64
    consumers: int = 2
    columns: int = 128
    stages: int = 2
    registers: tuple[int, int] = (240, 24)
    l2_bytes: int = 24 << 20
    q_registers: bool = True
    items: int = 8
    processors: int = 132

    @property
    def row_tokens(self) -> int:
        """Query rows of a thread block."""
        return self.rows * self.consumers


def shared_tile(shape, dtype):
    """A swizzled shared-memory buffer of tiles that TMA fills and wgmma reads."""
    item = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * item * 8)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, swizzle // item)), plgpu.SwizzleTransform(swizzle))
    )


def value_tiles(policy: Policy, tiles):
    """Shared memory for a policy's `column_values`, a ring as deep as that of the column tiles."""
    return [plgpu.SMEM((tiles.stages, tiles.columns), jnp.int32) for _ in range(policy.values)]


def load_values(policy: Policy, mask_refs, columns, slot, values_s, ready):
    """Loads a column tile's values; each is one arrival at the slot's barrier."""
    for gmem, smem in zip(policy.column_values(mask_refs), values_s, strict=True):
        plgpu.copy_gmem_to_smem(gmem.at[columns], smem.at[slot], ready.at[slot])


def drain(turns, depth: int, *free, first: int = 0):
    """Waits until the last of so many turns of rings are free: nothing may be pending when a thread block ends.

    Args:
      depth: of the rings.
      free: barriers of each ring; this one's begin with the `first`.
    """
    def wait(n, _):
        slot = lax.rem(n, jnp.int32(depth))
        for barriers in free:
            plgpu.barrier_wait(barriers.at[first + slot if first else slot])

    lax.fori_loop(jnp.maximum(turns - depth, 0), turns, wait, None)


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple that is >= n."""
    return -(-n // multiple) * multiple


def heads_side_by_side(q_heads: int, kv_heads: int, kv_bytes: int, budget: int) -> int:
    """Query heads whose keys and values (kv_bytes a kv head) fit the budget together; divides q_heads."""
    fitting = max(1, min(kv_heads, budget // max(1, kv_bytes)))
    while kv_heads % fitting:
        fitting -= 1
    return fitting * (q_heads // kv_heads)


def split_number(n, by: int):
    """Quotient and remainder, int32."""
    return lax.div(n, jnp.int32(by)), lax.rem(n, jnp.int32(by))


def forward(q, k, v, policy: Policy, scale: float, tiles: ForwardTiles, *, out_dtype=None, before=None):
    """Attention of q over k and v under a mask policy.

    Args:
      q: [batch, q_len, q_heads, head_dim], bfloat16 or float16; k, v: [batch, kv_len, kv_heads, head_dim].
      policy: rows are queries in tiles of `tiles.row_tokens`, columns are keys in tiles of `tiles.columns`.
      scale: > 0.
      out_dtype: of out; q's by default.
      before: out (float32) and lse of other keys, as this function returns them, that these are to be merged with;
        rows that see none of these keys are not touched where out stays float32.

    Returns: out [batch, rows, q_heads, head_dim] and lse float32 [batch, q_heads, rows], natural log, -inf where
    empty; rows are q_len padded to whole tiles.
    """
    batch, q_len, q_heads, dim = q.shape
    padded = round_up(q_len, tiles.row_tokens)
    out_dtype = jnp.dtype(out_dtype or q.dtype)
    kv_bytes = 4 * k.shape[1] * dim
    side = heads_side_by_side(q_heads, k.shape[2], kv_bytes, tiles.l2_bytes)
    places = padded // tiles.row_tokens
    adds = before is not None
    items = batch * q_heads * places
    kernel = _Forward(
        policy, tiles, scale, batch, k.shape[2], q_heads, dim, side, items, places, q.dtype, out_dtype, adds)
    n, t = tiles.consumers, tiles
    staged, bar = jnp.dtype(q.dtype), plgpu.Barrier
    results = [
        jax.ShapeDtypeStruct((batch, q_heads, padded), jnp.float32),
        jax.ShapeDtypeStruct((batch, padded, q_heads, dim), out_dtype),
    ]
    in_place = adds and out_dtype == before[0].dtype
    onto = (before[1], jax.new_ref(before[0]) if in_place else before[0]) if adds else ()
    lse, *made = plgpu.kernel(
        kernel.body,
        out_type=results[:1] if in_place else results,
        scratch_types={
            "q_s": shared_tile((2, n, t.rows, dim), staged),
            "k_s": shared_tile((t.stages, t.columns, dim), staged),
            "v_s": shared_tile((t.stages, t.columns, dim), staged),
            "lse_s": plgpu.SMEM((n, t.rows), jnp.float32),
            "item_s": plgpu.SMEM((2, 5), jnp.int32),
            "column_s": plgpu.SMEM((t.stages,), jnp.int32),
            "values_s": value_tiles(policy, t),
            "q_ready": bar(num_arrivals=n + 1, num_barriers=2),
            "q_free": bar(num_arrivals=n, num_barriers=2),
            "k_ready": bar(num_arrivals=2 + policy.values, num_barriers=t.stages),
            "v_ready": bar(num_barriers=t.stages),
            "k_free": bar(num_arrivals=n, num_barriers=t.stages),
            "v_free": bar(num_arrivals=n, num_barriers=t.stages),
        },
        grid=(kernel.blocks,),
        grid_names=("block",),
        num_threads=n + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER,
        kernel_name="hopper_forward",
    )(q, k, v, *onto, *policy.operands())
    return onto[1][...] if in_place else made[0], lse


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The kernel's body and what it closes over."""

    policy: Policy
    tiles: ForwardTiles
    scale: float
    batch: int
    kv_heads: int
    q_heads: int
    dim: int
    side: int
    items: int
    places: int
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    adds: bool

    @property
    def blocks(self) -> int:
        """Thread blocks."""
        return self.policy.share_blocks if self.policy.orders_blocks else blocks_of(self.items, self.tiles)

    @property
    def unit(self) -> float:
        """What the logits that the softmax sees are to be multiplied by."""
        return 1.0 if self.policy.changes_scores else self.scale

    def body(self, q_g, k_g, v_g, *refs, **scratch):
        """One thread block: a few items, row tiles of one head each."""
        before, refs = (refs[:2], refs[2:]) if self.adds else ((None, None), refs)
        if self.adds and self.out_dtype == jnp.float32:  # in place
            *mask_refs, lse_g = refs
            out_g = before[1]
        else:
            *mask_refs, lse_g, out_g = refs
        s = _Scratch(q_g, k_g, v_g, out_g, lse_g, *before, **scratch)
        warpgroup = lax.axis_index("warpgroup")
        if self.policy.orders_blocks:
            items = self.policy.share(mask_refs, lax.axis_index("block"), 0)
        else:
            items = items_of_block(self.items, self.blocks)
        pl.when(warpgroup == self.tiles.consumers)(lambda: self._produce(s, mask_refs, items))

        @pl.when(warpgroup < self.tiles.consumers)
        def _():
            plgpu.set_max_registers(self.tiles.registers[0], action="increase")
            _consume(self, s, mask_refs, warpgroup, items)

    def _item(self, mask_refs, n):
        """Head and row tile of a block's n-th item: as the policy says, or heads side by side, then heaviest tiles."""
        if self.policy.orders_blocks:
            number, q_head = split_number(self.policy.share(mask_refs, lax.axis_index("block"), n + 1), self.q_heads)
            tile, batch = split_number(number, self.batch)
            return Head(batch, q_head, lax.div(q_head, jnp.int32(self.q_heads // self.kv_heads))), tile
        number, side = split_number(item_number(n, self.blocks), self.side)
        number, place = split_number(number, self.places)
        batch, section = split_number(number, self.q_heads // self.side)
        q_head = section * self.side + side
        head = Head(batch, q_head, lax.div(q_head, jnp.int32(self.q_heads // self.kv_heads)))
        return head, self.policy.row_tile(mask_refs, head, place)

    def _produce(self, s, mask_refs, items):
        """Loads each item's queries, and its keys one step ahead of its values, which are wanted one step later."""
        plgpu.set_max_registers(self.tiles.registers[1], action="decrease")
        t, stages = self.tiles, self.tiles.stages

        def item(n, before):  # before: steps of the items before this one
            head, tile = self._item(mask_refs, n)
            walk = self.policy.walk(mask_refs, head, tile)
            buffer = lax.rem(n, jnp.int32(2))
            pl.when(n >= 2)(lambda: plgpu.barrier_wait(s.q_free.at[buffer]))
            for field, value in enumerate((head.batch, head.q, tile, walk.partial, walk.total)):
                s.item_s[buffer, field] = value
            plgpu.barrier_arrive(s.q_ready.at[buffer])
            for warpgroup in range(t.consumers):
                rows = pl.ds(tile * t.row_tokens + warpgroup * t.rows, t.rows)
                plgpu.copy_gmem_to_smem(
                    s.q_g.at[head.batch, rows, head.q], s.q_s.at[buffer, warpgroup], s.q_ready.at[buffer]
                )

            def load(n, gmem, smem, ready, free):
                slot, column = lax.rem(before + n, jnp.int32(stages)), walk.column(n)
                pl.when(before + n >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                keys = pl.ds(column * t.columns, t.columns)
                plgpu.copy_gmem_to_smem(gmem.at[head.batch, keys, head.kv], smem.at[slot], ready.at[slot])
                return slot, column

            def load_k(n):
                slot, column = load(n, s.k_g, s.k_s, s.k_ready, s.k_free)
                load_values(self.policy, mask_refs, pl.ds(column * t.columns, t.columns), slot, s.values_s, s.k_ready)
                s.column_s[slot] = column  # consumers read it from here, so that they hold no state of the walk
                plgpu.barrier_arrive(s.k_ready.at[slot])

            def load_v(n):
                load(n, s.v_g, s.v_s, s.v_ready, s.v_free)

            def step(n, _):
                pl.when(n < walk.total)(lambda: load_k(n))
                pl.when(n > 0)(lambda: load_v(n - 1))

            pl.when(walk.total > 0)(lambda: lax.fori_loop(0, walk.total + 1, step, None))
            return before + walk.total

        total = lax.fori_loop(0, items, item, jnp.int32(0))

        drain(total, stages, s.k_free, s.v_free)
        drain(items, 2, s.q_free)


@dataclasses.dataclass(frozen=True)
class _Scratch:
    """Device-memory and shared-memory references of a thread block (_g and _s) and its barriers."""

    q_g: jax.Ref
    k_g: jax.Ref
    v_g: jax.Ref
    out_g: jax.Ref
    lse_g: jax.Ref
    before_lse_g: jax.Ref | None
    before_g: jax.Ref | None
    q_s: jax.Ref
    k_s: jax.Ref
    v_s: jax.Ref
    lse_s: jax.Ref
    item_s: jax.Ref
    column_s: jax.Ref
    values_s: list[jax.Ref]
    q_ready: jax.Ref
    q_free: jax.Ref
    k_ready: jax.Ref
    v_ready: jax.Ref
    k_free: jax.Ref
    v_free: jax.Ref


def _consume(kernel: _Forward, s: _Scratch, mask_refs, warpgroup, items):
    """One consumer warpgroup: all items of the block, one after the other."""
    t = kernel.tiles

    def item(n, before):
        buffer = lax.rem(n, jnp.int32(2))
        plgpu.barrier_wait(s.q_ready.at[buffer])
        batch, q_head, tile, partial, total = (s.item_s[buffer, field] for field in range(5))
        head = Head(batch, q_head, lax.div(q_head, jnp.int32(kernel.q_heads // kernel.kv_heads)))
        row0 = tile * t.row_tokens + warpgroup * t.rows
        _Consumer(kernel, s, head, warpgroup, row0, n, before, partial, total).run(mask_refs)
        return before + total

    lax.fori_loop(0, items, item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(s.q_free.at[lax.rem(items - 1, jnp.int32(2))])


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One item of one consumer warpgroup: online softmax over the column tiles of its rows.

    item: its number in the block; before: steps of the items before it; partial, total: its steps.
    """

    kernel: _Forward
    s: _Scratch
    head: Head
    warpgroup: jax.Array
    row0: jax.Array
    item: jax.Array
    before: jax.Array
    partial: jax.Array
    total: jax.Array
    q: jax.Array | jax.Ref | None = None

    @property
    def tiles(self) -> ForwardTiles:
        """The schedule."""
        return self.kernel.tiles

    @property
    def _q_s(self):
        """This item's queries, and at its end its results."""
        return self.s.q_s.at[lax.rem(self.item, jnp.int32(2)), self.warpgroup]

    def run(self, mask_refs):
        """Runs the column tiles, writes out and lse."""
        s, t, dim = self.s, self.tiles, self.kernel.dim
        rows = pl.ds(self.row0, t.rows)
        mask_rows = self.kernel.policy.load_rows(mask_refs, self.head, self.row0, t.rows)
        q = plgpu.load(self._q_s, layout=TILE) if t.q_registers else self._q_s
        steps = functools.partial(dataclasses.replace(self, q=q)._all_steps, mask_rows)
        acc, top, weight = pl.run_scoped(steps, plgpu.ACC((t.rows, dim), jnp.float32))
        some = weight > 0
        inverse = jnp.where(some, 1.0 / jnp.where(some, weight, 1.0), 0.0)
        out = acc * lax.broadcast_in_dim(inverse, acc.shape, [0])
        lse = top * self.kernel.unit + jnp.log2(jnp.where(some, weight, 1.0)) / LOG2E
        lse = jnp.where(some, lse, -jnp.inf)
        whole = lambda: out  # noqa: E731
        if self.kernel.adds:
            lse, *weights = self._weights(lse)
            whole = functools.partial(self._merged, out, *weights, rows)
        s.lse_s[self.warpgroup] = lse
        if self.kernel.out_dtype.itemsize == 2:
            self._q_s[...] = whole().astype(self.kernel.out_dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.lse_s.at[self.warpgroup], s.lse_g.at[self.head.batch, self.head.q, rows])
        if self.kernel.out_dtype.itemsize == 2:
            plgpu.copy_smem_to_gmem(self._q_s, s.out_g.at[self.head.batch, rows, self.head.q])
        else:
            def write():
                s.out_g[self.head.batch, rows, self.head.q] = whole()

            pl.when(self.total > 0)(write) if self.kernel.adds else write()

    def _release_before(self):
        """Hands the buffer of the item before back, once its results are read out of it."""
        @pl.when(self.item > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.s.q_free.at[lax.rem(self.item + 1, jnp.int32(2))])

    def _weights(self, lse):
        """lse of the earlier keys and these together, and what the earlier out and this one count in it."""
        rows = pl.ds(self.row0, self.tiles.rows)
        old = plgpu.load(self.s.before_lse_g.at[self.head.batch, self.head.q, rows], layout=ROW, optimized=False)
        top = jnp.maximum(old, lse)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        old, new = (jnp.exp2((x - top) * LOG2E) for x in (old, lse))
        some = old + new > 0
        total = jnp.where(some, old + new, 1.0)
        return jnp.where(some, top + jnp.log2(total) / LOG2E, -jnp.inf), old / total, new / total

    def _merged(self, out, old, new, rows):
        before = plgpu.load(self.s.before_g.at[self.head.batch, rows, self.head.q], layout=TILE, optimized=False)
        old, new = (lax.broadcast_in_dim(x, out.shape, [0]) for x in (old, new))
        return before * old + out * new

    def _all_steps(self, mask_rows, acc_ref):
        t, total = self.tiles, self.total
        row = functools.partial(jnp.full, (t.rows,))
        top = plgpu.layout_cast(row(-jnp.inf, jnp.float32), ROW)
        weight = plgpu.layout_cast(row(0.0, jnp.float32), ROW)
        p = plgpu.layout_cast(jnp.zeros((t.rows, t.columns), self.kernel.dtype), TILE)
        first = functools.partial(self._first, mask_rows)
        carry = lax.cond(total > 0, first, lambda carry: carry, (top, weight, p))
        self._release_before()
        masked, unmasked = (functools.partial(self._step, acc_ref, rows) for rows in (mask_rows, None))
        carry = lax.fori_loop(1, self.partial, masked, carry)
        top, weight, p = lax.fori_loop(jnp.maximum(1, self.partial), total, unmasked, carry)

        @pl.when(total > 0)
        def _():
            self._product(acc_ref, p, total - 1)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.s.v_free.at[self._slot(total - 1)])

        return acc_ref[...], top, weight

    def _slot(self, n):
        return lax.rem(self.before + n, jnp.int32(self.tiles.stages))

    def _logits(self, s_ref, n):
        plgpu.wgmma(s_ref, self.q, self.s.k_s.at[self._slot(n)].transpose((1, 0)))

    def _product(self, acc_ref, p, n):
        plgpu.barrier_wait(self.s.v_ready.at[self._slot(n)])
        plgpu.wgmma(acc_ref, p, self.s.v_s.at[self._slot(n)])

    def _first(self, mask_rows, carry):
        """Step 0: logits and softmax only."""
        plgpu.barrier_wait(self.s.k_ready.at[self._slot(jnp.int32(0))])

        def issue(s_ref):
            self._logits(s_ref, jnp.int32(0))
            return s_ref[...]

        logits = pl.run_scoped(issue, plgpu.ACC((self.tiles.rows, self.tiles.columns), jnp.float32))
        top, weight, p, _ = self._softmax(logits, jnp.int32(0), *carry[:2], mask_rows)
        return top, weight, p.astype(self.kernel.dtype)

    def _step(self, acc_ref, mask_rows, n, carry):
        """Logits of step n and, under its softmax, the product of step n - 1."""
        s, (top, weight, p) = self.s, carry
        plgpu.barrier_wait(s.k_ready.at[self._slot(n)])

        def issue(s_ref):
            self._logits(s_ref, n)
            self._product(acc_ref, p, n - 1)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)

        logits = pl.run_scoped(issue, plgpu.ACC((self.tiles.rows, self.tiles.columns), jnp.float32))
        top, weight, p, alpha = self._softmax(logits, n, top, weight, mask_rows)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s.v_free.at[self._slot(n - 1)])
        acc_ref[...] = acc_ref[...] * lax.broadcast_in_dim(alpha, acc_ref.shape, [0])
        return top, weight, p.astype(self.kernel.dtype)

    def _softmax(self, logits, n, top, weight, mask_rows):
        """(new top in logit units, new weight, p float32, factor of the old accumulator); frees the keys' slot.

        mask_rows: what the element test needs of the rows, or None where the tile is full.
        """
        policy, masked = self.kernel.policy, mask_rows is not None
        base = self.kernel.unit * LOG2E
        if masked or policy.changes_scores:
            column0 = self.s.column_s[self._slot(n)] * self.tiles.columns
            values = tuple(x.at[self._slot(n)] for x in self.s.values_s)
            place = Place(self.row0, column0, self.tiles.rows, self.tiles.columns, values)
        if policy.changes_scores:
            logits = policy.scores(logits * self.kernel.scale, self.head, place)
        if masked:
            logits = jnp.where(policy.seen(mask_rows, self.head, place), logits, -jnp.inf)
        plgpu.barrier_arrive(self.s.k_free.at[self._slot(n)])
        new_top = jnp.maximum(top, logits.max(axis=1))
        # A row that has seen nothing yet keeps -inf; zero stands in for it, so that its exponents are -inf, not NaN.
        hidden = masked or policy.changes_scores
        reference = jnp.where(new_top == -jnp.inf, 0.0, new_top) if hidden else new_top
        # The difference first: as a fused top * base - reference * base it is not 0 where top is as it was, and a
        # weight that is 1 + 1e-7 at every step had lse off by 2e-5 after 512 of them.
        alpha = jnp.exp2((top - reference) * base)
        reference = reference * base
        p = jnp.exp2(logits * base - lax.broadcast_in_dim(reference, logits.shape, [0]))
        return new_top, weight * alpha + p.sum(axis=1), p, alpha
