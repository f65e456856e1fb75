"""Published models by name: their sizes and constants without their weights, to measure with random ones.

The sizes are those of each model's `config.json`. No JAX here.
"""

from __future__ import annotations

import dataclasses

from jaxpaged.models.config import Llama3RopeScaling, ModelConfig

RANDOM = "random:"
"""What stands before a shape's name where a model is asked for: `LLM(model="random:llama-3.1-8b")`."""

_LLAMA_1 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
_LLAMA_2 = dataclasses.replace(_LLAMA_1, rms_norm_eps=1e-5, max_position_embeddings=4096)
_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_layers": 40, "num_heads": 40, "num_kv_heads": 40}
_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
_LLAMA_3 = dataclasses.replace(
    _LLAMA_2,
    vocab_size=128256,
    intermediate_size=14336,
    num_kv_heads=8,
    rope_theta=500000.0,
    max_position_embeddings=8192,
)
_LLAMA_31 = dataclasses.replace(
    _LLAMA_3, max_position_embeddings=131072, rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
)
_LLAMA_32 = dataclasses.replace(
    _LLAMA_31, tie_word_embeddings=True, rope_scaling=Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
)

SHAPES: dict[str, ModelConfig] = {
    "llama-7b": _LLAMA_1,
    "llama-13b": dataclasses.replace(_LLAMA_1, **_13B),
    "llama-2-7b": _LLAMA_2,
    "llama-2-13b": dataclasses.replace(_LLAMA_2, **_13B),
    "llama-2-70b": dataclasses.replace(_LLAMA_2, **_70B),
    "llama-3-8b": _LLAMA_3,
    "llama-3-70b": dataclasses.replace(_LLAMA_3, **_70B),
    "llama-3.1-8b": _LLAMA_31,
    "llama-3.1-70b": dataclasses.replace(_LLAMA_31, **_70B),
    "llama-3.2-1b": dataclasses.replace(
        _LLAMA_32, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64
    ),
    "llama-3.2-3b": dataclasses.replace(
        _LLAMA_32, hidden_size=3072, intermediate_size=8192, num_layers=28, num_heads=24
    ),
    # No published model: two layers, to try a command in seconds.
    "tiny": dataclasses.replace(
        _LLAMA_1,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    ),
}


def shape(name: str) -> ModelConfig:
    """The shape of that name.

    Raises:
      ValueError: there is none; lists those that there are.
    """
    if name not in SHAPES:
        raise ValueError(f"model={RANDOM + name!r}: there is no shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def with_random_weights(model: str) -> str:
    """The name of a shape as the model with random weights in that shape; any other model's as it is."""
    return RANDOM + model if model in SHAPES else model
