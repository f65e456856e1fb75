"""The host half of logit edits: what each row's request asks for, as flat arrays of (row, token, value).

Owns the meaning of logit_bias, min_tokens, allowed_token_ids, bad_words and of which tokens the penalties look
at, as in vLLM. `logit_passes` puts the arrays to the logits on the device. No JAX here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpaged.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """One row of the logits, and what decides how they are edited at this step."""

    row: int
    params: SamplingParams
    prompt_ids: Sequence[int] | np.ndarray
    output_ids: Sequence[int] | np.ndarray
    """The tokens generated so far, all of them where penalties or bad words look at them."""
    num_output: int
    """How many tokens were generated so far; may count ones that the host has not read yet."""
    eos_ids: Sequence[int] = ()
    """The model's end-of-sequence tokens, which min_tokens holds back along with the request's stop tokens."""
    bad_words: Sequence[Sequence[int]] = ()
    """`params.bad_words` as token ids: of each word, its tokenisation with and without a leading space."""


class Entries(NamedTuple):
    """Cells of the logits: `tokens[i]` of row `rows[i]`. Both int32 [entries]."""

    rows: np.ndarray
    tokens: np.ndarray


class LogitEdits(NamedTuple):
    """All edits of a step, in numpy. Empty entries and neutral penalties mean that nobody asks."""

    restricted: np.ndarray
    """bool [rows]: rows where only `allowed` tokens may be sampled."""
    allowed: Entries
    biased: Entries
    bias: np.ndarray
    """float32, one for each of `biased`; -inf bans."""
    prompt: Entries
    """Prompt tokens of rows with a repetition penalty."""
    output: Entries
    """Output tokens, repeats included, of rows with any penalty."""
    presence: np.ndarray
    frequency: np.ndarray
    repetition: np.ndarray
    """float32 [rows] each; neutral (0, 0, 1) where a row has no penalty."""

    @property
    def has_penalties(self) -> bool:
        """Whether the penalties can change anything."""
        return bool(self.output.rows.size or self.prompt.rows.size)


class _Flat:
    """Ids of several rows, gathered row by row and then made into one array."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[np.ndarray] = []

    def add(self, row: int, ids: Sequence[int] | np.ndarray) -> int:
        array = np.asarray(ids, np.int32)
        if array.size:
            self._rows.append(row)
            self._ids.append(array)
        return array.size

    def entries(self) -> Entries:
        if not self._ids:
            return Entries(np.empty(0, np.int32), np.empty(0, np.int32))
        rows = np.repeat(np.array(self._rows, np.int32), [ids.size for ids in self._ids])
        return Entries(rows, np.concatenate(self._ids))


def collect_edits(requests: Iterable[EditRequest], rows: int) -> LogitEdits | None:
    """The edits of one step, or None if this step needs none.

    Args:
      requests: the rows that may have edits (`SamplingParams.has_logit_edits`); others may be left out.
      rows: rows of the logits, padding included.
    """
    requests = list(requests)
    if not requests:
        return None  # most steps: no arrays need making
    restricted = np.zeros(rows, bool)
    presence, frequency = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    repetition = np.ones(rows, np.float32)
    allowed, biased, prompt, output = _Flat(), _Flat(), _Flat(), _Flat()
    bias: list[float] = []
    for request in requests:
        row, params = request.row, request.params
        if params.allowed_ids is not None:
            restricted[row] = True
            allowed.add(row, params.allowed_ids)
        bans = banned_ids(request)
        biased.add(row, bans)
        bias.extend([-np.inf] * len(bans))
        biased.add(row, [token for token, _ in params.bias_items])
        bias.extend(value for _, value in params.bias_items)
        if params.has_penalties:
            presence[row], frequency[row] = params.presence_penalty, params.frequency_penalty
            # Within normal float32 numbers, since the device divides and multiplies by it.
            repetition[row] = np.clip(params.repetition_penalty, *_NORMAL_FLOAT32)
            output.add(row, request.output_ids)
            if params.repetition_penalty != 1:
                prompt.add(row, request.prompt_ids)
    edits = LogitEdits(
        restricted,
        allowed.entries(),
        biased.entries(),
        np.array(bias, np.float32),
        prompt.entries(),
        output.entries(),
        presence,
        frequency,
        repetition,
    )
    return edits if restricted.any() or bias or edits.has_penalties else None


_NORMAL_FLOAT32 = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))


def banned_ids(request: EditRequest) -> list[int]:
    """Tokens that the request's next token may not be: EOS and stop tokens before min_tokens, and bad words' ends."""
    banned: dict[int, None] = {}
    if request.num_output < request.params.min_tokens:
        banned.update(dict.fromkeys((*request.eos_ids, *request.params.stop_ids)))
    for word in request.bad_words:
        # An output shorter than the word's beginning gives a shorter slice, which equals no beginning.
        start = len(request.output_ids) - (len(word) - 1)
        if word and list(request.output_ids[start:]) == list(word[:-1]):
            banned[word[-1]] = None
    return list(banned)
