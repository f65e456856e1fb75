"""Text as it is generated: incremental detokenisation and stop strings, both exact and O(1) a token.

The engine feeds token ids to an `IncrementalDetokenizer`, and the pieces it returns through a `StopStringMatcher`.
Pieces never hold half a character, and joined they are what decoding everything at once gives.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxpaged.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: with this many tokens kept, a cut through a
# character at the window's start has no effect on how its end decodes.
_KEPT = 6


class TokenTexts:
    """What single tokens of a tokenizer decode to, looked up once each and shared by all sequences."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.hf.backend_tokenizer
        self._appends = _appends_texts(self._backend)
        self.alone = functools.cache(self._decode_alone)
        self.following = functools.cache(self._decode_following)

    def _decode_alone(self, token_id: int) -> str:
        """The token's text, as if there were no other."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _decode_following(self, token_id: int) -> str | None:
        """What the token adds to text that is not empty and ends with a whole character; None if that depends."""
        token = self._backend.id_to_token(token_id)
        if not self._appends or token is None or token_id in self._tokenizer.special_token_ids:
            return None
        text = self._backend.decoder.decode(["x", token])
        # U+FFFD: the token has part of a character, or an ill-formed one.
        return text[1:] if text.startswith("x") and len(text) > 1 and _REPLACEMENT not in text else None


@functools.lru_cache(maxsize=4)
def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """The `TokenTexts` that all sequences of a tokenizer share."""
    return TokenTexts(tokenizer)


def _appends_texts(backend: Backend) -> bool:
    """Whether a token of whole characters appends the same text to every text that ends with a whole one.

    True of the two decoders that nearly all models have: byte-level BPE, which joins the tokens' bytes, and
    SentencePiece's, which changes spaces token by token and strips at most one at the start of the whole.
    """
    decoder = backend.decoder
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    if state.get("type") == "ByteLevel":
        return True
    steps = state.get("decoders", ())
    return [s["type"] for s in steps][:3] == ["Replace", "ByteFallback", "Fuse"] and all(
        s["type"] == "Strip" and s["start"] <= 1 and s["stop"] == 0 for s in steps[3:]
    )


class IncrementalDetokenizer:
    """Turns the output ids of one sequence into text, in the context of its prompt.

    With T(x) the whole decoding of x, the joined pieces are what T(prompt + output) adds to T(prompt). If the prompt
    ends within a character that the output completes, the character belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        """Only the last few prompt ids are looked at."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._texts = token_texts(tokenizer)
        self._following = self._texts.following
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                self._window.append(token_id)
                if len(self._window) == _KEPT:
                    break
        self._window.reverse()
        self._emitted = self._decode()
        """The part of the window's text that was returned already, or belongs to the prompt."""
        self._is_settled = _ends_whole(self._emitted)
        """Whether the text so far is not empty, ends with a whole character, and was returned up to its end."""
        self._anchor: int | None = None
        """The newest token, if it was looked up instead of decoded: all that is left of the window then."""

    def push(self, token_id: int) -> str:
        """Takes the next output id; returns the text that became final, which may be empty.

        A trailing U+FFFD is held back: it may stand for a character whose other bytes are still to come.
        """
        if self._is_settled:
            piece = self._following(token_id)
            if piece is not None:
                self._anchor = token_id
                return piece
        if token_id in self._skipped:
            return ""
        if self._anchor is not None:
            self._window, self._emitted = [self._anchor], self._texts.alone(self._anchor)
            self._anchor = None
        self._window.append(token_id)
        text = self._decode()
        piece = self._advance(text[:-1] if text.endswith(_REPLACEMENT) else text)
        self._is_settled = _ends_whole(text) and self._emitted == text
        if len(self._window) > 2 * _KEPT:
            self._shorten(held=len(text) - len(self._emitted))
        return piece

    def finish(self) -> str:
        """Returns what was held back: at the end of the output an incomplete character is U+FFFD."""
        return "" if self._is_settled else self._advance(self._decode())

    def _advance(self, final: str) -> str:
        if final.startswith(self._emitted):
            start = len(self._emitted)
        elif len(final) < len(self._emitted):
            return ""
        else:
            # The prompt ended within a character, shown as U+FFFD, which the output has now completed.
            start = _shared(final, self._emitted)
        self._emitted = final
        return final[start:]

    def _shorten(self, held: int) -> None:
        self._window = self._window[-_KEPT:]
        text = self._decode()
        self._emitted = text[: len(text) - held]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


def _ends_whole(text: str) -> bool:
    """Whether the text is not empty and its end won't change: a final U+FFFD may be part of a character."""
    return bool(text) and not text.endswith(_REPLACEMENT)


def _shared(a: str, b: str) -> int:
    """Length of the longest common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StopStringMatcher:
    """Finds the first stop string in a stream of pieces and holds back text that may turn out to begin one.

    The match that is complete first wins, and of several complete at the same character the longest: the result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop`: whether the stop string itself is emitted. ValueError for an empty stop string."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop must be a list of non-empty strings, found {stops!r:.80}")
        self._stops = tuple(stops)
        self._first_letters = frozenset(stop[0] for stop in stops)
        self._beginnings = frozenset(stop[:size] for stop in stops for size in range(1, len(stop)))
        self._longest_beginning = max((len(stop) for stop in stops), default=1) - 1
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, once there is one."""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Returns text that is safe to emit, and the stop string if one is complete now.

        Once a stop string was found, everything that follows is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_letters.isdisjoint(piece):
            return piece, None  # no stop string begins here
        text = self._held + piece
        found = []
        for stop in self._stops:
            # A stop string within the held text was complete before, and passed over.
            if (at := text.find(stop, max(0, len(self._held) + 1 - len(stop)))) >= 0:
                found.append((at + len(stop), at, stop))
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], self.matched
        return self._hold_back(text), None

    def pass_over(self, piece: str) -> str:
        """As `push`, but a stop string that is complete within this piece does not count; one that begins may."""
        return self._hold_back(self._held + piece)

    def _hold_back(self, text: str) -> str:
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Returns what was held back: the text has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest_beginning, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
