"""Cascade attention: the KV of a prefix that a group of sequences shares is read once for the group.

Attention over the prefix, in which all queries of a group are those of one sequence, and attention over each
sequence's own suffix are two calls of `paged_attention`; their outputs merge by log-sum-exp. Source: Juravsky et al.,
"Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024, arXiv:2402.05099; Ye et al., "Cascade Inference",
2024, https://flashinfer.ai/2024/02/02/cascade-inference.html.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.op import public_op
from pallas_kernels.options import check_sizes, positive_int
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.debug import checked_tables
from pallas_kernels.paged_attention.merge import merge_attention


@public_op
def cascade_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    group_starts: Int32[Array, " groups_plus_1"],
    prefix_lens: Int32[Array, " groups"],
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    max_query_len: int | None = None,
    prefix_splits: int = 1,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """What causal `paged_attention` gives, for groups of sequences whose block tables begin with the same blocks.

    Group `g` is the sequences `group_starts[g]` to `group_starts[g + 1] - 1`, neighbours in the batch; their first
    `prefix_lens[g]` tokens lie in the same blocks. That part of the cache is read once for the group (once for each
    tile of its queries, where these are many) instead of once a sequence, and the result is rounded to `q`'s dtype
    once more. Arguments not listed here are those of `paged_attention`.

    Args:
      group_starts: the first sequence of each group, non-decreasing from 0, `groups + 1` entries. A group may be one
        sequence, or none (padding). Sequences from `group_starts[-1]` on share nothing.
      prefix_lens: tokens that each group shares, 0 for none; whole blocks count. At most `kv_lens - queries` of
        every member: the queries themselves come after the prefix.
      sliding_window: must be None; it is here to say so.
      max_query_len: most queries that any sequence has.
      prefix_splits: into how many pieces each prefix is cut, that are computed side by side: for prefixes with fewer
        (KV head, tile of queries) pairs than the GPU has multiprocessors.

    Returns:
      As `paged_attention`.

    Raises:
      ValueError: as `paged_attention`; or shapes of the groups disagree, or there is a sliding window.
    """
    _check(q, k_pool, block_tables, kv_lens, query_starts, group_starts, prefix_lens, sliding_window)
    splits = positive_int("cascade_attention", "prefix_splits", prefix_splits) or 1
    max_query_len = positive_int("cascade_attention", "max_query_len", max_query_len)
    attend = functools.partial(
        paged_attention,
        scale=scale,
        logit_soft_cap=logit_soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        implementation=implementation,
    )
    pools = (k_pool, v_pool)
    tokens, q_heads, head_dim = q.shape
    block_size = k_pool.shape[1]
    block_tables = checked_tables(  # here, where rows have the caller's numbers; each call checks its own as well
        block_tables,
        kv_lens,
        query_starts,
        num_tokens=tokens,
        num_blocks=k_pool.shape[0],
        block_size=block_size,
        causal=True,
        max_query_len=max_query_len,
        groups=(group_starts, prefix_lens),
    )
    if tokens == 0 or kv_lens.shape[0] == 0:  # no pieces to make, nothing to merge
        nothing = attend(q, *pools, block_tables, kv_lens, query_starts, sinks=sinks, max_query_len=max_query_len)
        return nothing if return_lse else nothing[0]
    prefix_blocks = jnp.pad(prefix_lens // block_size, (0, 1))  # the last is of the sequences that are in no group
    pieces = _prefix_pieces(
        block_tables, query_starts, group_starts, prefix_blocks, splits=splits, tokens=tokens, size=block_size
    )
    out, lse = attend(jnp.tile(q, (splits, 1, 1)), *pools, *pieces, causal=False)
    out, lse = out.reshape(-1, tokens, q_heads, head_dim), lse.reshape(-1, tokens, q_heads)

    # A sink takes part in the softmax once: in the suffix, which every query has.
    suffixes = _suffixes(block_tables, kv_lens, group_starts, prefix_blocks, size=block_size)
    own = attend(q, *pools, *suffixes, query_starts, sinks=sinks, max_query_len=max_query_len)
    merged, merged_lse = merge_attention(jnp.concatenate([out, own[0][None]]), jnp.concatenate([lse, own[1][None]]))
    return (merged, merged_lse) if return_lse else merged


def _prefix_pieces(
    block_tables: Array,
    query_starts: Array,
    group_starts: Array,
    prefix_blocks: Array,
    *,
    splits: int,
    tokens: int,
    size: int,
) -> tuple[Array, Array, Array]:
    """Tables, lengths and query starts of the prefixes, each group a sequence, for `splits` copies of the queries.

    The queries of no group, padding among them, are one more sequence, without keys, at the end of each copy.
    """
    tables = jnp.pad(block_tables[jnp.minimum(group_starts[:-1], block_tables.shape[0] - 1)], ((0, 1), (0, 0)))
    per_piece = (prefix_blocks + splits - 1) // splits
    copies = jnp.arange(splits, dtype=jnp.int32)[:, None]
    firsts = copies * per_piece[None]  # of each piece's blocks, [splits, groups + 1]
    lens = jnp.clip(prefix_blocks[None] - firsts, 0, per_piece[None]) * size
    starts = copies * tokens + query_starts[group_starts][None]
    tables = _shift(jnp.tile(tables, (splits, 1)), firsts.reshape(-1))
    return tables, lens.reshape(-1), jnp.append(starts.reshape(-1), splits * tokens)


def _suffixes(
    block_tables: Array, kv_lens: Array, group_starts: Array, prefix_blocks: Array, *, size: int
) -> tuple[Array, Array]:
    """Tables and lengths of what each sequence has beyond its group's prefix."""
    seqs = jnp.arange(block_tables.shape[0], dtype=jnp.int32)
    blocks = prefix_blocks[jnp.searchsorted(group_starts, seqs, side="right") - 1]
    return _shift(block_tables, blocks), jnp.maximum(kv_lens - blocks * size, 0)


