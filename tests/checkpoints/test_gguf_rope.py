"""Llama 3's RoPE scaling, recovered from the factors that llama.cpp's converter stores in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from jaxpaged.checkpoints import open_checkpoint
from jaxpaged.checkpoints.gguf_rope import recover_llama3
from jaxpaged.models.config import Llama3RopeScaling, parse_rope

Make = Callable[..., Any]


def converter_factors(theta: float, head_dim: int, factor: float, low: float, high: float, old: int) -> np.ndarray:
    """llama.cpp's loop: every frequency by its wavelength, in float32."""
    factors = []
    for freq in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)):
        wavelength = 2 * math.pi / float(freq)
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize(
    ("head_dim", "factor", "low", "high", "old"),
    [
        (128, 8.0, 1.0, 4.0, 8192),  # Llama 3.1
        (64, 32.0, 1.0, 4.0, 8192),  # Llama 3.2 1B
        (128, 4.0, 1.0, 8.0, 4096),
        (64, 2.5, 1.0, 3.0, 2048),
    ],
)
def test_parameters_are_recovered(head_dim: int, factor: float, low: float, high: float, old: int) -> None:
    scaling = recover_llama3(converter_factors(500000.0, head_dim, factor, low, high, old), 500000.0)
    assert scaling == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": old,
    }


def test_equivalent_parameters_are_found_where_the_true_ones_cannot_be() -> None:
    # Only original/low and original/high act: (2, 8, 8192) is the same function as (1, 4, 4096).
    scaling = recover_llama3(converter_factors(500000.0, 128, 8.0, 2.0, 8.0, 8192), 500000.0)
    assert scaling is not None
    assert scaling["original_max_position_embeddings"] == 4096
    assert scaling["high_freq_factor"] == 4.0


def test_no_scaling() -> None:
    assert recover_llama3(np.ones(32, np.float32), 10000.0) is None


@pytest.mark.parametrize("index", [0, 20, 31])
def test_other_factors_are_refused(index: int) -> None:
    factors = converter_factors(500000.0, 64, 8.0, 1.0, 4.0, 8192)
    factors[index] *= 1.01
    with pytest.raises(ValueError, match="not Llama 3 scaling"):
        recover_llama3(factors, 500000.0)


def test_in_a_file(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    tiny.tensors["rope_freqs.weight"] = (converter_factors(500000.0, 32, 8.0, 1.0, 4.0, 8192), Q.F32)
    reader = open_checkpoint(tiny.write())
    assert "rope_freqs.weight" not in reader.shapes()
    assert parse_rope(reader.hf_config, "tiny") == (500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))


def test_in_a_file_refused(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    tiny.tensors["rope_freqs.weight"] = (np.linspace(1, 3, 16, dtype=np.float32), Q.F32)
    path = tiny.write()
    with pytest.raises(ValueError, match=r"rope_freqs\.weight is not Llama 3 scaling") as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


def test_wrong_length(tiny_gguf: Make) -> None:
    tiny = tiny_gguf().llama()
    tiny.tensors["rope_freqs.weight"] = (np.ones(8, np.float32), Q.F32)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight has shape \(8,\), expected \(16,\)"):
        open_checkpoint(tiny.write())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_other_kinds_of_scaling_are_refused(tiny_gguf: Make, kind: str) -> None:
    tiny = tiny_gguf().llama()
    tiny.writer.add_string("llama.rope.scaling.type", kind)
    with pytest.raises(ValueError, match=f"rope scaling '{kind}' is not supported"):
        open_checkpoint(tiny.write())
