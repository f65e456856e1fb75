"""The device half of beam search against a sort of everything, on the host."""

import jax
import numpy as np
import pytest

from jaxpaged.beam_candidates import Beams, find_candidates, padded_width, read_candidates, start_search


def all_sorted(logits, beams, num_candidates):
    """(parent, token, sum) of the best continuations of a request's beams, ties by parent and token."""
    found = []
    for parent, total in enumerate(beams.logprobs):
        row_logits = logits[beams.first_row + parent].astype(np.float64)
        peak = row_logits.max()
        normalised = row_logits - peak - np.log(np.exp(row_logits - peak).sum())
        found += [(-(total + value), parent, token) for token, value in enumerate(normalised)]
    return [(parent, token, -negative) for negative, parent, token in sorted(found)[:num_candidates]]


def candidates(logits, requests, num_eos=1):
    return read_candidates(jax.device_get(start_search(logits, requests, num_eos)), len(requests))


def check(logits, requests, num_eos=1, tolerance=1e-5):
    for beams, found in zip(requests, candidates(logits, requests, num_eos), strict=True):
        expected = all_sorted(logits, beams, padded_width(beams.width) * max(2, 1 + num_eos))
        assert [(c.parent, c.token_id) for c in found] == [(parent, token) for parent, token, _ in expected]
        np.testing.assert_allclose([c.logprob for c in found], [total for _, _, total in expected], atol=tolerance)


@pytest.mark.parametrize(
    ("vocab", "width", "sizes", "num_eos"),
    [
        # Whole groups, some of a single beam (as after the prompt), and some that are not full.
        (17, 2, [2, 1, 2, 2, 1], 0),
        (1000, 1, [1] * 8, 1),
        (128, 4, [4, 1, 3], 3),
        (288, 3, [3, 1, 2, 1, 1], 1),
        (1000, 8, [7, 1], 1),
        (300, 16, [8], 1),  # may get wider than there are rows
    ],
)
def test_the_best_of_all_continuations_in_order(vocab, width, sizes, num_eos):
    rng = np.random.default_rng(vocab + width)
    logits = rng.normal(0, 3, (8, vocab)).astype(np.float32)
    first_rows = np.cumsum([0, *sizes[:-1]]).tolist()
    sums = [rng.normal(-3, 1, size).astype(np.float32).tolist() for size in sizes]
    requests = [Beams(width, first, own) for first, own in zip(first_rows, sums, strict=True)]
    check(logits, requests[::-1], num_eos)


def test_searches_of_several_widths_in_one_step():
    logits = np.random.default_rng(5).normal(0, 3, (8, 288)).astype(np.float32)
    widths = [2, 4, 1, 2, 3]
    requests = [Beams(width, i, [-float(i)]) for i, width in enumerate(widths)]
    requests += [Beams(2, 5, [-1.0, -2.0])]
    check(logits, requests)


def test_equal_continuations_go_by_beam_and_token():
    """Ones at both ends of the vocabulary and in chunks of their own, the same in both beams."""
    logits = np.zeros((2, 1000), np.float32)
    logits[:, [999, 3, 2, 640, 500]] = 1
    (found,) = candidates(logits, [Beams(2, 0, [-2.0, -2.0])], num_eos=3)
    best = [2, 3, 500, 640, 999]
    assert [(c.parent, c.token_id) for c in found] == [(0, token) for token in best] + [
        (1, token) for token in best[:3]
    ]


def test_a_large_sum_of_log_probabilities_keeps_its_digits():
    """A thousand tokens into an output the sums are large, and the candidates still differ."""
    logits = np.random.default_rng(0).normal(0, 3, (2, 288)).astype(np.float32)
    check(logits, [Beams(2, 0, [-2000.0, -2000.5])], tolerance=1e-3)


def test_what_the_model_rules_out_comes_last():
    logits = np.full((2, 300), -np.inf, np.float32)
    logits[0, [5, 299]] = [1.0, 2.0]
    (found,) = candidates(logits, [Beams(2, 0, [0.0])])
    assert [c.token_id for c in found[:2]] == [299, 5]
    assert np.isfinite([c.logprob for c in found]).tolist() == [True, True, False, False]


def test_a_shape_is_compiled_once():
    logits = np.random.default_rng(1).normal(0, 1, (4, 288)).astype(np.float32)
    candidates(logits, [Beams(2, 0, [0.0])])
    before = find_candidates._cache_size()
    candidates(logits, [Beams(2, 0, [0.0, -1.0]), Beams(2, 2, [-1.0]), Beams(2, 3, [-1.0])])
    assert find_candidates._cache_size() == before
    assert [padded_width(width) for width in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]
