"""The device half of beam search: of all continuations of a request's beams, the likeliest.

The runner calls `start_search` between `forward` and `sample`, in steps that have beams only. Nothing is compiled
at start-up: a variant for each bucket of rows and each beam width (padded to a power of two) would cost every engine
that never searches seconds. Each is compiled when it is first used, and kept in JAX's persistent cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxpaged.beams import Candidate, num_candidates

_CHUNK = 128  # tokens of the vocabulary that compete as one at first


class Candidates(NamedTuple):
    """Of each group, the best continuations, best first."""

    logprobs: Float32[Array, "groups candidates"]
    """Sum over the output's tokens, the candidate's included."""
    parents: Int32[Array, "groups candidates"]
    """Beam of the group."""
    token_ids: Int32[Array, "groups candidates"]


class Beams(NamedTuple):
    """A request's beams in a step."""

    width: int
    """As many as there may be."""
    first_row: int
    """Row of the first one's logits; the others' follow."""
    logprobs: Sequence[float]
    """Of each the sum over its output so far."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["found"], meta_fields=["requests"])
@dataclasses.dataclass(frozen=True)
class PendingCandidates:
    """Candidates of some requests, on the device or brought to the host: a pytree of arrays."""

    requests: tuple[int, ...]
    """Which requests the first groups are, as they were given; the others are padding."""
    found: Candidates


def padded_width(beam_width: int) -> int:
    """The width that a search's compiled variants have: the next power of two."""
    return 1 << (beam_width - 1).bit_length()


def start_search(
    logits: Float32[Array, "rows vocab"], requests: Sequence[Beams], num_eos: int
) -> list[PendingCandidates]:
    """Starts what finds all requests' candidates, as many requests of a width in one call as fill the rows.

    Args:
      logits: the step's.
      requests: whose beams are among the rows.
      num_eos: the model's end-of-sequence tokens.
    """
    pending = []
    num_rows = logits.shape[0]
    for width in sorted({padded_width(beams.width) for beams in requests}):
        members = [i for i, beams in enumerate(requests) if padded_width(beams.width) == width]
        capacity = max(1, num_rows // width)
        for start in range(0, len(members), capacity):
            chosen = members[start : start + capacity]
            rows, logprobs = np.full((capacity, width), num_rows, np.int32), np.zeros((capacity, width), np.float32)
            for group, i in enumerate(chosen):
                _, first, sums = requests[i]
                rows[group, : len(sums)] = range(first, first + len(sums))
                logprobs[group, : len(sums)] = sums
            found = find_candidates(logits, rows, logprobs, num_candidates=num_candidates(width, num_eos))
            pending.append(PendingCandidates(tuple(chosen), found))
    return pending


def read_candidates(pending: Sequence[PendingCandidates], num_requests: int) -> list[list[Candidate]]:
    """Of each request its candidates, best first; `pending` is what `start_search` gave, brought to the host."""
    candidates: list[list[Candidate]] = [[] for _ in range(num_requests)]
    for part in pending:
        columns = (column.tolist() for column in (part.found.parents, part.found.token_ids, part.found.logprobs))
        for i, parents, token_ids, logprobs in zip(part.requests, *columns, strict=False):
            candidates[i] = list(map(Candidate, parents, token_ids, logprobs))
    return candidates


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
