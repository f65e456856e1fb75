"""Probabilities as integers, and sums of them that are exact.

A sum of floats depends on its order, which the compiler picks anew for each batch shape; a sum of integers
does not. So masses are summed as integers, and a row is sampled alike alone and in any batch. A weight has
`2 * limb_bits(vocab)` bits (24 or more up to a vocabulary of a million). A total needs more than 32 bits, so
sums are kept as two 32-bit words, `high * 2**limb_bits + low`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32


class Mass(NamedTuple):
    """A sum of weights: `high * 2**limb_bits + low`, with `low < 2**limb_bits` once carried."""

    high: UInt32[Array, "*shape"]
    low: UInt32[Array, "*shape"]


def limb_bits(vocab: int) -> int:
    """Bits of each half of a weight, such that neither half's sum over `vocab` weights overflows 32 bits."""
    return min(15, 32 - max(vocab - 1, 1).bit_length())


def fixed_point_weights(relative: Float32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Integers proportional to `relative`, probabilities divided by the largest of their row.

    Args:
      relative: values in [0, 1]. Larger ones count as 1; negative ones and NaN as 0.

    Returns:
      Weights below `2**(2 * limb_bits(vocab))`, rounded to nearest: a value under half a step becomes 0.
    """
    # The largest float32 integer below the full scale, or a weight of 1 would need one bit more.
    bits = 2 * limb_bits(relative.shape[-1])
    scale = 2.0**bits - max(1.0, 2.0 ** (bits - 24))
    clean = jnp.where(relative > 0, jnp.minimum(relative, 1.0), 0.0)  # NaN > 0 is false
    return jnp.round(clean * jnp.float32(scale)).astype(jnp.uint32)


def carry(mass: Mass, bits: int) -> Mass:
    """The same mass with the excess of `low` moved to `high`."""
    return Mass(mass.high + (mass.low >> bits), mass.low & ((1 << bits) - 1))


def total_mass(weights: UInt32[Array, "*shape axis"], bits: int) -> Mass:
    """Exact sum over the last axis, carried. `bits` is `limb_bits` of the whole vocabulary."""
    zero = jnp.uint32(0)
    # One reduction of two operands: apart, XLA for CPU would read the row once for each.
    high, low = lax.reduce(
        (weights >> bits, weights & ((1 << bits) - 1)),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (weights.ndim - 1,),
    )
    return carry(Mass(high, low), bits)


def prefix_mass(mass: Mass, bits: int) -> Mass:
    """Inclusive prefix sums along the last axis, carried."""
    high, low = jnp.cumsum(jnp.stack(mass), axis=-1, dtype=jnp.uint32)
    return carry(Mass(high, low), bits)


def as_float(mass: Mass, bits: int) -> Float32[Array, "*shape"]:
    """The mass rounded to float32: monotone, and within two roundings of exact."""
    return mass.high.astype(jnp.float32) * 2.0**bits + mass.low.astype(jnp.float32)


def exceeds(a: Mass, b: Mass) -> Array:
    """Elementwise `a > b` of carried masses."""
    return (a.high > b.high) | ((a.high == b.high) & (a.low > b.low))


def subtract(a: Mass, b: Mass, bits: int) -> Mass:
    """`a - b` of carried masses, `a >= b`."""
    borrow = (a.low < b.low).astype(jnp.uint32)
    return Mass(a.high - b.high - borrow, a.low + (borrow << bits) - b.low)


def fraction(mass: Mass, uniform: UInt32[Array, "*shape"], bits: int) -> Mass:
    """About `mass * uniform / 2**32`, rounded down, and always less than a mass that is not zero."""
    whole, rest = _multiply(mass.high, uniform)
    low_part, _ = _multiply(mass.low, uniform)
    return carry(Mass(whole, (rest >> (32 - bits)) + low_part), bits)


def _multiply(a: Array, b: Array) -> tuple[Array, Array]:
    """The 64-bit product of two uint32 values as (high, low) words, from 16-bit halves."""
    mask = 0xFFFF
    low = (a & mask) * (b & mask)
    cross_a = (a >> 16) * (b & mask)
    cross_b = (a & mask) * (b >> 16)
    middle = (low >> 16) + (cross_a & mask) + (cross_b & mask)
    high = (a >> 16) * (b >> 16) + (cross_a >> 16) + (cross_b >> 16) + (middle >> 16)
    return high, (low & mask) | (middle << 16)
