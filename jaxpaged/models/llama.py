"""The Llama family: Llama 1 to 3.x and the many models of the same shape (SmolLM2, TinyLlama, Vicuna, ...)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxpaged.models.config import ModelConfig, as_ids, integer, number, parse_rope
from jaxpaged.models.layers import (
    AddRMSNorm,
    Attend,
    Embedding,
    GatedMLP,
    Linear,
    RopeAngles,
    rope_angles,
    rope_frequencies,
)
from jaxpaged.models.loading import Source, WeightMap


class LlamaAttention(nn.Module):
    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(
        self, x: Float[Array, "tokens hidden"], angles: RopeAngles, kv: Any, attend: Attend
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        c = self.config
        heads = c.num_heads + 2 * c.num_kv_heads
        qkv = Linear(heads * c.head_dim, self.param_dtype, name="qkv")(x).reshape(-1, heads, c.head_dim)
        out, kv = attend(qkv, angles, kv)
        return Linear(c.hidden_size, self.param_dtype, name="out")(out.reshape(x.shape[0], -1)), kv


# Jitted, so that the layers of a model are traced and lowered once and not one by one.
@nn.jit
class LlamaLayer(nn.Module):
    config: ModelConfig
    param_dtype: jnp.dtype

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        delta: Float[Array, "tokens hidden"],
        angles: RopeAngles,
        kv: Any,
        attend: Attend,
    ) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"], Any]:
        c, dtype = self.config, self.param_dtype
        x, normed = AddRMSNorm(c.rms_norm_eps, dtype, name="attention_norm")(x, delta)
        delta, kv = LlamaAttention(c, dtype, name="attention")(normed, angles, kv, attend)
        x, normed = AddRMSNorm(c.rms_norm_eps, dtype, name="mlp_norm")(x, delta)
        return x, GatedMLP(c.intermediate_size, dtype, name="mlp")(normed), kv


class Llama(nn.Module):
    """A decoder over a flat batch of tokens; which sequence a token belongs to is `attend`'s business."""

    config: ModelConfig
    param_dtype: jnp.dtype

    def setup(self) -> None:
        c, dtype = self.config, self.param_dtype
        self.embed = Embedding(c.vocab_size, c.hidden_size, dtype)
        self.layers = [LlamaLayer(c, dtype) for _ in range(c.num_layers)]
        self.norm = AddRMSNorm(c.rms_norm_eps, dtype)
        if not c.tie_word_embeddings:
            self.head = Embedding(c.vocab_size, c.hidden_size, dtype)

    def __call__(
        self,
        tokens: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        cache: tuple[Any, ...],
        attend: Attend,
    ) -> tuple[Float[Array, "tokens hidden"], tuple[Any, ...]]:
        """Final hidden states, normalised (what `logits` takes), and the new cache, an entry a layer."""
        x = self.embed(tokens)
        delta = jnp.zeros_like(x)
        angles = rope_angles(positions, rope_frequencies(self.config))
        new_cache = []
        for layer, kv in zip(self.layers, cache, strict=True):
            x, delta, kv = layer(x, delta, angles, kv, attend)
            new_cache.append(kv)
        return self.norm(x, delta)[1], tuple(new_cache)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Next-token logits in float32."""
        return (self.embed if self.config.tie_word_embeddings else self.head).attend(hidden)


def llama_config(hf: Mapping[str, Any], origin: str) -> ModelConfig:
    """`ModelConfig` of a Hugging Face Llama `config.json`.

    Raises:
      ValueError: an entry is missing, or asks for a variant that is not supported; names `origin`.
    """
    for name, supported in {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}.items():
        if hf.get(name, supported) != supported:
            raise ValueError(f"{origin}: {name}={hf[name]!r} is not supported for Llama, only {supported!r}")
    hidden, heads = integer(hf, "hidden_size", origin), integer(hf, "num_attention_heads", origin)
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"{origin}: dtype={dtype!r:.40} is not supported, only float32, bfloat16 and float16")
    theta, scaling = parse_rope(hf, origin)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=integer(hf, "vocab_size", origin),
        hidden_size=hidden,
        intermediate_size=integer(hf, "intermediate_size", origin),
        num_layers=integer(hf, "num_hidden_layers", origin, maximum=1024),
        num_heads=heads,
        num_kv_heads=integer(hf, "num_key_value_heads", origin, default=heads),
        head_dim=integer(hf, "head_dim", origin, default=max(hidden // heads, 1)),
        rms_norm_eps=number(hf, "rms_norm_eps", origin, default=1e-6),
        rope_theta=theta,
        max_position_embeddings=integer(hf, "max_position_embeddings", origin, default=2048),
        tie_word_embeddings=hf.get("tie_word_embeddings") is True,
        rope_scaling=scaling,
        eos_token_ids=as_ids(hf.get("eos_token_id"), f"{origin}: eos_token_id"),
        dtype=dtype,
    )
    if config.head_dim % 2:
        raise ValueError(f"{origin}: head_dim={config.head_dim} must be even, since RoPE turns pairs of dimensions")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{origin}: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def llama_weights(c: ModelConfig) -> WeightMap:
    """Which checkpoint tensors make up each parameter."""
    hidden, inner, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    weights: WeightMap = {
        "embed/embedding": (Source("model.embed_tokens.weight", (c.vocab_size, hidden)),),
        "norm/scale": (Source("model.norm.weight", (hidden,)),),
    }
    if not c.tie_word_embeddings:
        weights["head/embedding"] = (Source("lm_head.weight", (c.vocab_size, hidden)),)
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        weights[f"{ours}/attention_norm/scale"] = (Source(f"{theirs}.input_layernorm.weight", (hidden,)),)
        weights[f"{ours}/attention/qkv/kernel"] = (
            Source(f"{theirs}.self_attn.q_proj.weight", (q, hidden)),
            Source(f"{theirs}.self_attn.k_proj.weight", (kv, hidden)),
            Source(f"{theirs}.self_attn.v_proj.weight", (kv, hidden)),
        )
        weights[f"{ours}/attention/out/kernel"] = (Source(f"{theirs}.self_attn.o_proj.weight", (hidden, q)),)
        weights[f"{ours}/mlp_norm/scale"] = (Source(f"{theirs}.post_attention_layernorm.weight", (hidden,)),)
        weights[f"{ours}/mlp/gate_up/kernel"] = (
            Source(f"{theirs}.mlp.gate_proj.weight", (inner, hidden)),
            Source(f"{theirs}.mlp.up_proj.weight", (inner, hidden)),
        )
        weights[f"{ours}/mlp/down/kernel"] = (Source(f"{theirs}.mlp.down_proj.weight", (hidden, inner)),)
    return weights
