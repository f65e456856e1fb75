from itertools import pairwise

import numpy as np
import pytest
from host import VOCAB, make_sequence

from jaxpaged import batch
from jaxpaged.batch import Bucket, Buckets, StepShape
from jaxpaged.config import SchedulerConfig
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler

BLOCK_SIZE = 16
SHAPE = StepShape(table_width=6, block_size=BLOCK_SIZE, num_slots=21 * BLOCK_SIZE)


def make_scheduler(budget=32) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=20, block_size=BLOCK_SIZE, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=budget
        )
    )


def packed(plan, bucket) -> batch.StepInputs:
    return batch.unpack(batch.pack(plan, bucket, SHAPE), bucket, SHAPE)


def test_buckets_cover_every_step_and_nothing_is_smaller():
    buckets = Buckets.coarse(32, 256)
    assert buckets.decode == (Bucket(8, 8, True), Bucket(32, 32, True))
    assert buckets.mixed == (Bucket(64, 32, False), Bucket(256, 32, False))
    assert buckets.largest == Bucket(256, 32, False)
    assert buckets.fit(8, 8) == Bucket(8, 8, True)
    assert buckets.fit(9, 9) == Bucket(32, 32, True)
    assert buckets.fit(9, 1) == Bucket(64, 32, False)
    assert buckets.fit(65, 32) == Bucket(256, 32, False)


def test_fine_buckets():
    buckets = Buckets.fine(256, 2048)
    assert [b.rows for b in buckets.decode] == [1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 224, 256]
    tokens = [128, 256, 320, 352, 384, 448, 544, 672, 864, 1152, 1568, 2048]
    assert buckets.mixed == tuple(Bucket(t, min(t, 256), False) for t in tokens)
    assert {b.rows for b in buckets.mixed} < {b.rows for b in buckets.decode}  # no further executables for sampling
    assert buckets.fit(130, 3) == Bucket(256, 256, False)
    assert buckets.fit(100, 20) == Bucket(128, 128, False)
    assert buckets.fit(100, 130, num_empty_rows=30) == Bucket(256, 256, False)


@pytest.mark.parametrize("budget", [1, 5, 100, 128, 200, 256, 300, 2048, 8192])
@pytest.mark.parametrize("seqs", [1, 3, 5, 64, 100, 128, 200, 256, 1000])
@pytest.mark.parametrize("kind", [Buckets.coarse, Buckets.fine])
def test_any_limits_leave_no_step_without_a_bucket(seqs, budget, kind):
    budget = max(budget, seqs)
    buckets = kind(seqs, budget)
    assert buckets.largest[:2] == (budget, seqs)
    for rows in range(1, seqs + 1):
        assert buckets.fit(rows, rows).rows <= seqs
        assert buckets.fit(budget, rows).tokens == budget
        assert buckets.fit(rows, rows, num_empty_rows=1).tokens <= budget
    assert len(buckets.all) < 45
    sizes = [b.tokens for b in buckets.mixed]
    assert all(b >= 1.05 * a for a, b in pairwise(sizes))


