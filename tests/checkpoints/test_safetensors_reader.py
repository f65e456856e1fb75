"""The safetensors reader and the choice of a reader: what is read, and one clear error for each kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpaged.checkpoints import CheckpointReader, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": 2}
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "model.embed_tokens.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "model.norm.weight": rng.standard_normal(4).astype(np.float16),
        "lm_head.weight": rng.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        shard = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / shard)
        weight_map[name] = shard
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def edit_index(folder: Path, **changes: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def assert_reads_all(folder: Path) -> None:
    reader = open_checkpoint(folder)
    assert isinstance(reader, CheckpointReader)
    assert reader.path == folder
    assert reader.hf_config == CONFIG
    assert reader.shapes() == {name: tensor.shape for name, tensor in tensors().items()}
    for name, tensor in tensors().items():
        found = reader.read(name)
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found.astype(np.float32), tensor.astype(np.float32))


@pytest.mark.parametrize("file_name", ["model.safetensors", "other.safetensors"])
def test_single_file(folder: Path, file_name: str) -> None:
    save_file(tensors(), folder / file_name)
    assert_reads_all(folder)


def test_sharded(sharded: Path) -> None:
    assert_reads_all(sharded)


def test_sharded_through_links_out_of_the_folder(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # How the Hugging Face cache lays out a snapshot.
    snapshot = tmp_path_factory.mktemp("snapshot")
    for file in sharded.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert_reads_all(snapshot)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (2,)), ({}, (2,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 8]}, (7, 8))],
)
def test_eos_of_generation_config_wins(folder: Path, generation: dict | None, expected: tuple[int, ...]) -> None:
    save_file(tensors(), folder / "model.safetensors")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(folder).eos_token_ids == expected


def test_missing_config(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json: the file is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]", '"x"'])
def test_bad_config(folder: Path, content: str) -> None:
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: (not valid JSON|expected a JSON object)"):
        open_checkpoint(folder)


def test_quantised_weights_are_refused(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config .*gptq.* is not supported"):
        open_checkpoint(folder)


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard model-1\.safetensors is missing"):
        open_checkpoint(sharded)


def test_tensor_not_in_its_shard(sharded: Path) -> None:
    edit_index(sharded, **{"lm_head.weight": "model-0.safetensors"})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is said to be in model-0\.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../out.safetensors", "/etc/passwd", "a/../../b", "..\\out.safetensors", "C:\\x"])
def test_index_that_leaves_the_folder(sharded: Path, shard: str) -> None:
    save_file(tensors(), sharded.parent / "out.safetensors")
    edit_index(sharded, **{"lm_head.weight": shard})
    with pytest.raises(ValueError, match="lies outside the folder"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": {"a": 1}}'])
def test_bad_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: (not valid JSON|'weight_map' must map)"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_truncated_file(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    save_file(tensors(), file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a whole safetensors file"):
        open_checkpoint(folder)


def test_unsupported_dtype_and_unknown_name(folder: Path) -> None:
    save_file({"ids": np.arange(3), "ok": np.ones(2, np.float32)}, folder / "model.safetensors")
    reader = open_checkpoint(folder)
    assert reader.shapes() == {"ids": (3,), "ok": (2,)}
    with pytest.raises(ValueError, match="tensor 'ids' has dtype I64, which is not supported"):
        reader.read("ids")
    with pytest.raises(ValueError, match="no tensor 'other'"):
        reader.read("other")


def test_several_files_without_index(folder: Path) -> None:
    for name in ("a", "b"):
        save_file(tensors(), folder / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"several safetensors files \(a\.safetensors, b\.safetensors"):
        open_checkpoint(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors file; found pytorch_model\.bin"):
        open_checkpoint(folder)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing at this path"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "model.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"found a file of type '\.txt'"):
        open_checkpoint(tmp_path / "model.txt")
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=r"this folder holds m\.gguf: give the file's path"):
        open_checkpoint(tmp_path)
