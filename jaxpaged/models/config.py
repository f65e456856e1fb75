"""What a model is: its shape and constants, parsed once from a Hugging Face style configuration.

Every checkpoint reader hands over a `config.json` mapping (GGUF metadata is translated to one), and this
is the only place that reads it. No JAX here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


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


def parse_rope(hf: Mapping[str, Any], origin: str) -> tuple[float, Llama3RopeScaling | None]:
    """Rope base and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    params = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(params.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"{origin}: rope_type {kind!r} is not supported; supported: 'default', 'llama3'")
    fields = dataclasses.fields(Llama3RopeScaling)
    missing = [f.name for f in fields if f.name not in params]
    if missing:
        raise ValueError(f"{origin}: rope scaling 'llama3' lacks {', '.join(missing)}")
    return theta, Llama3RopeScaling(
        factor=float(params["factor"]),
        low_freq_factor=float(params["low_freq_factor"]),
        high_freq_factor=float(params["high_freq_factor"]),
        original_max_position_embeddings=int(params["original_max_position_embeddings"]),
    )


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """An `eos_token_id` entry, which may be absent, one id or several, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
