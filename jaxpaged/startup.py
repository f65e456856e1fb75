"""How long a start takes, phase by phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StartupTimes:
    """Wall-clock seconds of each phase, in the order in which the phases began; they don't overlap.

    An engine's: "device" (JAX finds it), "checkpoint" (headers and tokenizer), "sizing" (of the pool), "weights" (read
    or made, onto the device; programs are loaded, traced and compiled meanwhile), then waits for the rest of that:
    "loading" (what an earlier start compiled), "tracing" (to XLA's input) and "compiling"; and "pool" (its allocation).
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds of its body to a phase."""
        start = time.perf_counter()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] += seconds
            logger.info("%s: %.1f s", name, seconds)

    def __str__(self) -> str:
        return summary(self.seconds)


def summary(seconds: Mapping[str, float]) -> str:
    """One line: the total, then the phases that took a tenth of a second or more."""
    phases = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items() if s >= 0.1)
    total = f"{sum(seconds.values()):.1f} s"
    return f"{total} ({phases})" if phases else total
