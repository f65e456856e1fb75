import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import plan

BATCHES = {
    "one long": [8192],
    "few long": [16384] * 8,
    "uniform": [2048] * 128,
    "one long among short": [0, 5, 16384, *[100] * 60],
    "random": np.random.default_rng(0).integers(0, 3000, 200).tolist(),
}


TABLE = np.random.default_rng(1).integers(1, 10**6, (256, 16384 // 16))


def make_plan(kv_lens, queried=None, *, kv_heads=8, window=None):
    counts = np.ones(len(kv_lens), np.int32) if queried is None else np.asarray(queried, np.int32)
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    options = {"tile": 64, "block_size": 16, "ahead": 2, "sliding_window": window, "kv_heads": kv_heads, "slots": 396}
    table = np.asarray(
        plan.plan_decode(
            jnp.asarray(kv_lens, jnp.int32), starts, jnp.asarray(TABLE[: len(kv_lens)], jnp.int32), **options
        )
    )
    assert table[-1, 0] == counts.sum()
    return table[:-1]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kv_heads", [1, 8, 40])
def test_every_tile_is_in_one_piece_and_pieces_of_a_sequence_are_neighbours(batch, kv_heads):
    lens = BATCHES[batch]
    table = make_plan(lens, kv_heads=kv_heads)
    work = table[table[:, plan.PIECES] > 0]
    assert not table[len(work) :, : plan.COUNTERS].any()
    for seq, n in enumerate(lens):
        rows = np.flatnonzero((table[:, plan.SEQ] == seq) & (table[:, plan.PIECES] > 0))
        tiles = [t for r in rows for t in range(table[r, plan.FIRST_TILE], table[r, plan.END_TILE])]
        assert tiles == list(range(max(1, -(-n // 64))))
        assert (table[rows, plan.PIECES] == len(rows)).all()
        assert (table[rows, plan.HOME] == rows[0]).all()
        assert (np.diff(rows) == 1).all()
        assert (table[rows, plan.KV_LEN] == n).all()
        assert (table[rows, plan.QUERY] == seq).all()


@pytest.mark.parametrize("batch", BATCHES)
def test_counters_start_at_zero_and_the_first_block_ids_come_along(batch):
    table = make_plan(BATCHES[batch])[:-1]
    counters, blocks = np.split(table[:, plan.COUNTERS :], [8], axis=1)
    assert not counters.any()
    for row, ids in zip(table, blocks, strict=True):
        first = row[plan.FIRST_TILE] * 4  # a tile of 64 holds 4 blocks of 16
        known = TABLE[row[plan.SEQ], first : first + 8]
        np.testing.assert_array_equal(ids[: len(known)], known)


def test_longest_first():
    table = make_plan(BATCHES["random"])
    work = table[table[:, plan.PIECES] > 0]
    sizes = (work[:, plan.END_TILE] - work[:, plan.FIRST_TILE])[work[:, plan.HOME] == np.arange(len(work))]
    assert (np.diff(sizes) <= 0).all()


def test_long_rows_are_split_and_uniform_batches_are_not():
    assert make_plan([8192])[0, plan.PIECES] >= 17  # more programs of 8 heads than an H200 has multiprocessors
    assert make_plan([16384] * 8)[0, plan.PIECES] == 6
    assert make_plan([2048] * 128)[:, plan.PIECES].max() == 1
    ragged = make_plan(BATCHES["one long among short"])
    assert ragged[0, plan.SEQ] == 2
    assert ragged[0, plan.PIECES] > 8


def test_a_window_leaves_out_the_tiles_before_it():
    table = make_plan([1000], window=100)
    assert table[0, plan.FIRST_TILE] == 900 // 64
    assert table[:, plan.END_TILE].max() == 16


def test_only_sequences_with_one_query_have_pieces():
    table = make_plan([100, 200, 5000, 300], [1, 0, 70, 1])
    work = table[table[:, plan.PIECES] > 0]
    assert set(zip(work[:, plan.SEQ], work[:, plan.QUERY], strict=True)) == {(0, 0), (3, 71)}


def test_a_batch_of_chunks_has_no_piece():
    assert not make_plan([100, 5000], [100, 2])[:, plan.PIECES].any()
