"""The device half of logit edits: passes of a fixed capacity, so that nothing recompiles whatever users send.

Owns how the flat arrays of `logit_edits` reach the logits: allowed tokens, then bans and biases, then penalties,
which is vLLM's order. The caller is the runner, each step in which `collect_edits` found something, with the passes
that were compiled ahead for its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int32

from jaxpaged.compiling import Program
from jaxpaged.logit_edits import Entries, LogitEdits

CAPACITY = 4096
"""Entries of one pass. Padding entries have row == rows and are dropped (never -1, JAX's last row)."""


def apply_bias(
    logits: Float32[Array, "rows vocab"],
    rows: Int32[Array, " capacity"],
    tokens: Int32[Array, " capacity"],
    values: Float32[Array, " capacity"],
) -> Float32[Array, "rows vocab"]:
    """Adds `values` to their cells; -inf bans a token. Entries whose row is `rows` are dropped."""
    return logits.at[rows, tokens].add(values, mode="drop")


def accumulate_mask(
    mask: Bool[Array, "rows vocab"], rows: Int32[Array, " capacity"], tokens: Int32[Array, " capacity"]
) -> Bool[Array, "rows vocab"]:
    """Sets the cells; entries whose row is `rows` are dropped."""
    return mask.at[rows, tokens].set(True, mode="drop")


def accumulate_counts(
    counts: Int32[Array, "rows vocab"], rows: Int32[Array, " capacity"], tokens: Int32[Array, " capacity"]
) -> Int32[Array, "rows vocab"]:
    """Adds 1 to each cell, as often as it appears; entries whose row is `rows` are dropped."""
    return counts.at[rows, tokens].add(1, mode="drop")


def restrict_to_allowed(
    logits: Float32[Array, "rows vocab"], restricted: Bool[Array, " rows"], allowed: Bool[Array, "rows vocab"]
) -> Float32[Array, "rows vocab"]:
    """Bans all but the allowed tokens of the restricted rows."""
    return jnp.where(restricted[:, None] & ~allowed, -jnp.inf, logits)


def apply_penalties(
    logits: Float32[Array, "rows vocab"],
    output_counts: Int32[Array, "rows vocab"],
    prompt_mask: Bool[Array, "rows vocab"],
    presence: Float32[Array, " rows"],
    frequency: Float32[Array, " rows"],
    repetition: Float32[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    """Repetition penalty over prompt and output tokens, then frequency and presence penalties over output tokens.

    Neutral values (0, 0, 1) leave a row's logits as they are, to the bit.
    """
    in_output = output_counts > 0
    factor = repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(in_output | prompt_mask, repeated, logits)
    per_use = frequency[:, None] * output_counts.astype(jnp.float32)
    return logits - (per_use + jnp.where(in_output, presence[:, None], 0.0))


def _copy(logits: Array) -> Array:
    return jnp.array(logits, copy=True)


def _no_mask(logits: Array) -> Array:
    return jnp.zeros_like(logits, dtype=bool)


def _no_counts(logits: Array) -> Array:
    return jnp.zeros_like(logits, dtype=jnp.int32)


# The logits are copied once and then edited in place: each pass owns, and gives away, its first argument.
_PASSES: dict[str, tuple[Callable[..., Array], tuple[int, ...]]] = {
    "copy": (_copy, ()),
    "no_mask": (_no_mask, ()),
    "no_counts": (_no_counts, ()),
    "apply_bias": (apply_bias, (0,)),
    "accumulate_mask": (accumulate_mask, (0,)),
    "accumulate_counts": (accumulate_counts, (0,)),
    "restrict_to_allowed": (restrict_to_allowed, (0,)),
    "apply_penalties": (apply_penalties, (0,)),
}

Passes = Mapping[str, Callable[..., Array]]
"""Everything that `edit_logits` runs on the device, by name, compiled for its rows and vocabulary or jitted."""

JITTED_PASSES: Passes = {name: jax.jit(edit, donate_argnums=donate) for name, (edit, donate) in _PASSES.items()}


def programs(rows: int, vocab: int) -> dict[str, Program]:
    """The passes, to compile them ahead."""

    def shape(dtype: DTypeLike, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    logits, mask = shape(jnp.float32, rows, vocab), shape(bool, rows, vocab)
    counts, per_row = shape(jnp.int32, rows, vocab), shape(jnp.float32, rows)
    cells = shape(jnp.int32, CAPACITY), shape(jnp.int32, CAPACITY)
    args = {
        "copy": (logits,),
        "no_mask": (logits,),
        "no_counts": (logits,),
        "apply_bias": (logits, *cells, shape(jnp.float32, CAPACITY)),
        "accumulate_mask": (mask, *cells),
        "accumulate_counts": (counts, *cells),
        "restrict_to_allowed": (logits, shape(bool, rows), mask),
        "apply_penalties": (logits, counts, mask, per_row, per_row, per_row),
    }
    return {name: Program(name, edit, args[name], donate) for name, (edit, donate) in _PASSES.items()}


def edit_logits(
    raw_logits: Float32[Array, "rows vocab"], edits: LogitEdits, passes: Passes = JITTED_PASSES
) -> Float32[Array, "rows vocab"]:
    """The logits to sample from; `raw_logits` stays as it is, for log-probabilities.

    Dispatches a few passes and returns without waiting for them. Cells that nobody edits keep their bits.
    """
    rows = raw_logits.shape[0]
    logits = passes["copy"](raw_logits)
    if edits.restricted.any():
        logits = passes["restrict_to_allowed"](logits, edits.restricted, _mask(raw_logits, passes, edits.allowed))
    for row_ids, tokens, values in _chunks(rows, edits.biased, edits.bias):
        logits = passes["apply_bias"](logits, row_ids, tokens, values)
    if edits.has_penalties:
        counts = passes["no_counts"](raw_logits)
        for row_ids, tokens, _ in _chunks(rows, edits.output):
            counts = passes["accumulate_counts"](counts, row_ids, tokens)
        prompt_mask = _mask(raw_logits, passes, edits.prompt)
        logits = passes["apply_penalties"](
            logits, counts, prompt_mask, edits.presence, edits.frequency, edits.repetition
        )
    return logits


def _mask(like: Array, passes: Passes, entries: Entries) -> Bool[Array, "rows vocab"]:
    mask = passes["no_mask"](like)
    for row_ids, tokens, _ in _chunks(like.shape[0], entries):
        mask = passes["accumulate_mask"](mask, row_ids, tokens)
    return mask


def _chunks(
    rows: int, entries: Entries, values: np.ndarray | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The entries in pieces of CAPACITY, the last one padded with entries that are dropped."""
    for start in range(0, entries.rows.size, CAPACITY):
        piece = slice(start, start + CAPACITY)
        used = entries.rows[piece].size
        row_ids, tokens = np.full(CAPACITY, rows, np.int32), np.zeros(CAPACITY, np.int32)
        amounts = np.zeros(CAPACITY, np.float32)
        row_ids[:used], tokens[:used] = entries.rows[piece], entries.tokens[piece]
        if values is not None:
            amounts[:used] = values[piece]
        yield row_ids, tokens, amounts
