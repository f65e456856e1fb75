"""Text as it is generated: incremental detokenisation and stop strings, both exact and O(1) a token.

The engine feeds token ids to an `IncrementalDetokenizer`, and the pieces it returns through a `StopStringMatcher`.
Pieces never hold half a character, and joined they are what decoding everything at once gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpaged.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, and a token at least one: with this many tokens kept, a cut through a
# character at the window's start has no effect on how its end decodes.
_KEPT = 6


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
        self._window: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                self._window.append(token_id)
                if len(self._window) == _KEPT:
                    break
        self._window.reverse()
        self._emitted = self._decode()
        """The part of the window's text that was returned already, or belongs to the prompt."""

    def push(self, token_id: int) -> str:
        """Takes the next output id; returns the text that became final, which may be empty.

        A trailing U+FFFD is held back: it may stand for a character whose other bytes are still to come.
        """
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        piece = self._advance(text[:-1] if text.endswith(_REPLACEMENT) else text)
        if len(self._window) > 2 * _KEPT:
            self._shorten(held=len(text) - len(self._emitted))
        return piece

    def finish(self) -> str:
        """Returns what was held back: at the end of the output an incomplete character is U+FFFD."""
        return self._advance(self._decode())

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
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], self.matched
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Returns what was held back: the text has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
