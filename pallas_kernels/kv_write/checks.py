"""What the ops that write into the pools refuse, before any launch."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.options import check_pool_dtype, check_sizes


def check_pools(op: str, k_pool: Array, v_pool: Array) -> None:
    """Raises ValueError unless both are `[blocks, block_size, kv_heads, head_dim]` of a known dtype, and agree."""
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"{op}: the pools must be [blocks, block_size, kv_heads, head_dim] and agree: k_pool is "
            f"{k_pool.dtype}{k_pool.shape}, v_pool {v_pool.dtype}{v_pool.shape}"
        )
    check_pool_dtype(op, k_pool)
    check_sizes(op, "k_pool", k_pool, {"blocks": 0, "block_size": 1, "kv_heads": 2, "head_dim": 3})


def check_float(op: str, name: str, x: Array) -> None:
    """Raises ValueError unless `x` holds floats, of any width."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} must be a float array, not {x.dtype}")


def check_scales(op: str, kv_heads: int, k_scale: Array | None, v_scale: Array | None) -> None:
    """Raises ValueError unless each is None or has one float a KV head."""
    for name, scale in {"k_scale": k_scale, "v_scale": v_scale}.items():
        if scale is None:
            continue
        if scale.shape != (kv_heads,):
            raise ValueError(f"{op}: {name} must have shape ({kv_heads},), one a KV head, not {scale.shape}")
        check_float(op, name, scale)


def check_slots(op: str, slots: Array) -> None:
    """Raises ValueError unless slots is a row of int32."""
    if slots.ndim != 1:
        raise ValueError(f"{op}: slots must have shape [tokens], not {slots.shape}")
    if slots.dtype != jnp.int32:
        raise ValueError(f"{op}: slots must be int32, not {slots.dtype}")
