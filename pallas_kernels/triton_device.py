"""Which calls Pallas-Triton kernels can serve, as far as that depends on the device and on the arrays' sizes.

They go through JAX's Triton backend for Pallas, which JAX has deprecated and still ships: tests that turn warnings
into errors have to let its `DeprecationWarning` pass.
"""

from __future__ import annotations

from jaxtyping import Array


def compute_capability() -> int | None:
    """Of the NVIDIA GPU that this trace is for, times ten, as in 90; None for other devices."""
    from jax.experimental.pallas import triton as pltriton  # a second of imports, of no use without a GPU

    if not pltriton.is_gpu_device():
        return None
    try:
        return pltriton.get_gpu_info().compute_capability or None  # 0: an AMD GPU
    except ValueError:  # a GPU that JAX does not know
        return None


def device_refusal(*arrays: Array) -> str | None:
    """Why no Triton kernel can run on the device that this trace is for, or on these arrays; or None."""
    capability = compute_capability()
    if capability is None or capability < 80:
        return "needs an NVIDIA GPU, sm_80 or newer" + (f", not sm_{capability}" if capability else "")
    for x in arrays:
        # Pallas-Triton counts elements in 64 bits from 4 GiB on only, and of 32 bits one is the sign.
        if x.dtype.itemsize == 1 and 2**31 < x.size <= 2**32:
            return f"it can't address a {x.dtype} array of 2 to 4 GiB, here {x.size} bytes"
    return None
