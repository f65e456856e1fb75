"""Layers that model families share. Linen modules, used functionally over plain parameter pytrees.

Matrices are stored `[in, out]` and applied in the parameters' dtype with float32 accumulation; float32 matrices
are multiplied in true float32 on every device.

The residual stream travels in two parts, `x` and what the last block adds to it, so that the addition and the norm
after it are one kernel.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxpaged.models.config import Llama3RopeScaling, ModelConfig
from pallas_kernels import add_rms_norm

RopeAngles = tuple[Float[Array, "tokens half_dim"], Float[Array, "tokens half_dim"]]
"""Cosine and sine of every token's rotation angles, float32."""


class Attend(Protocol):
    """What a layer attends to is its caller's choice: a paged cache, or the dense batch itself. A pytree."""

    def __call__(self, qkv: Array, angles: RopeAngles, kv: Any) -> tuple[Array, Any]:
        """Attention output `[tokens, heads, head_dim]` and the layer's new cache entry.

        Args:
          qkv: `[tokens, heads + 2 * kv_heads, head_dim]`: queries, keys and values, as the fused projection gives
            them. Rotating queries and keys is part of attending, so that a cache can do it as it writes.
          angles: by which they are rotated, dimension `i` paired with `i + head_dim / 2` (Su et al., 2021).
          kv: the layer's cache entry.
        """
        ...


def _precision(dtype: jnp.dtype) -> str | None:
    """Of products: no TF32 for float32. Others have one precision; asked for a higher one, XLA takes slower kernels."""
    return "highest" if dtype == jnp.float32 else None


class Linear(nn.Module):
    """`x @ kernel`, no bias."""

    features: int
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.features), self.param_dtype)
        return jnp.dot(x, kernel, precision=_precision(self.param_dtype))


class AddRMSNorm(nn.Module):
    """`x + delta`, and its root mean square normalisation (`pallas_kernels.add_rms_norm`)."""

    epsilon: float
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "tokens hidden"], delta: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        return add_rms_norm(x, delta, scale, epsilon=self.epsilon)


class Embedding(nn.Module):
    """Token embedding; `attend` gives the logits of a head with the same shape (tied or its own)."""

    vocab_size: int
    hidden_size: int
    param_dtype: jnp.dtype

    def setup(self) -> None:
        shape = (self.vocab_size, self.hidden_size)
        self.embedding = self.param("embedding", nn.initializers.normal(0.02), shape, self.param_dtype)

    def __call__(self, tokens: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return self.embedding[tokens]

    def attend(self, x: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        return jax.lax.dot_general(
            x,
            self.embedding,
            (((1,), (1,)), ((), ())),
            precision=_precision(self.param_dtype),
            preferred_element_type=jnp.float32,
        )


class GatedMLP(nn.Module):
    """SwiGLU feed-forward (Shazeer, 2020) with gate and up projections in one matrix."""

    intermediate_size: int
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        gate, up = jnp.split(Linear(2 * self.intermediate_size, self.param_dtype, name="gate_up")(x), 2, axis=-1)
        return Linear(x.shape[-1], self.param_dtype, name="down")(nn.silu(gate) * up)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Inverse frequencies of rotary embedding, float32 `[head_dim // 2]`, scaling applied."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is not None:
        frequencies = _llama3_scaled(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _llama3_scaled(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended linearly in frequency."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rope_angles(positions: Int32[Array, " tokens"], frequencies: np.ndarray) -> RopeAngles:
    """The rotation angles of tokens at these positions."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None]
    return jnp.cos(angles), jnp.sin(angles)
