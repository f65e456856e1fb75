"""Logit edits, host and device half together, against a slow reference that edits cell by cell as vLLM does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.logit_edits import EditRequest, Entries, LogitEdits, banned_ids, collect_edits
from jaxpaged.logit_passes import CAPACITY, JITTED_PASSES, edit_logits, programs
from jaxpaged.sampling_params import SamplingParams

ROWS, VOCAB = 4, 6000


def request(row: int = 0, prompt: Any = (), output: Any = (), **given: Any) -> EditRequest:
    extra = {name: given.pop(name) for name in ("eos_ids", "bad_words") if name in given}
    params = SamplingParams(max_tokens=None, **given)
    return EditRequest(row=row, params=params, prompt_ids=prompt, output_ids=output, num_output=len(output), **extra)


def slow_edit(logits: np.ndarray, asked: EditRequest) -> np.ndarray:
    """One row, in the order: allowed, bad words, min_tokens and logit_bias, penalties."""
    params, output, prompt = asked.params, list(asked.output_ids), list(asked.prompt_ids)
    edited = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        for token in range(len(edited)):
            if token not in params.allowed_token_ids:
                edited[token] = -np.inf
    for word in asked.bad_words:
        *before, last = word
        if not before or (len(output) >= len(before) and output[-len(before) :] == before):
            edited[last] = -np.inf
    if len(output) < params.min_tokens:
        for token in {*asked.eos_ids, *(params.stop_token_ids or ())}:
            edited[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += bias
    for token in {*output, *prompt}:
        repetition = params.repetition_penalty
        edited[token] = edited[token] / repetition if edited[token] > 0 else edited[token] * repetition
    for token in set(output):
        edited[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return edited


def check(requests: list[EditRequest], seed: int = 0) -> np.ndarray:
    raw = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    raw[:, 5] = -np.inf
    given = jnp.asarray(raw)
    edits = collect_edits(requests, ROWS)
    assert edits is not None
    edited = np.asarray(edit_logits(given, edits))
    np.testing.assert_array_equal(given, raw)  # not donated, not written
    expected = raw.astype(np.float64)
    for asked in requests:
        expected[asked.row] = slow_edit(raw[asked.row], asked)
    np.testing.assert_allclose(edited, expected, rtol=1e-6, atol=1e-5)
    untouched = expected == raw
    np.testing.assert_array_equal(edited[untouched], raw[untouched])
    return edited


LONG = np.random.default_rng(1).integers(0, VOCAB, 2 * CAPACITY + 17).tolist()


@pytest.mark.parametrize(
    "asked",
    [
        request(logit_bias={0: 5, 5: 100, VOCAB - 1: -100}),
        request(row=ROWS - 1, allowed_token_ids=[7]),
        request(allowed_token_ids=[7, 9], logit_bias={7: -3, 11: 100}),
        request(allowed_token_ids=range(VOCAB - CAPACITY - 5, VOCAB)),
        request(min_tokens=3, output=[1, 2], eos_ids=[4, 8], stop_token_ids=[8, 9], logit_bias={4: 100}),
        request(bad_words=[[3], [1, 2, 30], [2, 31], [9, 2, 32], [0, 1, 2, 33]], output=[1, 2]),
        request(presence_penalty=1.5, output=[3, 3, 4], prompt=[8]),
        request(frequency_penalty=-0.7, output=[3, 3, 4], prompt=[8]),
        request(repetition_penalty=1.7, output=[3, 3, 4], prompt=[8, 8, 3]),
        request(repetition_penalty=0.5, prompt=[8, 5]),
        request(repetition_penalty=1e4, prompt=[8]),
        request(
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            presence_penalty=-0.4,
            logit_bias={3: 2, 8: -1},
            output=np.array([3, 3, 4]),
            prompt=np.array([8]),
        ),
        request(repetition_penalty=1.1, frequency_penalty=0.2, output=LONG, prompt=LONG[: CAPACITY + 1]),
    ],
    ids=lambda asked: f"{asked.params.allowed_token_ids or asked.params.logit_bias or len(asked.output_ids)}",
)
def test_each_edit(asked: EditRequest) -> None:
    check([asked])


@pytest.mark.parametrize("seed", range(6))
def test_random_mixtures_on_several_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def ids(most: int) -> list[int]:
        return rng.integers(0, 40, rng.integers(0, most + 1)).tolist()

    requests = []
    for row in rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)].tolist():
        requests.append(
            request(
                row,
                ids(30),
                ids(30),
                eos_ids=ids(2),
                stop_token_ids=ids(3),
                min_tokens=int(rng.integers(0, 30)),
                bad_words=[[*word, 1] for word in (ids(2), ids(1), ids(0))],
                logit_bias={token: float(rng.uniform(-9, 9)) for token in ids(9)},
                allowed_token_ids=[0, *ids(30)] if rng.random() < 0.5 else None,
                presence_penalty=float(rng.choice([0, 0.5, -2])),
                frequency_penalty=float(rng.choice([0, 0.5, -2])),
                repetition_penalty=float(rng.choice([1, 1.3, 0.7])),
            )
        )
    check(requests, seed)


def test_restricted_rows_keep_their_allowed_tokens_only() -> None:
    edited = check([request(1, allowed_token_ids=[7, 9]), request(3, allowed_token_ids=[0])])
    assert np.flatnonzero(edited[1] > -np.inf).tolist() == [7, 9]
    assert np.flatnonzero(edited[3] > -np.inf).tolist() == [0]
    assert (edited[[0, 2]] > -np.inf).sum() == 2 * (VOCAB - 1)


def test_no_edits_is_none() -> None:
    assert collect_edits([], ROWS) is None
    nothing_now = [
        request(min_tokens=2, output=[1, 2], eos_ids=[0]),
        request(min_tokens=2),
        request(presence_penalty=1.0, prompt=[1]),
        request(bad_words=[[1, 2]], output=[2]),
        request(temperature=0),
    ]
    assert collect_edits(nothing_now, ROWS) is None


def test_a_bad_word_longer_than_the_output_is_not_there_yet() -> None:
    assert banned_ids(request(bad_words=[[1, 2, 3]], output=[2])) == []
    assert banned_ids(request(bad_words=[[1, 2, 3]], output=[1, 2])) == [3]
    assert banned_ids(request(bad_words=[[1, 2, 3], []], output=[1, 2, 0])) == []
    assert banned_ids(request(bad_words=[[3], [3]], output=[])) == [3]


def test_extreme_penalties_make_no_nan() -> None:
    for penalty in (1e-300, 1e-30, 1e30, 1e300):
        edits = collect_edits([request(repetition_penalty=penalty, prompt=[0, 1, 2, 3])], 1)
        assert edits is not None
        edited = edit_logits(jnp.array([[0.0, 5.0, -5.0, -jnp.inf, 1.0]]), edits)
        assert not jnp.isnan(edited).any()
        assert edited[0, 4] == 1.0


def test_the_compiled_passes_serve_any_edits() -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 77))
    passes = {name: program.lower().compile() for name, program in programs(2, 77).items()}
    assert passes.keys() == JITTED_PASSES.keys()
    for output in ([3], LONG[:10], [token % 77 for token in LONG]):
        everything = request(
            1,
            output,
            [token % 77 for token in output],
            eos_ids=[4],
            min_tokens=10**6,
            allowed_token_ids=range(len(output) % 70 + 1),
            logit_bias={1: 1.0},
            repetition_penalty=2,
            frequency_penalty=1,
        )
        edits = collect_edits([everything], 2)
        assert edits is not None
        edited = edit_logits(logits, edits, passes)  # which refuse any other shape or dtype
        np.testing.assert_array_equal(edited, edit_logits(logits, edits))


def test_padding_is_dropped() -> None:
    # Full of real entries, then one more: the last pass is nearly all padding, whose row must hit no row.
    entries = Entries(np.zeros(CAPACITY + 1, np.int32), np.zeros(CAPACITY + 1, np.int32))
    none = Entries(np.empty(0, np.int32), np.empty(0, np.int32))
    neutral = np.zeros(2, np.float32)
    edits = LogitEdits(
        np.zeros(2, bool), none, entries, np.ones(CAPACITY + 1, np.float32), none, none, neutral, neutral, neutral + 1
    )
    expected = [[CAPACITY + 1, 0, 0], [0, 0, 0]]
    assert edit_logits(jnp.zeros((2, 3)), edits).tolist() == expected
