"""Logits to token ids and log-probabilities, on the device, inside a jitted step.

Owns the choice of the token: greedy, or temperature, min_p, top_k and top_p (in vLLM's order) and one draw.
Edits of the logits come before, in `logit_passes`. Promises: a row's token depends on that row alone, bit for
bit, whatever the batch around it; randomness comes from (seed, position) only; nothing sorts the vocabulary.
"""

from __future__ import annotations

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
    num_logprobs: Int32[Array, ""]
    """Most alternatives any row wants; 0 = nobody wants any, and they are not computed."""


class Rating(NamedTuple):
    """How the model itself (before any edit) rates given tokens."""

    logprobs: Float32[Array, " rows"]
    """log_softmax of the raw logits at the token."""
    ranks: Int32[Array, " rows"]
    """1 + the number of tokens that the raw logits rate strictly higher."""
    top_ids: Int32[Array, "rows max_logprobs"]
    """The raw distribution's best tokens, best first; zeros unless somebody wants alternatives."""
    top_logprobs: Float32[Array, "rows max_logprobs"]


class SampleOutput(NamedTuple):
    """Sampled tokens and their rating."""

    token_ids: Int32[Array, " rows"]
    rating: Rating


def sample(
    raw_logits: Float32[Array, "rows vocab"],
    edited_logits: Float32[Array, "rows vocab"],
    inputs: SamplingInputs,
    *,
    max_logprobs: int,
) -> SampleOutput:
    """Samples one token a row from `edited_logits` and rates it by `raw_logits`.

    Traceable, with static shapes. The costs of random rows and of alternatives are paid only when a row asks.
    A row whose edited logits are all -inf gets token 0. A row with NaN gets some token of the vocabulary and
    changes no other row.

    Args:
      raw_logits: the model's logits.
      edited_logits: the same after biases, bans and penalties; the same array when nobody edits.
      inputs: see `SamplingInputs`.
      max_logprobs: width of the alternatives. Where it exceeds the vocabulary the rest stays zero.

    Raises:
      ValueError: logits that are not two float32 arrays of one [rows, vocab] shape.
    """
    for name, logits in (("raw_logits", raw_logits), ("edited_logits", edited_logits)):
        if logits.ndim != 2 or logits.shape != raw_logits.shape or logits.dtype != jnp.float32:
            raise ValueError(
                f"sample: {name} is {logits.dtype}{logits.shape}; give float32 [rows, vocab], shaped like raw_logits"
            )
    is_random = inputs.temperature > 0
    best = _first_largest(edited_logits)
    token_ids = lax.cond(
        jnp.any(is_random),
        lambda: jnp.where(is_random, _sample_random(edited_logits, best, is_random, inputs), best),
        lambda: best,
    )
    return SampleOutput(token_ids, rate(raw_logits, token_ids, inputs.num_logprobs, max_logprobs=max_logprobs))


def rate(
    logits: Float32[Array, "rows vocab"],
    token_ids: Int32[Array, " rows"],
    num_logprobs: Int32[Array, ""],
    *,
    max_logprobs: int,
) -> Rating:
    """Rates one token a row; the alternatives are computed only if `num_logprobs` > 0."""
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1)
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    ranks = 1 + jnp.sum(jnp.where(logits > chosen, jnp.int32(1), 0), axis=1, dtype=jnp.int32)
    top_ids, top_logprobs = _alternatives(logits, normaliser, num_logprobs, max_logprobs)
    return Rating((chosen - normaliser)[:, 0], ranks, top_ids, top_logprobs)


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
) -> Int32[Array, " rows"]:
    """Temperature, min_p, top_k, top_p, draw. Greedy rows run along and ask for no threshold."""
    rows, vocab = logits.shape
    scaled = _scaled(logits, jnp.where(is_random, inputs.temperature, 1.0))
    relative = jnp.exp(scaled)
    keep = relative >= inputs.min_p[:, None]  # relative to the best token, as min_p is

    wants_top_k = is_random & (inputs.top_k > 0) & (inputs.top_k < vocab)
    cut = lax.cond(
        jnp.any(wants_top_k),
        lambda: kth_largest(scaled, jnp.where(wants_top_k, inputs.top_k, vocab)),
        lambda: jnp.full(rows, -jnp.inf, jnp.float32),
    )
    weights = fixed_point_weights(jnp.where(keep & (scaled >= cut[:, None]), relative, 0.0))

    wants_top_p = is_random & (inputs.top_p < 1)
    floor = lax.cond(
        jnp.any(wants_top_p),
        lambda: jnp.where(wants_top_p, top_p_threshold(weights, inputs.top_p), 0),
        lambda: jnp.zeros(rows, jnp.uint32),
    )
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


def _alternatives(
    raw_logits: Float32[Array, "rows vocab"],
    normaliser: Float32[Array, "rows 1"],
    num_logprobs: Int32[Array, ""],
    max_logprobs: int,
) -> tuple[Int32[Array, "rows max_logprobs"], Float32[Array, "rows max_logprobs"]]:
    rows, vocab = raw_logits.shape
    nothing = (jnp.zeros((rows, max_logprobs), jnp.int32), jnp.zeros((rows, max_logprobs), jnp.float32))
    width = min(max_logprobs, vocab)
    if width == 0:
        return nothing

    def compute() -> tuple[Array, Array]:
        values, ids = lax.top_k(raw_logits, width)
        padding = ((0, 0), (0, max_logprobs - width))
        return jnp.pad(ids, padding), jnp.pad(values - normaliser, padding)

    return lax.cond(num_logprobs > 0, compute, lambda: nothing)
