"""Paged decode attention in Pallas-Triton: one query a sequence, bound by the reading of the KV cache.

`plan.py` cuts the sequences into pieces and orders them, longest first. A program of the first kernel computes all
query heads of a KV head for one piece, the heads being the rows of products on the tensor cores (as in flash-decoding,
which splits KV over programs and merges by log-sum-exp). The second kernel merges the pieces of those sequences that
have several.
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

from pallas_kernels.paged_attention import plan
from pallas_kernels.paged_attention.spec import AttentionSpec
from pallas_kernels.paged_attention.triton_common import (
    LEAST,
    LOG2_E,
    Device,
    Inputs,
    KeysAndValues,
    Launch,
    Shapes,
    Softmax,
    load,
)

_TILE_BYTES = 16 * 1024  # of keys, and as many of values: small enough for the shared memory of every GPU
_MAX_TILE = 64
_MAX_ROWS = 64
_STAGES = 2  # with four programs a multiprocessor as fast on an H200 as any other choice
_MERGE_PARTS = 16  # that a program of the merge reads at once
_MERGE_HEADS = 4  # of a program, where one each would be more programs than these
_MERGE_PROGRAMS = 4096


def default_launch(shapes: Shapes) -> Launch:
    widest = max(shapes.dtype.itemsize, shapes.operand.itemsize)  # of the pool's dtype and that of products
    tile = max(16, min(_MAX_TILE, _TILE_BYTES // (shapes.columns * widest)))
    rows = max(16, min(_MAX_ROWS, pl.next_power_of_2(shapes.group)))
    warps = 8 if shapes.operand == jnp.float32 else 4  # float32 products are made from registers
    return Launch(tile=tile, warps=warps, stages=_STAGES, rows=rows)


@functools.partial(jax.jit, static_argnames=("spec", "device", "launch"))
def triton_decode(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    sinks: Array | None,
    k_scale: Array | None,
    v_scale: Array | None,
    *,
    spec: AttentionSpec,
    device: Device,
    launch: Launch | None = None,
) -> tuple[Array, Array | None]:
    """Output and, if `spec.return_lse`, log-sum-exp; see `pallas_kernels.paged_attention`."""
    shapes = Shapes.of(q, k_pool, device.native_fp8)
    launch = launch or default_launch(shapes)
    work = plan.plan_decode(
        kv_lens,
        query_starts,
        block_tables,
        tile=launch.tile,
        block_size=shapes.block_size,
        ahead=0,
        sliding_window=spec.sliding_window,
        kv_heads=shapes.kv_heads,
        slots=launch.programs * device.multiprocessors,
    )
    inputs = Inputs(q, k_pool, v_pool, block_tables, work, sinks, k_scale, v_scale)
    outs = _decode(inputs, shapes, spec, launch, device)
    out, lse = _merge(outs, inputs, shapes, device)
    return out, lse


Outputs = tuple[Any, ...]
"""Output, log-sum-exp, and both of pieces that are merged: float32 [rows, q_heads, head_dim] and, in units of log2,
[rows, q_heads]."""


def _decode(inputs: Inputs, shapes: Shapes, spec: AttentionSpec, launch: Launch, device: Device) -> Outputs:
    chunks = -(-shapes.group // launch.rows)  # of a KV head's query heads
    pieces = inputs.work.shape[0] - 1
    heads = shapes.tokens, shapes.q_heads
    float32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def paged_decode(refs: Inputs, *outs: Any) -> None:
        row = pl.program_id(1)
        kv_head, chunk = lax.div(pl.program_id(0), chunks), lax.rem(pl.program_id(0), chunks)
        pl.when(refs.work[row, plan.PIECES] > 0)(lambda: _attend(refs, outs, shapes, spec, launch, row, kv_head, chunk))
        _clear_padding(refs, outs, shapes, launch, row, pieces, kv_head, chunk)

    return pl.pallas_call(
        paged_decode,
        out_shape=(
            jax.ShapeDtypeStruct((*heads, shapes.head_dim), shapes.dtype),
            float32(heads) if spec.return_lse else None,
            float32((pieces, shapes.q_heads, shapes.head_dim)),
            float32((pieces, shapes.q_heads)),
        ),
        grid=(shapes.kv_heads * chunks, pieces),
        compiler_params=pltriton.CompilerParams(num_warps=launch.warps, num_stages=launch.stages),
        interpret=device.interpret,
    )(inputs)


class _Heads:
    """The query heads of a program, rows of its matrices."""

    def __init__(self, shapes: Shapes, launch: Launch, kv_head: Any, chunk: Any):
        offset = chunk * launch.rows + jnp.arange(launch.rows, dtype=jnp.int32)
        self.index = kv_head * shapes.group + offset
        self.valid = None if shapes.group % launch.rows == 0 else offset < shapes.group
        columns = jnp.arange(shapes.columns, dtype=jnp.int32)
        self.matrix = self.index[:, None], columns[None]
        shape = launch.rows, shapes.columns
        self.matrix_valid = None if self.valid is None else jnp.broadcast_to(self.valid[:, None], shape)
        if shapes.columns != shapes.head_dim:
            inside = jnp.broadcast_to((columns < shapes.head_dim)[None], shape)
            self.matrix_valid = inside if self.matrix_valid is None else self.matrix_valid & inside

    def store(self, out: Any, lse: Any, row: Any, values: Array, log_sum: Array) -> None:
        """To `row` of `out` and, if there is one, of `lse`."""
        pltriton.store(out.at[row, *self.matrix], values.astype(out.dtype), mask=self.matrix_valid)
        if lse is not None:
            pltriton.store(lse.at[row, self.index], log_sum, mask=self.valid)


def _attend(
    refs: Inputs,
    outs: Outputs,
    shapes: Shapes,
    spec: AttentionSpec,
    launch: Launch,
    row: Any,
    kv_head: Any,
    chunk: Any,
) -> None:
    """One piece: to the output where it is a sequence's only one, else to the buffers of pieces."""
    fields = [refs.work[row, i] for i in (plan.SEQ, plan.QUERY, plan.KV_LEN, plan.FIRST_TILE, plan.END_TILE)]
    seq, query, kv_len, first_tile, end_tile = fields
    heads = _Heads(shapes, launch, kv_head, chunk)
    q = load(refs.q, (query, *heads.matrix), heads.matrix_valid)
    kv = KeysAndValues(shapes, spec, launch.tile, refs, seq, kv_head, q)

    def step(i: Any, carry: tuple[Softmax, Array]) -> tuple[Softmax, Array]:
        state, blocks = carry
        position = kv.positions(i)
        seen = position < kv_len
        if spec.sliding_window is not None:
            seen &= position >= kv_len - spec.sliding_window
        k = kv.keys(i, blocks, seen)
        v = kv.values(i, blocks, seen)
        blocks = kv.block_ids(i + 1, kv_len)  # a tile ahead, so that no load of keys waits for one of ids
        return kv.attend(state, k, v, jnp.broadcast_to(seen[None], (launch.rows, launch.tile))), blocks

    start = Softmax.fresh(launch.rows, shapes.columns), kv.block_ids(first_tile, kv_len)
    state, _ = lax.fori_loop(first_tile, end_tile, step, start)
    out, lse, part_out, part_lse = outs

    @pl.when(refs.work[row, plan.PIECES] == 1)
    def _alone() -> None:
        sinks = None if refs.sinks is None else load(refs.sinks, (heads.index,), heads.valid)
        finished = kv.finish(state, sinks)
        log_sum = finished.log_sum() / LOG2_E
        heads.store(out, lse, query, finished.normalised(), log_sum)

    @pl.when(refs.work[row, plan.PIECES] > 1)
    def _with_others() -> None:
        heads.store(part_out, part_lse, row, state.normalised(), state.log_sum())


