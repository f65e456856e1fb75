"""Paged attention of ragged prefill chunks in Pallas-Triton, tile by tile (as in FlashAttention-2, arXiv:2307.08691).

`prefill_plan.py` cuts the queries into tiles of one sequence each, about the longest first. A program computes one
tile for some query heads of one KV head: its rows are tokens times heads, so that heads which share keys read them
once. Of the KV tiles only those at the ends need a mask.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from pallas_kernels.paged_attention.prefill_plan import KV_LEN, POSITION, ROW, ROWS, SEQ, plan_prefill
from pallas_kernels.paged_attention.spec import AttentionSpec
from pallas_kernels.paged_attention.triton_common import (
    LOG2_E,
    Device,
    Inputs,
    KeysAndValues,
    Launch,
    Shapes,
    Softmax,
    load,
)

_MAX_PACK = 16
_BUNDLE_TOKENS = 512  # of a sequence, scheduled together


def default_launch(shapes: Shapes, device: Device) -> Launch:
    """By the bytes of a row: what fits the shared memory (99 KiB on sm_86) and registers of every GPU."""
    row = shapes.columns * max(shapes.dtype.itemsize, shapes.operand.itemsize)
    if shapes.operand == jnp.float32:
        return Launch(tile=max(16, min(32, 16 * 1024 // row)), warps=8, stages=2, rows=32)
    if row <= 256 and device.is_hopper:
        return Launch(tile=32, warps=4, stages=3, rows=64)  # the best of several on an H200
    if row <= 256:  # as many rows as columns at least, so that Triton gives each row of a product to one warp
        return Launch(tile=64, warps=8, stages=3, rows=128)
    return Launch(tile=32, warps=8, stages=2, rows=64)


@functools.partial(jax.jit, static_argnames=("spec", "device", "launch"))
def triton_prefill(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    sinks: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    decoded: tuple[Array, Array | None] | None = None,
    *,
    spec: AttentionSpec,
    device: Device,
    launch: Launch | None = None,
) -> tuple[Array, Array | None]:
    """Output and, if `spec.return_lse`, log-sum-exp; see `pallas_kernels.paged_attention`.

    `decoded` has both, with the rows of sequences of one query and those of padding filled in: then the other rows are
    computed, and written to the same buffers.
    """
    shapes = Shapes.of(q, k_pool, device.native_fp8)
    launch = launch or default_launch(shapes, device)
    pack = min(shapes.group & -shapes.group, _MAX_PACK)  # query heads a tile
    tokens = launch.rows // pack
    bundle = max(1, _BUNDLE_TOKENS // tokens)
    plan = plan_prefill(
        query_starts,
        kv_lens,
        shapes.tokens,
        tokens,
        bundle,
        causal=spec.causal,
        fewest_queries=1 if decoded is None else 2,
    )
    inputs = Inputs(q, k_pool, v_pool, block_tables, plan.tiles, sinks, k_scale, v_scale)
    heads = shapes.tokens, shapes.q_heads
    slots = plan.tiles.shape[0]

    def paged_prefill(refs: Inputs, total: Any, _: Any, out: Any, lse: Any) -> None:
        index = pl.program_id(1)
        tile = _Tile(refs, shapes, launch, pack, index, pl.program_id(0) * pack)
        pl.when(tile.rows > 0)(lambda: _attend(refs, out, lse, shapes, spec, launch, tile))
        if decoded is None:
            _clear_padding(out, lse, shapes, launch, tile, total[0] + index * tokens, slots * tokens)

    first_decoded = len(jax.tree.leaves(inputs)) + 1
    return pl.pallas_call(
        paged_prefill,
        out_shape=(
            jax.ShapeDtypeStruct((*heads, shapes.head_dim), shapes.dtype),
            jax.ShapeDtypeStruct(heads, jnp.float32) if spec.return_lse else None,
        ),
        grid=(shapes.q_heads // pack, slots),
        input_output_aliases={first_decoded + i: i for i in range(len(jax.tree.leaves(decoded)))},
        compiler_params=pltriton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=device.interpret,
    )(inputs, query_starts[-1:], decoded)


class _Tile:
    """A program's rows: token `r // pack`, head `r % pack`."""

    def __init__(self, refs: Inputs, shapes: Shapes, launch: Launch, pack: int, index: Any, first_head: Any):
        fields = [refs.work[index, i] for i in (SEQ, ROW, ROWS, POSITION, KV_LEN)]
        self.seq, self.row, self.rows, self.position, self.kv_len = fields
        self.kv_head = lax.div(first_head, shapes.group)
        row = jnp.arange(launch.rows, dtype=jnp.int32)
        self.token = lax.div(row, jnp.full_like(row, pack))
        self.head = first_head + lax.rem(row, jnp.full_like(row, pack))
        self.column = jnp.arange(shapes.columns, dtype=jnp.int32)
        self.inside = None if shapes.columns == shapes.head_dim else self.column < shapes.head_dim

    def matrix(self, first: Any, end: Any) -> tuple[tuple[Array, Array, Array], Array]:
        """Where the rows of q are whose tokens are `first` and on, and which of them come before `end`."""
        token = first + self.token
        index = token[:, None], self.head[:, None], self.column[None]
        mask = jnp.broadcast_to((token < end)[:, None], (token.shape[0], self.column.shape[0]))
        return index, mask if self.inside is None else mask & self.inside[None]

    def store(self, out: Any, lse: Any, first: Any, end: Any, values: Array, log_sum: Array) -> None:
        """The rows whose tokens are `first` and on, but before `end`."""
        index, mask = self.matrix(first, end)
        pltriton.store(out.at[index], values.astype(out.dtype), mask=mask)
        if lse is not None:
            token = first + self.token
            pltriton.store(lse.at[token, self.head], log_sum, mask=token < end)


