"""What a request gives back. Plain data."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort"]


class Logprob(NamedTuple):
    """How the model's raw distribution rates a token. (A tuple, since a step can make thousands.)"""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """None if the request does not detokenise."""


TokenLogprobs = dict[int, Logprob]
"""The token itself and the most likely alternatives, by id."""


class TextDelta(str):
    """Text that a completion has grown by."""

    index: int
    """The completion's, among those of its prompt."""

    def __new__(cls, text: str, index: int) -> TextDelta:
        delta = super().__new__(cls, text)
        delta.index = index
        return delta


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, as far as it has come."""

    index: int
    """Its place among those of the prompt, from 0 on."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    """Sum of the raw log-probabilities of `token_ids`."""
    logprobs: list[TokenLogprobs] | None
    """For each token, if asked for."""
    finish_reason: FinishReason | None
    """None while it runs."""
    stop_reason: int | str | None
    """The stop token id or stop string that ended it; None for end-of-sequence, length or abort."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and its completions."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    """For each prompt token, if asked for; None for the first, which nothing predicts."""
    outputs: list[CompletionOutput]
    """`SamplingParams.n` of them, in the order of their indices."""
    finished: bool
    """Whether all of them have ended."""
    num_preemptions: int
    """Of all its sequences."""
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the pool and not computed."""


@dataclasses.dataclass(frozen=True)
class BeamSequence:
    """One of the sequences that a beam search found."""

    token_ids: list[int]
    """Output tokens; an end-of-sequence token is the last of them."""
    text: str | None
    """Without that token; None if the request does not detokenise."""
    cumulative_logprob: float
    """Sum of the log-probabilities of `token_ids`."""
    score: float
    """`cumulative_logprob` / number of tokens ** length_penalty, which the sequences are ordered by."""
    finish_reason: FinishReason
    """"stop" at an end-of-sequence token, "length" at the last token allowed."""


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """A prompt and the likeliest continuations that were found."""

    request_id: str
    prompt: str | None
    """None if the prompt was given as token ids."""
    prompt_token_ids: list[int]
    sequences: list[BeamSequence]
    """`beam_width` of them, best first."""
    num_preemptions: int
    num_cached_tokens: int
    """Prompt tokens whose KV was found in the pool and not computed."""


@dataclasses.dataclass(frozen=True)
class StepStats:
    """What an engine's steps did so far; the difference of two tells of the time between."""

    num_steps: int = 0
    num_rows: int = 0
    """Sequences of each step, summed."""
    num_tokens: int = 0
    """Tokens computed, recomputed ones included."""
    num_padded_tokens: int = 0
    """The same with the padding of the steps' shapes."""
    slots_allocated: int = 0
    """KV slots of the blocks in use, summed over the steps."""
    slots_held: int = 0
    """Those of them that held a token."""
    num_preemptions: int = 0

    def __sub__(self, before: StepStats) -> StepStats:
        fields = dataclasses.astuple(self), dataclasses.astuple(before)
        return StepStats(*(now - then for now, then in zip(*fields, strict=True)))


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """The KV pool now and over the engine's life."""

    num_blocks: int
    block_size: int
    num_blocks_used: int
    peak_blocks_used: int
    slots_held_share: float
    """Share of the allocated KV slots that held a token, averaged over all steps; 0 before the first."""
    num_preemptions: int
    num_steps: int
    num_prompt_tokens: int
    """Of all requests that were started."""
    num_cached_tokens: int
    """Those of them whose KV was found in the pool and not computed (prefix caching)."""
