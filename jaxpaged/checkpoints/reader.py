"""The contract of every checkpoint reader, and the choice of one from a path.

A reader presents a checkpoint as Hugging Face would: tensor names, `[out, in]` shapes and the content of
`config.json`, whatever the file on disk looks like. The model loader and the tokenizer see only this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class CheckpointReader(Protocol):
    """One opened checkpoint. Headers are read when it is opened, tensors when they are asked for."""

    path: Path
    """The folder, or the GGUF file."""

    hf_config: dict[str, Any]
    """The content of `config.json`, or its equivalent derived from GGUF metadata."""

    eos_token_ids: tuple[int, ...]
    """Ids that end a generation; `generation_config.json` wins over `config.json`."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's Hugging Face name and shape, e.g. `model.layers.0.self_attn.q_proj.weight: (out, in)`."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, of the shape that `shapes()` tells, as float32, float16 or `ml_dtypes.bfloat16`.

        Raises ValueError, naming tensor and file, if there is no such tensor or its dtype is not supported.
        The array may be a read-only view of the mapped file.
        """
        ...


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Opens a folder with `config.json` and `*.safetensors`, or a `.gguf` file.

    Raises ValueError, in one line, if the path is neither or what it holds is damaged.
    """
    from jaxpaged.checkpoints.gguf_reader import GGUFReader
    from jaxpaged.checkpoints.safetensors_reader import SafetensorsReader

    path = Path(path).expanduser()
    expected = "expected a folder with config.json and *.safetensors, or a .gguf file"
    if path.is_dir():
        if not (path / "config.json").exists():
            ggufs = sorted(p.name for p in path.glob("*.gguf"))
            if ggufs:
                raise ValueError(f"model={str(path)!r}: {expected}; this folder holds {ggufs[0]}: give the file's path")
        return SafetensorsReader(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf" or _has_gguf_magic(path):
            return GGUFReader(path)
        raise ValueError(f"model={str(path)!r}: {expected}; found a file of type {path.suffix or 'unknown'!r}")
    raise ValueError(f"model={str(path)!r}: {expected}; there is nothing at this path")


def _has_gguf_magic(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
