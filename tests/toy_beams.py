"""A pretend model for beam searches, and the search that an engine ought to make on it. No JAX."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from jaxpaged.beams import BeamSearch, Candidate, Hypothesis, num_candidates
from jaxpaged.sampling_params import BeamSearchParams

EOS = 0

Logprobs = Callable[[tuple[int, ...]], Sequence[float]]
"""From an output so far to the log-probability of each token."""


class ToyModel:
    """Log-probabilities of the next token, made up from the tokens so far."""

    def __init__(self, vocab: int, seed: int, eos_bias: float = 0.0) -> None:
        self.vocab = vocab
        self._seed = seed
        self._eos_bias = eos_bias
        self._known: dict[tuple[int, ...], list[float]] = {}

    def logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        if tokens in self._known:
            return self._known[tokens]
        rng = random.Random(f"{self._seed} {tokens}")
        logits = [rng.gauss(0, 1.5) + (self._eos_bias if token == EOS else 0) for token in range(self.vocab)]
        total = math.log(sum(map(math.exp, logits)))
        return self._known.setdefault(tokens, [x - total for x in logits])


def best_continuations(logprobs: Logprobs, beams: list[tuple[tuple[int, ...], float]], wanted: int) -> list[Candidate]:
    """Of all continuations of some beams (output, sum), the likeliest, best first."""
    found = [
        Candidate(parent, token, total + logprob)
        for parent, (tokens, total) in enumerate(beams)
        for token, logprob in enumerate(logprobs(tokens))
    ]
    return sorted(found, key=lambda candidate: -candidate.logprob)[:wanted]


def search(
    logprobs: Logprobs, params: BeamSearchParams, max_tokens: int, eos: tuple[int, ...] = (EOS,)
) -> list[Hypothesis]:
    """The whole search, beams as plain tuples."""
    state = BeamSearch(params, max_tokens, eos)
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while not state.is_over:
        candidates = best_continuations(logprobs, beams, num_candidates(params.beam_width, len(eos)))
        survivors = state.advance(candidates)
        assert len(survivors) <= params.beam_width
        beams = [((*beams[c.parent][0], c.token_id), c.logprob) for c in survivors]
    return state.finished()
