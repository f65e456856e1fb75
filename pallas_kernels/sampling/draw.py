"""One draw a row by inverse CDF: a uniform integer below the row's mass, and the token whose interval holds it.

Two levels, so that no prefix sum runs over the whole vocabulary: sums of blocks find the block, a prefix sum
within the block finds the token. Everything is exact integer arithmetic, so a weight of 0 is never drawn.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.sampling.fixed_point import (
    Mass,
    exceeds,
    fraction,
    limb_bits,
    prefix_mass,
    subtract,
    total_mass,
)

_BLOCK = 512


def draw(
    weights: UInt32[Array, "rows vocab"], uniform: UInt32[Array, " rows"], fallback: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """A token of each row with probability proportional to its weight.

    Args:
      weights: from `fixed_point_weights`, 0 where a token is out.
      uniform: 32 random bits a row; larger ones give higher tokens.
      fallback: the token of a row whose weights are all 0.
    """
    rows, vocab = weights.shape
    bits = limb_bits(vocab)
    blocks = -(-vocab // _BLOCK)
    blocked = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - vocab))).reshape(rows, blocks, _BLOCK)

    ends = prefix_mass(total_mass(blocked, bits), bits)
    total = Mass(ends.high[:, -1], ends.low[:, -1])
    target = fraction(total, uniform, bits)
    block, before = _interval(ends, target)

    within = jnp.take_along_axis(blocked, block[:, None, None], axis=1)[:, 0]
    limbs = Mass(within >> bits, within & ((1 << bits) - 1))
    offset, _ = _interval(prefix_mass(limbs, bits), subtract(target, before, bits))
    empty = (total.high | total.low) == 0
    return jnp.where(empty, fallback, jnp.minimum(block * _BLOCK + offset, vocab - 1))


def _interval(ends: Mass, target: Mass) -> tuple[Int32[Array, " rows"], Mass]:
    """Index of the interval [end before, end) that holds the target in each row, and the end before it."""
    passed = ~exceeds(ends, Mass(target.high[:, None], target.low[:, None]))
    index = jnp.sum(passed, axis=-1, dtype=jnp.int32)
    previous = jnp.maximum(index - 1, 0)[:, None]
    before = Mass(*(jnp.where(index > 0, jnp.take_along_axis(limb, previous, axis=-1)[:, 0], 0) for limb in ends))
    return jnp.minimum(index, passed.shape[-1] - 1), before
