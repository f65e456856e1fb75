"""Order and splits of ragged decode work, planned on the device with static shapes.

A sequence's KV is cut into pieces of whole tiles where one program would keep the others waiting. The pieces of all
sequences, longest first, fill the rows of one table, of which every program of the kernel reads its own: with the ids
of its first blocks, so that it need not wait for one load before the next, and with the counters of a merge, so that
nothing has to be cleared before a launch. Ranks come from comparing all sequences with all, which for the few hundred
of a batch is two small fusions and no sort.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

SEQ, QUERY, KV_LEN, FIRST_TILE, END_TILE, HOME, PIECES, COUNTERS = range(8)
"""Columns of the table: the sequence, its row of q, its tokens, the piece's tiles, the row of the sequence's first
piece and how many it has (0: the row holds no work). From COUNTERS on, a 0 for each KV head, then block ids."""

# Costs in the time that a program needs for a tile while the whole GPU is busy, fitted to measurements on an H200.
_LONE_SPEEDUP = 3  # a program that has its multiprocessor to itself is this much faster
_PROGRAM_COST = 0.5  # to start and end
_MERGE_COST = 0.8  # of a sequence's pieces, if any has several
_PART_COST = 0.03  # for each piece of the sequence that has most


def plan_decode(
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    block_tables: Int32[Array, "seqs table_width"],
    *,
    tile: int,
    block_size: int,
    ahead: int,
    sliding_window: int | None,
    kv_heads: int,
    slots: int,
) -> Int32[Array, "rows_plus_1 columns"]:
    """The table of pieces, and in a last row the number of queries (in column 0).

    Args:
      kv_lens: tokens of each sequence.
      query_starts: as of `paged_attention`; sequences that have another number of queries than one get no piece.
      block_tables: block ids; whatever lies past the last block of a sequence is looked up, and not used.
      tile: tokens a program handles at once.
      block_size: tokens a block.
      ahead: tiles of a piece whose block ids go into the table, each in as many columns as a tile has blocks.
      sliding_window: positions that a query sees; tiles before them are left out.
      kv_heads: each piece is run once a KV head.
      slots: programs that the GPU runs at a time.
    """
    seqs = kv_lens.shape[0]
    extra = -(-slots // kv_heads)  # enough that a sequence alone can fill the GPU
    rows = seqs + extra
    queried = query_starts[1:] - query_starts[:-1] == 1
    first = jnp.maximum(kv_lens - sliding_window, 0) // tile if sliding_window else jnp.zeros_like(kv_lens)
    tiles = jnp.where(queried, jnp.maximum((kv_lens + tile - 1) // tile - first, 1), 0)

    longest = _longest_piece(tiles, _candidates(-(-block_tables.shape[1] * block_size // tile)), rows, kv_heads, slots)
    pieces = (tiles + longest - 1) // longest
    size = (tiles + jnp.maximum(pieces, 1) - 1) // jnp.maximum(pieces, 1)
    index = jnp.arange(seqs, dtype=jnp.int32)
    earlier = (size[None] > size[:, None]) | ((size[None] == size[:, None]) & (index[None] < index[:, None]))
    home = jnp.sum(jnp.where(earlier, pieces[None], 0), axis=1, dtype=jnp.int32)

    row = jnp.arange(rows, dtype=jnp.int32)
    owns = (home[None] <= row[:, None]) & (row[:, None] < (home + pieces)[None])  # [rows, seqs], at most one a row
    begin = first[None] + (row[:, None] - home[None]) * size[None]
    end = jnp.minimum(begin + size[None], (first + tiles)[None])
    fields = [index[None], query_starts[None, :-1], kv_lens[None], begin, end, home[None], pieces[None]]
    columns = [jnp.sum(jnp.where(owns, field, 0), axis=1, dtype=jnp.int32) for field in fields]
    counters = jnp.zeros((rows, kv_heads), jnp.int32)
    copied = min(block_size, tile)  # tokens of one block that a tile takes
    offsets = jnp.arange(ahead * tile // copied, dtype=jnp.int32) * copied
    blocks = (columns[FIRST_TILE][:, None] * tile + offsets[None]) // block_size
    first_blocks = block_tables[columns[SEQ][:, None], jnp.minimum(blocks, block_tables.shape[1] - 1)]
    table = jnp.concatenate([jnp.stack(columns, axis=1), counters, first_blocks], axis=1)
    return jnp.concatenate([table, jnp.broadcast_to(query_starts[-1:, None], (1, table.shape[1]))])


def _candidates(most_tiles: int) -> np.ndarray:
    """Piece lengths to choose from: all short ones, then steps of 8 %."""
    lengths = {1, most_tiles}
    length = 1.0
    while length < most_tiles:
        lengths.add(int(length))
        length = max(length + 1, length * 1.08)
    return np.array(sorted(lengths), np.int32)


def _longest_piece(tiles: Array, lengths: np.ndarray, rows: int, kv_heads: int, slots: int) -> Array:
    """The length of `lengths` that makes the estimated time least; the pieces of all then fit in `rows`."""
    pieces = (tiles[None] + lengths[:, None] - 1) // lengths[:, None]  # [lengths, seqs]
    count = pieces.sum(axis=1)
    longest = ((tiles[None] + jnp.maximum(pieces, 1) - 1) // jnp.maximum(pieces, 1)).max(axis=1).astype(jnp.float32)
    programs = (count * kv_heads).astype(jnp.float32)
    busy = tiles.sum().astype(jnp.float32) * kv_heads / slots  # tiles of each slot if all were equally loaded
    # What runs while most of the GPU rests: the longest piece beyond the mean load; if the programs come in several
    # waves, some of the last wave too, which are short ones.
    last_wave = jnp.where(programs <= slots, 0, tiles.sum() / jnp.maximum(count, 1))
    tail = jnp.maximum(jnp.maximum(longest - busy, 0), last_wave) / _LONE_SPEEDUP
    parts = pieces.max(axis=1)
    merge = jnp.where(parts > 1, _MERGE_COST + _PART_COST * parts, 0)
    cost = tail + _PROGRAM_COST * programs / slots + merge
    return jnp.asarray(lengths)[jnp.argmin(jnp.where(count <= rows, cost, jnp.inf))]
