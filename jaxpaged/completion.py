"""The text side of a sequence: detokenising, stopping, collecting log-probabilities. No JAX, no scheduling."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import NamedTuple

from jaxpaged.detokenizer import IncrementalDetokenizer, StopStringMatcher, token_texts
from jaxpaged.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from jaxpaged.request import Sequence
from jaxpaged.tokenizer import Tokenizer


class TokenRating(NamedTuple):
    """How the model rated one token, read from the device."""

    logprob: float
    rank: int
    top_ids: Ids[int]
    """Alternatives, best first: at least as many as the request asks for."""
    top_logprobs: Ids[float]


class Completion:
    """Follows one sequence as its tokens are read, and decides when it ends.

    The first completion of a request for several samples stands for the request: it holds the `others`.
    """

    def __init__(
        self,
        sequence: Sequence,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: Ids[int],
        others: Ids[Completion] = (),
    ) -> None:
        """Without a tokenizer the completion has no text, whatever the request asks for.

        Args: `others` are the request's completions with the indices 1, 2, ..., which only the first one gets.
        """
        request = sequence.request
        params = request.params
        self.sequence = sequence
        self.others = tuple(others)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._prompt = prompt
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._end_ids = self._eos.union(params.stop_ids)
        self._detokenizer = None
        self._text_of: Callable[[int], str | None] = _no_text
        if tokenizer is not None and params.detokenize:
            self._text_of = token_texts(tokenizer).alone
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._stop_strings = params.stop_strings
        self._stops = StopStringMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_taken = 0  # pieces that take_text has handed out
        self._cumulative_logprob = 0.0
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if sequence.wants_prompt_logprobs:
            self._prompt_logprobs = [None for _ in range(sequence.num_prompt_tokens)]

    @property
    def all(self) -> tuple[Completion, ...]:
        """It and the `others`: of the first one, all of the request."""
        return (self, *self.others)

    def other(self, sequence: Sequence) -> Completion | None:
        """The one of `others` that follows a sequence; None if it is of another request, which may have had this id."""
        if not 0 < sequence.index <= len(self.others):
            return None
        completion = self.others[sequence.index - 1]
        return completion if completion.sequence is sequence else None

    @property
    def request_finished(self) -> bool:
        """Whether `all` have ended."""
        return self.finish_reason is not None and all(c.finish_reason is not None for c in self.others)

    @property
    def num_read(self) -> int:
        """Output tokens read so far, of `all`."""
        num = len(self.sequence.token_ids) - self.sequence.num_prompt_tokens
        for completion in self.others:
            num += completion.num_read
        return num

    def append(self, token_id: int, rating: TokenRating) -> bool:
        """Takes in the sequence's newest token; True if it ends the completion."""
        params, sequence = self._params, self.sequence
        self._cumulative_logprob += rating.logprob
        if self._logprobs is not None:
            self._logprobs.append(self._entry(token_id, rating, params.logprobs))
        num_output = len(sequence.token_ids) - sequence.num_prompt_tokens
        ends = token_id in self._end_ids and num_output >= params.min_tokens
        if ends:
            self.stop_reason = None if token_id in self._eos else token_id
        if self._detokenizer is not None and (not ends or params.include_stop_str_in_output):
            piece = self._detokenizer.push(token_id)
            if self._stop_strings:
                counts = num_output > params.min_tokens
                piece = self._match(piece) if counts else self._stops.pass_over(piece)
            self._pieces.append(piece)
        if self.finish_reason is None and (ends or num_output >= sequence.max_tokens):
            self.finish("stop" if ends else "length")
        return self.finish_reason is not None

    def finish(self, reason: FinishReason) -> None:
        """Ends the completion and flushes text that was held back."""
        self.finish_reason = reason
        if self._detokenizer is not None:
            self._pieces.append(self._match(self._detokenizer.finish()))
            self._pieces.append(self._stops.finish())

    def rate_prompt_token(self, position: int, token_id: int, rating: TokenRating) -> None:
        """Records the rating of the prompt token at `position`; again with the same result after a preemption."""
        if self._prompt_logprobs is not None:
            num = self.sequence.request.params.prompt_logprobs
            self._prompt_logprobs[position] = self._entry(token_id, rating, num)

    def take_text(self) -> str:
        """The text that became final since the last call."""
        new = self._pieces[self._num_taken :]
        self._num_taken = len(self._pieces)
        return "".join(new)

    def output(self) -> RequestOutput:
        """The request as far as it has come, told by its first completion."""
        sequence = self.sequence
        outputs = [completion._output() for completion in self.all]
        return RequestOutput(
            request_id=sequence.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(sequence.request.prompt_token_ids),
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            outputs=outputs,
            finished=all(output.finish_reason is not None for output in outputs),
            num_preemptions=sum(completion.sequence.num_preemptions for completion in self.all),
            num_cached_tokens=sequence.num_cached,
        )

    def _output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.sequence.index,
            text="".join(self._pieces),
            token_ids=self.sequence.output_token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _match(self, piece: str) -> str:
        """Text that is safe to show; ends the completion at a stop string."""
        safe, stop = self._stops.push(piece)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return safe

    def _entry(self, token_id: int, rating: TokenRating, num_alternatives: int | None) -> TokenLogprobs:
        """The token first, then the best alternatives."""
        text_of = self._text_of
        token = Logprob(rating.logprob, rating.rank, text_of(token_id))
        ids = rating.top_ids[: num_alternatives or 0]
        top = map(Logprob, rating.top_logprobs, itertools.count(1), map(text_of, ids))
        entry = {token_id: token}
        entry.update(zip(ids, top, strict=True))
        entry[token_id] = token  # rather than itself as an alternative
        return entry


def _no_text(token_id: int) -> None:
    """Stands for a token's text where nothing is detokenised."""
