"""From a step plan to the arrays of a step, padded to a bucket, in one transfer to the device.

Three stages: `Buckets.fit` picks the padded shape; `pack` (host, numpy) writes every field into one int32 buffer;
`unpack` slices the buffer into `StepInputs` again, inside the jitted step (or on the host: it only slices).

A row without tokens samples from the logits of the row before it: its last token is that one's.

Padding is inert: padded tokens write to a slot past the pool, padded rows have no tokens, padded table entries are
the null block.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxpaged.block_pool import NULL_BLOCK
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import StepPlan

_SAMPLING = struct.Struct("=fiffII")  # temperature, top_k, top_p, min_p, seed high and low
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_SAMPLING_WORDS = _SAMPLING.size // 4


class Bucket(NamedTuple):
    """A padded shape of a step. One executable each."""

    tokens: int
    rows: int
    decode: bool
    """Whether every row has one token at most."""


class StepShape(NamedTuple):
    """What the layout of the buffer depends on besides the bucket."""

    table_width: int
    block_size: int
    num_slots: int
    """Slots of the pool; a token written to this one or beyond is dropped."""


class StepInputs(NamedTuple):
    """The arrays of a step, int32 where nothing else is said."""

    tokens: Any  # [tokens]
    sources: Any  # [tokens] row of the previous step that sampled the token, or -1
    positions: Any  # [tokens]
    slots: Any  # [tokens]
    query_starts: Any  # [rows + 1]
    kv_lens: Any  # [rows]
    block_tables: Any  # [rows, table_width]
    sample_positions: Any  # [rows] position of the token that the row samples
    sampling: Any  # [rows, words] bits of temperature, top_k, top_p, min_p, seed high, seed low

    @property
    def last_tokens(self) -> Any:
        """`[rows]` index of each row's last token: whose logits the row samples from."""
        return (self.query_starts[1:] - 1).clip(0)


