"""Logits to token ids and log-probabilities, on the device, inside a jitted step.

Owns the choice of the token: greedy, or temperature, min_p, top_k and top_p (in vLLM's order) and one draw.
Edits of the logits come before, in `logit_passes`. Promises: a row's token depends on that row alone, bit for
bit, whatever the batch around it; randomness comes from (seed, position) only; nothing sorts the vocabulary.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.sampling import draw, fixed_point_weights, kth_largest, top_p_threshold

_LARGEST = float(jnp.finfo(jnp.float32).max)
_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


class SamplingInputs(NamedTuple):
    """What each row asked for; padding rows are best left greedy (temperature 0)."""

    temperature: Float32[Array, " rows"]
    """0 = greedy."""
    top_k: Int32[Array, " rows"]
    """The vocabulary's size (or anything not in 1 .. that size) = off."""
    top_p: Float32[Array, " rows"]
    """1 = off."""
    min_p: Float32[Array, " rows"]
    """0 = off."""
    seeds: UInt32[Array, "rows 2"]
    """The request's random key (`SamplingParams.seed_words`, or the engine's own choice)."""
    positions: Int32[Array, " rows"]
    """Index of the token being sampled in its sequence; folded into the key."""


class Draws(enum.Enum):
    """The most that a row of a step asks for. What a row gets does not depend on it.

    Known when the step is dispatched, and compiled in: on a GPU each branch on the device (`lax.cond`) would make the
    host wait for the step.
    """

    GREEDY = "greedy"
    PLAIN = "plain"
    """Rows with a temperature, and perhaps min_p."""
    CUT = "cut"
    """Rows with top_k or top_p too."""


class Rating(NamedTuple):
    """How the model itself (before any edit) rates given tokens."""

    logprobs: Float32[Array, " rows"]
    """log_softmax of the raw logits at the token."""
    ranks: Int32[Array, " rows"]
    """1 + the number of tokens that the raw logits rate strictly higher."""


class Alternatives(NamedTuple):
    """The model's own best tokens, best first."""

    token_ids: Int32[Array, "rows alternatives"]
    logprobs: Float32[Array, "rows alternatives"]


class SampleOutput(NamedTuple):
    """Sampled tokens and their rating."""

    token_ids: Int32[Array, " rows"]
    rating: Rating


def sample(
    raw_logits: Float32[Array, "rows vocab"],
    edited_logits: Float32[Array, "rows vocab"],
    inputs: SamplingInputs,
    draws: Draws,
) -> SampleOutput:
    """Samples one token a row from `edited_logits` and rates it by `raw_logits`.

    A row whose edited logits are all -inf gets token 0. A row with NaN gets some token of the vocabulary and
    changes no other row.

    Args:
      raw_logits: the model's logits.
      edited_logits: the same after biases, bans and penalties; the same array when nobody edits.
      inputs: see `SamplingInputs`.
      draws: the most that any row asks for; static.

    Raises:
      ValueError: logits that are not two float32 arrays of one [rows, vocab] shape.
    """
    for name, logits in (("raw_logits", raw_logits), ("edited_logits", edited_logits)):
        if logits.ndim != 2 or logits.shape != raw_logits.shape or logits.dtype != jnp.float32:
            raise ValueError(
                f"sample: {name} is {logits.dtype}{logits.shape}; give float32 [rows, vocab], shaped like raw_logits"
            )
    token_ids = _first_largest(edited_logits)
    if draws is not Draws.GREEDY:
        is_random = inputs.temperature > 0
        drawn = _sample_random(edited_logits, token_ids, is_random, inputs, cut=draws is Draws.CUT)
        token_ids = jnp.where(is_random, drawn, token_ids)
    return SampleOutput(token_ids, rate(raw_logits, token_ids))


def rate(logits: Float32[Array, "rows vocab"], token_ids: Int32[Array, " rows"]) -> Rating:
    """Rates one token a row."""
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    ranks = 1 + jnp.sum(jnp.where(logits > chosen, jnp.int32(1), 0), axis=1, dtype=jnp.int32)
    return Rating((chosen - normaliser)[:, 0], ranks)


def alternatives(logits: Float32[Array, "rows vocab"], number: int) -> Alternatives:
    """The `number` likeliest tokens of each row, or all of a smaller vocabulary."""
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    values, ids = lax.top_k(logits, min(number, logits.shape[1]))
    return Alternatives(ids, values - normaliser)


def _first_largest(logits: Float32[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """argmax, lowest id on ties, in two plain reductions (XLA for CPU is several times slower at argmax)."""
    vocab = logits.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_largest = logits == jnp.max(logits, axis=1, keepdims=True)
    return jnp.minimum(jnp.min(jnp.where(is_largest, ids, vocab), axis=1), vocab - 1)


def _sample_random(
    logits: Float32[Array, "rows vocab"],
    best: Int32[Array, " rows"],
    is_random: Bool[Array, " rows"],
    inputs: SamplingInputs,
    *,
    cut: bool,
) -> Int32[Array, " rows"]:
    """Temperature, min_p, top_k, top_p, draw. Greedy rows run along and ask for no threshold."""
    vocab = logits.shape[1]
    scaled = _scaled(logits, jnp.where(is_random, inputs.temperature, 1.0))
    relative = jnp.exp(scaled)
    keep = relative >= inputs.min_p[:, None]  # relative to the best token, as min_p is

    if cut:
        wants_top_k = is_random & (inputs.top_k > 0) & (inputs.top_k < vocab)
        threshold = kth_largest(scaled, jnp.where(wants_top_k, inputs.top_k, vocab))
        keep &= (scaled >= threshold[:, None]) | ~wants_top_k[:, None]
    weights = fixed_point_weights(jnp.where(keep, relative, 0.0))
    if cut:
        wants_top_p = is_random & (inputs.top_p < 1)
        floor = jnp.where(wants_top_p, top_p_threshold(weights, inputs.top_p), 0)
        weights = jnp.where(weights >= floor[:, None], weights, 0)
    return draw(weights, _random_bits(inputs.seeds, inputs.positions), best)


def _scaled(logits: Float32[Array, "rows vocab"], temperature: Float32[Array, " rows"]) -> Float32[Array, "rows vocab"]:
    """(logits - best) / temperature: at most 0, so that no temperature overflows upwards."""
    logits = jnp.minimum(logits, _LARGEST)
    peak = jnp.max(logits, axis=1, keepdims=True)
    peak = jnp.where(peak >= -_LARGEST, peak, 0.0)  # all -inf, or NaN: leave the row as it is
    return (logits - peak) / jnp.clip(temperature, _SMALLEST, _LARGEST)[:, None]


def _random_bits(seeds: UInt32[Array, "rows 2"], positions: Int32[Array, " rows"]) -> UInt32[Array, " rows"]:
    def one(seed: Array, position: Array) -> Array:
        # The generator is named, so that JAX's default one can change without changing anybody's output.
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (), jnp.uint32)

    return jax.vmap(one)(seeds, positions)
