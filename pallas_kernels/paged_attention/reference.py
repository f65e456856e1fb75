"""Paged attention in plain XLA with float32 accumulation: the oracle of the kernels, and the CPU path.

Queries are cut into tiles that belong to one sequence each; all tiles walk over the KV cache together, a few
blocks at a time, with the running maximum and sum of online softmax (Milakov and Gimelshein, 2018,
arXiv:1805.02867). The walk ends at the longest sequence of the call, so that a wide block table costs nothing,
and nothing of the size of queries x keys is ever held.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.paged_attention.spec import AttentionSpec

_QUERY_TILE = 16
_KV_CHUNK_TOKENS = 128


class _Tiles(NamedTuple):
    """Queries cut into tiles of one sequence each; tiles past the last one in use hold no valid query."""

    seq: Int32[Array, " tiles"]
    query: Int32[Array, "tiles tile"]  # row of q; clipped where not valid
    position: Int32[Array, "tiles tile"]  # in the sequence
    valid: Bool[Array, "tiles tile"]


def _cut(query_starts: Array, kv_lens: Array, num_queries: int, tile: int) -> _Tiles:
    counts = jnp.diff(query_starts)
    ends = jnp.cumsum((counts + tile - 1) // tile)  # of each sequence's tiles
    num_tiles = min(num_queries, num_queries // tile + counts.shape[0])  # most there can be
    index = jnp.arange(num_tiles, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(ends, index, side="right"), counts.shape[0] - 1).astype(jnp.int32)
    first_tile = jnp.where(seq > 0, ends[seq - 1], 0)
    offset = (index - first_tile)[:, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None]
    valid = (offset < counts[seq, None]) & (index < ends[-1])[:, None]
    query = jnp.clip(query_starts[seq, None] + offset, 0, num_queries - 1)
    return _Tiles(seq, query, kv_lens[seq, None] - counts[seq, None] + offset, valid)


def paged_attention_reference(
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
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Output and log-sum-exp; see `pallas_kernels.paged_attention`."""
    num_queries, q_heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_pool.shape
    table_width = block_tables.shape[1]
    tile = min(_QUERY_TILE, num_queries if spec.max_query_len is None else spec.max_query_len)
    tiles = _cut(query_starts, kv_lens, num_queries, tile)

    chunk_blocks = min(table_width, max(1, _KV_CHUNK_TOKENS // block_size))
    chunk = chunk_blocks * block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -table_width % chunk_blocks)))[tiles.seq]
    # The last position that each query sees.
    sees = tiles.position if spec.causal else jnp.broadcast_to(kv_lens[tiles.seq, None] - 1, tiles.position.shape)
    tile_ends = jnp.max(jnp.where(tiles.valid, sees + 1, 0), axis=1)  # KV tokens that a tile sees
    window = spec.sliding_window or table_width * block_size

    grouped = q[tiles.query].reshape(-1, tile, kv_heads, q_heads // kv_heads, head_dim)
    grouped = grouped.astype(jnp.float32) * spec.scale

    def walk(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, acc = state
        blocks = jax.lax.dynamic_slice_in_dim(tables, i * chunk_blocks, chunk_blocks, axis=1)
        k, v = (p[blocks].reshape(-1, chunk, kv_heads, head_dim).astype(jnp.float32) for p in (k_pool, v_pool))
        kv_position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        distance = sees[:, :, None] - kv_position[None, None]
        seen = tiles.valid[:, :, None] & (distance >= 0) & (distance < window)  # [tiles, tile, chunk]
        # Slots that nobody sees may hold anything, NaN included, and 0 * NaN is NaN.
        v = jnp.where(seen.any(axis=1)[:, :, None, None], v, 0)
        if k_scale is not None:
            k = k * k_scale.astype(jnp.float32)[None, None, :, None]
        scores = jnp.einsum("nthgd,nchd->nhgtc", grouped, k, precision="highest")
        if spec.logit_soft_cap is not None:
            scores = spec.logit_soft_cap * jnp.tanh(scores / spec.logit_soft_cap)
        scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        finite = jnp.where(jnp.isneginf(new_maximum), 0, new_maximum)
        weights = jnp.exp(scores - finite[..., None])
        decay = jnp.exp(maximum - finite)
        acc = acc * decay[..., None] + jnp.einsum("nhgtc,nchd->nhgtd", weights, v, precision="highest")
        return new_maximum, total * decay + weights.sum(axis=-1), acc

    rows = (tables.shape[0], kv_heads, q_heads // kv_heads, tile)
    state = (jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    first = jnp.where(tiles.valid, sees - (window - 1), jnp.iinfo(jnp.int32).max).min().clip(0) // chunk
    end = (tile_ends.max() + chunk - 1) // chunk
    maximum, total, acc = jax.lax.fori_loop(first, end, walk, state)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, -1, 1)
        new_maximum = jnp.maximum(maximum, sinks)
        finite = jnp.where(jnp.isneginf(new_maximum), 0, new_maximum)  # a sink of -inf is none
        decay = jnp.exp(maximum - finite)
        maximum, total = new_maximum, total * decay + jnp.exp(sinks - finite)
        acc = acc * decay[..., None]
    if v_scale is not None:
        acc = acc * v_scale.astype(jnp.float32)[None, :, None, None, None]
    lse = maximum + jnp.log(total)
    out = acc / jnp.where(total > 0, total, 1)[..., None]

    target = jnp.where(tiles.valid, tiles.query, num_queries).reshape(-1)  # padding is dropped
    out = out.transpose(0, 3, 1, 2, 4).reshape(-1, q_heads, head_dim).astype(q.dtype)
    lse = lse.transpose(0, 3, 1, 2).reshape(-1, q_heads)
    return (
        jnp.zeros_like(q).at[target].set(out, mode="drop"),
        jnp.full((num_queries, q_heads), -jnp.inf).at[target].set(lse, mode="drop"),
    )
