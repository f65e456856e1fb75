"""A tiny Llama written as GGUF the way llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB, LAYERS = 4, 2, 32, 128, 256, 10, 2


def hf_tensors() -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, float32."""
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (HIDDEN,),
            f"{layer}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.post_attention_layernorm": (HIDDEN,),
            f"{layer}.mlp.gate_proj": (FFN, HIDDEN),
            f"{layer}.mlp.up_proj": (FFN, HIDDEN),
            f"{layer}.mlp.down_proj": (HIDDEN, FFN),
        }
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(hf_name: str) -> str:
    """The `gguf` package's own name for a tensor: an independent statement of our table."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    stem, _, suffix = hf_name.rpartition(".")
    return f"{names.get_name(stem)}.{suffix}"


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


class TinyGGUF:
    """Collects metadata and tensors, then writes one file."""

    def __init__(self, path: Path, arch: str = "llama") -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, arch)
        self.tensors: dict[str, tuple[np.ndarray, Q]] = {}

    def llama(self, kind: Q = Q.F32, tied: bool = False) -> TinyGGUF:
        writer = self.writer
        writer.add_block_count(LAYERS)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_freq_base(500000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, tensor in hf_tensors().items():
            if name == "lm_head.weight" and tied:
                continue
            if ".q_proj." in name or ".k_proj." in name:
                tensor = permute(tensor, HEADS if ".q_proj." in name else KV_HEADS)
            self.tensors[gguf_name(name)] = (tensor, kind if tensor.ndim > 1 else Q.F32)
        return self

    def write(self) -> Path:
        for name, (tensor, kind) in self.tensors.items():
            self.add_raw(name, quantize(tensor, kind), kind)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def add_raw(self, name: str, data: np.ndarray, kind: Q) -> None:
        self.writer.add_tensor(name, data, raw_dtype=kind)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., TinyGGUF]:
    """Makes a `TinyGGUF` under `tmp_path`."""
    return lambda arch="llama": TinyGGUF(tmp_path / "tiny.gguf", arch)


@pytest.fixture
def hf_weights() -> dict[str, np.ndarray]:
    """The weights of the tiny model, as Hugging Face has them."""
    return hf_tensors()
