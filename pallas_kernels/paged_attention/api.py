"""The paged attention op: what it computes, what it refuses, and who computes it."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.paged_attention.reference import paged_attention_reference

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def _always(*_: object) -> None:
    return None


IMPLEMENTATIONS = (Implementation("reference", paged_attention_reference, _always),)


def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    *,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention of ragged queries over keys and values in a paged pool.

    Sequence `i` owns the queries `q[query_starts[i]:query_starts[i + 1]]`: one row for a decode, many for a
    (chunk of a) prefill, in any mix. They are its last tokens: the newest has position `kv_lens[i] - 1`, and
    each attends to every position up to its own. The keys and values of position `p` lie in block
    `block_tables[i, p // block_size]` at row `p % block_size`, those of the queries themselves included
    (`write_kv` comes first).

    Grouped-query attention: `q_heads` is a multiple of `kv_heads`; query head `h` reads KV head
    `h // (q_heads // kv_heads)`.

    Args:
      q: queries; float32, bfloat16 or float16. Rows from `query_starts[-1]` on are padding.
      k_pool: keys of all blocks, any of the three dtypes.
      v_pool: values of all blocks, shaped like `k_pool`.
      block_tables: block ids; entries past a sequence's last block are never used, but must be valid ids
        (0, the null block, by convention).
      kv_lens: tokens of each sequence that are in the pool, its queries included; 0 for a padding row.
      query_starts: where each sequence's queries start, non-decreasing from 0, `seqs + 1` entries.
      scale: factor on the scores; `head_dim ** -0.5` if None.
      implementation: `"reference"`, or None for the best that serves this call.

    Returns:
      The attention output in `q`'s shape and dtype; zeros in padding rows.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    _check(q, k_pool, v_pool, block_tables, kv_lens, query_starts)
    args = (q, k_pool, v_pool, block_tables, kv_lens, query_starts)
    chosen = choose("paged_attention", IMPLEMENTATIONS, implementation, *args)
    return chosen.run(*args, scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale)


def _check(q: Array, k_pool: Array, v_pool: Array, block_tables: Array, kv_lens: Array, query_starts: Array) -> None:
    ranks = {"q": (q, 3), "k_pool": (k_pool, 4), "v_pool": (v_pool, 4), "block_tables": (block_tables, 2)}
    ranks |= {"kv_lens": (kv_lens, 1), "query_starts": (query_starts, 1)}
    for name, (x, rank) in ranks.items():
        if x.ndim != rank:
            raise ValueError(f"paged_attention: {name} must have {rank} dimensions, not shape {x.shape}")
    for name, x in {"q": q, "k_pool": k_pool, "v_pool": v_pool}.items():
        if x.dtype not in _FLOATS:
            raise ValueError(f"paged_attention: {name} must be float32, bfloat16 or float16, not {x.dtype}")
    for name, x in {"block_tables": block_tables, "kv_lens": kv_lens, "query_starts": query_starts}.items():
        if x.dtype != jnp.int32:
            raise ValueError(f"paged_attention: {name} must be int32, not {x.dtype}")
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"paged_attention: k_pool {k_pool.dtype}{k_pool.shape} and v_pool {v_pool.dtype}{v_pool.shape} "
            "must agree in shape and dtype"
        )
    if q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"paged_attention: head_dim of q ({q.shape[2]}) and of k_pool ({k_pool.shape[3]}) differ")
    if q.shape[1] % k_pool.shape[2]:
        raise ValueError(
            f"paged_attention: q has {q.shape[1]} heads, which must be a multiple of the {k_pool.shape[2]} KV heads"
        )
    seqs = block_tables.shape[0]
    if kv_lens.shape[0] != seqs or query_starts.shape[0] != seqs + 1:
        raise ValueError(
            f"paged_attention: block_tables has {seqs} rows, so kv_lens must have {seqs} entries (has "
            f"{kv_lens.shape[0]}) and query_starts {seqs + 1} (has {query_starts.shape[0]})"
        )
