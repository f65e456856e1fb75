"""The device half of beam search against a sort of everything, on the host."""

import numpy as np
import pytest

from jaxpaged.beam_candidates import find_candidates, group_rows, padded_width


def all_sorted(logits, group, num_candidates):
    """(log-probability, parent, token) of a group's best continuations, ties by parent and token."""
    found = []
    for parent, (row, total) in enumerate(group):
        row_logits = logits[row].astype(np.float64)
        peak = row_logits.max()
        normalised = row_logits - peak - np.log(np.exp(row_logits - peak).sum())
        found += [(-(total + value), parent, token) for token, value in enumerate(normalised)]
    return [(-negative, parent, token) for negative, parent, token in sorted(found)[:num_candidates]]


def found_by_device(logits, groups, width, num_candidates):
    found = []
    for beam_rows in group_rows(groups, width, len(logits)):
        best = find_candidates(logits, *beam_rows, num_candidates=num_candidates)
        found += list(zip(*map(np.asarray, best), strict=True))
    return found[: len(groups)]


@pytest.mark.parametrize(
    ("vocab", "width", "num_candidates"), [(17, 2, 4), (1000, 1, 2), (128, 4, 16), (288, 4, 8), (1000, 8, 16)]
)
def test_the_best_of_all_continuations_in_order(vocab, width, num_candidates):
    rng = np.random.default_rng(vocab + width)
    logits = rng.normal(0, 3, (8, vocab)).astype(np.float32)
    rows = rng.permutation(8)
    # Whole groups, one of a single beam (as after the prompt), and one that is not full.
    sizes = {1: [1] * 8, 2: [2, 1, 2, 2, 1], 4: [4, 1, 3], 8: [7, 1]}[width]
    groups, first = [], 0
    for size in sizes:
        groups.append([(int(row), float(np.float32(rng.normal(-3, 1)))) for row in rows[first : first + size]])
        first += size
    assert first == 8
    found = found_by_device(logits, groups, width, num_candidates)
    for group, (logprobs, parents, tokens) in zip(groups, found, strict=True):
        expected = all_sorted(logits, group, num_candidates)
        assert list(zip(parents.tolist(), tokens.tolist(), strict=True)) == [(p, t) for _, p, t in expected]
        np.testing.assert_allclose(logprobs, [value for value, _, _ in expected], atol=1e-5)


def test_equal_continuations_go_by_beam_and_token():
    """Ones at both ends of the vocabulary and in chunks of their own, the same in both beams."""
    logits = np.zeros((2, 1000), np.float32)
    best = [999, 3, 2, 640, 500]
    logits[:, best] = 1
    ((_, parents, tokens),) = found_by_device(logits, [[(1, -2.0), (0, -2.0)]], 2, 8)
    assert list(zip(parents.tolist(), tokens.tolist(), strict=True)) == [
        *((0, token) for token in sorted(best)),
        *((1, token) for token in sorted(best)[:3]),
    ]


def test_a_large_sum_of_log_probabilities_keeps_its_digits():
    """A thousand tokens into an output the sums are large, and the candidates still differ."""
    logits = np.random.default_rng(0).normal(0, 3, (2, 288)).astype(np.float32)
    group = [(0, -2000.0), (1, -2000.5)]
    ((logprobs, parents, tokens),) = found_by_device(logits, [group], 2, 4)
    expected = all_sorted(logits, group, 4)
    assert list(zip(parents.tolist(), tokens.tolist(), strict=True)) == [(p, t) for _, p, t in expected]
    np.testing.assert_allclose(logprobs, [value for value, _, _ in expected], atol=1e-3)


def test_what_the_model_rules_out_comes_last():
    logits = np.full((2, 300), -np.inf, np.float32)
    logits[0, [5, 299]] = [1.0, 2.0]
    ((logprobs, _, tokens),) = found_by_device(logits, [[(0, 0.0)]], 2, 4)
    assert tokens[:2].tolist() == [299, 5]
    assert np.isfinite(logprobs).tolist() == [True, True, False, False]


def test_as_many_groups_as_the_rows_allow_share_a_call():
    groups = [[(row, -1.0)] for row in range(7)]
    arrays = group_rows(groups, 4, 8)
    assert [a.rows.shape for a in arrays] == [(2, 4)] * 4
    assert np.concatenate([a.rows for a in arrays])[:, 0].tolist() == [*range(7), 8]
    assert [a.rows.shape for a in group_rows(groups[:1], 8, 4)] == [(1, 8)]  # wider than the rows: one at a time
    assert [padded_width(width) for width in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


def test_a_shape_is_compiled_once():
    logits = np.random.default_rng(1).normal(0, 1, (4, 288)).astype(np.float32)
    found_by_device(logits, [[(0, 0.0)]], 2, 4)
    before = find_candidates._cache_size()
    found_by_device(logits, [[(0, 0.0), (1, -1.0)], [(2, -1.0)], [(3, -1.0)]], 2, 4)
    assert find_candidates._cache_size() == before
