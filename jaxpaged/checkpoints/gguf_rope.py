"""Recovers RoPE scaling from GGUF, where Llama 3's is stored as its effect and not as its parameters.

llama.cpp's converter writes a tensor `rope_freqs.weight`, float32 `[head_dim / 2]`, by which the plain inverse
frequencies are divided. The parameters are found from it again and must reproduce it; otherwise the file is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# Of all Llama 3.x releases; tried first because a short tensor may leave a fit undetermined.
_RELEASED = (1.0, 4.0, 8192)
_TOLERANCE = 1e-5
"""Relative. The tensor is float32, and the converter computed it in float32."""


def llama3_factors(theta: float, count: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    """What Llama 3 divides its `count` inverse frequencies by, float64 `[count]`."""
    wavelength = _wavelengths(theta, count)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def recover_llama3(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` entry that yields these factors, float32 `[head_dim / 2]`.

    Only `original / low` and `original / high` act on the result, so a fit is given with `low_freq_factor` 1.
    Returns None if all factors are 1 (nothing is scaled). Raises ValueError if no parameters reproduce them.
    """
    factors = np.asarray(factors, np.float64)
    if np.all(factors == 1.0):
        return None
    factor = float(str(np.float32(factors.max())))
    candidates = [_RELEASED, *_fit(factors, theta, factor)]
    for low, high, original in candidates:
        again = llama3_factors(theta, len(factors), factor, low, high, original)
        if np.allclose(again, factors, rtol=_TOLERANCE, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ValueError("rope_freqs.weight is not Llama 3 scaling, the only kind supported in this tensor")


def _wavelengths(theta: float, count: int) -> np.ndarray:
    return 2.0 * math.pi * theta ** (np.arange(count) / count)


def _fit(factors: np.ndarray, theta: float, factor: float) -> list[tuple[float, float, int]]:
    """Parameters from the ramp: between the two bounds `smooth` is linear in the frequency."""
    ramp = (factors > 1.0 + 1e-6) & (factors < factor * (1.0 - 1e-6))
    if factor <= 1.0 or ramp.sum() < 2:
        return []
    smooth = (1.0 / factors[ramp] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(1.0 / _wavelengths(theta, len(factors))[ramp], smooth, 1)
    if offset >= 0.0:
        return []
    span = -1.0 / offset
    return [(1.0, round(1.0 + span, 4), round(slope * span))]
