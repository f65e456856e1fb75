"""The device that a trace is for, and whether Pallas-Triton kernels can run there.

They go through JAX's Triton backend for Pallas, which JAX has deprecated and still ships: tests that turn warnings
into errors have to let its `DeprecationWarning` pass.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array


def default_device() -> Any:
    """Where programs of this thread run."""
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device  # a platform's name: its first device


def _device() -> Any:
    return jax.sharding.get_abstract_mesh().abstract_device or default_device()


def num_multiprocessors() -> int:
    """Of the GPU that this trace is for; of an H200 where that is unknown."""
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 132


def compute_capability() -> int | None:
    """Of the NVIDIA GPU that this trace is for, times ten, as in 90; None for other devices."""
    if _device().platform not in ("gpu", "cuda"):
        return None
    from jax.experimental.pallas import triton as pltriton  # a second of imports, of no use without a GPU

    try:
        return pltriton.get_gpu_info().compute_capability or None  # 0: an AMD GPU
    except ValueError:  # an abstract GPU of a kind that JAX does not know
        return None


def triton_refusal(*arrays: Array) -> str | None:
    """Why no Triton kernel can run on the device that this trace is for, or on these arrays; or None."""
    capability = compute_capability()
    if capability is None or capability < 80:
        found = f"sm_{capability}" if capability else _device().device_kind
        return f"needs an NVIDIA GPU, sm_80 or newer, not {found}"
    for x in arrays:
        # Pallas-Triton counts elements in 64 bits from 4 GiB on only, and of 32 bits one is the sign.
        if x.dtype.itemsize == 1 and 2**31 < x.size <= 2**32:
            return f"it can't address a {x.dtype} array of 2 to 4 GiB, here {x.size} bytes"
    return None
