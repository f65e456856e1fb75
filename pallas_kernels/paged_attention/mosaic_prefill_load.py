"""The loaders of the prefill kernel: one warpgroup that brings queries, keys and values into shared memory."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.mosaic_prefill_geometry import KV_SLOTS, Geometry, Memory
from pallas_kernels.paged_attention.mosaic_prefill_items import Item, Items


def load(g: Geometry, memory: Memory, items: Items, q: Any, k_pool: Any, v_pool: Any, tables: Any) -> None:
    """The loading warpgroup's life: all tiles of all items, as the compute warpgroups empty the buffers."""
    num = items.num
    keys = (k_pool, memory.k, memory.k_full, memory.k_empty)
    values = (v_pool, memory.v, memory.v_full, memory.v_empty)

    @plgpu.warp_map
    def _warp(warp):  # two warps a pool: one alone is too slow to issue the copies of small blocks
        for me, stream in enumerate((keys, keys, values, values)):
            run = functools.partial(_load_kv, g, stream, tables, items, num, half=me % 2)
            pl.when(warp == me)(functools.partial(run, q=q if me == 0 else None, memory=memory))


def _load_kv(
    g: Geometry, stream: tuple[Any, ...], tables: Any, items: Items, num: Any, half: int, q: Any, memory: Memory
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
            t, slot = item.last - i, lax.rem(step, KV_SLOTS)
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


def _block(g: Geometry, tables: Any, seq: Any, t: Any, j: int) -> tuple[Any, Any]:
    """Block id and first row of copy `j` of KV tile `t`."""
    if g.block_size > g.kv_tile:
        tiles = g.block_size // g.kv_tile
        return tables[seq, lax.div(t, tiles)], lax.rem(t, tiles) * g.kv_tile
    return tables[seq, lax.min(t * g.copies + j, g.table_width - 1)], 0


def _load_q(g: Geometry, q: Any, memory: Memory, item: Item, slot: Any) -> None:
    plgpu.barrier_wait(memory.q_empty.at[slot])
    for c in range(g.slabs):
        source = q.at[pl.ds(item.row, g.tile_tokens), pl.ds(item.head, g.pack), pl.ds(c * g.slab, g.slab)]
        plgpu.copy_gmem_to_smem(source, memory.q.at[slot, c], memory.q_full.at[slot])
