"""Ties scheduler and runner: requests in, steps, completions out.

One step ahead: while the device runs a step, `step` plans and dispatches the next one, and only then reads the
first. A sequence that turns out to have ended has one row too many in flight, whose token is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Ids

from jaxpaged import batch
from jaxpaged.completion import Completion, TokenRating
from jaxpaged.outputs import CacheStats
from jaxpaged.request import Request, Sequence
from jaxpaged.runner import Runner, StepHandle, StepResult, prompt_targets, wants_prompt_logprobs
from jaxpaged.sampler import Rating
from jaxpaged.sampling_params import SamplingParams, validate_for
from jaxpaged.scheduler import Row, Scheduler, StepPlan
from jaxpaged.tokenizer import Tokenizer


class Engine:
    """Serves requests in the calling thread, a step at a time. Not thread-safe."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Ids[int],
        seed: int,
        max_logprobs: int,
    ) -> None:
        """Args: `vocab_size` is that of the model's logits; `seed` serves requests that bring none."""
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._seed = seed
        self._max_logprobs = max_logprobs
        self._completions: dict[str, Completion] = {}
        self._num_requests = 0
        self._in_flight: StepHandle | None = None
        self._stats = _PoolStats()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._completions)

    def add_request(self, request_id: str, prompt: str | Ids[int], params: SamplingParams) -> Completion:
        """Queues a request; its completion fills as `step` is called.

        Args:
          request_id: unique among the running ones.
          prompt: text, or token ids.
          params: how to sample.

        Raises:
          ValueError: the prompt or a parameter is out of range, or the request could never be served.
        """
        if request_id in self._completions:
            raise ValueError(f"request_id={request_id!r} is in use by a request that still runs; choose another")
        validate_for(params, self._vocab_size, self._max_logprobs)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._checked_ids(prompt)
        if not token_ids:
            raise ValueError(f"prompt={prompt!r} has no tokens; give at least one")
        arrival = self._num_requests
        seed = params.seed if params.seed_words is not None else self._own_seed(arrival)
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival=arrival,
            sampling_words=batch.sampling_words(params, seed, self._vocab_size),
            bad_words=self._bad_words(params),
        )
        sequence = Sequence(request)
        self.scheduler.add(sequence)
        self._num_requests += 1
        completion = Completion(
            sequence, prompt if isinstance(prompt, str) else None, self.tokenizer, self._eos_token_ids
        )
        self._completions[request_id] = completion
        return completion

    def abort_request(self, request_id: str) -> None:
        """Ends a request now and frees its blocks; does nothing if it has ended."""
        completion = self._completions.pop(request_id, None)
        if completion is not None:
            completion.finish("abort")
            self.scheduler.finish(completion.sequence)

    def step(self) -> list[Completion]:
        """Dispatches a step, reads the one before, and returns the completions that it advanced."""
        plan = self.scheduler.schedule()
        previous, self._in_flight = self._in_flight, None
        if plan is not None:
            self._stats.add(plan, self.scheduler.config.block_size)
            self._in_flight = self.runner.dispatch(plan)
        return [] if previous is None else self._take_in(previous.plan, previous.read())

    def cache_stats(self) -> CacheStats:
        """The KV pool now and over the engine's life."""
        config = self.scheduler.config
        return CacheStats(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_blocks_used=self.scheduler.blocks.num_used,
            peak_blocks_used=self._stats.peak_blocks,
            slots_held_share=self._stats.held_share,
            num_preemptions=self.scheduler.num_preemptions,
            num_steps=self._stats.num_steps,
        )

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[Completion]:
        advanced = []
        offset = 0
        for i, row in enumerate(plan.rows):
            completion = self._completions.get(row.sequence.request.request_id)
            if completion is not None and completion.sequence is row.sequence:
                if result.prompt is not None and wants_prompt_logprobs(row):
                    _rate_prompt(completion, row, result.prompt, offset)
                if row.samples:
                    self._append(completion, int(result.token_ids[i]), _rating(result.rating, i))
                    advanced.append(completion)
            offset += row.count
        return advanced

    def _append(self, completion: Completion, token_id: int, rating: TokenRating) -> None:
        self.scheduler.append(completion.sequence, token_id)
        if completion.append(token_id, rating):
            self.scheduler.finish(completion.sequence)
            del self._completions[completion.sequence.request.request_id]

    def _own_seed(self, arrival: int) -> int:
        """A request's seed where it brings none: the same for the same engine seed and order of requests."""
        return int.from_bytes(hashlib.sha256(f"{self._seed} {arrival}".encode()).digest()[:8])

    def _checked_ids(self, prompt: Ids[int]) -> list[int]:
        ids = list(prompt)
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._vocab_size:
                raise ValueError(f"prompt[{i}]={token!r} must be a token id from 0 to {self._vocab_size - 1}")
        return ids

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as token ids, each as it stands and, where that differs, after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_word_strings:
            for text in (word, f" {word.lstrip()}"):
                words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        words.pop((), None)
        return tuple(words)


class _PoolStats:
    """Sums over the steps, for `CacheStats`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.peak_blocks = 0
        self._held = 0
        self._allocated = 0

    @property
    def held_share(self) -> float:
        return self._held / self._allocated if self._allocated else 0.0

    def add(self, plan: StepPlan, block_size: int) -> None:
        self.num_steps += 1
        self.peak_blocks = max(self.peak_blocks, plan.num_blocks_used)
        self._held += plan.num_tokens_held
        self._allocated += plan.num_blocks_used * block_size


def _rating(rating: Rating, i: int) -> TokenRating:
    return TokenRating(float(rating.logprobs[i]), int(rating.ranks[i]), rating.top_ids[i], rating.top_logprobs[i])


def _rate_prompt(completion: Completion, row: Row, rating: Rating, offset: int) -> None:
    """Hands the completion the ratings of the prompt tokens that follow the row's tokens."""
    last = row.sequence.num_prompt_tokens - 1
    for j, token in enumerate(prompt_targets(row)):
        position = row.start + 1 + j
        if position <= last:
            completion.rate_prompt_token(position, int(token), _rating(rating, offset + j))
