"""Beam search on the host: which candidates live on, which are finished, and when to stop. No JAX, no KV.

The rules are those of Hugging Face Transformers 5 (`GenerationMixin._beam_search`):

- Of all one-token continuations of the running beams, the likeliest are candidates, `num_candidates` of them, which
  leaves `beam_width` that go on whatever ends.
- A candidate ends with an end-of-sequence token, or with the last token that it may have. It is finished if it is among
  the `beam_width` best candidates; of the finished ones, the `beam_width` with the best scores are kept.
- A score is the sum of the log-probabilities divided by length ** length_penalty, where the length counts the output's
  tokens, the end-of-sequence token included.
- The search is over once `beam_width` are finished and either early_stopping is True, or the best running beam would
  not beat the worst of them. What it would reach is guessed from its sum and its present length; for "never" and a
  penalty above 0, which favours long outputs, from the greatest length.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from jaxpaged.sampling_params import BeamSearchParams


class Candidate(NamedTuple):
    """A running beam and a token that may follow it."""

    parent: int
    """Index among the running beams."""
    token_id: int
    logprob: float
    """Sum over the output's tokens, this one included."""


class Hypothesis(NamedTuple):
    """A finished beam."""

    token_ids: list[int]
    logprob: float
    """Sum over the tokens."""
    score: float
    is_ended: bool
    """Whether its last token is an end-of-sequence token."""


_Chain = tuple["_Chain", int] | None  # a beam's tokens, the last one outside: continuing one copies nothing


def num_candidates(beam_width: int, num_eos: int) -> int:
    """How many candidates a step needs, so that `beam_width` of them go on: each beam ends once with each EOS token."""
    return beam_width * max(2, 1 + num_eos)


class BeamSearch:
    """The search for one prompt. Before the first `advance` there is one beam, the prompt."""

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos_token_ids: Collection[int]) -> None:
        """`max_tokens` is what `params.max_tokens` comes to in the engine."""
        self._params = params
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._length = 0
        self._running: list[_Chain] = [None]
        self._logprobs = [0.0]
        self._finished: list[tuple[float, Candidate, _Chain]] = []  # score, candidate, the tokens before it; best first

    @property
    def is_over(self) -> bool:
        return not self._running

    @property
    def logprobs(self) -> list[float]:
        """Sums of the running beams, best first."""
        return self._logprobs

    def advance(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Takes in the candidates of a step, best first, and gives those that run on, best first; none at the end."""
        width = self._params.beam_width
        self._length += 1
        is_last = self._length == self._max_tokens
        survivors: list[Candidate] = []
        for rank, candidate in enumerate(candidates):
            if is_last or candidate.token_id in self._eos:
                if rank < width:
                    score = self._score(candidate.logprob, self._length)
                    self._finished.append((score, candidate, self._running[candidate.parent]))
            elif len(survivors) < width:
                survivors.append(candidate)
        self._finished.sort(key=lambda entry: -entry[0])  # stable: of equal ones the earlier is kept
        del self._finished[width:]
        if survivors and self._can_stop(survivors[0].logprob):
            survivors = []
        self._running = [(self._running[c.parent], c.token_id) for c in survivors]
        self._logprobs = [c.logprob for c in survivors]
        return survivors

    def finished(self) -> list[Hypothesis]:
        """The finished beams so far, best first: `beam_width` of them once the search is over."""
        return [
            Hypothesis([*_unchained(before), c.token_id], c.logprob, score, c.token_id in self._eos)
            for score, c, before in self._finished
        ]

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length**self._params.length_penalty

    def _can_stop(self, best_running: float) -> bool:
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        favours_long = params.early_stopping == "never" and params.length_penalty > 0
        worst_finished = self._finished[-1][0]
        return not self._score(best_running, self._max_tokens if favours_long else self._length) > worst_finished


def _unchained(chain: _Chain) -> list[int]:
    tokens = []
    while chain is not None:
        chain, token = chain
        tokens.append(token)
    return tokens[::-1]
