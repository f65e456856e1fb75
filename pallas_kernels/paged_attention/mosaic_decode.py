"""Paged decode attention for Hopper: one query a sequence, bound by the reading of the KV cache.

`plan.py` cuts the sequences into pieces and orders them, longest first; `mosaic_decode_kernel.py` computes, a piece
and KV head at a time, and merges. Here is which calls it serves, and the call.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.devices import num_multiprocessors
from pallas_kernels.paged_attention import plan
from pallas_kernels.paged_attention.mosaic_common import common_refusal
from pallas_kernels.paged_attention.mosaic_decode_kernel import (
    LOG2_E,
    OPERAND_ROWS,
    STAGES,
    TILE,
    DecodeShapes,
    decode_kernel,
)
from pallas_kernels.paged_attention.spec import AttentionSpec


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
    block_size = k_pool.shape[1]
    if spec.max_query_len != 1:
        return "it needs max_query_len=1, a promise of one query a sequence at most"
    if (reason := common_refusal(q, k_pool, spec, STAGES, k_scale, v_scale)) is not None:
        return reason
    if block_size % 8 or (block_size % TILE and TILE % block_size):
        return f"block_size must be 8, 16, 32 or a multiple of 64, not {block_size}"
    if _shapes(q, k_pool).rows > OPERAND_ROWS:
        return f"at most {OPERAND_ROWS} query heads can share a KV head, not {q.shape[1] // k_pool.shape[2]}"
    return None


def _shapes(q: Array, k_pool: Array) -> DecodeShapes:
    _, block_size, kv_heads, head_dim = k_pool.shape
    return DecodeShapes(kv_heads, q.shape[1] // kv_heads, head_dim, block_size, jnp.dtype(q.dtype))


def mosaic_decode(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: None = None,
    v_scale: None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """Output and, if `spec.return_lse`, log-sum-exp; see `pallas_kernels.paged_attention`."""
    return _decode(q, k_pool, v_pool, block_tables, kv_lens, query_starts, sinks, spec, num_multiprocessors())


@functools.partial(jax.jit, static_argnames=("spec", "multiprocessors"))  # one trace for all layers of a model
def _decode(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    sinks: Array | None,
    spec: AttentionSpec,
    multiprocessors: int,
) -> tuple[Array, Array | None]:
    shapes = _shapes(q, k_pool)
    # Ids outside the pool read some block of it instead of faulting. And an operand that is computed is aligned as
    # Mosaic wants it, which a slice of an array, as callers pass it, need not be.
    block_tables = jnp.clip(block_tables, 0, k_pool.shape[0] - 1)
    work = plan.plan_decode(
        kv_lens,
        query_starts,
        block_tables,
        tile=TILE,
        block_size=shapes.block_size,
        ahead=shapes.stages,
        sliding_window=spec.sliding_window,
        kv_heads=shapes.kv_heads,
        slots=shapes.programs_per_multiprocessor * multiprocessors,
    )
    inputs = [_pad_groups(q, shapes) if shapes.pads_groups else q, k_pool, v_pool, block_tables, work]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)[None, :, None] * LOG2_E
        sinks = (_pad_groups(sinks, shapes) if shapes.pads_groups else sinks).reshape(-1)
        inputs.append(jnp.pad(sinks, (0, OPERAND_ROWS)))  # every program reads as many as it has rows
    out, *rest = decode_kernel(shapes, spec, sinks is not None, q.shape[0], work.shape[0] - 1)(*inputs)
    return out, rest[-1] if spec.return_lse else None


def _pad_groups(x: Array, shapes: DecodeShapes) -> Array:
    """[tokens, heads, columns] with `stride` rows a group."""
    grouped = x.reshape(x.shape[0], shapes.kv_heads, shapes.group, x.shape[2])
    padded = jnp.pad(grouped, ((0, 0), (0, 0), (0, shapes.stride - shapes.group), (0, 0)))
    return padded.reshape(x.shape[0], -1, x.shape[2])
