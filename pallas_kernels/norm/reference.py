"""Residual addition and RMS normalisation by XLA, which makes several kernels of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def add_rms_norm_reference(
    x: Float[Array, "tokens hidden"],
    delta: Float[Array, "tokens hidden"],
    scale: Float[Array, " hidden"],
    epsilon: float,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """See `pallas_kernels.add_rms_norm`."""
    total = x + delta
    wide = total.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return total, wide.astype(x.dtype) * scale[None]
