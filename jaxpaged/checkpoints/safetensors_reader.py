"""Reads a Hugging Face folder: `config.json` and safetensors, in one file or sharded by an index.

Owns the folder's layout and its errors. Headers of all shards are read when it is opened, so a missing or
truncated shard is known before any weight is loaded; tensors are read from the mapped files one at a time.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpaged.models.config import as_ids

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16")


class SafetensorsReader:
    """A folder with `config.json` and safetensors as a `CheckpointReader`."""

    def __init__(self, path: Path) -> None:
        """Reads the configuration and every shard's header; ValueError names the file or tensor at fault."""
        self.path = path
        self.hf_config = _read_json(path / "config.json")
        if quantisation := self.hf_config.get("quantization_config"):
            raise ValueError(
                f"{path / 'config.json'}: quantization_config {quantisation!r:.80} is not supported; "
                "use the unquantised checkpoint, or a GGUF file"
            )
        self.eos_token_ids = self._eos_token_ids()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        index = path / _INDEX
        if index.exists():
            self._open_index(index)
        else:
            shard = _only_file(path)
            self._file_of = dict.fromkeys(self._open_shard(shard), shard)
        self._shapes = {
            name: tuple(self._files[file].get_slice(name).get_shape()) for name, file in self._file_of.items()
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        return dict(self._shapes)

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, float16 or bfloat16; ValueError if it is absent or of another dtype."""
        if name not in self._file_of:
            raise ValueError(f"{self.path}: there is no tensor {name!r}")
        shard = self._file_of[name]
        file = self._files[shard]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self.path / shard}: tensor {name!r} has dtype {dtype}, which is not supported; "
                f"supported: {', '.join(_DTYPES)}"
            )
        return file.get_tensor(name)

    def _eos_token_ids(self) -> tuple[int, ...]:
        generation = self.path / "generation_config.json"
        stated = _read_json(generation).get("eos_token_id") if generation.exists() else None
        own = as_ids(self.hf_config.get("eos_token_id"), f"{self.path / 'config.json'}: eos_token_id")
        return as_ids(stated, f"{generation}: eos_token_id") or own

    def _open_index(self, index: Path) -> None:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError(f"{index}: 'weight_map' must map tensor names to file names")
        names_of = {shard: self._open_shard(shard, index) for shard in sorted(set(weight_map.values()))}
        for name, shard in weight_map.items():
            if name not in names_of[shard]:
                raise ValueError(f"{index}: tensor {name!r} is said to be in {shard}, which does not hold it")
        self._file_of = dict(weight_map)

    def _open_shard(self, shard: str, index: Path | None = None) -> set[str]:
        """Opens one file of the folder; returns the names of its tensors."""
        if _leaves_folder(shard):
            raise ValueError(f"{index}: shard {shard!r} lies outside the folder; only files inside it are read")
        file = self.path / shard
        if not file.is_file():
            raise ValueError(f"{index}: shard {shard} is missing from the folder; download it again")
        try:
            # A handle stays open: the file is mapped, and closing it would cost a header parse a tensor.
            self._files[shard] = handle = safe_open(file, framework="numpy")
            return set(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: not a whole safetensors file ({error}); download it again") from error


def _leaves_folder(shard: str) -> bool:
    # Lexical on purpose: in the Hugging Face cache every file is a link into a sibling folder.
    kinds = (PurePosixPath(shard), PureWindowsPath(shard))
    return any(kind.is_absolute() or kind.drive or ".." in kind.parts for kind in kinds)


def _only_file(path: Path) -> str:
    found = sorted(p.name for p in path.glob("*.safetensors"))
    if _SINGLE in found:
        return _SINGLE
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{path}: several safetensors files ({', '.join(found[:3])}, …) but no {_INDEX}")
    other = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; found {other[0]}, which is not read from a folder" if other else ""
    raise ValueError(f"{path}: no *.safetensors file{hint}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: the file is missing; a checkpoint folder must hold it") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