def _shift(block_tables: Array, blocks: Array) -> Array:
    """Each row without its first `blocks` entries; behind its end stand valid ids that are never used."""
    width = block_tables.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None] + blocks[:, None]
    return jnp.take_along_axis(block_tables, jnp.minimum(index, width - 1), axis=1)


def _check(
    q: Array,
    k_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    group_starts: Array,
    prefix_lens: Array,
    sliding_window: int | None,
) -> None:
    """What `paged_attention` can't see of a call, or would see too late."""
    ranks: dict[str, tuple[Any, int]] = {"q": (q, 3), "k_pool": (k_pool, 4), "block_tables": (block_tables, 2)}
    ranks |= {"kv_lens": (kv_lens, 1), "query_starts": (query_starts, 1)}
    ranks |= {"group_starts": (group_starts, 1), "prefix_lens": (prefix_lens, 1)}
    for name, (x, rank) in ranks.items():
        if x.ndim != rank:
            raise ValueError(f"cascade_attention: {name} must have {rank} dimensions, not shape {x.shape}")
    check_sizes("cascade_attention", "q", q, {"q_heads": 1, "head_dim": 2})
    check_sizes("cascade_attention", "k_pool", k_pool, {"blocks": 0, "block_size": 1, "kv_heads": 2, "head_dim": 3})
    check_sizes("cascade_attention", "block_tables", block_tables, {"table_width": 1})
    for name, x in {"group_starts": group_starts, "prefix_lens": prefix_lens}.items():
        if x.dtype != jnp.int32:
            raise ValueError(f"cascade_attention: {name} must be int32, not {x.dtype}")
    if group_starts.shape[0] != prefix_lens.shape[0] + 1:
        raise ValueError(
            f"cascade_attention: prefix_lens has {prefix_lens.shape[0]} groups, so group_starts must have "
            f"{prefix_lens.shape[0] + 1} entries, not {group_starts.shape[0]}"
        )
    seqs = block_tables.shape[0]
    if kv_lens.shape[0] != seqs or query_starts.shape[0] != seqs + 1:
        raise ValueError(
            f"cascade_attention: block_tables has {seqs} rows, so kv_lens must have {seqs} entries (has "
            f"{kv_lens.shape[0]}) and query_starts {seqs + 1} (has {query_starts.shape[0]})"
        )
    if sliding_window is not None:
        raise ValueError(
            f"cascade_attention: sliding_window={sliding_window} is not served, since a window hides the prefix from "
            "some queries of a group only: use paged_attention"
        )
