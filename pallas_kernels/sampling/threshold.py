"""Where top-k and top-p cut a row: exact thresholds by bisection, bit by bit, without sorting.

Non-negative integers are compared bit by bit from the top, so the largest threshold that still leaves enough
(a count, or a mass) is built by trying each bit in turn: one fused pass over the row for each. The number of
passes is fixed, so that a GPU need not ask the host whether to go on.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pallas_kernels.sampling.fixed_point import as_float, limb_bits, total_mass

_SIGN = np.uint32(0x80000000)


def kth_largest(x: Float32[Array, "rows vocab"], k: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    """The k-th largest value of each row, counting repeated values as often as they appear.

    `x >= kth_largest(x, k)[:, None]` is top-k with all ties of the last place kept.

    Args:
      x: float32 values, infinities included. A row with NaN gives some value and harms no other row.
      k: 1 .. vocab, clipped to that range.
    """
    k = jnp.clip(k, 1, x.shape[-1])
    keys = _ordered_bits(x)

    def enough(threshold: UInt32[Array, " rows"]) -> Bool[Array, " rows"]:
        return jnp.sum(jnp.where(keys >= threshold[:, None], jnp.int32(1), 0), axis=-1, dtype=jnp.int32) >= k

    return _from_ordered_bits(_largest(enough, 32, x.shape[0]))


def top_p_threshold(weights: UInt32[Array, "rows vocab"], p: Float32[Array, " rows"]) -> UInt32[Array, " rows"]:
    """The smallest weight of each row's nucleus: the fewest largest weights that make up `p` of the row's mass.

    `weights >= top_p_threshold(weights, p)[:, None]` is the nucleus with all ties of the last place kept.

    Args:
      weights: from `fixed_point_weights`, zeroed where a token is already out.
      p: share of the row's mass, above 0 and at most 1. The comparison is made in float32, on exact masses.
    """
    bits = limb_bits(weights.shape[-1])
    target = p * as_float(total_mass(weights, bits), bits)

    def enough(threshold: UInt32[Array, " rows"]) -> Bool[Array, " rows"]:
        kept = jnp.where(weights >= threshold[:, None], weights, 0)
        return as_float(total_mass(kept, bits), bits) >= target

    return _largest(enough, 2 * bits, weights.shape[0])


def _largest(enough: Callable[[Array], Array], bits: int, rows: int) -> UInt32[Array, " rows"]:
    """The largest `bits`-bit threshold of each row that leaves enough, if 0 does and enough is monotone."""

    def try_bit(step: Array, threshold: Array) -> Array:
        candidate = threshold | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
        return jnp.where(enough(candidate), candidate, threshold)

    return lax.fori_loop(0, bits, try_bit, jnp.zeros(rows, jnp.uint32))


def _ordered_bits(x: Float32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """An unsigned integer for each float, in the same order (-0.0 just below 0.0)."""
    raw = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(raw >= _SIGN, ~raw, raw | _SIGN)


def _from_ordered_bits(keys: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    raw = jnp.where(keys >= _SIGN, keys ^ _SIGN, ~keys)
    return lax.bitcast_convert_type(raw, jnp.float32)
