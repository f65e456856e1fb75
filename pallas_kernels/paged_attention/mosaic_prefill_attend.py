"""The arithmetic of the prefill kernel: what a compute warpgroup does with its 64 rows of each item.

A step multiplies the queries with the keys of one KV tile, and the weights of the tile before with its values, which
may end the item before: both products are under way before the softmax, so that the tensor cores work while it runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.primitives import wgmma_accumulator_load, wgmma_accumulator_store
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_prefill_geometry import KV_SLOTS, MATRIX, ROWS, VECTOR, Geometry, Memory
from pallas_kernels.paged_attention.mosaic_prefill_items import Item, Items
from pallas_kernels.paged_attention.mosaic_prefill_store import LOG2E, Output, spread

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


@dataclasses.dataclass(frozen=True)
class Attention:
    """The compute warpgroup's life: all items.

    What steps carry: the output so far, the maximum, the sum, the weights of the last tile, whose values are still to
    be added, and how many tiles there were, of all items.
    """

    geometry: Geometry
    memory: Memory
    items: Items
    sinks: Any  # [groups, 64], or None
    output: Output
    warpgroup: Any

    def run(self, num: Any) -> None:
        """All `num` items, of which there must be one."""
        memory = self.memory

        def next_item(n: Any, state: Any) -> Any:
            before, carry = state
            item = self.items.get(n)
            plgpu.barrier_wait(memory.q_full.at[lax.rem(n, self.geometry.q_slots)])
            return item, self._rest(self._step(item.last, carry, n, item, True, before), n, item)

        item = self.items.get(0)
        plgpu.barrier_wait(memory.q_full.at[0])
        state = (item, self._rest(self._first_step(item), 0, item))
        item, (acc, maximum, total, weights, at) = lax.fori_loop(1, num, next_item, state)
        values = memory.v.at[lax.rem(at - 1, KV_SLOTS)]
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, values))(_ACC.init(acc))
        self.output.store(item, acc, maximum, total)

    @property
    def _scores_shape(self) -> tuple[int, int]:
        return ROWS, self.geometry.kv_tile

    @property
    def _out_shape(self) -> tuple[int, int]:
        return ROWS, self.geometry.head_dim

    def _first_step(self, item: Item) -> Any:
        """Scores of the first tile of all."""
        plgpu.barrier_wait(self.memory.k_full.at[0])

        def scores(acc: Any) -> Any:
            self._issue_scores(acc, 0, 0)
            return acc[...]

        s = pl.run_scoped(scores, _ACC(self._scores_shape, jnp.float32))
        plgpu.barrier_arrive(self.memory.k_empty.at[0])
        weights, maximum, total, _ = self._softmax(s, *self._fresh(item), item, item.last, True)
        self._await_values(0, item, item.last, True)
        acc = plgpu.layout_cast(jnp.full(self._out_shape, 0, jnp.float32), MATRIX)
        return acc, maximum, total, weights.astype(self.geometry.dtype), jnp.int32(1)

    def _step(self, t: Any, carry: Any, n: Any, item: Item, masked: bool, before: Item | None = None) -> Any:
        """Scores of tile `t`, and the values of the tile before: of item `before`, which ends, if given."""
        memory = self.memory
        acc, maximum, total, weights, at = carry
        slot, previous = lax.rem(at, KV_SLOTS), lax.rem(at - 1, KV_SLOTS)
        plgpu.barrier_wait(memory.k_full.at[slot])

        def both(scores_acc: Any, out_acc: Any) -> Any:
            wgmma_accumulator_store(out_acc, acc)
            self._issue_scores(scores_acc, at, n)
            plgpu.wgmma(out_acc, weights, memory.v.at[previous])
            s = wgmma_accumulator_load(scores_acc, wait_n=1)
            plgpu.barrier_arrive(memory.k_empty.at[slot])
            start = (maximum, total) if before is None else self._fresh(item)
            new = lax.optimization_barrier(self._softmax(s, *start, item, t, masked))
            o = wgmma_accumulator_load(out_acc, wait_n=0)
            plgpu.barrier_arrive(memory.v_empty.at[previous])
            return new, o

        accs = (_ACC(self._scores_shape, jnp.float32), _ACC(self._out_shape, jnp.float32))
        (new_weights, new_maximum, new_total, decay), o = pl.run_scoped(both, *accs)
        new_weights = new_weights.astype(self.geometry.dtype)
        if before is None:
            o = o * spread(decay, self._out_shape)
        else:
            self.output.store(before, o, maximum, total)
            o = jnp.zeros_like(o)
        self._await_values(at, item, t, masked)
        return o, new_maximum, new_total, new_weights, at + 1

    def _rest(self, carry: Any, n: Any, item: Item) -> Any:
        """All tiles of an item but its last, which is visited first."""

        def down_from(end: Any, masked: bool) -> Any:
            return lambda i, carry: self._step(end - 1 - i, carry, n, item, masked)

        if self.geometry.spec.causal:  # else only the last tile needs a mask
            carry = lax.fori_loop(0, item.last - item.high, down_from(item.last, True), carry)
        carry = lax.fori_loop(0, item.high - item.low, down_from(item.high, False), carry)
        if self.geometry.spec.sliding_window is not None:
            carry = lax.fori_loop(0, item.low - item.first, down_from(item.low, True), carry)
        plgpu.barrier_arrive(self.memory.q_empty.at[lax.rem(n, self.geometry.q_slots)])
        return carry

    def _issue_scores(self, acc: Any, at: Any, n: Any) -> None:
        g, memory = self.geometry, self.memory
        for c in range(g.slabs):
            queries = memory.q_tiled.at[lax.rem(n, g.q_slots), c, pl.ds(self.warpgroup * ROWS, ROWS)]
            plgpu.wgmma(acc, queries, memory.k.at[lax.rem(at, KV_SLOTS), :, pl.ds(c * g.slab, g.slab)].T)

    def _fresh(self, item: Item) -> tuple[Array, Array]:
        """Maximum and sum before the first key: a sink counts as a key without a value."""
        if self.geometry.has_sinks:
            maximum = plgpu.load(self.sinks.at[item.group], layout=VECTOR, optimized=False) * LOG2E
            return maximum, plgpu.layout_cast(jnp.full((ROWS,), 1, jnp.float32), VECTOR)
        start = (plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), VECTOR) for x in (-jnp.inf, 0))
        return next(start), next(start)

    def _softmax(self, s: Array, maximum: Array, total: Array, item: Item, t: Any, masked: bool) -> tuple[Array, ...]:
        """Weights of a tile of scores, the new maximum (of scores times log2 e) and sum, and the decay of the old."""
        spec = self.geometry.spec
        factor = spec.scale * LOG2E
        if (cap := spec.logit_soft_cap) is not None:
            # cap * tanh(x / cap), in units of log2 e; the hardware's tanh is good to 2^-11 only.
            s = cap * LOG2E - (2 * cap * LOG2E) / (jnp.exp2(s * (2 * factor / cap)) + 1)
            factor = 1.0
        if masked:
            s = self._mask(s, item, t)
        new_maximum = jnp.maximum(maximum, s.max(axis=1) * factor)
        finite = new_maximum
        if masked:  # a row may have seen nothing yet
            finite = jnp.where(new_maximum == -jnp.inf, jnp.zeros_like(new_maximum), new_maximum)
        decay = jnp.exp2(maximum - finite)
        weights = jnp.exp2(s * factor - spread(finite, s.shape))
        return weights, new_maximum, total * decay + weights.sum(axis=1), decay

    def _mask(self, s: Array, item: Item, t: Any) -> Array:
        """-inf where a row of the tile of scores does not see the key."""
        g, start = self.geometry, t * self.geometry.kv_tile
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX)
        if not g.spec.causal:
            return jnp.where(column < item.kv_len - start, s, -jnp.inf)
        # Row r is token r // pack, so that the causal rule is column * pack - r <= limit.
        limit = (item.position - start) * g.pack + self.warpgroup * ROWS
        row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=MATRIX)
        distance = column * g.pack - row
        s = jnp.where(distance <= limit, s, -jnp.inf)
        if g.spec.sliding_window is not None:
            s = jnp.where(distance > limit - g.spec.sliding_window * g.pack, s, -jnp.inf)
        return s

    def _await_values(self, at: Any, item: Item, t: Any, masked: bool) -> None:
        slot = lax.rem(at, KV_SLOTS)
        plgpu.barrier_wait(self.memory.v_full.at[slot])
        if masked:
            self._zero_hidden(self.memory.v.at[slot], item, t)

    def _zero_hidden(self, values: Any, item: Item, t: Any) -> None:
        """Zeros the values of KV tile `t` that no query sees: they may be NaN, which a weight of 0 does not silence.

        Both warpgroups do it, to the same bits.
        """
        g = self.geometry
        low, high = jnp.int32(0), item.kv_len - t * g.kv_tile
        if g.spec.sliding_window is not None:
            low = item.position - (g.spec.sliding_window - 1) - t * g.kv_tile

        @pl.when((low > 0) | (high < g.kv_tile))
        def _():
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, g.slab), 0, layout=MATRIX)
            for r in range(0, g.kv_tile, ROWS):
                for c in range(g.slabs):
                    ref = values.at[pl.ds(r, ROWS), pl.ds(c * g.slab, g.slab)]
                    v = plgpu.load(ref, layout=MATRIX)
                    v = jnp.where(row < high - r, v, jnp.zeros_like(v))
                    if g.spec.sliding_window is not None:
                        v = jnp.where(row >= low - r, v, jnp.zeros_like(v))
                    ref[...] = v
            plgpu.commit_smem()
