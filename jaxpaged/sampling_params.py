"""What a user asks of the sampler for one prompt: names, defaults and rules of vLLM's SamplingParams.

Owns the rules. Every violation is a ValueError that names the field, the value and the remedy. The fields keep
what the user gave; the engine reads the lists through the properties, snapshots taken at construction that no
later change of the user's list can reach. No JAX here.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NoReturn

_GREEDY_BELOW = 1e-5
_MOST_SAMPLES = 1024  # each costs the host a little at once, which one request must not make all others wait for
_MOST_STOP_CHARACTERS = 4000  # their beginnings are all looked up, which takes the square of their length


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt. Frozen, keyword only; `dataclasses.replace` makes variants.

    Lists may be given as a list, tuple, set or range. Raises ValueError for anything out of range or of another
    type; `validate_for` checks what depends on the model and the engine.
    """

    n: int = 1
    """Completions a prompt, at most 1024. The prompt is computed once and its KV shared; the output has them in order.
    Completion i is what `n=1` gives with the seed `seed + i`. Greedy ones are all the same, which is allowed."""
    temperature: float = 1.0
    """0 (below 1e-5) = greedy; the higher, the flatter."""
    top_k: int = 0
    """Sample among the k best tokens only; 0 or -1 = all."""
    top_p: float = 1.0
    """Sample among the best tokens that make up this share of the probability only."""
    min_p: float = 0.0
    """Sample among the tokens at least this probable, relative to the best one, only."""
    seed: int | None = None
    """Same seed, same output, in any batch; None (or -1) = the engine chooses. With `n` completions, the first one's:
    each has the seed of the one before plus 1."""
    max_tokens: int | None = 16
    """Most tokens to generate; None = up to max_model_len."""
    min_tokens: int = 0
    """EOS and stop tokens can't be sampled before this many."""
    stop: str | Collection[str] | None = field(default=None, hash=False)
    """Text that ends the output."""
    stop_token_ids: Collection[int] | None = field(default=None, hash=False)
    """Tokens that end the output."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Keep going past EOS."""
    logprobs: int | None = None
    """Alternatives to report for each output token; 0 = the sampled token's log-probability alone."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output already holds."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that the output holds it."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the output less likely: divides positive logits, multiplies others."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these tokens."""
    allowed_token_ids: Collection[int] | None = field(default=None, hash=False)
    """Sample among these tokens only."""
    bad_words: Collection[str] | None = field(default=None, hash=False)
    """Words that may not appear in the output."""
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, "an int", 1, _MOST_SAMPLES)
        _number("temperature", self.temperature, 0)
        _integer("top_k", self.top_k, "an int, 0 or -1 to disable it", -1)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, above=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _flag(name, getattr(self, name))
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), "an int, or None for no log-probabilities", 0)
        self._check_lists()

    def _check_lengths(self) -> None:
        if self.seed is not None:
            _integer("seed", self.seed, "an int, or None for one that the engine chooses", -(2**63), 2**64 - 1)
        _integer("min_tokens", self.min_tokens, "an int", 0)
        if self.max_tokens is None:
            return
        _integer("max_tokens", self.max_tokens, "an int, or None for as many as fit", 1)
        if self.min_tokens > self.max_tokens:
            _refuse(
                "min_tokens", self.min_tokens, f"above max_tokens={self.max_tokens}", "lower it or raise max_tokens"
            )

    def _check_lists(self) -> None:
        """Reads every list once: the cached properties check it and keep the snapshot."""
        if sum(map(len, self.stop_strings)) > _MOST_STOP_CHARACTERS:
            _refuse("stop", self.stop, f"longer than {_MOST_STOP_CHARACTERS} characters in all", "use shorter or fewer")
        if self.stop_strings and not self.detokenize:
            _refuse("stop", self.stop, "text, which detokenize=False never makes", "use stop_token_ids or detokenize")
        if self.allowed_ids is not None and not self.allowed_ids:
            _refuse("allowed_token_ids", self.allowed_token_ids, "empty", "name a token, or use None to allow all")
        _ = self.stop_ids, self.bias_items, self.bad_word_strings

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; empty if there is none."""
        return _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple without repeats; empty if there are none."""
        return _token_ids("stop_token_ids", self.stop_token_ids) or ()

    @cached_property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """`allowed_token_ids` as a tuple without repeats; None = every token."""
        return _token_ids("allowed_token_ids", self.allowed_token_ids)

    @cached_property
    def bias_items(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token id, bias) pairs; empty if there is none."""
        if self.logit_bias is None:
            return ()
        if not isinstance(self.logit_bias, Mapping):
            _refuse("logit_bias", self.logit_bias, "not a dict", "give {token id: bias}")
        ids = _token_ids("logit_bias", list(self.logit_bias)) or ()
        values = [_number(f"logit_bias[{i}]", value, -100, 100) for i, value in self.logit_bias.items()]
        return tuple(zip(ids, values, strict=True))

    @cached_property
    def bad_word_strings(self) -> tuple[str, ...]:
        """`bad_words` as a tuple; empty if there are none."""
        return _strings("bad_words", self.bad_words)

    @property
    def is_greedy(self) -> bool:
        """Takes the best token always."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Logits change with what the output (and, for repetition, the prompt) already holds."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs_host_history(self) -> bool:
        """The next distribution depends on which tokens the output already holds, not on their number alone."""
        return self.has_penalties or bool(self.bad_word_strings)

    @property
    def has_logit_edits(self) -> bool:
        """Some step of the request may sample from other logits than the model's."""
        return bool(self.needs_host_history or self.bias_items or self.allowed_ids is not None or self.min_tokens)

    @property
    def seed_words(self) -> tuple[int, int] | None:
        """The seed as two 32-bit words, high one first, which is JAX's threefry key; None = not seeded."""
        return None if self.seed in (None, -1) else divmod(int(self.seed) % 2**64, 2**32)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search for the likeliest continuations of one prompt (`LLM.beam_search`, `jaxpaged.beams`).

    The options and their meanings are those of Hugging Face Transformers. Raises ValueError for anything out of range
    or of another type.
    """

    beam_width: int
    """Beams that are followed, and sequences that come back."""
    max_tokens: int | None = 16
    """Most tokens of a sequence; None = up to max_model_len."""
    length_penalty: float = 1.0
    """Sequences are compared by the sum of their log-probabilities divided by length ** length_penalty: above 0, the
    higher, the longer they get; below 0 the shorter."""
    early_stopping: bool | Literal["never"] = False
    """When to stop, with beam_width sequences finished: True = at once, False = when the best running beam is unlikely
    to beat the worst of them, "never" = when it can't."""
    ignore_eos: bool = False
    """Keep going past EOS: all sequences get max_tokens tokens."""
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, "an int", 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, "an int, or None for as many as fit", 1)
        _number("length_penalty", self.length_penalty, -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            _refuse("early_stopping", self.early_stopping, "unknown", 'give True, False or "never"')
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            _flag(name, getattr(self, name))

    @cached_property
    def as_sampling(self) -> SamplingParams:
        """What the engine's other parts see: a request that samples greedily and waits for each of its tokens."""
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, detokenize=False)


