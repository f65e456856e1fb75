"""What a model is: its shape and constants, parsed once from a Hugging Face style configuration.

Every checkpoint reader hands over a `config.json` mapping (GGUF metadata is translated to one), and this
is the only place that reads it. No JAX here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

_MOST = 1 << 24
"""Largest plausible size; beyond it positions are no longer exact in float32."""


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_scaling: Llama3RopeScaling | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """Dtype of the stored weights: what `dtype="auto"` resolves from."""

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes that the K and V of one token take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def integer(hf: Mapping[str, Any], name: str, origin: str, default: int | None = None, maximum: int = _MOST) -> int:
    """A positive integer entry; a default, if given, stands in for a missing or null one.

    Raises:
      ValueError: missing, of another type, or out of range; names `origin` and the entry.
    """
    value = hf.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ValueError(f"{origin}: {name}={value!r:.40} must be an integer from 1 to {maximum}")
    return value


def number(hf: Mapping[str, Any], name: str, origin: str, default: float | None = None) -> float:
    """A positive finite number, as `integer`."""
    value = hf.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{origin}: {name}={value!r:.40} must be a positive number")
    return float(value)


def parse_rope(hf: Mapping[str, Any], origin: str) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    params = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"{origin}: rope_parameters={params!r:.40} must be an object")
    theta = number({**hf, **params}, "rope_theta", origin, default=10000.0)
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{origin}: rope_type {kind!r:.40} is not supported; supported: 'default', 'llama3'")
    missing = [f.name for f in dataclasses.fields(Llama3RopeScaling) if f.name not in params]
    if missing:
        raise ValueError(f"{origin}: rope scaling 'llama3' lacks {', '.join(missing)}")
    scaling = Llama3RopeScaling(
        factor=number(params, "factor", origin),
        low_freq_factor=number(params, "low_freq_factor", origin),
        high_freq_factor=number(params, "high_freq_factor", origin),
        original_max_position_embeddings=integer(params, "original_max_position_embeddings", origin),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ValueError(
            f"{origin}: rope scaling's high_freq_factor={scaling.high_freq_factor} must be above its "
            f"low_freq_factor={scaling.low_freq_factor}"
        )
    return theta, scaling


def as_ids(value: Any, origin: str = "eos_token_id") -> tuple[int, ...]:
    """An `eos_token_id` entry, which may be absent, one id or several, as a tuple.

    Raises:
      ValueError: something else than ids; names `origin`.
    """
    ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"{origin}: {value!r:.40} must be a token id or a list of token ids")
    return ids
