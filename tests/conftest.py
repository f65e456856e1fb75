"""Fixtures that several rooms' tests share. Compiled engines are made once a session: compiling is what takes time."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import jax
import pytest

# Code that a user's stricter settings would break must not pass here.
jax.config.update("jax_numpy_rank_promotion", "raise")

TINY = Path(__file__).parent / "data" / "tiny"
TINY_OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 8,
    "num_kv_blocks": 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(autouse=True, scope="session")
def no_kept_executables():
    """Engines of tests are traced and compiled, whatever an earlier run left in the user's cache."""
    if not importlib.util.find_spec("flax"):  # the kernels' tests run without the engine too
        yield
        return
    from jaxpaged import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "executables_folder", lambda: None)
        yield


@pytest.fixture(scope="session")
def demo_path():
    """The demo model's GGUF file, fetched once into the user's cache."""
    from jaxpaged.checkpoints.demo import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="session")
def demo_llm(demo_path):
    """The demo model in float32 with a pool that holds little more than its longest golden prompt."""
    from jaxpaged import LLM

    return LLM(
        str(demo_path), dtype="float32", max_model_len=768, num_kv_blocks=36, max_num_seqs=8, max_num_batched_tokens=64
    )


@pytest.fixture(scope="session")
def tiny_llm():
    """A random model of two layers with a byte-level tokenizer, in a pool of 24 blocks of 8."""
    from jaxpaged import LLM

    return LLM(str(TINY / "llama_tied_sharded"), **TINY_OPTIONS)
