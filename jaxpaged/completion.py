"""The text side of a sequence: detokenising, stopping, collecting log-probabilities. No JAX, no scheduling."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import NamedTuple

from jaxpaged.detokenizer import IncrementalDetokenizer, StopStringMatcher
from jaxpaged.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput, TokenLogprobs
from jaxpaged.request import Sequence
from jaxpaged.tokenizer import Tokenizer


class TokenRating(NamedTuple):
    """How the model rated one token, read from the device."""

    logprob: float
    rank: int
    top_ids: Ids[int]
    top_logprobs: Ids[float]


class Completion:
    """Follows one sequence as its tokens are read, and decides when it ends."""

    def __init__(self, sequence: Sequence, prompt: str | None, tokenizer: Tokenizer, eos_token_ids: Ids[int]) -> None:
        request = sequence.request
        params = request.params
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_ids)
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = StopStringMatcher(params.stop_strings, include_stop=params.include_stop_str_in_output)
        self._pieces: list[str] = []
        self._num_taken = 0  # pieces that take_text has handed out
        self._cumulative_logprob = 0.0
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * sequence.num_prompt_tokens

    def append(self, token_id: int, rating: TokenRating) -> bool:
        """Takes in the sequence's newest token; True if it ends the completion."""
        params = self.sequence.request.params
        self._cumulative_logprob += rating.logprob
        if self._logprobs is not None:
            self._logprobs.append(self._entry(token_id, rating, params.logprobs))
        num_output = len(self.sequence.token_ids) - self.sequence.num_prompt_tokens
        ends = num_output >= params.min_tokens and (token_id in self._eos or token_id in self._stop_ids)
        if ends:
            self.stop_reason = None if token_id in self._eos else token_id
        if not ends or params.include_stop_str_in_output:
            self._decode(token_id, search_stops=num_output > params.min_tokens)
        if self.finish_reason is None and ends:
            self.finish("stop")
        elif self.finish_reason is None and num_output >= self.sequence.max_tokens:
            self.finish("length")
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
        """The request as far as it has come."""
        sequence = self.sequence
        completion = CompletionOutput(
            index=0,
            text="".join(self._pieces),
            token_ids=sequence.output_token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=sequence.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(sequence.request.prompt_token_ids),
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            outputs=[completion],
            finished=self.finish_reason is not None,
            num_preemptions=sequence.num_preemptions,
        )

    def _decode(self, token_id: int, *, search_stops: bool) -> None:
        if self._detokenizer is None:
            return
        piece = self._detokenizer.push(token_id)
        self._pieces.append(self._match(piece) if search_stops else piece)

    def _match(self, piece: str) -> str:
        """Text that is safe to show; ends the completion at a stop string."""
        safe, stop = self._stops.push(piece)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return safe

    def _entry(self, token_id: int, rating: TokenRating, num_alternatives: int | None) -> TokenLogprobs:
        """The token first, then the best alternatives."""
        entry = {token_id: self._logprob(token_id, rating.logprob, rating.rank)}
        for rank, (i, logprob) in enumerate(zip(rating.top_ids, rating.top_logprobs, strict=True), start=1):
            if rank > (num_alternatives or 0):
                break
            entry.setdefault(int(i), self._logprob(int(i), float(logprob), rank))
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        decode = self.sequence.request.params.detokenize
        text = self._tokenizer.decode([token_id], skip_special_tokens=False) if decode else None
        return Logprob(logprob, rank, text)
