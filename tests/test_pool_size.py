"""The size of the KV pool: by what is given, by the memory, and smaller where steps need more than was estimated."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpaged import pool_size
from jaxpaged.batch import Bucket
from jaxpaged.config import EngineConfig
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.shapes import shape

BFLOAT16 = jnp.dtype("bfloat16")
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
BLOCK_BYTES = 16 * MODEL.kv_bytes_per_token(2)  # bfloat16, blocks of 16


def pretend_device(monkeypatch, stats, backend="gpu"):
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])


def pool_blocks(monkeypatch, stats, others=0, backend="gpu", **options) -> int:
    pretend_device(monkeypatch, stats, backend)
    return pool_size.num_pool_blocks(EngineConfig(model="demo", **options), MODEL, BFLOAT16, others)


def test_on_a_gpu_the_pool_gets_what_weights_and_temporaries_leave(monkeypatch):
    stats = {"bytes_limit": 1000 * BLOCK_BYTES, "bytes_in_use": 100 * BLOCK_BYTES}
    assert pool_blocks(monkeypatch, stats, gpu_memory_utilization=1.0) == 900
    assert pool_blocks(monkeypatch, stats, gpu_memory_utilization=0.5) == 400
    assert pool_blocks(monkeypatch, stats, 50 * BLOCK_BYTES, gpu_memory_utilization=0.5) == 350
    assert pool_blocks(monkeypatch, stats, 50 * BLOCK_BYTES + 1, gpu_memory_utilization=0.5) == 348  # even


def test_sizes_that_are_given_ask_no_device(monkeypatch):
    assert pool_blocks(monkeypatch, None, num_kv_blocks=7) == 8
    assert pool_blocks(monkeypatch, None, kv_cache_memory_bytes=7 * BLOCK_BYTES) == 7
    assert pool_blocks(monkeypatch, None, backend="cpu") == 2**30 // BLOCK_BYTES


@pytest.mark.parametrize(
    ("in_use", "options", "message"),
    [
        (50, {}, r"gpu_memory_utilization=0.9 leaves \d+ bytes, but the least KV pool, two blocks of 16 tokens, takes"),
        (200, {}, "gpu_memory_utilization=0.9 leaves 0 bytes"),
        (0, {"kv_cache_memory_bytes": BLOCK_BYTES}, f"kv_cache_memory_bytes={BLOCK_BYTES} is given, but the least"),
    ],
)
def test_a_pool_of_less_than_two_blocks_is_refused(monkeypatch, in_use, options, message):
    stats = {"bytes_limit": 100 * BLOCK_BYTES, "bytes_in_use": in_use * BLOCK_BYTES}
    with pytest.raises(ValueError, match=message):
        pool_blocks(monkeypatch, stats, others=39 * BLOCK_BYTES, **options)


def test_a_device_that_does_not_tell_its_memory_asks_for_a_size(monkeypatch):
    with pytest.raises(ValueError, match="does not tell its memory size; give num_kv_blocks or kv_cache_memory_bytes"):
        pool_blocks(monkeypatch, None)


@pytest.mark.parametrize("options", [{"num_kv_blocks": 10**9}, {"kv_cache_memory_bytes": 10**15}])
def test_a_pool_larger_than_the_memory_is_refused_before_anything_is_allocated(monkeypatch, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=\d+ makes a KV pool of .* GiB, more than the .* GiB of memory"):
        pool_blocks(monkeypatch, None, backend="cpu", **options)
    with pytest.raises(ValueError, match=name):
        pool_blocks(monkeypatch, {"bytes_limit": 2**30, "bytes_in_use": 0}, **options)


def test_what_a_step_is_estimated_to_need():
    llama, whole = shape("llama-3.1-8b"), Bucket(2048, 256, False)
    estimate = pool_size.step_bytes(llama, BFLOAT16, whole)
    mlp, logits = 2048 * 3 * 14336 * 2, 256 * 128256 * 4
    assert mlp + 5 * logits < estimate < 1.5 * 2**30
    assert pool_size.step_bytes(llama, BFLOAT16, Bucket(8192, 256, False)) > estimate + 3 * mlp
    assert pool_size.step_bytes(llama, BFLOAT16, Bucket(2048, 512, False)) > estimate + 5 * logits


def test_the_rounding_hides_small_differences_and_costs_less_than_one_percent():
    for blocks in (2, 3, 127, 128, 1000, 40_283, 10**6 + 7):
        assert 0.99 * blocks < pool_size.rounded(blocks) <= blocks
    assert pool_size.rounded(40_283) == pool_size.rounded(40_283 - 50) == 40_192


class Compiled:
    """Stands for `Executables`."""

    def __init__(self, step: int) -> None:
        self.step_bytes = lambda: step


def fit(monkeypatch, num_blocks, steps, stats, **options) -> Any:
    """What is compiled for, time after time, as steps turn out to need so many bytes; and what comes out."""
    pretend_device(monkeypatch, stats)
    tried, answers = [], iter(steps)

    def compiled(blocks) -> Any:
        tried.append(blocks)
        return Compiled(next(answers))

    config = EngineConfig(model="demo", **options)
    return tried, pool_size.fit(config, MODEL, BFLOAT16, num_blocks, compiled)


STATS = {"bytes_limit": 1000 * BLOCK_BYTES, "bytes_in_use": 100 * BLOCK_BYTES}


def test_a_step_as_small_as_estimated_is_compiled_once(monkeypatch):
    tried, (blocks, executables) = fit(monkeypatch, 800, [100 * BLOCK_BYTES], STATS, gpu_memory_utilization=1.0)
    assert (tried, blocks) == ([800], 800)
    assert executables.step_bytes() == 100 * BLOCK_BYTES


def test_a_step_that_needs_more_gets_it_from_the_pool(monkeypatch):
    steps = [200 * BLOCK_BYTES, 205 * BLOCK_BYTES, 205 * BLOCK_BYTES]  # the second time a little more
    tried, (blocks, executables) = fit(monkeypatch, 800, steps, STATS, gpu_memory_utilization=1.0)
    assert (tried, blocks) == ([800, 700, 692], 692)  # of 695, a multiple of 4
    assert executables.step_bytes() == 205 * BLOCK_BYTES
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=1\.0 leaves 0 bytes"):
        fit(monkeypatch, 800, [900 * BLOCK_BYTES], STATS, gpu_memory_utilization=1.0)


@pytest.mark.parametrize("options", [{"num_kv_blocks": 799}, {"kv_cache_memory_bytes": 800 * BLOCK_BYTES}])
def test_a_size_that_is_given_stays(monkeypatch, options):
    assert fit(monkeypatch, 800, [900 * BLOCK_BYTES], STATS, **options)[0] == [800]
