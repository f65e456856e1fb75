"""The GGUF container: metadata and the table of tensors, read from a mapped file.

Knows nothing of models. The `gguf` package's own reader keeps one numpy array per metadata element (seconds
for a large vocabulary) and does not tell a truncated file from a malformed one, so the header is parsed here;
dequantisation is the package's.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NATIVE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
# The legacy formats, the K-quants, and the two that K-quant mixes fall back to for odd row lengths.
_QUANTISED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS"),
)
SUPPORTED_TYPES = (*_NATIVE, *_QUANTISED)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file. `shape` is in row-major order, as numpy and Hugging Face write it."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GGUFFile:
    """A parsed GGUF header over a mapped file.

    `metadata` maps each key to a Python scalar, string or list. A float32 scalar is given as the shortest decimal
    that rounds to it (1e-05, not 9.99999974e-06). `tensors` maps each name to its `TensorInfo`; every one of them
    has a supported type and lies within the file.
    """

    def __init__(self, path: Path) -> None:
        """Parses the header; ValueError names the file, and the tensor where one is at fault."""
        self.path = path
        if path.stat().st_size < 24:
            raise ValueError(f"{path}: not a GGUF file ({path.stat().st_size} bytes)")
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        cursor = _Cursor(path, memoryview(self._data))
        magic = bytes(cursor.take(4))
        if magic != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file (it begins with {magic!r})")
        version = cursor.scalar("I")
        if version not in (2, 3):
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise ValueError(f"{path}: {kind} GGUF is not supported; supported: little-endian, versions 2 and 3")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            if key in self.metadata:
                raise ValueError(f"{path}: metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(key)
        self.tensors = self._tensor_table(cursor, tensor_count)

    def read(self, name: str) -> np.ndarray:
        """One tensor: a read-only view for F32, F16 and BF16; a new float32 array for quantised types."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.nbytes].view(np.ndarray)
        if info.type_name in _NATIVE:
            return raw.view(_NATIVE[info.type_name]).reshape(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        return dequantize(rows, GGMLQuantizationType[info.type_name]).reshape(info.shape)

    def _tensor_table(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries = []
        for _ in range(count):
            name = cursor.string()
            dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            entries.append((name, dims, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise ValueError(f"{self.path}: general.alignment must be a positive multiple of 8, found {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        table: dict[str, TensorInfo] = {}
        for name, dims, type_id, offset in entries:
            if name in table:
                raise ValueError(f"{self.path}: tensor {name!r} occurs twice")
            table[name] = self._tensor_info(name, dims, type_id, start + offset)
        return table

    def _tensor_info(self, name: str, dims: list[int], type_id: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            kind = None
        type_name = f"number {type_id}" if kind is None else kind.name
        if kind is None or type_name not in SUPPORTED_TYPES:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {type_name}, which is not supported; "
                f"supported: {', '.join(SUPPORTED_TYPES)}"
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not dims or len(dims) > 4 or dims[0] % block:
            raise ValueError(f"{self.path}: tensor {name!r} of type {type_name} has a malformed shape: {dims}")
        nbytes = math.prod(dims) // block * block_bytes
        if offset + nbytes > len(self._data):
            raise ValueError(
                f"{self.path}: the file is truncated: tensor {name!r} ends at byte {offset + nbytes}, "
                f"the file at {len(self._data)}; download it again"
            )
        return TensorInfo(name, tuple(reversed(dims)), type_name, offset, nbytes)


class _Cursor:
    """Reads little-endian values one after another, and never past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.position = 0
        self._path = path
        self._data = data

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise ValueError(f"{self._path}: the file is truncated within its header; download it again")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self._path}: a string in the header is not UTF-8: {raw[:40]!r}") from None

    def value(self, key: str) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        number = self.scalar(self._code(key, kind))
        return float(str(np.float32(number))) if kind == 6 else number

    def _array(self, key: str) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = self._code(key, kind)
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def _code(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: metadata key {key!r} has value type {kind}, which is not supported")
        return _SCALARS[kind]