def _attend(refs: Inputs, out: Any, lse: Any, shapes: Shapes, spec: AttentionSpec, launch: Launch, tile: _Tile) -> None:
    index, mask = tile.matrix(tile.row, tile.row + tile.rows)
    q = load(refs.q, index, mask)
    kv = KeysAndValues(shapes, spec, launch.tile, refs, tile.seq, tile.kv_head, q)
    # Every row sees the positions before `common`, none those from `end` on or before `begin`.
    end, common, begin = tile.kv_len, tile.kv_len, 0
    if spec.causal:
        end, common = jnp.minimum(tile.position + tile.rows, tile.kv_len), tile.position + 1
    if spec.sliding_window is not None:
        begin = jnp.maximum(tile.position - (spec.sliding_window - 1), 0)

    def step(i: Any, carry: tuple[Softmax, Array], masked: bool) -> tuple[Softmax, Array]:
        state, blocks = carry
        some = every = None
        if masked:
            position = kv.positions(i)
            some = (position >= begin) & (position < end)
            every = jnp.broadcast_to(some[None], (launch.rows, launch.tile))
            if spec.causal:
                distance = (tile.position + tile.token)[:, None] - position[None]
                every &= distance >= 0
                if spec.sliding_window is not None:
                    every &= distance < spec.sliding_window
        k = kv.keys(i, blocks, some)
        v = kv.values(i, blocks, some)
        return kv.attend(state, k, v, every), kv.block_ids(i + 1, end)

    first, last = lax.div(begin, launch.tile), lax.div(end + (launch.tile - 1), launch.tile)
    carry = Softmax.fresh(launch.rows, shapes.columns), kv.block_ids(first, end)
    if spec.sliding_window is None:
        full = lax.div(jnp.minimum(common, end), launch.tile)
        carry = lax.fori_loop(first, full, functools.partial(step, masked=False), carry)
        first = full
    state, _ = lax.fori_loop(first, last, functools.partial(step, masked=True), carry)
    state = kv.finish(state, None if refs.sinks is None else load(refs.sinks, (tile.head,), None))
    tile.store(out, lse, tile.row, tile.row + tile.rows, state.normalised(), state.log_sum() / LOG2_E)


def _clear_padding(out: Any, lse: Any, shapes: Shapes, launch: Launch, tile: _Tile, first: Any, step: int) -> None:
    """Zeros (and a log-sum-exp of -inf) in the rows past the last query, shared among the programs."""

    @pl.when(first < shapes.tokens)
    def _clear() -> None:
        zeros, nothing = jnp.zeros((launch.rows, shapes.columns)), jnp.full(launch.rows, -jnp.inf)

        def clear(i: Any, _: None) -> None:
            tile.store(out, lse, first + i * step, shapes.tokens, zeros, nothing)

        lax.fori_loop(0, lax.div(shapes.tokens - first + (step - 1), step), clear, None)
