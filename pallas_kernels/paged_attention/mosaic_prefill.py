"""Paged attention for prefill on Hopper, in Pallas Mosaic GPU: ragged causal chunks on the tensor cores.

One program a multiprocessor, which stays: two compute warpgroups of 64 rows each and one of loaders. A tile of 128
rows holds `pack` query heads of one KV head for `128 // pack` tokens of one sequence (`prefill_plan` cuts them), so
that short chunks and decode rows fill it better. An item is a tile and a group of heads; programs take items in snake
order, about the longest first, which balances them.

Of an item, the KV tiles are visited from the last to the first, with the running maximum and sum of online softmax
(Milakov and Gimelshein, 2018, arXiv:1805.02867): only those at both ends need a mask. The scores of the next KV tile,
also of the next item, are issued before the product with the values of this one (as in FlashAttention-3,
arXiv:2407.08608), so that the tensor cores work while the softmax runs.

Serves any mix of chunks and decode rows; the latter are right, not fast. `refusal` says what it can't serve.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.primitives import wgmma_accumulator_load, wgmma_accumulator_store
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.mosaic_common import device_refusal, num_multiprocessors
from pallas_kernels.paged_attention.prefill_plan import KV_LEN, POSITION, ROW, ROWS, SEQ, PrefillPlan, plan_prefill
from pallas_kernels.paged_attention.spec import AttentionSpec

_LOG2E = math.log2(math.e)
_ROWS = 64  # of a compute warpgroup: the height of a wgmma
_WARPGROUPS = 2  # that compute
_TILE_ROWS = _WARPGROUPS * _ROWS
_KV_SLOTS = 2  # of the ring of keys, and of that of values
_BUNDLE_TOKENS = 512  # of a sequence, scheduled together; 128 and 2048 are slower
_MAX_PACK = 8
_SLAB = 64  # columns of two bytes in a swizzled row of 128 bytes
_MATRIX = plgpu.Layout.WGMMA
_VECTOR = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a matrix
_SWIZZLED = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]
_TILED = (plgpu.TilingTransform((8, _SLAB)), *_SWIZZLED)  # pyright: ignore[reportAbstractUsage]
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_HEAD_DIMS = (64, 128, 256)
_BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """Everything static about a launch."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: Any
    block_size: int
    table_width: int
    programs: int
    spec: AttentionSpec
    has_sinks: bool

    @property
    def pack(self) -> int:
        """Query heads in a tile: a power of two that divides those of a KV head."""
        group = self.q_heads // self.kv_heads
        return min(group & -group, _MAX_PACK)

    @property
    def tile_tokens(self) -> int:
        return _TILE_ROWS // self.pack

    @property
    def warpgroup_tokens(self) -> int:
        return _ROWS // self.pack

    @property
    def groups(self) -> int:
        """Items of one tile."""
        return self.q_heads // self.pack

    @property
    def bundle(self) -> int:
        """Tiles of a sequence that are scheduled together."""
        return _BUNDLE_TOKENS // self.tile_tokens

    @property
    def kv_tile(self) -> int:
        """Tokens whose keys and values are loaded at a time; the registers of wide heads leave less room."""
        return 128 if self.head_dim <= 128 else 64

    @property
    def q_slots(self) -> int:
        """Buffers of queries: two, so that the next item's come early, if shared memory allows."""
        return 2 if self.head_dim <= 128 else 1

    @property
    def slabs(self) -> int:
        return self.head_dim // _SLAB

    @property
    def out_slabs(self) -> int:
        """Slabs of the output that are staged at a time."""
        return min(self.slabs, 2)

    @property
    def copy_rows(self) -> int:
        """Rows that one copy of keys or values brings: of one block."""
        return min(self.block_size, self.kv_tile)

    @property
    def copies(self) -> int:
        return self.kv_tile // self.copy_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Item:
    """One tile for one group of heads; scalars in registers."""

    tile: Any
    group: Any
    head: Any  # first query head
    kv_head: Any
    seq: Any
    row: Any  # first row of q
    rows: Any  # tokens in use
    position: Any  # of the first row
    kv_len: Any
    first: Any  # KV tile, visited last
    last: Any  # KV tile, visited first
    low: Any  # KV tiles from here on ...
    high: Any  # ... to before here need no mask


