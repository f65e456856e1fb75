"""A GGUF file as a `CheckpointReader`: Hugging Face names, layouts and configuration.

Quantised tensors are dequantised to float32. What llama.cpp's converter changed is changed back: names, the row
order of q and k, and RoPE scaling. What cannot be represented exactly is refused, naming the key or tensor.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from jaxpaged.checkpoints.gguf_file import GGUFFile, TensorInfo
from jaxpaged.checkpoints.gguf_names import ARCHITECTURES
from jaxpaged.checkpoints.gguf_rope import recover_llama3

_ROPE_FREQS = "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFReader:
    """A `.gguf` file of a supported architecture as a `CheckpointReader`."""

    def __init__(self, path: Path) -> None:
        """Parses the header; ValueError names the file and the key or tensor at fault."""
        self.path = path
        self._file = GGUFFile(path)
        if self.metadata.get("split.count", 0) > 1:
            raise ValueError(f"{path}: GGUF split over several files is not supported; join it by llama-gguf-split")
        name = self._key("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise ValueError(
                f"{path}: general.architecture {name!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
            )
        self._prefix = name
        self._architecture = ARCHITECTURES[name]
        self._infos = self._map_tensors()
        self.hf_config = self._config()
        self._heads = {"q_proj": self.hf_config["num_attention_heads"], "k_proj": self.hf_config["num_key_value_heads"]}
        self.eos_token_ids = self._eos_token_ids()

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata as it is, e.g. for the tokenizer."""
        return self._file.metadata

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's Hugging Face name and shape."""
        return {name: info.shape for name, info in self._infos.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32 if it was quantised, else as stored; ValueError if there is none of this name."""
        if name not in self._infos:
            raise ValueError(f"{self.path}: there is no tensor {name!r}")
        tensor = self._file.read(self._infos[name].name)
        if self._architecture.is_interleaved(name):
            return _to_half_rotation(tensor, self._heads[name.split(".")[-2]])
        return tensor

    def _map_tensors(self) -> dict[str, TensorInfo]:
        infos: dict[str, TensorInfo] = {}
        for gguf_name, info in self._file.tensors.items():
            if gguf_name == _ROPE_FREQS:
                continue
            name = self._architecture.hf_name(gguf_name)
            if name is None:
                raise ValueError(f"{self.path}: architecture {self._prefix!r} has no tensor {gguf_name!r}")
            infos[name] = info
        if "model.embed_tokens.weight" not in infos:
            raise ValueError(f"{self.path}: tensor 'token_embd.weight' is missing")
        return infos

    def _config(self) -> dict[str, Any]:
        for suffix in self._architecture.unsupported_keys:
            if value := self.metadata.get(f"{self._prefix}.{suffix}"):
                raise ValueError(f"{self.path}: {self._prefix}.{suffix}={value!r} is not supported")
        heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        for suffix in ("attention.value_length", "rope.dimension_count"):
            if (other := self._number(suffix, head_dim)) != head_dim:
                raise ValueError(
                    f"{self.path}: {self._prefix}.{suffix}={other} differs from the head size {head_dim}, "
                    "which is not supported"
                )
        theta = float(self._number("rope.freq_base", 10000.0))
        config = {
            "architectures": [self._architecture.hf_class],
            "model_type": self._architecture.model_type,
            "vocab_size": self._infos["model.embed_tokens.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._number("context_length"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(theta, head_dim),
            "attention_bias": any(".self_attn." in name and name.endswith(".bias") for name in self._infos),
            "mlp_bias": any(".mlp." in name and name.endswith(".bias") for name in self._infos),
            "tie_word_embeddings": "lm_head.weight" not in self._infos,
            "dtype": self._dtype(),
        }
        for key in ("bos_token_id", "eos_token_id"):
            config[key] = self.metadata.get(f"tokenizer.ggml.{key}")
        return config

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, Any] | None:
        kind = self.metadata.get(f"{self._prefix}.rope.scaling.type", "none")
        stored = _ROPE_FREQS in self._file.tensors
        if kind in ("none", "llama3") and stored:
            factors = self._file.read(_ROPE_FREQS)
            if factors.shape != (head_dim // 2,):
                raise ValueError(f"{self.path}: {_ROPE_FREQS} has shape {factors.shape}, expected ({head_dim // 2},)")
            try:
                return recover_llama3(factors, theta)
            except ValueError as error:
                raise ValueError(f"{self.path}: {error}") from None
        if kind != "none" or self.metadata.get(f"{self._prefix}.rope.scale_linear", 1.0) != 1.0:
            detail = f" with {_ROPE_FREQS}" if stored else ""
            raise ValueError(f"{self.path}: rope scaling {kind!r}{detail} is not supported; supported: 'llama3'")
        return None

    def _dtype(self) -> str:
        """Dtype of what `read` gives for most of the matrices' elements."""
        sizes: Counter[str] = Counter()
        for info in self._infos.values():
            if len(info.shape) > 1:
                sizes[_DTYPES.get(info.type_name, "float32")] += int(np.prod(info.shape))
        return sizes.most_common(1)[0][0]

    def _eos_token_ids(self) -> tuple[int, ...]:
        # End of turn and end of message stop a chat as end of text does.
        found = [self.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _key(self, key: str) -> Any:
        if key not in self.metadata:
            raise ValueError(f"{self.path}: metadata key {key!r} is missing")
        return self.metadata[key]

    def _number(self, suffix: str, default: float | None = None) -> Any:
        """A number of the architecture; where GGUF gives one a layer, all must be the same."""
        key = f"{self._prefix}.{suffix}"
        value = self._key(key) if default is None else self.metadata.get(key, default)
        values = set(value) if isinstance(value, list) else {value}
        if len(values) != 1:
            raise ValueError(f"{self.path}: {key} differs between layers, which is not supported")
        (number,) = values
        if not isinstance(number, int | float) or number <= 0:
            raise ValueError(f"{self.path}: {key} must be a positive number, found {number!r}")
        return number


def _to_half_rotation(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head's rows from pairs (2j, 2j+1) to halves (j, j + head_dim/2). `[heads * head_dim, ...]`."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)
