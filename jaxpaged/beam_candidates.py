"""The device half of beam search: of all continuations of a request's beams, the likeliest.

The runner calls `find_candidates` between `forward` and `sample`, in steps that have beams only. Nothing is compiled
at start-up: a variant for each bucket of rows and each beam width (padded to a power of two) would cost every engine
that never searches seconds. Each is compiled when it is first used, and kept in JAX's persistent cache.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

_CHUNK = 128  # tokens of the vocabulary that compete as one at first


class Candidates(NamedTuple):
    """Of each group, the best continuations, best first."""

    logprobs: Float32[Array, "groups candidates"]
    """Sum over the output's tokens, the candidate's included."""
    parents: Int32[Array, "groups candidates"]
    """Beam of the group."""
    token_ids: Int32[Array, "groups candidates"]


class BeamRows(NamedTuple):
    """Some requests' beams in a step, all padded to the same width. Numpy, made by `group_rows`."""

    rows: np.ndarray
    """int32 [groups, width]: rows of the logits, one past the last where there is no beam."""
    logprobs: np.ndarray
    """float32 [groups, width]: of each beam the sum over its output so far."""


def padded_width(beam_width: int) -> int:
    """The width that a search's compiled variants have: the next power of two."""
    return 1 << (beam_width - 1).bit_length()


def group_rows(groups: Sequence[Sequence[tuple[int, float]]], width: int, num_rows: int) -> list[BeamRows]:
    """Beams, request by request, as arrays of a fixed shape: as many groups of `width` as fill the rows.

    Args:
      groups: for each request (row, sum of log-probabilities) of each beam, `width` at most.
      width: padded beam width.
      num_rows: rows of the logits.
    """
    capacity = max(1, num_rows // width)
    arrays = []
    for first in range(0, len(groups), capacity):
        rows, logprobs = np.full((capacity, width), num_rows, np.int32), np.zeros((capacity, width), np.float32)
        for i, group in enumerate(groups[first : first + capacity]):
            rows[i, : len(group)], logprobs[i, : len(group)] = zip(*group, strict=True)
        arrays.append(BeamRows(rows, logprobs))
    return arrays


@functools.partial(jax.jit, static_argnames="num_candidates")
def find_candidates(
    logits: Float32[Array, "rows vocab"],
    rows: Int32[Array, "groups width"],
    logprobs: Float32[Array, "groups width"],
    *,
    num_candidates: int,
) -> Candidates:
    """The `num_candidates` likeliest continuations of each group's beams, best first.

    A continuation's measure is its beam's `logprobs` + log_softmax of the beam's logits at the token, in float32. Of
    equal ones the lower beam goes first, then the lower token. Rows past the last have no continuation (-inf).

    The vocabulary is never sorted: the best `num_candidates` lie in as many of its chunks, those with the highest
    maxima, so that two small top-k over maxima and over the chosen chunks find them, exactly.

    Args:
      logits: the model's logits, float32.
      rows: the beams' rows.
      logprobs: the beams' sums so far.
      num_candidates: at most width × vocab.
    """
    groups, width = rows.shape
    num_rows, vocab = logits.shape
    own = logits[rows.clip(0, num_rows - 1)]  # [groups, width, vocab]
    sums = jax.nn.log_softmax(own, axis=-1) + logprobs[:, :, None]
    sums = jnp.where((rows < num_rows)[:, :, None], sums, -jnp.inf)
    num_chunks = -(-vocab // _CHUNK)
    padding = ((0, 0), (0, 0), (0, num_chunks * _CHUNK - vocab))
    chunks = jnp.pad(sums, padding, constant_values=-jnp.inf).reshape(groups, width * num_chunks, _CHUNK)

    num_chosen = min(num_candidates, width * num_chunks)
    _, chosen = lax.top_k(chunks.max(-1), num_chosen)
    chosen = jnp.sort(chosen, axis=1)  # in order of beams and tokens, so that ties go as promised
    competing = jnp.take_along_axis(chunks, chosen[:, :, None], axis=1).reshape(groups, num_chosen * _CHUNK)
    best, places = lax.top_k(competing, num_candidates)
    winners = jnp.take_along_axis(chosen, places // _CHUNK, axis=1)
    parents, chunk_of_beam = winners // num_chunks, winners % num_chunks
    return Candidates(best, parents, chunk_of_beam * _CHUNK + places % _CHUNK)
