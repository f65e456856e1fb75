"""Requests and the sequences that serve them: tokens, progress, status. Plain state, no policy.

Owners: the scheduler sets `status`, `num_computed` and the in-flight fields; the block manager alone changes
`block_table` and `num_writable`; tokens are appended by the scheduler when the engine has read them, those of
beams by their group.
"""

from __future__ import annotations

import dataclasses
import enum
from array import array
from collections.abc import Sequence as Ids
from typing import Any

from jaxpaged.sampling_params import SamplingParams


class Status(enum.Enum):
    UNFORKED = "unforked"
    """Its request's prompt is still to be computed, by the sequence that it will be forked from."""
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What a user asked for."""

    request_id: str
    prompt_token_ids: Ids[int]
    params: SamplingParams
    arrival: int
    """Orders requests: first come, first served."""
    sampling_words: bytes = b""
    """Sampling parameters and seed of its first sequence as the device reads them, see `batch.sampling_words`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of `params.bad_words`."""
    cache_salt: str = ""
    """Requests share cached prefixes with those of the same salt only."""


class Sequence:
    """One chain of tokens being generated for a request."""

    __slots__ = (
        "beams",
        "block_keys",
        "block_table",
        "cache_epoch",
        "in_flight_row",
        "index",
        "max_tokens",
        "needs_host_history",
        "num_cached",
        "num_computed",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_tokens",
        "num_writable",
        "order",
        "request",
        "sampling_words",
        "status",
        "token_ids",
        "unforked",
    )

    def __init__(self, request: Request, index: int = 0, sampling_words: bytes | None = None) -> None:
        """The request's sequence number `index`; its own sampling words, or the request's if None."""
        self.request = request
        self.index = index
        self.order = (request.arrival, index)
        """Orders sequences as they are served."""
        self.sampling_words = request.sampling_words if sampling_words is None else sampling_words
        self.beams: Any = None
        """The `beam_group.BeamGroup` that it stands for in the scheduler's queues; None for an ordinary sequence."""
        self.unforked: list[Sequence] = []
        """The request's other sequences, until they are forked from this one where its prompt ends."""
        self.token_ids = array("i", request.prompt_token_ids)
        """Prompt and output tokens that the host knows."""
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = request.params.max_tokens or 0
        """Most output tokens; the scheduler replaces an open end (0) by what can fit."""
        self.num_computed = 0
        """Tokens whose KV is in the pool once all dispatched steps have run."""
        self.num_in_flight = 0
        """Tokens sampled by dispatched steps and not read yet; they follow `token_ids`."""
        self.num_tokens = self.num_prompt_tokens
        """Tokens of the sequence, those in flight included."""
        self.in_flight_row = -1
        """Row of the latest dispatched step which samples the newest of them."""
        self.needs_host_history = request.params.needs_host_history
        """As `SamplingParams.needs_host_history`, looked up once."""
        self.block_table = array("i")
        self.num_writable = 0
        """Tokens up to which it may write; for more it needs blocks, or a copy of one that it shares with a fork."""
        self.block_keys: list[bytes] = []
        """Of its full blocks, as far as the block manager has hashed them."""
        self.cache_epoch = 0
        """That of the prefix cache when the sequence took its first block; see `BlockManager.forget_prefixes`."""
        self.num_published = 0
        """Blocks from the first on that are published, or were found to hold what others hold too."""
        self.num_cached = 0
        """Tokens that its first admission found in the pool."""
        self.num_preemptions = 0
        self.status = Status.UNFORKED if index else Status.WAITING

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Its steps rate the prompt; of several samples the first one's do."""
        return self.request.params.prompt_logprobs is not None and not self.index

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, those in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Sampled tokens that the host knows."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
