"""What the Mosaic GPU attention kernels share: what they all refuse, and how their tiles lie in shared memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

from pallas_kernels.paged_attention.spec import AttentionSpec

SMEM_BYTES = 227 * 1024
"""Shared memory of a Hopper multiprocessor that kernels can have, 1 KiB a program besides."""


def device_refusal() -> str | None:
    """Why the device that this trace is for can't run Hopper kernels, or None."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        name = abstract.device_kind
        return None if any(x in name for x in ("H100", "H20", "H800")) else f"needs a Hopper GPU (sm_90), not {name}"
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str) or device.platform != "gpu":
        return f"needs a Hopper GPU (sm_90), not {device}"
    capability = getattr(device, "compute_capability", "unknown")
    return None if capability == "9.0" else f"needs a Hopper GPU (sm_90), not {device.device_kind} (sm {capability})"


def common_refusal(
    q: Array,
    k_pool: Array,
    spec: AttentionSpec,
    head_dims: Collection[int],
    k_scale: Array | None,
    v_scale: Array | None,
) -> str | None:
    """Why no Hopper kernel can serve a call, or None: the device, dtypes, scales, head_dim or scale."""
    if (reason := device_refusal()) is not None:
        return reason
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k_pool.dtype != q.dtype:
        return f"q and the pools must both be bfloat16 or float16, not {q.dtype} and {k_pool.dtype}"
    if k_scale is not None or v_scale is not None:
        return "it knows no FP8 pools, so no k_scale or v_scale"
    if (head_dim := q.shape[2]) not in head_dims:
        return f"head_dim must be one of {sorted(head_dims)}, not {head_dim}"
    if not spec.scale > 0:
        return f"scale must be above 0, not {spec.scale}"
    return None


def tiled_smem(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for matrices `[..., rows, columns]` that TMA fills and wgmma reads: tiled and swizzled."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
