"""What the ops that write into the pools refuse, before any launch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array


def check_pools(op: str, k_pool: Array, v_pool: Array) -> None:
    """Raises ValueError unless both are `[blocks, block_size, kv_heads, head_dim]` and agree."""
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"{op}: the pools must be [blocks, block_size, kv_heads, head_dim] and agree: k_pool is "
            f"{k_pool.dtype}{k_pool.shape}, v_pool {v_pool.dtype}{v_pool.shape}"
        )


def check_scales(op: str, kv_heads: int, k_scale: Array | None, v_scale: Array | None) -> None:
    """Raises ValueError unless each is None or has one entry a KV head."""
    for name, scale in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if scale is not None and scale.shape != (kv_heads,):
            raise ValueError(f"{op}: {name} must have shape ({kv_heads},), one a KV head, not {scale.shape}")


def check_slots(op: str, slots: Array) -> None:
    """Raises ValueError unless slots is a row of int32."""
    if slots.ndim != 1:
        raise ValueError(f"{op}: slots must have shape [tokens], not {slots.shape}")
    if slots.dtype != jnp.int32:
        raise ValueError(f"{op}: slots must be int32, not {slots.dtype}")
