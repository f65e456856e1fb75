"""The GGUF reader: names, layouts, dequantisation and configuration, and one clear error for each kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize, quantize

from jaxpaged.checkpoints import CheckpointReader, open_checkpoint
from jaxpaged.checkpoints.gguf_file import GGUFFile

Make = Callable[..., Any]


def test_names_shapes_and_row_order(tiny_gguf: Make, hf_weights: dict[str, np.ndarray]) -> None:
    reader = open_checkpoint(tiny_gguf().llama().write())
    assert isinstance(reader, CheckpointReader)
    assert reader.shapes() == {name: tensor.shape for name, tensor in hf_weights.items()}
    for name, tensor in hf_weights.items():
        np.testing.assert_array_equal(reader.read(name), tensor, err_msg=name)


def test_config(tiny_gguf: Make) -> None:
    reader = open_checkpoint(tiny_gguf().llama().write())
    assert reader.hf_config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 10,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert reader.eos_token_ids == (2,)


def test_tied_head_and_ends_of_turn(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama(tied=True)
    tiny.writer.add_eot_token_id(5)
    tiny.writer.add_eom_token_id(2)
    reader = open_checkpoint(tiny.write())
    assert reader.hf_config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in reader.shapes()
    assert reader.eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("kind", "dtype", "config_dtype"),
    [
        (Q.F16, np.float16, "float16"),
        (Q.BF16, ml_dtypes.bfloat16, "bfloat16"),
        (Q.Q4_0, np.float32, "float32"),
        (Q.Q4_1, np.float32, "float32"),
        (Q.Q5_0, np.float32, "float32"),
        (Q.Q5_1, np.float32, "float32"),
        (Q.Q8_0, np.float32, "float32"),
    ],
)
def test_tensor_types(
    tiny_gguf: Make, hf_weights: dict[str, np.ndarray], kind: Q, dtype: type, config_dtype: str
) -> None:
    reader = open_checkpoint(tiny_gguf().llama(kind).write())
    assert reader.hf_config["dtype"] == config_dtype
    bits = {Q.F16: 11, Q.BF16: 8, Q.Q8_0: 8}.get(kind, 5 if "5" in kind.name else 4)
    for name, tensor in hf_weights.items():
        found = reader.read(name)
        assert found.dtype == (dtype if tensor.ndim > 1 else np.float32)
        bound = 2.2 * np.abs(tensor).max() / 2**bits
        np.testing.assert_allclose(found.astype(np.float32), tensor, atol=bound, err_msg=name)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS])
def test_types_that_can_only_be_dequantised(tiny_gguf: Make, kind: Q) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(2).integers(0, 60, (3, 2 * size), dtype=np.uint8)  # small: finite float16 scales
    tiny = tiny_gguf().llama()
    tiny.tensors.pop("blk.0.ffn_down.weight")
    tiny.add_raw("blk.0.ffn_down.weight", rows, kind)
    reader = open_checkpoint(tiny.write())
    name = "model.layers.0.mlp.down_proj.weight"
    assert reader.shapes()[name] == (3, 2 * block)
    found = reader.read(name)
    assert np.isfinite(found).all()
    assert found.std() > 0
    np.testing.assert_array_equal(found, dequantize(rows, kind))


def test_q4_0_by_hand(tiny_gguf: Make) -> None:
    # One block: scale 2.0, then 16 bytes; the low nibbles are elements 0 to 15, the high ones 16 to 31, less 8.
    block = np.frombuffer(struct.pack("<e", 2.0) + bytes(range(0xF0, 0x100)), np.uint8)
    tiny = tiny_gguf().llama()
    tiny.tensors.pop("blk.0.ffn_up.weight")
    tiny.add_raw("blk.0.ffn_up.weight", block.reshape(1, -1), Q.Q4_0)
    found = open_checkpoint(tiny.write()).read("model.layers.0.mlp.up_proj.weight")
    expected = [2.0 * (i - 8) for i in range(16)] + [14.0] * 16
    np.testing.assert_array_equal(found, [expected])


def test_biases_of_q_and_k_are_reordered_too(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    bias = np.arange(64, dtype=np.float32)
    permuted = bias.reshape(2, 2, 16).swapaxes(1, 2).reshape(-1)
    tiny.tensors["blk.1.attn_k.bias"] = (permuted, Q.F32)
    reader = open_checkpoint(tiny.write())
    assert reader.hf_config["attention_bias"] is True
    np.testing.assert_array_equal(reader.read("model.layers.1.self_attn.k_proj.bias"), bias)


def test_unpermute_agrees_with_transformers(demo_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    reader, raw = open_checkpoint(demo_path), GGUFFile(demo_path)
    for layer, part in ((0, "q"), (29, "q"), (0, "k"), (17, "k")):
        source = f"blk.{layer}.attn_{part}.weight"
        expected = processor.process(raw.read(source), source).weights
        found = reader.read(f"model.layers.{layer}.self_attn.{part}_proj.weight")
        np.testing.assert_array_equal(found, expected)
        assert not np.array_equal(found, raw.read(source))


def test_header_agrees_with_gguf_package(tiny_gguf: Make) -> None:
    from gguf import GGUFReader

    tiny = tiny_gguf().llama(Q.Q8_0)
    tiny.writer.add_token_list(["a", "é", "<s>"])
    tiny.writer.add_token_scores([0.5, -1.0, 0.0])
    tiny.writer.add_bool("tokenizer.ggml.add_bos_token", True)
    tiny.writer.add_custom_alignment(64)
    path = tiny.write()
    ours, theirs = GGUFFile(path), GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        expected = theirs.fields[key].contents()
        assert ours.metadata[key] == (pytest.approx(expected) if isinstance(expected, float) else expected), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type_name, info.offset, info.nbytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_every_truncation_of_the_header_is_told(tiny_gguf: Make) -> None:
    path = tiny_gguf().llama().write()
    whole = path.read_bytes()
    for kept in (*range(24, 1200, 37), len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="the file is truncated") as error:
            open_checkpoint(path)
        assert str(path) in str(error.value)


def test_truncation_names_the_tensor(tiny_gguf: Make) -> None:
    path = tiny_gguf().llama().write()
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ValueError, match=r"truncated: tensor 'blk\.1\.ffn_down\.weight' ends at byte"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 GGUF is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), r"'general\.architecture' is missing"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "truncated within its header"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"ab", 77), "'ab' has value type 77"),
        (b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"ab", 9, 9, 1), "'ab' has value type 9"),
        (b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"ab", 9, 10, 1 << 61), "truncated within its header"),
        (b"GGUF" + struct.pack("<IQQQ2s", 3, 0, 1, 2, b"\xff\xff"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q2sIB", 2, b"ab", 0, 1), "'ab' occurs twice"),
    ],
)
def test_malformed_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_unsupported_architecture(tiny_gguf: Make) -> None:
    with pytest.raises(ValueError, match="'mamba' is not supported; supported: llama"):
        open_checkpoint(tiny_gguf("mamba").llama().write())


def test_unsupported_tensor_type(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    tiny.add_raw("blk.0.ffn_up.weight.x", np.zeros((2, 4), np.int32), Q.I32)
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.ffn_up\.weight\.x' has type I32.*supported: F32, F16"):
        open_checkpoint(tiny.write())


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.x.attn_q.weight", "output_norm", "other.weight"])
def test_unexpected_tensor(tiny_gguf: Make, name: str) -> None:
    tiny = tiny_gguf().llama()
    tiny.tensors[name] = (np.zeros(4, np.float32), Q.F32)
    with pytest.raises(ValueError, match=f"architecture 'llama' has no tensor '{name}'"):
        open_checkpoint(tiny.write())


def test_missing_embedding_and_unknown_name(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    tiny.tensors.pop("token_embd.weight")
    with pytest.raises(ValueError, match=r"'token_embd\.weight' is missing"):
        open_checkpoint(tiny.write())


def test_unknown_tensor_asked_for(tiny_gguf: Make) -> None:
    with pytest.raises(ValueError, match="no tensor 'other'"):
        open_checkpoint(tiny_gguf().llama().write()).read("other")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, r"llama\.expert_count=8 is not supported"),
        ("llama.attention.value_length", 16, "differs from the head size 32"),
        ("llama.attention.key_length", 64, "rope.dimension_count=32 differs from the head size 64"),
        ("split.count", 3, "split over several files"),
    ],
)
def test_what_would_compute_something_else_is_refused(tiny_gguf: Make, key: str, value: int, message: str) -> None:
    tiny = tiny_gguf().llama()
    tiny.writer.add_uint32(key, value)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tiny.write())


def test_heads_per_layer(tiny_gguf: Make, tmp_path: Path) -> None:
    tiny = tiny_gguf().llama()
    tiny.writer.kv_data[0].pop("llama.attention.head_count_kv")
    tiny.writer.add_head_count_kv([2, 2])
    assert open_checkpoint(tiny.write()).hf_config["num_key_value_heads"] == 2
    (tmp_path / "tiny.gguf").unlink()
    tiny = tiny_gguf().llama()
    tiny.writer.kv_data[0].pop("llama.attention.head_count_kv")
    tiny.writer.add_head_count_kv([2, 4])
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count_kv differs between layers"):
        open_checkpoint(tiny.write())


@pytest.mark.parametrize("key", ["llama.block_count", "llama.embedding_length", "llama.context_length"])
def test_missing_key(tiny_gguf: Make, key: str) -> None:
    tiny = tiny_gguf().llama()
    tiny.writer.kv_data[0].pop(key)
    with pytest.raises(ValueError, match=f"metadata key '{key}' is missing"):
        open_checkpoint(tiny.write())


def test_quantize_is_not_trivial() -> None:
    # Guards test_tensor_types: its bound would also hold if the writer had not quantised at all.
    tensor = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    assert not np.array_equal(dequantize(quantize(tensor, Q.Q4_0), Q.Q4_0), tensor)
