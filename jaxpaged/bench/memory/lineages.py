"""Which beams survive each step of a beam search: recorded from a model, or drawn where there is none.

A lineage is an endless iterator of steps; a step tells for each of the k survivors, best first, which of the k beams
before it continues.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

Step = tuple[int, ...]


class Recorded:
    """Lineages of searches over a real model (`scripts/record_beam_lineages.py`).

    A lineage follows one of them from its beginning, and where that ends goes on with the second half of another one:
    outputs of the traces are longer than what was recorded.
    """

    def __init__(self, searches: list[list[Step]]) -> None:
        self.searches = searches

    @classmethod
    def read(cls, path: Path, width: int) -> Recorded:
        """The searches with `width` beams.

        Raises:
          ValueError: the file can't be read, is no such record, or has no search of that width.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))["lineages"]
            widths = sorted(record)
            searches = [_steps(text, width) for text in record.get(str(width), ())]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"lineages={str(path)!r} can't be read: {type(error).__name__}: {error}") from error
        if not searches:
            raise ValueError(f"lineages={str(path)!r} has no search with {width} beams, but with {', '.join(widths)}")
        return cls(searches)

    def lineage(self, draw: Random) -> Iterator[Step]:
        yield from draw.choice(self.searches)
        while True:
            search = draw.choice(self.searches)
            yield from search[len(search) // 2 :]


def _steps(text: str, width: int) -> list[Step]:
    parents = [int(digit) for digit in text]
    if not parents or len(parents) % width or max(parents) >= width:
        raise ValueError(f"{text[:40]!r} is no search with {width} beams")
    return list(itertools.batched(parents, width))


class HalfSpeed:
    """The recorded lineages with a pause after each step, in which every beam goes on by itself: it takes twice as long
    until only one of them has survivors."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def lineage(self, draw: Random) -> Iterator[Step]:
        for step in self._recorded.lineage(draw):
            yield step
            yield tuple(range(len(step)))


class Independent:
    """Each survivor continues any of the beams, with equal chances (the Wright-Fisher model of genetics)."""

    def __init__(self, width: int) -> None:
        self._beams = range(width)

    def lineage(self, draw: Random) -> Iterator[Step]:
        while True:
            yield tuple(sorted(draw.choices(self._beams, k=len(self._beams))))


class Apart:
    """Each beam goes on by itself and shares nothing but the prompt: parallel sampling."""

    def __init__(self, width: int) -> None:
        self._step = tuple(range(width))

    def lineage(self, draw: Random) -> Iterator[Step]:
        return itertools.repeat(self._step)