@dataclasses.dataclass(frozen=True)
class _Items:
    """The items of this program."""

    geometry: _Geometry
    tiles: Any  # [tiles, 8] in global memory
    tiles_used: Any

    @property
    def num(self) -> Any:
        items = self.tiles_used * self.geometry.groups
        rounds = lax.div(items, self.geometry.programs)
        return rounds + jnp.where(self._index(rounds) < items, 1, 0)

    def _index(self, n: Any) -> Any:
        """Of the program's n-th item among all, in snake order over the programs."""
        program, programs = lax.axis_index("program"), self.geometry.programs
        return n * programs + jnp.where(lax.rem(n, 2) == 1, programs - 1 - program, program)

    def get(self, n: Any) -> _Item:
        """The program's n-th item. All items come in blocks of `bundle` tiles, head by head: tiles of one sequence
        that share keys run at the same time, and find them in the L2 cache."""
        g, index = self.geometry, self._index(n)
        block = lax.div(index, g.bundle * g.groups)
        size = lax.min(self.tiles_used - block * g.bundle, g.bundle)  # of the block, in tiles
        within = index - block * (g.bundle * g.groups)
        group = lax.div(within, size)
        tile = block * g.bundle + (within - group * size)
        seq, row, rows, position, kv_len = (self.tiles[tile, c] for c in (SEQ, ROW, ROWS, POSITION, KV_LEN))

        end = position + rows
        last = lax.div(end + (g.kv_tile - 1), g.kv_tile) - 1
        first, low = jnp.int32(0), jnp.int32(0)
        if (window := g.spec.sliding_window) is not None:
            first = lax.div(lax.max(position - (window - 1), 0), g.kv_tile)
            low = lax.div(lax.max(end - window, 0) + (g.kv_tile - 1), g.kv_tile)
        high = lax.max(lax.min(lax.div(position + 1, g.kv_tile), last), first)
        low = lax.max(lax.min(low, high), first)
        head = group * g.pack
        kv_head = lax.div(head, g.q_heads // g.kv_heads)
        return _Item(tile, group, head, kv_head, seq, row, rows, position, kv_len, first, last, low, high)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Shared memory: queries, rings of keys and values, and the staged output, with their barriers."""

    q: Any  # [q_slots, slabs, tile_tokens, pack, 64]: what copies from q[tokens, heads, columns] fill
    q_tiled: Any  # [q_slots, slabs, 128, 64]: the same bytes, as wgmma reads them
    k: Any  # [slots, kv_tile, head_dim]
    v: Any  # [slots, kv_tile, head_dim]
    out: Any  # [warpgroups, out_slabs, warpgroup_tokens, pack, 64]: what copies to the output read
    out_tiled: Any  # [warpgroups, out_slabs, 64, 64]: the same bytes, as registers are stored
    lse: Any  # [warpgroups, 64]
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


def _scratch(g: _Geometry) -> dict[str, Any]:
    smem = functools.partial(plgpu.SMEM, dtype=g.dtype)
    ring = smem((_KV_SLOTS, g.kv_tile, g.head_dim), transforms=_TILED)
    # Copies of rows at any offset need rows, wgmma needs tiles of 8: a slab of 64 columns has the same bytes in both.
    q = plgpu.RefUnion(
        smem((g.q_slots, g.slabs, g.tile_tokens, g.pack, _SLAB), transforms=_SWIZZLED),
        smem((g.q_slots, g.slabs, _TILE_ROWS, _SLAB), transforms=_TILED),
    )
    out = plgpu.RefUnion(
        smem((_WARPGROUPS, g.out_slabs, g.warpgroup_tokens, g.pack, _SLAB), transforms=_SWIZZLED),
        smem((_WARPGROUPS, g.out_slabs, _ROWS, _SLAB), transforms=_TILED),
    )
    scratch = {"q": q, "out": out, "k": ring, "v": ring, "lse": plgpu.SMEM((_WARPGROUPS, _ROWS), jnp.float32)}
    for name, copies, slots in (("q", g.slabs, g.q_slots), ("k", g.copies, _KV_SLOTS), ("v", g.copies, _KV_SLOTS)):
        scratch[name + "_full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=slots)
        scratch[name + "_empty"] = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=slots)
    return scratch


def _kernel(g: _Geometry, inputs: tuple[Any, ...], out: Any, lse: Any, memory: _Memory) -> None:
    q, k_pool, v_pool, tables, tiles, tiles_used, total, sinks = inputs
    warpgroup = lax.axis_index("warpgroup")
    items = _Items(g, tiles, tiles_used[0])
    num = items.num

    @pl.when(warpgroup == _WARPGROUPS)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        keys, values = (
            (k_pool, memory.k, memory.k_full, memory.k_empty),
            (v_pool, memory.v, memory.v_full, memory.v_empty),
        )

        @plgpu.warp_map
        def _warp(warp):  # two warps a pool: one alone is too slow to issue the copies of small blocks
            for me, stream in enumerate((keys, keys, values, values)):
                load = functools.partial(_load_kv, g, stream, tables, items, num, half=me % 2)
                pl.when(warp == me)(functools.partial(load, q=q if me == 0 else None, memory=memory))

    @pl.when(warpgroup < _WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        for empty, slots in ((memory.q_empty, g.q_slots), (memory.k_empty, _KV_SLOTS), (memory.v_empty, _KV_SLOTS)):
            for slot in range(slots):
                plgpu.barrier_arrive(empty.at[slot])
        pl.when(num > 0)(lambda: _attend(g, memory, items, num, sinks, out, lse, warpgroup))
        _zero_padding(g, memory, out, warpgroup, total[0])
        plgpu.wait_smem_to_gmem(0)


def _load_kv(
    g: _Geometry, stream: tuple[Any, ...], tables: Any, items: _Items, num: Any, half: int, q: Any, memory: _Memory
) -> None:
    """One half of the copies of all KV tiles from one pool through its ring; and the queries, if given `q`."""
    pool, ring, full, empty = stream
    halves = min(2, g.copies)
    if half >= halves:
        return
    mine = range(half * g.copies // halves, (half + 1) * g.copies // halves)

    def load_item(n, step):
        item = items.get(n)
        if q is not None:
            _load_q(g, q, memory, item, lax.rem(n, g.q_slots))

        def load_tile(i, step):
            t, slot = item.last - i, lax.rem(step, _KV_SLOTS)
            blocks = {j: _block(g, tables, item.seq, t, j) for j in mine}
            plgpu.barrier_wait(empty.at[slot])
            for j, (block, start) in blocks.items():
                plgpu.copy_gmem_to_smem(
                    pool.at[block, pl.ds(start, g.copy_rows), item.kv_head],
                    ring.at[slot, pl.ds(j * g.copy_rows, g.copy_rows)],
                    full.at[slot],
                    predicate=t * g.kv_tile + j * g.copy_rows < item.kv_len,
                )
            return step + 1

        return lax.fori_loop(0, item.last - item.first + 1, load_tile, step)

    lax.fori_loop(0, num, load_item, jnp.int32(0))


def _block(g: _Geometry, tables: Any, seq: Any, t: Any, j: int) -> tuple[Any, Any]:
    """Block id and first row of copy `j` of KV tile `t`."""
    if g.block_size > g.kv_tile:
        tiles = g.block_size // g.kv_tile
        return tables[seq, lax.div(t, tiles)], lax.rem(t, tiles) * g.kv_tile
    return tables[seq, lax.min(t * g.copies + j, g.table_width - 1)], 0


def _load_q(g: _Geometry, q: Any, memory: _Memory, item: _Item, slot: Any) -> None:
    plgpu.barrier_wait(memory.q_empty.at[slot])
    for c in range(g.slabs):
        source = q.at[pl.ds(item.row, g.tile_tokens), pl.ds(item.head, g.pack), pl.ds(c * _SLAB, _SLAB)]
        plgpu.copy_gmem_to_smem(source, memory.q.at[slot, c], memory.q_full.at[slot])


def _attend(
    g: _Geometry, memory: _Memory, items: _Items, num: Any, sinks: Any, out: Any, lse: Any, warpgroup: Any
) -> None:
    """The compute warpgroup's life: all items; a step is the scores of one KV tile and the values of the one before.

    What steps carry: the output so far, the maximum, the sum, the weights of the last tile, whose values are still to
    be added, and how many tiles there were, of all items.
    """
    scores_shape, out_shape = (_ROWS, g.kv_tile), (_ROWS, g.head_dim)

    def issue_scores(acc: Any, at: Any, n: Any) -> None:
        for c in range(g.slabs):
            queries = memory.q_tiled.at[lax.rem(n, g.q_slots), c, pl.ds(warpgroup * _ROWS, _ROWS)]
            plgpu.wgmma(acc, queries, memory.k.at[lax.rem(at, _KV_SLOTS), :, pl.ds(c * _SLAB, _SLAB)].T)

    def softmax(s: Array, maximum: Array, total: Array, item: _Item, t: Any, masked: bool) -> tuple[Array, ...]:
        limit = (item.position - t * g.kv_tile) * g.pack + warpgroup * _ROWS if masked else None
        return _online_softmax(g, s, maximum, total, limit)

    def fresh(item: _Item) -> tuple[Array, Array]:
        """Maximum and sum before the first key: a sink counts as a key without a value."""
        if g.has_sinks:
            maximum = plgpu.load(sinks.at[item.group], layout=_VECTOR, optimized=False) * _LOG2E
            return maximum, plgpu.layout_cast(jnp.full((_ROWS,), 1, jnp.float32), _VECTOR)
        start = (plgpu.layout_cast(jnp.full((_ROWS,), x, jnp.float32), _VECTOR) for x in (-jnp.inf, 0))
        return next(start), next(start)

    def await_values(at: Any, item: _Item, t: Any, masked: bool) -> None:
        plgpu.barrier_wait(memory.v_full.at[lax.rem(at, _KV_SLOTS)])
        if masked:
            _zero_hidden(g, memory.v.at[lax.rem(at, _KV_SLOTS)], item, t)

    def step(t: Any, carry: Any, n: Any, item: _Item, masked: bool, before: _Item | None = None) -> Any:
        """Scores of tile `t`, and the values of the tile before: of item `before`, which ends, if given."""
        acc, maximum, total, weights, at = carry
        slot, previous = lax.rem(at, _KV_SLOTS), lax.rem(at - 1, _KV_SLOTS)
        plgpu.barrier_wait(memory.k_full.at[slot])

        def both(scores_acc: Any, out_acc: Any) -> Any:
            wgmma_accumulator_store(out_acc, acc)
            issue_scores(scores_acc, at, n)
            plgpu.wgmma(out_acc, weights, memory.v.at[previous])
            s = wgmma_accumulator_load(scores_acc, wait_n=1)
            plgpu.barrier_arrive(memory.k_empty.at[slot])
            start = (maximum, total) if before is None else fresh(item)
            new = lax.optimization_barrier(softmax(s, *start, item, t, masked))
            o = wgmma_accumulator_load(out_acc, wait_n=0)
            plgpu.barrier_arrive(memory.v_empty.at[previous])
            return new, o

        accs = (_ACC(scores_shape, jnp.float32), _ACC(out_shape, jnp.float32))
        (new_weights, new_maximum, new_total, decay), o = pl.run_scoped(both, *accs)
        new_weights = new_weights.astype(g.dtype)
        if before is None:
            o = o * _spread(decay, out_shape)
        else:
            _store(g, memory, out, lse, warpgroup, before, o, maximum, total)
            o = jnp.zeros_like(o)
        await_values(at, item, t, masked)
        return o, new_maximum, new_total, new_weights, at + 1

    def rest(carry: Any, n: Any, item: _Item) -> Any:
        """All tiles of an item but its last, which is visited first."""

        def down_from(end: Any, masked: bool) -> Any:
            return lambda i, carry: step(end - 1 - i, carry, n, item, masked)

        carry = lax.fori_loop(0, item.last - item.high, down_from(item.last, True), carry)
        carry = lax.fori_loop(0, item.high - item.low, down_from(item.high, False), carry)
        if g.spec.sliding_window is not None:
            carry = lax.fori_loop(0, item.low - item.first, down_from(item.low, True), carry)
        plgpu.barrier_arrive(memory.q_empty.at[lax.rem(n, g.q_slots)])
        return carry

    def first_step(item: _Item) -> Any:
        plgpu.barrier_wait(memory.k_full.at[0])

        def scores(acc: Any) -> Any:
            issue_scores(acc, 0, 0)
            return acc[...]

        s = pl.run_scoped(scores, _ACC(scores_shape, jnp.float32))
        plgpu.barrier_arrive(memory.k_empty.at[0])
        weights, maximum, total, _ = softmax(s, *fresh(item), item, item.last, True)
        await_values(0, item, item.last, True)
        acc = plgpu.layout_cast(jnp.full(out_shape, 0, jnp.float32), _MATRIX)
        return acc, maximum, total, weights.astype(g.dtype), jnp.int32(1)

    def next_item(n: Any, state: Any) -> Any:
        before, carry = state
        item = items.get(n)
        plgpu.barrier_wait(memory.q_full.at[lax.rem(n, g.q_slots)])
        return item, rest(step(item.last, carry, n, item, True, before), n, item)

    item = items.get(0)
    plgpu.barrier_wait(memory.q_full.at[0])
    state = (item, rest(first_step(item), 0, item))
    item, (acc, maximum, total, weights, at) = lax.fori_loop(1, num, next_item, state)
    values = memory.v.at[lax.rem(at - 1, _KV_SLOTS)]
    acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(_ACC.init(acc))
    _store(g, memory, out, lse, warpgroup, item, acc, maximum, total)


def _spread(rows: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(rows, shape, [0])


def _online_softmax(g: _Geometry, s: Array, maximum: Array, total: Array, limit: Any) -> tuple[Array, ...]:
    """Weights of a tile of scores, the new maximum (of scores times log2 e) and sum, and the decay of the old ones.

    `limit` (None: all is seen) places the mask: row r is token r // pack, so that the causal rule for column c is
    `c * pack - r <= limit`.
    """
    factor = g.spec.scale * _LOG2E
    if (cap := g.spec.logit_soft_cap) is not None:
        # cap * tanh(x / cap), in units of log2 e; the hardware's tanh is good to 2^-11 only.
        s = cap * _LOG2E - (2 * cap * _LOG2E) / (jnp.exp2(s * (2 * factor / cap)) + 1)
        factor = 1.0
    if limit is not None:
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=_MATRIX)
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=_MATRIX)
        distance = column * g.pack - row
        s = jnp.where(distance <= limit, s, -jnp.inf)
        if g.spec.sliding_window is not None:
            s = jnp.where(distance > limit - g.spec.sliding_window * g.pack, s, -jnp.inf)
    new_maximum = jnp.maximum(maximum, s.max(axis=1) * factor)
    finite = new_maximum
    if limit is not None:  # a row may have seen nothing yet
        finite = jnp.where(new_maximum == -jnp.inf, jnp.zeros_like(new_maximum), new_maximum)
    decay = jnp.exp2(maximum - finite)
    weights = jnp.exp2(s * factor - _spread(finite, s.shape))
    return weights, new_maximum, total * decay + weights.sum(axis=1), decay


def _zero_hidden(g: _Geometry, values: Any, item: _Item, t: Any) -> None:
    """Zeros the values of KV tile `t` that no query sees: they may be NaN, which a weight of 0 does not silence.

    Both warpgroups do it, to the same bits.
    """
    low, high = jnp.int32(0), item.kv_len - t * g.kv_tile
    if g.spec.sliding_window is not None:
        low = item.position - (g.spec.sliding_window - 1) - t * g.kv_tile

    @pl.when((low > 0) | (high < g.kv_tile))
    def _():
        row = plgpu.broadcasted_iota(jnp.int32, (_ROWS, _SLAB), 0, layout=_MATRIX)
        for r in range(0, g.kv_tile, _ROWS):
            for c in range(g.slabs):
                ref = values.at[pl.ds(r, _ROWS), pl.ds(c * _SLAB, _SLAB)]
                v = plgpu.load(ref, layout=_MATRIX)
                v = jnp.where(row < high - r, v, jnp.zeros_like(v))
                if g.spec.sliding_window is not None:
                    v = jnp.where(row >= low - r, v, jnp.zeros_like(v))
                ref[...] = v
        plgpu.commit_smem()


def _store(
    g: _Geometry,
    memory: _Memory,
    out: Any,
    lse: Any,
    warpgroup: Any,
    item: _Item,
    acc: Array,
    maximum: Array,
    total: Array,
) -> None:
    """Normalises a finished item and stores this warpgroup's part of its rows."""
    result = (acc * _spread(1.0 / total, acc.shape)).astype(g.dtype)
    before = warpgroup * g.warpgroup_tokens
    for first in range(0, g.slabs, g.out_slabs):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for c in range(g.out_slabs):
            memory.out_tiled[warpgroup, c] = result[:, (first + c) * _SLAB : (first + c + 1) * _SLAB]
        if lse is not None and first == 0:
            memory.lse[warpgroup] = (maximum + jnp.log2(total)) / _LOG2E
        plgpu.commit_smem()
        _copy_out(g, memory, out, warpgroup, item.row + before, item.head, item.rows - before, first)
    if lse is not None:
        plgpu.copy_smem_to_gmem(memory.lse.at[warpgroup], lse.at[item.tile, item.group, warpgroup])


def _copy_out(
    g: _Geometry, memory: _Memory, out: Any, warpgroup: Any, row: Any, head: Any, tokens: Any, first: int
) -> None:
    """Copies the first `tokens` that a warpgroup staged, to slab `first` on: at once, or in powers of two."""

    def copy(start: Any, size: int) -> None:
        for c in range(g.out_slabs):
            target = out.at[pl.ds(row + start, size), pl.ds(head, g.pack), pl.ds((first + c) * _SLAB, _SLAB)]
            plgpu.copy_smem_to_gmem(memory.out.at[warpgroup, c, pl.ds(start, size)], target, commit_group=False)

    size = g.warpgroup_tokens
    pl.when(tokens >= size)(lambda: copy(0, size))

    @pl.when((tokens > 0) & (tokens < size))
    def _ragged():
        start, part = 0, size // 2
        while part:
            pl.when((tokens & part) != 0)(functools.partial(copy, start, part))
            start = start + (tokens & part)
            part //= 2

    plgpu.commit_smem_to_gmem_group()


def _zero_padding(g: _Geometry, memory: _Memory, out: Any, warpgroup: Any, total: Any) -> None:
    """Zeros the rows of the output that belong to no sequence, spread over the warpgroups of all programs."""
    worker, workers = lax.axis_index("program") * _WARPGROUPS + warpgroup, g.programs * _WARPGROUPS
    pieces = lax.div(g.tokens - total + (g.warpgroup_tokens - 1), g.warpgroup_tokens) * g.groups
    mine = lax.div(pieces + (workers - 1) - worker, workers)

    @pl.when(mine > 0)
    def _():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for c in range(g.out_slabs):
            memory.out_tiled[warpgroup, c] = plgpu.layout_cast(jnp.full((_ROWS, _SLAB), 0, g.dtype), _MATRIX)
        plgpu.commit_smem()

        def zero(i, _):
            piece = worker + i * workers
            row, head = total + lax.div(piece, g.groups) * g.warpgroup_tokens, lax.rem(piece, g.groups) * g.pack
            for first in range(0, g.slabs, g.out_slabs):
                _copy_out(g, memory, out, warpgroup, row, head, g.tokens - row, first)

        lax.fori_loop(0, mine, zero, None)


def _launch(
    g: _Geometry, plan: PrefillPlan, arrays: tuple[Array, ...], sinks: Array | None
) -> tuple[Array, Array | None]:
    scratch = _scratch(g)
    inputs = (*arrays, plan.tiles, plan.count, plan.total, *([] if sinks is None else [sinks]))
    out_types = [jax.ShapeDtypeStruct((g.tokens, g.q_heads, g.head_dim), g.dtype)]
    if g.spec.return_lse:
        out_types.append(jax.ShapeDtypeStruct((plan.tiles.shape[0], g.groups, _WARPGROUPS, _ROWS), jnp.float32))

    def body(*refs: Any) -> None:
        ins, outs = refs[: len(inputs)], refs[len(inputs) : -len(scratch)]
        buffers = dict(zip(scratch, refs[-len(scratch) :], strict=True))
        q, q_tiled = buffers.pop("q")
        out, out_tiled = buffers.pop("out")
        memory = _Memory(q=q, q_tiled=q_tiled, out=out, out_tiled=out_tiled, **buffers)
        _kernel(g, (*ins, None)[:8], outs[0], outs[1] if g.spec.return_lse else None, memory)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(g.programs,),
        grid_names=("program",),
        kernel_name="paged_prefill",
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    results = kernel(*inputs)
    return results[0], results[1] if g.spec.return_lse else None


def _by_token(g: _Geometry, plan: PrefillPlan, lse: Array, tokens: int) -> Float[Array, "tokens q_heads"]:
    """The log-sum-exp from one a row of a tile to one a token; padding gets -inf."""
    lse = lse.reshape(-1, g.groups, g.tile_tokens, g.pack).swapaxes(1, 2).reshape(-1, g.tile_tokens, g.q_heads)
    offset = jnp.arange(g.tile_tokens, dtype=jnp.int32)[None]
    target = jnp.where(offset < plan.tiles[:, ROWS, None], plan.tiles[:, ROW, None] + offset, tokens)
    return jnp.full((tokens, g.q_heads), -jnp.inf).at[target].set(lse, mode="drop")


def refusal(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> str | None:
    """Why this implementation can't serve a call, or None."""
    head_dim, block_size = k_pool.shape[3], k_pool.shape[1]
    if (reason := device_refusal()) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q must be bfloat16 or float16, not {q.dtype}"
    if k_pool.dtype != q.dtype:
        return f"the pools must have q's dtype {q.dtype}, not {k_pool.dtype}"
    if k_scale is not None or v_scale is not None:
        return "it knows no FP8 pools, so no k_scale or v_scale"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, not {head_dim}"
    if block_size not in _BLOCK_SIZES:
        return f"block_size must be 8, 16, 32, 64 or 128, not {block_size}"
    if not spec.scale > 0:
        return f"scale must be above 0, not {spec.scale}"
    return None


def mosaic_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """Output, and log-sum-exp if `spec.return_lse`, else None; see `pallas_kernels.paged_attention`.

    For calls that `refusal` has nothing against.
    """
    assert k_scale is None
    assert v_scale is None
    tokens, q_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    g = _Geometry(
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        block_size=block_size,
        table_width=block_tables.shape[1],
        programs=num_multiprocessors(),
        spec=spec,
        has_sinks=sinks is not None,
    )
    plan = plan_prefill(query_starts, kv_lens, tokens, g.tile_tokens, g.bundle)
    if tokens < g.tile_tokens:  # a copy is no larger than what it reads
        g = dataclasses.replace(g, tokens=g.tile_tokens)
        q = jnp.pad(q, ((0, g.tokens - tokens), (0, 0), (0, 0)))
    if sinks is not None:  # one a row of a warpgroup
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(g.groups, g.pack), (1, g.warpgroup_tokens))
    out, lse = _launch(g, plan, (q, k_pool, v_pool, block_tables), sinks)
    return out[:tokens], None if lse is None else _by_token(g, plan, lse, tokens)
