"""Sequences and a pretend device, for host-side tests and measurements: no JAX, no model."""

from __future__ import annotations

import itertools

from jaxpaged.batch import sampling_words
from jaxpaged.request import Request, Sequence
from jaxpaged.sampling_params import SamplingParams

VOCAB = 1000
_arrivals = itertools.count()


def make_sequence(
    prompt: int | list[int], max_tokens: int | None = 16, arrival: int | None = None, salt: str = "", **params
) -> Sequence:
    """The first sequence of a request, to which the other samples are to be forked. `prompt`: ids, or their number."""
    arrival = next(_arrivals) if arrival is None else arrival
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    if isinstance(prompt, int):
        prompt = [(arrival * 31 + i) % VOCAB for i in range(prompt)]
    request = Request(
        request_id=str(arrival),
        prompt_token_ids=prompt,
        params=sampling,
        arrival=arrival,
        sampling_words=sampling_words(sampling, arrival, VOCAB),
        cache_salt=salt,
    )
    first = Sequence(request)
    first.unforked = [Sequence(request, i, sampling_words(sampling, arrival + i, VOCAB)) for i in range(1, sampling.n)]
    return first


def samples_of(first: Sequence) -> list[Sequence]:
    """All sequences of a request for several samples, by index; `first` has not been added to a scheduler yet."""
    return [first, *first.unforked]


def next_token(sequence: Sequence, position: int) -> int:
    """What the pretend model samples for a position: a function of the request, the sample and the position alone."""
    return (sequence.request.arrival * 7919 + sequence.index * 611953 + position * 104729) % VOCAB


def is_done(sequence: Sequence) -> bool:
    return len(sequence.token_ids) - sequence.num_prompt_tokens >= sequence.max_tokens
