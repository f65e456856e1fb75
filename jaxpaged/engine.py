"""Ties scheduler and runner: requests in, steps, completions out.

One step ahead: while the device runs a step, `step` plans and dispatches the next one, and only then reads the
first. A sequence that turns out to have ended has one row too many in flight, whose token is dropped.
"""

from __future__ import annotations

import functools
import hashlib
import numbers
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from itertools import count

from jaxpaged import batch
from jaxpaged.beam_candidates import Beams, padded_width, read_candidates
from jaxpaged.beam_completion import BeamCompletion
from jaxpaged.beam_group import BeamGroup
from jaxpaged.beams import num_candidates
from jaxpaged.completion import Completion, TokenRating
from jaxpaged.outputs import CacheStats, StepStats
from jaxpaged.request import Request, Sequence
from jaxpaged.runner import Runner, StepHandle, StepResult, prompt_targets, wants_prompt_logprobs
from jaxpaged.sampler import Alternatives, Rating
from jaxpaged.sampling_params import BeamSearchParams, SamplingParams, validate_for
from jaxpaged.scheduler import Row, Scheduler, StepPlan
from jaxpaged.tokenizer import Tokenizer


class Engine:
    """Serves requests in the calling thread, a step at a time; several threads take turns."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Ids[int],
        seed: int,
        max_logprobs: int,
    ) -> None:
        """A runner serves one engine: another one's steps would write into blocks whose contents this one remembers.

        Args: `vocab_size` is that of the model's logits; `seed` serves requests that bring none.

        Without a tokenizer, requests must give token ids and ask for no text.
        """
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._seed = seed
        self._max_logprobs = max_logprobs
        self._completions: dict[str, Completion] = {}  # of each request the first
        self._searches: dict[str, BeamCompletion] = {}  # of the requests for beam searches, which are not among those
        self._num_requests = 0
        self._in_flight: StepHandle | None = None
        self._stats = _PoolStats()
        self._turn = threading.RLock()
        self._is_whole = True  # not in the midst of a change

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          ValueError: it has none.
        """
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer: give token ids, and SamplingParams(detokenize=False)")
        return self._tokenizer

    @property
    def has_unfinished(self) -> bool:
        return bool(self._completions or self._searches)

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id has been added and has not ended."""
        return request_id in self._completions or request_id in self._searches

    def add_request(
        self, request_id: str, prompt: str | Ids[int], params: SamplingParams, cache_salt: str | None = None
    ) -> Completion:
        """Queues a request; its completion, the first one of several, fills as `step` is called.

        Args:
          request_id: unique among the running ones.
          prompt: text, or token ids.
          params: how to sample.
          cache_salt: shares cached prefixes with requests of the same salt only, None with those that have none.

        Raises:
          ValueError: the prompt or a parameter is out of range, or the request could never be served.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params={params!r:.80} must be a SamplingParams")
        validate_for(params, self.vocab_size, self._max_logprobs)
        token_ids = self._checked_prompt(prompt, cache_salt)
        with self._turn:
            self._mend()
            self._check_unused(request_id)
            completion = self._completion(
                self._request(request_id, token_ids, params, cache_salt), prompt if isinstance(prompt, str) else None
            )
            with self._whole_change():
                self.scheduler.add(completion.sequence)
                self._num_requests += 1
                self._completions[request_id] = completion
        return completion

    def add_beam_search(
        self, request_id: str, prompt: str | Ids[int], params: BeamSearchParams, cache_salt: str | None = None
    ) -> BeamCompletion:
        """Queues a beam search; its completion has its sequences when `step` has been called until it ends.

        Args: as for `add_request`.

        Raises:
          ValueError: as for `add_request`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params={params!r:.80} must be a BeamSearchParams")
        self._check_width(params.beam_width)
        token_ids = self._checked_prompt(prompt, cache_salt)
        tokenizer = self.tokenizer if params.detokenize else None
        with self._turn:
            self._mend()
            self._check_unused(request_id)
            request = self._request(request_id, token_ids, params.as_sampling, cache_salt)
            group = BeamGroup(request, params.beam_width)
            with self._whole_change():
                self.scheduler.add(group.leader)
                self._num_requests += 1
                text = prompt if isinstance(prompt, str) else None
                completion = BeamCompletion(group, params, text, tokenizer, self._eos_token_ids)
                self._searches[request_id] = completion
        return completion

    def abort_request(self, request_id: str) -> None:
        """Ends a request now and frees its blocks; does nothing if it has ended."""
        with self._turn:
            self._mend()
            if request_id in self._completions:
                with self._whole_change():
                    for completion in self._completions.pop(request_id).all:
                        if completion.finish_reason is None:
                            completion.finish("abort")
                            self.scheduler.finish(completion.sequence)
            elif request_id in self._searches:
                with self._whole_change():
                    search = self._searches.pop(request_id)
                    search.finish("abort")
                    self.scheduler.finish(search.sequence)

    def step(self) -> list[Completion | BeamCompletion]:
        """Dispatches a step, reads the one before, and returns the completions that it advanced.

        If the step fails or is interrupted, all requests end as aborted before the error goes on; the engine then
        serves new ones.
        """
        with self._turn:
            self._mend()
            self._is_whole = False
            try:
                plan = self.scheduler.schedule()
                previous, self._in_flight = self._in_flight, None
                if plan is not None:
                    self._stats.add(plan, self.scheduler.config.block_size)
                    self._in_flight = self._dispatch(plan)
                elif previous is None and self.has_unfinished:
                    raise RuntimeError("no request can advance, though none is in flight: the engine's books are wrong")
                advanced = [] if previous is None else self._take_in(previous.plan, previous.read())
            except BaseException:
                self._start_over()
                raise
            self._is_whole = True
        return advanced

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
            num_prompt_tokens=self.scheduler.num_prompt_tokens,
            num_cached_tokens=self.scheduler.num_cached_tokens,
        )

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; what runs goes on with the blocks that it has."""
        with self._turn:
            self.scheduler.blocks.forget_prefixes()

    def step_stats(self) -> StepStats:
        """What the steps did since the start."""
        stats, runner = self._stats, self.runner
        return StepStats(
            num_steps=stats.num_steps,
            num_rows=stats.num_rows,
            num_tokens=stats.num_tokens,
            num_padded_tokens=sum(bucket.tokens * steps for bucket, steps in runner.steps_by_bucket.items()),
            slots_allocated=stats.slots_allocated,
            slots_held=stats.slots_held,
            num_preemptions=self.scheduler.num_preemptions,
        )

    @contextmanager
    def _whole_change(self) -> Iterator[None]:
        """What is done within is done wholly, or refused with a ValueError that changed nothing, or all starts over."""
        self._is_whole = False
        try:
            yield
        except ValueError:
            self._is_whole = True
            raise
        except BaseException:
            self._start_over()
            raise
        self._is_whole = True

    def _mend(self) -> None:
        """Starts over if something was interrupted, and its starting over too: Ctrl-C may come at any time."""
        if not self._is_whole:
            self._start_over()

    def _start_over(self) -> None:
        """Drops all requests and books: a step that broke off may have left the books half written, or its tokens."""
        self._is_whole = False
        old, self.scheduler = self.scheduler, Scheduler(self.scheduler.config)
        for counter in ("num_preemptions", "num_prompt_tokens", "num_cached_tokens"):
            setattr(self.scheduler, counter, getattr(old, counter))
        self._in_flight = None
        self.runner.recover()
        for first in self._completions.values():
            for completion in first.all:
                if completion.finish_reason is None:
                    completion.finish("abort")
        for search in self._searches.values():
            if search.finish_reason is None:
                search.finish("abort")
        self._completions, self._searches = {}, {}
        self._is_whole = True

    def _take_in(self, plan: StepPlan, result: StepResult) -> list[Completion | BeamCompletion]:
        advanced: list[Completion | BeamCompletion] = self._take_in_searches(plan, result) if plan.searches else []
        offset = 0
        wanted = 0
        if result.alternatives is not None:
            wanted = max(row.sequence.request.params.logprobs or 0 for row in plan.rows)
        ratings = _ratings(result.rating, result.alternatives, 0, len(plan.rows), wanted)
        # The arrays are padded, and may be longer than the rows.
        for row, token_id, rating in zip(plan.rows, result.token_ids.tolist(), ratings, strict=False):
            sequence = row.sequence
            completion = first = self._completions.get(sequence.request.request_id)
            if first is not None and first.sequence is not sequence:
                completion = first.other(sequence)
            if completion is not None and first is not None and completion.finish_reason is None:
                if result.prompt is not None and wants_prompt_logprobs(row):
                    _rate_prompt(completion, row, result.prompt, offset)
                if row.samples:
                    self.scheduler.append(sequence, token_id)
                    if completion.append(token_id, rating):
                        self.scheduler.finish(sequence)
                        if first.request_finished:
                            del self._completions[sequence.request.request_id]
                    advanced.append(completion)
            offset += row.count
        return advanced

    def _dispatch(self, plan: StepPlan) -> StepHandle:
        if not plan.searches:
            return self.runner.dispatch(plan)
        searches = ((group, first, self._searches[group.request_id]) for group, first in plan.searches)
        return self.runner.dispatch(plan, [Beams(group.width, first, s.logprobs) for group, first, s in searches])

    def _take_in_searches(self, plan: StepPlan, result: StepResult) -> list[Completion | BeamCompletion]:
        advanced: list[Completion | BeamCompletion] = []
        found = read_candidates(result.pending, len(plan.searches))
        for (group, _), candidates in zip(plan.searches, found, strict=True):
            search = self._searches.get(group.request_id)
            if search is None or search.group is not group:
                continue  # it was aborted; another one may have its id
            survivors = search.advance(candidates)
            if survivors:
                self.scheduler.advance_beams(group, [(c.parent, c.token_id) for c in survivors])
            else:
                self.scheduler.finish(group.leader)
                del self._searches[group.request_id]
            advanced.append(search)
        return advanced

    def _completion(self, request: Request, prompt: str | None) -> Completion:
        """The first completion of a request, and all the others that it wants."""
        params = request.params
        seed = self._seed_of(params, request.arrival)
        others = [
            Sequence(request, i, batch.sampling_words(params, seed + i, self.vocab_size)) for i in range(1, params.n)
        ]
        first = Sequence(request)
        first.unforked = others.copy()
        tokenizer, eos = self.tokenizer if params.detokenize else None, self._eos_token_ids
        return Completion(first, prompt, tokenizer, eos, [Completion(other, None, tokenizer, eos) for other in others])

    def _request(
        self, request_id: str, token_ids: list[int], params: SamplingParams, cache_salt: str | None
    ) -> Request:
        arrival = self._num_requests
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival=arrival,
            sampling_words=batch.sampling_words(params, self._seed_of(params, arrival), self.vocab_size),
            bad_words=self._bad_words(params),
            cache_salt="" if cache_salt is None else f"salt {cache_salt}",  # the empty salt is one too
        )

    def _seed_of(self, params: SamplingParams, arrival: int) -> int:
        """A request's own seed; where it brings none the same for the same engine seed and order of requests."""
        if (words := params.seed_words) is not None:
            return words[0] << 32 | words[1]
        return int.from_bytes(hashlib.sha256(f"{self._seed} {arrival}".encode()).digest()[:8])

    def _check_unused(self, request_id: str) -> None:
        if self.is_running(request_id):
            raise ValueError(f"request_id={request_id!r} is in use by a request that still runs; choose another")

    def _check_width(self, beam_width: int) -> None:
        needed = num_candidates(padded_width(beam_width), len(self._eos_token_ids))
        if needed > self.vocab_size:
            raise ValueError(
                f"beam_width={beam_width} chooses among {needed} candidates, more than the {self.vocab_size} tokens of "
                "the model's vocabulary; lower it"
            )

    def _checked_prompt(self, prompt: str | Ids[int], cache_salt: str | None) -> list[int]:
        """The prompt's token ids."""
        if not isinstance(cache_salt, str | None):
            raise ValueError(f"cache_salt={cache_salt!r:.80} must be a string, or None")
        token_ids = self._checked_ids(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not token_ids:
            raise ValueError(f"prompt={prompt!r} has no tokens; give at least one")
        return token_ids

    def _checked_ids(self, prompt: Ids[int]) -> list[int]:
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Ids):
            raise ValueError(f"prompt={prompt!r:.80} must be text or a list of token ids")
        for i, token in enumerate(prompt):
            is_id = isinstance(token, numbers.Integral) and not isinstance(token, bool)
            if not is_id or not 0 <= token < self.vocab_size:
                last = self.vocab_size - 1
                raise ValueError(
                    f"prompt[{i}]={token!r:.80} must be a token id from 0 to {last}, the model's vocabulary"
                )
        return [int(token) for token in prompt]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as token ids, each as it stands and, where that differs, after a space."""
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_word_strings:
            for text in (word, f" {word.lstrip()}"):
                words[tuple(self.tokenizer.encode(text, add_special_tokens=False))] = None
        words.pop((), None)
        return tuple(words)


class _PoolStats:
    """Sums over the steps, for `CacheStats` and `StepStats`."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_rows = 0
        self.num_tokens = 0
        self.peak_blocks = 0
        self.slots_held = 0
        self.slots_allocated = 0

    @property
    def held_share(self) -> float:
        return self.slots_held / self.slots_allocated if self.slots_allocated else 0.0

    def add(self, plan: StepPlan, block_size: int) -> None:
        self.num_steps += 1
        self.num_rows += len(plan.rows)
        self.num_tokens += plan.num_tokens
        self.peak_blocks = max(self.peak_blocks, plan.num_blocks_used)
        self.slots_held += plan.num_tokens_held
        self.slots_allocated += plan.num_blocks_used * block_size


def _ratings(
    rating: Rating, alternatives: Alternatives | None, first: int, num: int, num_alternatives: int
) -> Iterator[TokenRating]:
    """Ratings of `num` tokens, converted an array at a time: number by number costs several times as much."""
    rows = slice(first, first + num)
    none = [[]] * num
    tops = (none, none) if alternatives is None else (a[rows, :num_alternatives].tolist() for a in alternatives)
    columns = zip(rating.logprobs[rows].tolist(), rating.ranks[rows].tolist(), *tops, strict=True)
    return map(functools.partial(tuple.__new__, TokenRating), columns)


def _rate_prompt(completion: Completion, row: Row, rated: tuple[Rating, Alternatives], offset: int) -> None:
    """Hands the completion the ratings of the prompt tokens that follow the row's tokens."""
    last = row.sequence.num_prompt_tokens - 1
    ratings = _ratings(*rated, offset, row.count, row.sequence.request.params.prompt_logprobs or 0)
    for position, token, rating in zip(count(row.start + 1), prompt_targets(row).tolist(), ratings, strict=False):
        if position <= last:
            completion.rate_prompt_token(position, token, rating)
