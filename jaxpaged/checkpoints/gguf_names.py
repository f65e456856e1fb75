"""One table an architecture: how GGUF names its tensors, and how Hugging Face does.

Adding an architecture is adding an entry to `ARCHITECTURES` (and its Flax model to the registry).
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Names of one architecture. In both columns `{i}` stands for the layer."""

    hf_class: str
    model_type: str
    tensors: dict[str, str]
    """GGUF name to Hugging Face name, without the `.weight` or `.bias` that both end in."""

    interleaved: frozenset[str] = frozenset()
    """Hugging Face modules whose rows GGUF stores for interleaved RoPE: pairs (2j, 2j+1) instead of halves."""

    unsupported_keys: tuple[str, ...] = ()
    """Metadata keys, after the architecture's prefix, that must be absent or zero: they mark another model."""

    def hf_name(self, gguf_name: str) -> str | None:
        """The Hugging Face name of a tensor, or None if the architecture has no such tensor."""
        stem, _, suffix = gguf_name.rpartition(".")
        if suffix not in ("weight", "bias"):
            return None
        layer = re.match(r"blk\.(\d+)\.", stem)
        pattern = self.tensors.get(stem if layer is None else stem.replace(layer[1], "{i}", 1))
        if pattern is None:
            return None
        return f"{pattern.replace('{i}', layer[1] if layer else '')}.{suffix}"

    def is_interleaved(self, hf_name: str) -> bool:
        """Whether this tensor's rows must be reordered to Hugging Face's layout."""
        return hf_name.split(".")[-2] in self.interleaved


_DECODER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{i}.attn_norm": "model.layers.{i}.input_layernorm",
    "blk.{i}.attn_q": "model.layers.{i}.self_attn.q_proj",
    "blk.{i}.attn_k": "model.layers.{i}.self_attn.k_proj",
    "blk.{i}.attn_v": "model.layers.{i}.self_attn.v_proj",
    "blk.{i}.attn_output": "model.layers.{i}.self_attn.o_proj",
    "blk.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
    "blk.{i}.ffn_gate": "model.layers.{i}.mlp.gate_proj",
    "blk.{i}.ffn_up": "model.layers.{i}.mlp.up_proj",
    "blk.{i}.ffn_down": "model.layers.{i}.mlp.down_proj",
}

ARCHITECTURES = {
    "llama": Architecture(
        hf_class="LlamaForCausalLM",
        model_type="llama",
        tensors=_DECODER,
        interleaved=frozenset({"q_proj", "k_proj"}),
        unsupported_keys=("expert_count", "attention.sliding_window"),
    ),
}
