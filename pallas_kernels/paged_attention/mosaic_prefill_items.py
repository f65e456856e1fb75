"""The prefill kernel's work: which tile and heads a program takes when, and which KV tiles these see."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.mosaic_prefill_geometry import Geometry
from pallas_kernels.paged_attention.prefill_plan import KV_LEN, POSITION, ROW, ROWS, SEQ


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Item:
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
class Items:
    """The items of this program."""

    geometry: Geometry
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

    def get(self, n: Any) -> Item:
        """The program's n-th item. All items come in blocks of `bundle` tiles, head by head: tiles of one sequence
        that share keys run at the same time, and find them in the L2 cache."""
        g, index = self.geometry, self._index(n)
        block = lax.div(index, g.bundle * g.groups)
        size = lax.min(self.tiles_used - block * g.bundle, g.bundle)  # of the block, in tiles
        within = index - block * (g.bundle * g.groups)
        group = lax.div(within, size)
        tile = block * g.bundle + (within - group * size)
        seq, row, rows, position, kv_len = (self.tiles[tile, c] for c in (SEQ, ROW, ROWS, POSITION, KV_LEN))
        first, last, low, high = kv_tiles(g, position, rows, kv_len)
        head = group * g.pack
        kv_head = lax.div(head, g.q_heads // g.kv_heads)
        return Item(tile, group, head, kv_head, seq, row, rows, position, kv_len, first, last, low, high)


def kv_tiles(g: Geometry, position: Any, rows: Any, kv_len: Any) -> tuple[Any, Any, Any, Any]:
    """`first`, `last`, `low` and `high` of an item. One KV tile at least: without keys it is all masked."""
    kv_tile, spec = g.kv_tile, g.spec
    end = position + rows if spec.causal else kv_len  # of what any row sees
    common_end = position + 1 if spec.causal else kv_len  # of what every row sees
    last = lax.max(lax.div(end + (kv_tile - 1), kv_tile) - 1, 0)
    first, low = jnp.int32(0), jnp.int32(0)
    if (window := spec.sliding_window) is not None:
        first = lax.div(lax.max(position - (window - 1), 0), kv_tile)
        low = lax.div(lax.max(end - window, 0) + (kv_tile - 1), kv_tile)
    high = lax.max(lax.min(lax.div(common_end, kv_tile), last), first)
    low = lax.max(lax.min(low, high), first)
    return first, last, low, high
