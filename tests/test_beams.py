"""The rules of beam search against two oracles: every sequence there is, and the rules written as masks over arrays."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_beams import EOS, ToyModel, search

from jaxpaged.beams import BeamSearch, Candidate
from jaxpaged.sampling_params import BeamSearchParams


def every_sequence(model: ToyModel, max_tokens: int, penalty: float) -> list[tuple[float, list[int]]]:
    """All outputs that there are, with their scores, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(model.vocab), repeat=length):
            if EOS in tokens[:-1] or (length < max_tokens and tokens[-1] != EOS):
                continue
            total = sum(model.logprobs(tokens[:i])[token] for i, token in enumerate(tokens))
            found.append((total / length**penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(5))
def test_with_room_for_every_beam_the_best_of_all_sequences_come_out(seed, penalty):
    """Two tokens go on and one ends: 8 beams at most before the last token, which 16 hold."""
    model = ToyModel(3, seed)
    params = BeamSearchParams(beam_width=16, length_penalty=penalty, early_stopping="never")
    expected = every_sequence(model, 4, penalty)
    assert len(expected) == 1 + 2 + 4 + 8 * 3
    finished = search(model.logprobs, params, 4)
    assert [h.token_ids for h in finished] == [tokens for _, tokens in expected[:16]]
    assert [h.score for h in finished] == pytest.approx([score for score, _ in expected[:16]])


def masked_search(
    model: ToyModel, width: int, penalty: float, early_stopping: bool | str, max_tokens: int, eos: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """The rules as arrays of fixed size with -1e9 where there is nothing, as Transformers computes them."""
    never = -1e9
    running, running_sums = [()] * width, np.array([0.0] + [never] * (width - 1))
    done, done_scores, done_flags = [()] * width, np.full(width, never), np.zeros(width, bool)
    kept = max(2, 1 + len(eos)) * width
    for length in range(1, max_tokens + 1):
        table = np.array([model.logprobs(tokens) for tokens in running]) + running_sums[:, None]
        order = np.argsort(-table, axis=None, kind="stable")[:kept]
        sums = table.reshape(-1)[order]
        extended = [(*running[i // model.vocab], int(i % model.vocab)) for i in order]
        hits = np.array([tokens[-1] in eos or length == max_tokens for tokens in extended])
        going = sums + np.where(hits, never, 0)
        chosen = np.argsort(-going, kind="stable")[:width]
        running, running_sums = [extended[i] for i in chosen], going[chosen]
        newly = hits & (np.arange(kept) < width)
        all_scores = np.concatenate([done_scores, sums / length**penalty + np.where(newly, 0, never)])
        all_flags = np.concatenate([done_flags, newly])
        best = np.argsort(-all_scores, kind="stable")[:width]
        done = [(done + extended)[i] for i in best]
        done_scores, done_flags = all_scores[best], all_flags[best]
        horizon = max_tokens if early_stopping == "never" and penalty > 0 else length
        worst = np.where(done_flags, done_scores.min(), never)
        improvable = (running_sums[0] / horizon**penalty > worst).any()
        if not improvable or (done_flags.all() and early_stopping is True) or hits.all():
            break
    assert done_flags.all()
    return list(zip(map(list, done), done_scores.tolist(), strict=True))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.sampled_from([-2.0, -0.5, 0.0, 0.6, 1.0, 2.0]),
    st.sampled_from([False, True, "never"]),
    st.integers(1, 8),
    st.sampled_from([(), (EOS,), (EOS, 1), (EOS, 1, 2)]),
    st.floats(-2, 3),
)
def test_the_same_beams_as_the_rules_over_masked_arrays(seed, width, penalty, early_stopping, max_tokens, eos, bias):
    model = ToyModel(25, seed, bias)  # more tokens than candidates: 5 * 4
    params = BeamSearchParams(
        beam_width=width, length_penalty=penalty, early_stopping=early_stopping, ignore_eos=not eos
    )
    finished = search(model.logprobs, params, max_tokens, eos or (EOS,))
    expected = masked_search(model, width, penalty, early_stopping, max_tokens, eos)
    assert [h.token_ids for h in finished] == [tokens for tokens, _ in expected]
    assert [h.score for h in finished] == pytest.approx([score for _, score in expected])
    for hypothesis in finished:
        assert hypothesis.is_ended == (hypothesis.token_ids[-1] in eos)
        assert hypothesis.is_ended or len(hypothesis.token_ids) == max_tokens
        total = sum(model.logprobs(tuple(hypothesis.token_ids[:i]))[t] for i, t in enumerate(hypothesis.token_ids))
        assert hypothesis.logprob == pytest.approx(total)


def num_steps(seed: int, early_stopping: bool | str) -> int:
    steps = 0

    class Counted(ToyModel):
        def logprobs(self, tokens: tuple[int, ...]) -> list[float]:
            nonlocal steps
            steps = max(steps, len(tokens) + 1)
            return super().logprobs(tokens)

    params = BeamSearchParams(beam_width=3, length_penalty=1.0, early_stopping=early_stopping)
    search(Counted(25, seed, eos_bias=2.0).logprobs, params, 12)
    return steps


def test_early_stopping_decides_how_long_the_search_goes_on():
    steps = [[num_steps(seed, kind) for kind in (True, False, "never")] for seed in range(10)]
    assert all(at_once <= unlikely <= never for at_once, unlikely, never in steps)
    at_once, unlikely, never = np.sum(steps, axis=0)
    assert at_once < unlikely < never


def test_an_end_beyond_the_best_candidates_is_not_finished():
    state = BeamSearch(BeamSearchParams(beam_width=2), 10, (EOS,))
    survivors = state.advance([Candidate(0, 5, -1), Candidate(0, 6, -2), Candidate(0, EOS, -3), Candidate(0, 7, -4)])
    assert [c.token_id for c in survivors] == [5, 6]
    assert state.finished() == []


def test_a_width_of_one_is_greedy_until_the_end():
    model = ToyModel(25, 3, eos_bias=1.0)
    (found,) = search(model.logprobs, BeamSearchParams(beam_width=1, early_stopping=True), 30)
    tokens: tuple[int, ...] = ()
    while EOS not in tokens and len(tokens) < 30:
        logprobs = model.logprobs(tokens)
        tokens += (logprobs.index(max(logprobs)),)
    assert found.token_ids == list(tokens)


def test_fewer_candidates_than_beams_are_followed_to_the_end():
    """As where the model rules out (-inf) all but a few tokens."""
    state = BeamSearch(BeamSearchParams(beam_width=4), 2, (EOS,))
    assert len(state.advance([Candidate(0, 5, -1)])) == 1
    assert state.advance([Candidate(0, 6, -2)]) == []
    assert [h.token_ids for h in state.finished()] == [[5, 6]]
    state = BeamSearch(BeamSearchParams(beam_width=4), 2, (EOS,))
    assert state.advance([]) == []
    assert state.is_over