def _clear_padding(
    refs: Inputs, outs: Outputs, shapes: Shapes, launch: Launch, row: Any, pieces: int, kv_head: Any, chunk: Any
) -> None:
    """Zeros (and a log-sum-exp of -inf) in the rows past the last query, shared among the programs."""
    first = refs.work[pieces, 0] + row
    out, lse, *_ = outs

    @pl.when(first < shapes.tokens)
    def _clear() -> None:
        heads = _Heads(shapes, launch, kv_head, chunk)
        zeros, nothing = jnp.zeros((launch.rows, shapes.columns)), jnp.full(launch.rows, -jnp.inf)

        def clear(i: Any, _: None) -> None:
            heads.store(out, lse, first + i * pieces, zeros, nothing)

        lax.fori_loop(0, lax.div(shapes.tokens - first + (pieces - 1), pieces), clear, None)


def _merge(outs: Outputs, inputs: Inputs, shapes: Shapes, device: Device) -> tuple[Array, Array | None]:
    """Output and log-sum-exp with those of sequences of several pieces in their places."""
    out, lse, part_out, part_lse = outs
    pieces = part_out.shape[0]
    most_heads = _MERGE_HEADS if shapes.q_heads * pieces > _MERGE_PROGRAMS else 1
    per_program = next(n for n in range(most_heads, 0, -1) if shapes.group % n == 0)

    def paged_decode_merge(refs: Any, *places: Any) -> None:
        row, first_head = pl.program_id(1), pl.program_id(0) * per_program
        count = refs["work"][row, plan.PIECES]

        @pl.when((count > 1) & (refs["work"][row, plan.HOME] == row))
        def _home() -> None:
            for i in range(per_program):
                _merge_head(refs, places, shapes, row, count, first_head + i)

    refs = {"work": inputs.work, "part_out": part_out, "part_lse": part_lse}
    refs |= {"sinks": inputs.sinks, "v_scale": inputs.v_scale, "out": out, "lse": lse}
    leaves, places = jax.tree.flatten(refs)
    del leaves
    flat = jax.tree.unflatten(places, range(places.num_leaves))
    aliases = {flat[name]: i for i, name in enumerate(("out", "lse")) if flat[name] is not None}
    struct = lambda x: None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    return pl.pallas_call(
        paged_decode_merge,
        out_shape=(struct(out), struct(lse)),
        grid=(shapes.q_heads // per_program, pieces),
        input_output_aliases=aliases,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=device.interpret,
    )(refs)


def _merge_head(refs: Any, places: Any, shapes: Shapes, home: Any, count: Any, head: Any) -> None:
    """Merges one head of the pieces in rows `home` to `home + count`."""
    column = jnp.arange(shapes.columns, dtype=jnp.int32)
    inside = column < shapes.head_dim

    def step(i: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, acc = state  # scalars and [columns]
        part = i * _MERGE_PARTS + jnp.arange(_MERGE_PARTS, dtype=jnp.int32)
        valid = part < count
        log_sum = jnp.where(valid, load(refs["part_lse"], (home + part, head), valid), -jnp.inf)
        mask = jnp.broadcast_to(valid[:, None], (_MERGE_PARTS, shapes.columns)) & inside[None]
        values = load(refs["part_out"], ((home + part)[:, None], head, column[None]), mask)
        grown = jnp.maximum(maximum, log_sum.max())
        weights, decay = jnp.exp2(log_sum - grown), jnp.exp2(maximum - grown)
        return grown, total * decay + weights.sum(), acc * decay + (values * weights[:, None]).sum(axis=0)

    start = jnp.float32(LEAST), jnp.float32(0), jnp.zeros(shapes.columns)
    maximum, total, acc = lax.fori_loop(0, lax.div(count + (_MERGE_PARTS - 1), _MERGE_PARTS), step, start)
    if refs["sinks"] is not None:
        sink = refs["sinks"][head].astype(jnp.float32) * LOG2_E
        grown = jnp.maximum(maximum, sink)
        decay = jnp.exp2(maximum - grown)
        maximum, total, acc = grown, total * decay + jnp.exp2(sink - grown), acc * decay
    if refs["v_scale"] is not None:
        acc = acc * refs["v_scale"][lax.div(head, shapes.group)].astype(jnp.float32)
    acc = acc * (shapes.fp8_factor * jnp.where(total > 0, 1 / total, 0.0))
    out, lse = places
    query = refs["work"][home, plan.QUERY]
    pltriton.store(out.at[query, head, column], acc.astype(out.dtype), mask=inside)
    if lse is not None:
        lse[query, head] = jnp.where(total > 0, (maximum + jnp.log2(total)) / LOG2_E, -jnp.inf)
