"""KV write as XLA's scatter, alone and after rotary embedding; in place where the pools are donated."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32


def write_kv_reference(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.write_kv`."""

    def write(pool: Array, new: Array, scale: Array | None) -> Array:
        blocks, block_size, *row = pool.shape
        flat = pool.reshape(blocks * block_size, *row)
        if scale is not None:
            new = new.astype(jnp.float32) / divisor(scale)[None, :, None]
        new = to_pool(new, pool.dtype)
        flat = flat.at[slots].set(new, mode="drop", wrap_negative_indices=False)
        return flat.reshape(pool.shape)

    return write(k_pool, k, k_scale), write(v_pool, v, v_scale)


def rope_and_write_kv_reference(
    qkv: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half_rotary_dim"],
    sin: Float[Array, "tokens half_rotary_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rope_and_write_kv`."""
    kv_heads = k_pool.shape[2]
    q_heads = qkv.shape[1] - 2 * kv_heads
    q, k, v = jnp.split(qkv, (q_heads, q_heads + kv_heads), axis=1)
    pools = write_kv_reference(k_pool, v_pool, _rotate(k, cos, sin), v, slots, k_scale=k_scale, v_scale=v_scale)
    return _rotate(q, cos, sin), *pools


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    cos, sin = cos[:, None], sin[:, None]
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = jnp.split(rotary.astype(jnp.float32), 2, axis=-1)
    rotary = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([rotary, rest], axis=-1)


def divisor(scale: Array) -> Array:
    """What to divide by, float32: 1 for a scale of 0, as a head that holds nothing but zeros gets it."""
    scale = scale.astype(jnp.float32)
    return jnp.where(scale == 0, 1, scale)


def to_pool(x: Array, dtype: DTypeLike) -> Array:
    """`x` in the pool's dtype; 8-bit floats saturate, where a plain cast would make NaN of what is too large."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)