def test_a_mixed_step_is_packed_field_by_field():
    scheduler = make_scheduler()
    first, second = make_sequence(5, arrival=0, logprobs=2), make_sequence(40, arrival=1, logprobs=7)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()  # 5 tokens and 27 of 40
    scheduler.append(first, 777)
    x = packed(scheduler.schedule(), Bucket(32, 8, False))  # a decode and the other 13
    assert x.query_starts.tolist() == [0, 1, 14, 14, 14, 14, 14, 14, 14]
    assert x.last_tokens[:2].tolist() == [0, 13]
    assert x.kv_lens.tolist() == [6, 40, 0, 0, 0, 0, 0, 0]
    assert x.sample_positions[:2].tolist() == [6, 40]
    assert x.tokens[:14].tolist() == [777, *second.token_ids[27:40]]
    assert x.positions[:14].tolist() == [5, *range(27, 40)]
    assert set(x.sources.tolist()) == {-1}
    assert x.block_tables[0].tolist() == [first.block_table[0], 0, 0, 0, 0, 0]
    assert x.block_tables[1].tolist() == [*second.block_table, 0, 0, 0]
    expected = [first.block_table[0] * 16 + 5] + [second.block_table[p // 16] * 16 + p % 16 for p in range(27, 40)]
    assert x.slots[:14].tolist() == expected


def test_padding_is_inert():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(5))
    x = packed(scheduler.schedule(), Bucket(64, 8, False))
    assert (x.slots[5:] >= SHAPE.num_slots).all()
    assert not x.block_tables[1:].any()
    assert not x.kv_lens[1:].any()
    assert (np.diff(x.query_starts)[1:] == 0).all()
    assert (x.last_tokens >= 0).all()


def test_a_token_in_flight_is_taken_from_the_row_that_samples_it():
    scheduler = make_scheduler()
    for arrival in range(3):
        scheduler.add(make_sequence(4, arrival=arrival))
    plan = scheduler.schedule()
    scheduler.finish(plan.rows[0].sequence)
    x = packed(scheduler.schedule(), Bucket(8, 8, True))
    assert x.sources.tolist() == [1, 2, -1, -1, -1, -1, -1, -1]
    assert x.positions[:2].tolist() == [4, 4]


def test_a_row_without_tokens_samples_from_the_row_before_it():
    scheduler = make_scheduler()
    before, first, after = make_sequence(5), make_sequence(3, n=3, logprobs=4), make_sequence(7)
    for sequence in (before, first, after):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    x = packed(plan, Bucket(32, 8, False))
    assert x.query_starts[:6].tolist() == [0, 5, 8, 8, 8, 15]
    assert x.last_tokens[:5].tolist() == [4, 7, 7, 7, 14]
    assert x.kv_lens[:5].tolist() == [5, 3, 0, 0, 7]
    assert x.sample_positions[:5].tolist() == [5, 3, 3, 3, 7]
    assert x.positions[:15].tolist() == [*range(5), *range(3), *range(7)]
    assert x.tokens[5:15].tolist() == [*first.token_ids, *after.token_ids]
    words = [np.frombuffer(row.sequence.sampling_words, np.int32).tolist() for row in plan.rows]
    assert x.sampling[:5].tolist() == words
    assert len({tuple(row) for row in words[1:4]}) == 3
    x = packed(scheduler.schedule(), Bucket(8, 8, True))
    assert x.sources[:5].tolist() == [0, 1, 2, 3, 4]


def test_a_sample_may_begin_where_the_token_in_flight_is_the_input_of_the_row_before_it():
    scheduler = make_scheduler()
    sequence, other = make_sequence(4), make_sequence(4)
    scheduler.add(sequence)
    scheduler.add(other)
    scheduler.schedule()
    plan = scheduler.schedule()
    rows = [plan.rows[0], plan.rows[1], plan.rows[1]._replace(count=0)]
    x = packed(plan._replace(rows=rows, num_empty_rows=1), Bucket(64, 8, False))
    assert x.sources[:3].tolist() == [0, 1, -1]
    assert x.last_tokens[:3].tolist() == [0, 1, 1]


def test_a_step_with_rows_without_tokens_is_no_decode():
    buckets = Buckets.coarse(32, 256)
    assert buckets.fit(8, 8, 3) == Bucket(64, 32, False)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=0), (0.0, VOCAB, 1.0, 0.0)),
        (SamplingParams(temperature=1e-7), (0.0, VOCAB, 1.0, 0.0)),
        (SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1), (0.5, 7, 0.9, 0.1)),
        (SamplingParams(top_k=-1), (1.0, VOCAB, 1.0, 0.0)),
        (SamplingParams(top_k=10**9), (1.0, VOCAB, 1.0, 0.0)),
    ],
)
def test_sampling_words(params, expected):
    words = np.frombuffer(batch.sampling_words(params, (3 << 32) + 4, VOCAB), np.int32)
    floats = words.view(np.float32)
    assert (floats[0], words[1], floats[2], floats[3]) == pytest.approx(expected)
    assert words[4:].tolist() == [3, 4]


def test_negative_seeds_are_taken_modulo_two_to_the_64():
    words = np.frombuffer(batch.sampling_words(SamplingParams(), -2, VOCAB), np.uint32)
    assert words[4:].tolist() == [2**32 - 1, 2**32 - 2]


def test_a_temperature_beyond_float32_is_the_largest_there_is():
    words = np.frombuffer(batch.sampling_words(SamplingParams(temperature=1e300), 0, VOCAB), np.float32)
    assert words[0] == np.finfo(np.float32).max
