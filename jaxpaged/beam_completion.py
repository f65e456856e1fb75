"""A beam search from its candidates to its output. No JAX, no scheduling."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Ids

from jaxpaged.beam_group import BeamGroup
from jaxpaged.beams import BeamSearch, Candidate
from jaxpaged.detokenizer import IncrementalDetokenizer
from jaxpaged.outputs import BeamSearchOutput, BeamSequence, FinishReason
from jaxpaged.request import Sequence
from jaxpaged.sampling_params import BeamSearchParams
from jaxpaged.tokenizer import Tokenizer


class BeamCompletion:
    """Follows a request's beams as their candidates are read, and decides when the search ends."""

    def __init__(
        self,
        group: BeamGroup,
        params: BeamSearchParams,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: Ids[int],
    ) -> None:
        """The scheduler must have accepted the group's leader. Without a tokenizer the sequences have no text."""
        self.group = group
        self.finish_reason: FinishReason | None = None
        self._search = BeamSearch(params, group.leader.max_tokens, eos_token_ids)
        self._params = params
        self._prompt = prompt
        self._tokenizer = tokenizer

    @property
    def sequence(self) -> Sequence:
        """The one that stands for all beams."""
        return self.group.leader

    @property
    def all(self) -> tuple[BeamCompletion]:
        """Itself, as `Completion.all` has those of a request for samples."""
        return (self,)

    @property
    def request_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def logprobs(self) -> list[float]:
        """Of each running beam the sum of its output's log-probabilities, in the group's order."""
        return self._search.logprobs

    def advance(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Takes in a step's candidates, best first; gives the beams that live on, none if the search has ended."""
        # What the model rules out (-inf) follows nowhere, and there may be nothing else.
        survivors = self._search.advance(c for c in candidates if c.logprob != -math.inf)
        if not survivors:
            self.finish("stop" if any(h.is_ended for h in self._search.finished()) else "length")
        return survivors

    def finish(self, reason: FinishReason) -> None:
        """Ends the search."""
        self.finish_reason = reason

    def output(self) -> BeamSearchOutput:
        """The sequences finished so far: all of them once the search has ended."""
        leader = self.sequence
        return BeamSearchOutput(
            request_id=leader.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(leader.request.prompt_token_ids),
            sequences=[
                BeamSequence(
                    token_ids=found.token_ids,
                    text=self._text(found.token_ids[:-1] if found.is_ended else found.token_ids),
                    cumulative_logprob=found.logprob,
                    score=found.score,
                    finish_reason="stop" if found.is_ended else "length",
                )
                for found in self._search.finished()
            ],
            num_preemptions=leader.num_preemptions,
            num_cached_tokens=leader.num_cached,
        )

    def _text(self, token_ids: list[int]) -> str | None:
        if self._tokenizer is None:
            return None
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            self.sequence.request.prompt_token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
        )
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
