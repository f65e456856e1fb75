"""What a benchmark asks for: requests of exact lengths, from a trace or all the same, over random tokens."""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_COLUMNS = ("prompt_tokens", "output_tokens")


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


class BenchRequest(NamedTuple):
    """A prompt, and the number of tokens that follow it, whatever they are."""

    prompt: list[int]
    num_output: int


def read_trace(path: Path, num_prompts: int | None = None) -> list[Lengths]:
    """The lengths in a CSV file with the columns prompt_tokens and output_tokens, the first `num_prompts` of them.

    Raises:
      ValueError: the file can't be read, lacks a column, or has an entry that is no positive integer, or fewer
        requests than are asked for.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [c for c in _COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"trace {path}: its first line lacks the column {' and the column '.join(missing)}")
            rows = [tuple(row[c] for c in _COLUMNS) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"trace {path}: it can't be read: {error}") from error
    if not rows:
        raise ValueError(f"trace {path}: it has no requests")
    if num_prompts is not None and num_prompts > len(rows):
        raise ValueError(f"num_prompts={num_prompts} is more than the {len(rows)} requests of trace {path}")
    return [Lengths(*(_count(entry, path, i) for entry in row)) for i, row in enumerate(rows[:num_prompts], 1)]


def _count(entry: str | None, path: Path, request: int) -> int:
    if entry is None or not entry.strip().isdecimal() or not int(entry):
        raise ValueError(f"trace {path}: request {request}: {entry!r:.40} must be a positive integer")
    return int(entry)


def fixed_lengths(input_len: int, output_len: int, num_prompts: int) -> list[Lengths]:
    """The same lengths for every request.

    Raises:
      ValueError: one of the numbers is below 1.
    """
    for name, value in {"input_len": input_len, "output_len": output_len, "num_prompts": num_prompts}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return [Lengths(input_len, output_len)] * num_prompts


def random_requests(lengths: Sequence[Lengths], vocab_size: int, seed: int) -> list[BenchRequest]:
    """Requests of these lengths over token ids drawn uniformly from the vocabulary; same seed, same requests."""
    draw = random.Random(seed)
    ids = range(vocab_size)
    return [BenchRequest(draw.choices(ids, k=prompt), output) for prompt, output in lengths]


def check_lengths(lengths: Sequence[Lengths], longest: int, limit: str) -> None:
    """Refuses requests that a model can't serve.

    Args:
      lengths: of the requests.
      longest: most tokens of prompt and output together.
      limit: what sets that limit, for the error.

    Raises:
      ValueError: a request is longer.
    """
    for i, (prompt, output) in enumerate(lengths, 1):
        if prompt + output > longest:
            raise ValueError(
                f"request {i} has {prompt} prompt and {output} output tokens, more than {limit}={longest}; raise that "
                "where the model allows it, or choose shorter requests"
            )
