"""The device half of logit edits: passes of a fixed capacity, so that nothing recompiles whatever users send.

Owns how the flat arrays of `logit_edits` reach the logits: allowed tokens, then bans and biases, then penalties,
which is vLLM's order. The caller is the runner: `edit_logits` each step in which `collect_edits` found something,
`warm_up` once for each bucket of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

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


# The logits are copied once and then edited in place: each pass owns, and gives away, its first argument.
_copy = jax.jit(lambda logits: jnp.array(logits, copy=True))
_no_mask = jax.jit(lambda logits: jnp.zeros_like(logits, dtype=bool))
_no_counts = jax.jit(lambda logits: jnp.zeros_like(logits, dtype=jnp.int32))
_apply_bias = jax.jit(apply_bias, donate_argnums=0)
_accumulate_mask = jax.jit(accumulate_mask, donate_argnums=0)
_accumulate_counts = jax.jit(accumulate_counts, donate_argnums=0)
_restrict_to_allowed = jax.jit(restrict_to_allowed, donate_argnums=0)
_apply_penalties = jax.jit(apply_penalties, donate_argnums=0)

JITTED_PASSES = (
    _copy,
    _no_mask,
    _no_counts,
    _apply_bias,
    _accumulate_mask,
    _accumulate_counts,
    _restrict_to_allowed,
    _apply_penalties,
)
"""Everything that `edit_logits` runs on the device; after `warm_up` none of them traces again."""


def edit_logits(raw_logits: Float32[Array, "rows vocab"], edits: LogitEdits) -> Float32[Array, "rows vocab"]:
    """The logits to sample from; `raw_logits` stays as it is, for log-probabilities.

    Dispatches a few jitted passes and returns without waiting for them. Cells that nobody edits keep their bits.
    """
    rows = raw_logits.shape[0]
    logits = _copy(raw_logits)
    if edits.restricted.any():
        logits = _restrict_to_allowed(logits, edits.restricted, _mask(raw_logits, edits.allowed))
    for row_ids, tokens, values in _chunks(rows, edits.biased, edits.bias):
        logits = _apply_bias(logits, row_ids, tokens, values)
    if edits.has_penalties:
        counts = _no_counts(raw_logits)
        for row_ids, tokens, _ in _chunks(rows, edits.output):
            counts = _accumulate_counts(counts, row_ids, tokens)
        prompt_mask = _mask(raw_logits, edits.prompt)
        logits = _apply_penalties(logits, counts, prompt_mask, edits.presence, edits.frequency, edits.repetition)
    return logits


def warm_up(logits: Float32[Array, "rows vocab"]) -> None:
    """Compiles every pass for these rows and this vocabulary.

    Args:
      logits: any array shaped, typed and placed (device, sharding) as the step's logits will be; unchanged.
    """
    rows = logits.shape[0]
    one = Entries(np.zeros(1, np.int32), np.zeros(1, np.int32))
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    restricted = np.ones(rows, bool)
    edit_logits(logits, LogitEdits(restricted, one, one, zeros[:1], one, one, zeros, zeros, ones))


def _mask(like: Array, entries: Entries) -> Bool[Array, "rows vocab"]:
    mask = _no_mask(like)
    for row_ids, tokens, _ in _chunks(like.shape[0], entries):
        mask = _accumulate_mask(mask, row_ids, tokens)
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
