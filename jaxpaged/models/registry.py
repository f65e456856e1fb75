"""Which model family serves an architecture name from `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.llama import Llama, llama_config, llama_weights
from jaxpaged.models.loading import WeightMap


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: its Flax module, how its configuration is read, and where its weights come from."""

    module: Callable[..., nn.Module]
    """`module(config, param_dtype)`, with `__call__(tokens, positions, cache, attend)` and `logits(hidden)`."""
    config: Callable[[Mapping[str, Any], str], ModelConfig]
    weights: Callable[[ModelConfig], WeightMap]
    ignored_tensors: str
    """Regular expression of checkpoint tensors that are left unread."""


FAMILIES = {
    "LlamaForCausalLM": Family(Llama, llama_config, llama_weights, r".*\.rotary_emb\.inv_freq|lm_head\.weight"),
}


def family_of(hf_config: Mapping[str, Any], origin: str) -> Family:
    """The family of a configuration's `architectures` entry.

    Raises:
      ValueError: no supported architecture is named; lists those that are.
    """
    architectures = hf_config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise ValueError(
        f"{origin}: architectures {architectures!r:.80} are not supported; supported: {', '.join(FAMILIES)}"
    )
