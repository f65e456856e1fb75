"""The work list of the prefill kernel: query tiles of one sequence each, longest first, planned on the device.

Shapes are static: there are at most `tokens // tile_tokens + seqs` tiles, and `count` says how many are in use. The
list is small (a few hundred tiles), so everything is counted by comparing all pairs, which XLA fuses into a few
reductions; scans and sorts would take several kernels each.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

SEQ, ROW, ROWS, POSITION, KV_LEN = range(5)
"""Columns of `PrefillPlan.tiles`."""
_COLUMNS = 8  # one aligned 32 byte sector a tile


class PrefillPlan(NamedTuple):
    """Tiles, about those first that see most keys; unused ones come last, all zero."""

    tiles: Int32[Array, "tiles 8"]
    """Sequence, first row of q, rows in use, position of the first row, tokens of the sequence; the rest is 0."""
    counts: Int32[Array, " 2"]
    """Tiles in use; rows of q that belong to a sequence (those behind are padding)."""


def plan_prefill(
    query_starts: Int32[Array, " seqs_plus_1"],
    kv_lens: Int32[Array, " seqs"],
    tokens: int,
    tile_tokens: int,
    bundle: int,
    causal: bool = True,
    fewest_queries: int = 1,
) -> PrefillPlan:
    """Cuts the queries of each sequence into tiles of `tile_tokens` rows, the last one partly in use.

    Args:
      query_starts: as of `paged_attention`.
      kv_lens: tokens of each sequence.
      tokens: rows of q.
      tile_tokens: rows a tile.
      bundle: tiles of a sequence that stay together, as if all saw as many keys as the last of them: they share most
        of these keys, and find them in the L2 cache if they run at the same time.
      causal: False if every query sees all keys of its sequence.
      fewest_queries: sequences with fewer get no tile.
    """
    seqs = kv_lens.shape[0]
    slots = min(tokens, tokens // tile_tokens + seqs)  # most tiles there can be
    queries = query_starts[1:] - query_starts[:-1]
    queries = jnp.where(queries >= fewest_queries, queries, 0)
    tiles = (queries + tile_tokens - 1) // tile_tokens
    order = jnp.arange(seqs, dtype=jnp.int32)
    ends = jnp.sum(
        jnp.where(order[None] <= order[:, None], tiles[None], 0), axis=1, dtype=jnp.int32
    )  # of each sequence's tiles

    index = jnp.arange(slots, dtype=jnp.int32)
    owner = ((ends - tiles)[None] <= index[:, None]) & (index[:, None] < ends[None])  # [slots, seqs], one a row in use
    pick = lambda x: jnp.sum(jnp.where(owner, x[None], 0), axis=1, dtype=jnp.int32)  # noqa: E731
    offset = jnp.where(index < ends[-1], index - pick(ends - tiles), 0) * tile_tokens
    rows = jnp.minimum(tile_tokens, pick(queries) - offset)
    kv_len = pick(kv_lens)
    columns = [pick(order), pick(query_starts[:-1]) + offset, rows, kv_len - pick(queries) + offset, kv_len]
    seen = kv_len
    if causal:
        later = (pick(tiles) - 1 - offset // tile_tokens) // bundle  # whole bundles behind this tile's
        seen = jnp.where(rows > 0, kv_len - later * (bundle * tile_tokens), 0)
    before = (seen[None] > seen[:, None]) | ((seen[None] == seen[:, None]) & (index[None] < index[:, None]))
    rank = jnp.sum(before, axis=1, dtype=jnp.int32)
    table = jnp.stack([*columns] + [jnp.zeros_like(rank)] * (_COLUMNS - len(columns)), axis=1)
    table = jnp.zeros_like(table).at[rank].set(table, unique_indices=True)
    return PrefillPlan(table, jnp.stack([ends[-1], query_starts[-1]]))
