"""What the Mosaic GPU attention kernels share: the device they need and how their tiles lie in shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

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


def num_multiprocessors() -> int:
    """Of the device that this trace is for; of an H200 where that is unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return abstract.num_cores or 132
    device = jax.config.jax_default_device or jax.devices()[0]
    return getattr(device, "core_count", None) or 132


def tiled_smem(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """Shared memory for matrices `[..., rows, columns]` that TMA fills and wgmma reads: tiled and swizzled."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))  # pyright: ignore[reportAbstractUsage]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=transforms)
