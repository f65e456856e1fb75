"""Which implementation of an op serves a call, and why the others do not.

An op owns a tuple of `Implementation`s, best first. Each says with `refusal` why it can't serve a call
(`None`: it can), so that asking for one by name fails with its reason and `None` picks the first that serves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def serves_all(*_: object, **__: object) -> None:
    """The refusal of an implementation that serves every call of its op."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op."""

    name: str
    run: Callable[..., Any]
    refusal: Callable[..., str | None]
    """Called with the op's arguments; returns why this implementation can't serve them, or None."""


def choose(
    op: str, implementations: Sequence[Implementation], wanted: str | None, *args: Any, **kwargs: Any
) -> Implementation:
    """The implementation called `wanted`, or the first that serves the arguments.

    Raises:
      ValueError: `wanted` is unknown, or can't serve this call; the message says why.
    """
    names = ", ".join(repr(i.name) for i in implementations)
    if wanted is not None:
        for candidate in implementations:
            if candidate.name == wanted:
                reason = candidate.refusal(*args, **kwargs)
                if reason is not None:
                    raise ValueError(f"{op}: implementation={wanted!r} can't serve this call: {reason}")
                return candidate
        raise ValueError(f"{op}: implementation={wanted!r} is unknown; choose one of {names}, or None")
    reasons = []
    for candidate in implementations:
        reason = candidate.refusal(*args, **kwargs)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    raise ValueError(f"{op}: no implementation serves this call; " + "; ".join(reasons))
