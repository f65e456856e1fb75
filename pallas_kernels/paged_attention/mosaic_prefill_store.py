"""How the prefill kernel's results leave: rows of an item through shared memory, and zeros in the padding."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_prefill_geometry import MATRIX, ROWS, WARPGROUPS, Geometry, Memory
from pallas_kernels.paged_attention.mosaic_prefill_items import Item

LOG2E = math.log2(math.e)


def spread(rows: Array, shape: tuple[int, ...]) -> Array:
    """One value a row to all columns."""
    return lax.broadcast_in_dim(rows, shape, [0])


@dataclasses.dataclass(frozen=True)
class Output:
    """What one compute warpgroup stores, and where."""

    geometry: Geometry
    memory: Memory
    out: Any  # [tokens, q_heads, head_dim]
    lse: Any  # [tiles, groups, warpgroups, 64], or None
    warpgroup: Any

    def store(self, item: Item, acc: Array, maximum: Array, total: Array) -> None:
        """Normalises a finished item and stores this warpgroup's part of its rows: zeros where nothing was seen."""
        g, memory = self.geometry, self.memory
        inverse = jnp.where(total > 0, 1.0 / total, jnp.zeros_like(total))
        result = (acc * spread(inverse, acc.shape)).astype(g.dtype)
        before = self.warpgroup * g.warpgroup_tokens
        for first in range(0, g.slabs, g.out_slabs):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(g.out_slabs):
                memory.out_tiled[self.warpgroup, c] = result[:, (first + c) * g.slab : (first + c + 1) * g.slab]
            if self.lse is not None and first == 0:
                memory.lse[self.warpgroup] = (maximum + jnp.log2(total)) / LOG2E
            plgpu.commit_smem()
            self._copy_out(item.row + before, item.head, item.rows - before, first)
        if self.lse is not None:
            plgpu.copy_smem_to_gmem(memory.lse.at[self.warpgroup], self.lse.at[item.tile, item.group, self.warpgroup])

    def _copy_out(self, row: Any, head: Any, tokens: Any, first: int) -> None:
        """Copies the first `tokens` that are staged, to slab `first` on: at once, or in powers of two and a rest."""
        g = self.geometry

        def copy(start: Any, size: int) -> None:
            for c in range(g.out_slabs):
                columns = pl.ds((first + c) * g.slab, g.slab)
                target = self.out.at[pl.ds(row + start, size), pl.ds(head, g.pack), columns]
                source = self.memory.out.at[self.warpgroup, c, pl.ds(start, size)]
                plgpu.copy_smem_to_gmem(source, target, commit_group=False)

        size = g.warpgroup_tokens
        pl.when(tokens >= size)(lambda: copy(0, size))

        @pl.when((tokens > 0) & (tokens < size))
        def _ragged():
            start, part = 0, size // 2
            while part >= g.aligned_tokens:
                pl.when((tokens & part) != 0)(functools.partial(copy, start, part))
                start = start + (tokens & part)
                part //= 2
            rest = tokens & (g.aligned_tokens - 1)  # at once: its second half would not start aligned
            for few in range(1, g.aligned_tokens):
                pl.when(rest == few)(functools.partial(copy, start, few))

        plgpu.commit_smem_to_gmem_group()

    def zero_padding(self, total: Any) -> None:
        """Zeros the rows from `total` on, which belong to no sequence, spread over the warpgroups of all programs."""
        g = self.geometry
        worker, workers = lax.axis_index("program") * WARPGROUPS + self.warpgroup, g.programs * WARPGROUPS
        pieces = lax.div(g.tokens - total + (g.warpgroup_tokens - 1), g.warpgroup_tokens) * g.groups
        mine = lax.div(pieces + (workers - 1) - worker, workers)

        @pl.when(mine > 0)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for c in range(g.out_slabs):
                zeros = plgpu.layout_cast(jnp.full((ROWS, g.slab), 0, g.dtype), MATRIX)
                self.memory.out_tiled[self.warpgroup, c] = zeros
            plgpu.commit_smem()

            def zero(i, _):
                piece = worker + i * workers
                row, head = total + lax.div(piece, g.groups) * g.warpgroup_tokens, lax.rem(piece, g.groups) * g.pack
                for first in range(0, g.slabs, g.out_slabs):
                    self._copy_out(row, head, g.tokens - row, first)

            lax.fori_loop(0, mine, zero, None)
