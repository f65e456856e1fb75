"""How results are shown and kept: percentiles, a table with a column a run, a JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

from jaxpaged.startup import summary


class Percentiles(NamedTuple):
    """Of a sample, interpolated linearly between its values."""

    median: float
    p90: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles:
    """The percentiles of at least one value."""
    ordered = sorted(values)
    return Percentiles(*(_quantile(ordered, q) for q in (0.5, 0.9, 0.99)))


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def table(runs: Mapping[str, Mapping[str, str]]) -> Table:
    """Figures by name, a column for each run; a run leaves out what it doesn't have."""
    shown = Table("")
    for name in runs:
        shown.add_column(name, justify="right")
    for label in dict.fromkeys(label for figures in runs.values() for label in figures):
        shown.add_row(label, *(figures.get(label, "") for figures in runs.values()))
    return shown


def spread(values: Percentiles, unit: str) -> str:
    """`12.3 / 14.0 / 15.1 ms`: median, 90th and 99th percentile."""
    return " / ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in values) + f" {unit}"


class Run(Protocol):
    """What one run came to, ready to be shown and kept."""

    def figures(self) -> dict[str, str]: ...

    def as_json(self) -> dict[str, Any]: ...


def publish(
    title: str,
    device: str,
    runs: Mapping[str, Run],
    startup: Mapping[str, float],
    json: Path | None,
    about: Mapping[str, Any],
) -> None:
    """Prints the runs' table and the seconds of the start by phase, and writes the JSON file if one is wanted.

    Raises:
      ValueError: the file can't be written.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"{title}, on {device}:", highlight=False)
    console.print(table({name: run.figures() for name, run in runs.items()}))
    console.print(f"start-up: {summary(startup)}", highlight=False)
    if json is not None:
        results = {name: run.as_json() for name, run in runs.items()}
        write_json(json, {**about, "device": device, "startup_seconds": dict(startup), "runs": results})


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Writes results with the date and the versions of what ran.

    Raises:
      ValueError: the file can't be written.
    """
    about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "versions": _versions()}
    try:
        path.write_text(json.dumps({**results, **about}, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"json={str(path)!r} can't be written: {error}") from error


def check_writable(option: str, path: Path | None) -> None:
    """Refuses a file that can't be written before anything is measured for it: opens it, and leaves it as it was.

    Args:
      option: what named it, for the error.
      path: the file; None if none is wanted.

    Raises:
      ValueError: there is no such folder, it is a folder itself, or the system does not let it be written.
    """
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{option}={str(path)!r} must be a file in a folder that exists")
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option}={str(path)!r} can't be written: {error}") from error


def _versions() -> dict[str, str]:
    found = {}
    for package in ("jaxpaged", "jax", "torch", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