class Buckets:
    """The few shapes that steps are padded to.

    A step of decodes alone has as many tokens as rows, padded to one of the row sizes; any other step has tokens
    padded to one of the token sizes, and the full number of rows, or as many as tokens if these are fewer.
    """

    def __init__(self, row_sizes: Iterable[int], token_sizes: Iterable[int]) -> None:
        self.decode = tuple(Bucket(r, r, True) for r in sorted(set(row_sizes)))
        most_rows = self.decode[-1].rows
        self.mixed = tuple(Bucket(t, min(t, most_rows), False) for t in sorted(set(token_sizes)))

    @classmethod
    def coarse(cls, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
        """As few as can be, for devices that take long to compile: sizes that grow by 4, rows from 8 and tokens from
        64 on."""
        rows = _geometric(min(8, max_num_seqs), 4, max_num_seqs)
        return cls(rows, _geometric(max(max_num_seqs, 64), 4, max_num_batched_tokens))

    @classmethod
    def fine(cls, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
        """Enough that padding costs less than 5 % of the time on chat traces (`scripts/bench_host.py padding`).

        Rows: powers of two up to 128, below which a step costs what the weights' reading does; then every 32, and
        every 64 from 256 on. Tokens: 128; then `max_num_seqs`, and beyond that sizes for prompts beside so many
        decodes: what the prompts take grows by half from size to size.
        """
        most = max_num_seqs
        rows = {*_geometric(1, 2, min(128, most)), *range(128, min(most, 256), 32), *range(256, most, 64), most}
        tokens, decodes, prompts = {128, max(128, most)}, max(128, most), max(256, most) / 5
        while (size := -(-int(decodes + prompts) // 32) * 32) < 0.9 * max_num_batched_tokens:
            tokens.add(size)
            prompts *= 1.5
        return cls(rows, {*(t for t in tokens if t < max_num_batched_tokens), max_num_batched_tokens})

    @property
    def all(self) -> tuple[Bucket, ...]:
        """Largest first, so that what doesn't fit the device fails at once."""
        return tuple(sorted({*self.mixed, *self.decode}, reverse=True))

    @property
    def largest(self) -> Bucket:
        return self.all[0]

    def fit(self, num_tokens: int, num_rows: int, num_empty_rows: int = 0) -> Bucket:
        """The smallest bucket that holds a step."""
        candidates = self.decode if num_tokens == num_rows and not num_empty_rows else self.mixed
        for bucket in candidates:
            if bucket.tokens >= num_tokens and bucket.rows >= num_rows:
                return bucket
        raise AssertionError(f"no bucket holds {num_tokens} tokens in {num_rows} rows")


def _geometric(first: int, ratio: int, last: int) -> Iterable[int]:
    """`first`, `first * ratio`, ... and at the end `last`."""
    size = first
    while size < last:
        yield size
        size *= ratio
    yield last


def sampling_words(params: SamplingParams, seed: int, vocab_size: int) -> bytes:
    """Sampling parameters as the words of a `StepInputs.sampling` row; `seed` counts modulo 2**64."""
    temperature = 0.0 if params.is_greedy else min(params.temperature, _LARGEST_FLOAT32)
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    high, low = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
    return _SAMPLING.pack(temperature, top_k, params.top_p, params.min_p, high, low)


def buffer_size(bucket: Bucket, shape: StepShape) -> int:
    """Entries of the packed buffer."""
    return sum(size for _, size in _layout(bucket, shape))


def unpack(buffer: Any, bucket: Bucket, shape: StepShape) -> StepInputs:
    """The fields of a packed buffer (numpy or JAX)."""
    fields, offset = [], 0
    for dims, size in _layout(bucket, shape):
        fields.append(buffer[offset : offset + size].reshape(dims))
        offset += size
    return StepInputs(*fields)


@functools.cache
def _layout(bucket: Bucket, shape: StepShape) -> list[tuple[tuple[int, ...], int]]:
    t, r, _ = bucket
    dims = [(t,), (t,), (t,), (t,), (r + 1,), (r,), (r, shape.table_width), (r,), (r, _SAMPLING_WORDS)]
    return [(d, int(np.prod(d))) for d in dims]


def pack(plan: StepPlan, bucket: Bucket, shape: StepShape) -> np.ndarray:
    """The step's arrays in one int32 buffer, padding included."""
    buffer = np.zeros(buffer_size(bucket, shape), np.int32)
    x = unpack(buffer, bucket, shape)  # views: writing a field writes the buffer
    num_tokens, num_rows = plan.num_tokens, len(plan.rows)
    _, start_column, count_column, _, sources = zip(*plan.rows, strict=True)
    starts, counts = np.array(start_column, np.int32), np.array(count_column, np.int32)
    x.query_starts[1 : num_rows + 1] = counts.cumsum()
    x.query_starts[num_rows + 1 :] = num_tokens
    x.kv_lens[:num_rows] = x.sample_positions[:num_rows] = starts + counts
    if plan.num_empty_rows:
        x.kv_lens[:num_rows][counts == 0] = 0  # they attend to nothing
    first, last = x.query_starts[:num_rows], x.query_starts[1 : num_rows + 1] - 1

    x.sources[:] = -1
    x.sources[last] = sources
    row_of_token = np.arange(num_rows).repeat(counts)
    positions = np.arange(num_tokens) + (starts - first)[row_of_token]
    x.positions[:num_tokens] = positions

    _copy_rows(plan, x, shape.table_width)
    blocks = x.block_tables[row_of_token, positions // shape.block_size]
    x.slots[:num_tokens] = blocks * shape.block_size + positions % shape.block_size
    x.slots[num_tokens:] = shape.num_slots
    x.sampling[num_rows:, 2] = np.float32(1).view(np.int32)  # top_p of padding: greedy rows, nothing cut
    return buffer


def _copy_rows(plan: StepPlan, x: StepInputs, table_width: int) -> None:
    """Copies what lies with the sequences: known tokens, block tables, sampling words, number of alternatives."""
    assert NULL_BLOCK == 0, "tables are padded by zeroing"
    # For many short copies a memoryview costs a fraction of a numpy array.
    tokens, tables = _words(x.tokens), _words(x.block_tables)
    token = entry = 0
    sampling = []
    for sequence, start, count, _, source in plan.rows:
        known = count if source < 0 else count - 1
        if known > 0:
            tokens[token : token + known] = sequence.token_ids[start : start + known]
        token += count
        table = sequence.block_table
        tables[entry : entry + len(table)] = table
        entry += table_width
        sampling.append(sequence.sampling_words)
    x.sampling[: len(sampling)] = np.frombuffer(b"".join(sampling), np.int32).reshape(-1, _SAMPLING_WORDS)


def _words(field: np.ndarray) -> memoryview:
    """The field's entries, writable from an `array("i")`."""
    return memoryview(field.reshape(-1)).cast("B").cast("i")