def validate_for(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Checks what depends on the model and the engine: token ids and the number of log-probabilities.

    Raises:
      ValueError: a token id of `logit_bias`, `allowed_token_ids` or `stop_token_ids` is not below `vocab_size`, or
        `logprobs` or `prompt_logprobs` is above `max_logprobs` or the vocabulary.
    """
    used = {
        "logit_bias": [token for token, _ in params.bias_items],
        "allowed_token_ids": params.allowed_ids or (),
        "stop_token_ids": params.stop_ids,
    }
    for name, ids in used.items():
        if ids and max(ids) >= vocab_size:
            _refuse(name, max(ids), "not in the vocabulary", f"use token ids from 0 to {vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name) or 0
        if wanted > max_logprobs:
            _refuse(name, wanted, f"above the engine's max_logprobs={max_logprobs}", "ask for less or raise that limit")
        if wanted > vocab_size:
            _refuse(name, wanted, "more than there are tokens", f"ask for at most {vocab_size}")


def _refuse(name: str, value: object, fault: str, remedy: str) -> NoReturn:
    raise ValueError(f"{name}={reprlib.repr(value)} is {fault}: {remedy}")


def _integer(name: str, value: object, what: str, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(name, value, "not an int", f"give {what}")
    number = int(value)
    if number < low or (high is not None and number > high):
        _refuse(
            name, value, "out of range", f"give {what}, at least {low}{'' if high is None else f', at most {high}'}"
        )
    return number


def _number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] if `above`."""
    span = f"{'above' if above else 'at least'} {low}" + ("" if high == math.inf else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(name, value, "not a number", f"give a float {span}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        _refuse(name, value, "out of range", f"give a float {span}")
    return number


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "not a bool", "give True or False")


def _members(name: str, values: object, of: str) -> list:
    if not isinstance(values, (list, tuple, set, frozenset, range)):
        _refuse(name, values, "not a list", f"give a list of {of}")
    return list(values)


def _strings(name: str, values: object) -> tuple[str, ...]:
    members = [] if values is None else _members(name, values, "strings")
    for value in members:
        if not isinstance(value, str) or not value:
            _refuse(name, values, "not a list of non-empty strings", "remove what is empty or not a string")
    return tuple(members)


def _token_ids(name: str, values: object) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = [_integer(f"{name}: token id", value, "a token id, an int", 0) for value in _members(name, values, "ints")]
    return tuple(dict.fromkeys(ids))
