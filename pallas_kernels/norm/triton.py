"""Residual addition and RMS normalisation in one Pallas-Triton kernel, a program a token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

_WIDE = 4096  # from here on 8 warps share a token


@functools.partial(jax.jit, static_argnames=("epsilon", "interpret"))  # one trace for all layers of a model
def add_rms_norm_triton(
    x: Float[Array, "tokens hidden"],
    delta: Float[Array, "tokens hidden"],
    scale: Float[Array, " hidden"],
    epsilon: float,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_rms_norm`. With `interpret` it runs on any device, slowly."""
    tokens, hidden = x.shape
    if tokens == 0:  # a grid has programs
        return x, x
    width = pl.next_power_of_2(hidden)

    def add_rms_norm(x_ref: Any, delta_ref: Any, scale_ref: Any, total_ref: Any, out_ref: Any) -> None:
        token, column = pl.program_id(0), jnp.arange(width, dtype=jnp.int32)
        mask = None if width == hidden else column < hidden

        def load(place: Any) -> Array:
            return pltriton.load(place, mask=mask, other=None if mask is None else 0)

        # Rounded as XLA rounds: after the addition, and before the scaling.
        total = load(x_ref.at[token, column]) + load(delta_ref.at[token, column])
        wide = total.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.sum(wide * wide) / hidden + epsilon)
        pltriton.store(total_ref.at[token, column], total, mask=mask)
        pltriton.store(out_ref.at[token, column], normed.astype(x.dtype) * load(scale_ref.at[column]), mask=mask)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        add_rms_norm,  # the kernel's name in profiles
        grid=(tokens,),
        out_shape=(like, like),
        compiler_params=pltriton.CompilerParams(num_warps=8 if hidden >= _WIDE else 4, num_stages=1),
        interpret=interpret,
    )(x, delta, scale)
