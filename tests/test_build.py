"""From options to an engine: sizes, dtypes, layouts. Most engines here have one bucket of one token: quick to build."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import GREEDY, PROMPT, TOKENS, tokens_of

from jaxpaged import LLM, SamplingParams, build
from jaxpaged.config import EngineConfig
from jaxpaged.models.config import ModelConfig

ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 1}
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
BLOCK_BYTES = 16 * MODEL.kv_bytes_per_token(2)  # bfloat16, blocks of 16


@pytest.mark.parametrize(("block_size", "num_kv_blocks"), [(16, 6), (128, 1)])
def test_tokens_do_not_depend_on_the_block_size(block_size, num_kv_blocks):
    llm = LLM(tiny.PATH, block_size=block_size, num_kv_blocks=num_kv_blocks, **ONE)
    stats = llm.cache_stats()
    assert (stats.num_blocks, stats.block_size) == (num_kv_blocks, block_size)
    assert llm.engine.scheduler.config.max_model_len == 256  # the model's
    assert tokens_of(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == TOKENS
    assert llm.cache_stats().peak_blocks_used == num_kv_blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_stays_close(dtype):
    block_bytes = 32 * tiny_kv_bytes(2)
    llm = LLM(
        tiny.PATH, dtype=dtype, block_size=32, max_model_len=128, kv_cache_memory_bytes=6 * block_bytes + 1, **ONE
    )
    assert llm.cache_stats().num_blocks == 5  # one of the six is the null block
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    completion = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
    expected = tiny.log_softmax(tiny.raw_logits(PROMPT + completion.token_ids))[len(PROMPT) - 1 : -1]
    rated = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert np.isfinite(rated).all()
    np.testing.assert_allclose(rated, expected[np.arange(8), completion.token_ids], atol=0.3)


def tiny_kv_bytes(itemsize: int) -> int:
    config = json.loads((tiny.PATH / "config.json").read_text())
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * itemsize


@pytest.mark.parametrize(
    ("backend", "wanted", "stored", "expected"),
    [
        ("cpu", "auto", "bfloat16", "float32"),
        ("cpu", "bfloat16", "float32", "bfloat16"),
        ("gpu", "auto", "float32", "bfloat16"),
        ("gpu", "auto", "bfloat16", "bfloat16"),
        ("gpu", "auto", "float16", "float16"),
        ("gpu", "float32", "float16", "float32"),
    ],
)
def test_dtype(monkeypatch, backend, wanted, stored, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert build.resolve_dtype(wanted, stored) == jnp.dtype(expected)


def pool_blocks(monkeypatch, stats, temporaries=0, backend="gpu", **options) -> int:
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    config = EngineConfig(model="demo", **options)
    return build._num_pool_blocks(config, MODEL, jnp.dtype("bfloat16"), lambda: temporaries)


def test_on_a_gpu_the_pool_gets_what_weights_and_temporaries_leave(monkeypatch):
    stats = {"bytes_limit": 1000 * BLOCK_BYTES, "bytes_in_use": 100 * BLOCK_BYTES}
    assert pool_blocks(monkeypatch, stats, gpu_memory_utilization=1.0) == 900
    assert pool_blocks(monkeypatch, stats, gpu_memory_utilization=0.5) == 400
    assert pool_blocks(monkeypatch, stats, 50 * BLOCK_BYTES, gpu_memory_utilization=0.5) == 350
    assert pool_blocks(monkeypatch, stats, 50 * BLOCK_BYTES + 1, gpu_memory_utilization=0.5) == 349


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
        pool_blocks(monkeypatch, stats, temporaries=39 * BLOCK_BYTES, **options)


def test_a_device_that_does_not_tell_its_memory_asks_for_a_size(monkeypatch):
    with pytest.raises(ValueError, match="does not tell its memory size; give num_kv_blocks or kv_cache_memory_bytes"):
        pool_blocks(monkeypatch, None)


@pytest.mark.parametrize("budget", [1, 4])
def test_prompt_logprobs_where_the_budget_is_that_of_decodes_alone(budget):
    llm = LLM(
        tiny.PATH,
        max_model_len=128,
        num_kv_blocks=16,
        max_num_seqs=budget,
        max_num_batched_tokens=budget,
        dtype="float32",
    )
    prompt = tiny.prompt(11)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=2, prompt_logprobs=1), use_tqdm=False)
    expected = tiny.log_softmax(tiny.raw_logits(prompt))
    for i in range(1, 11):
        assert output.prompt_logprobs[i][prompt[i]].logprob == pytest.approx(expected[i - 1, prompt[i]], abs=1e-4)


@pytest.mark.parametrize("options", [{"num_kv_blocks": 10**9}, {"kv_cache_memory_bytes": 10**15}])
def test_a_pool_larger_than_the_memory_is_refused_before_anything_is_allocated(monkeypatch, options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}=\d+ makes a KV pool of .* GiB, more than the .* GiB of memory"):
        pool_blocks(monkeypatch, None, backend="cpu", **options)
    with pytest.raises(ValueError, match=name):
        pool_blocks(monkeypatch, {"bytes_limit": 2**30, "bytes_in_use": 0}, **options)
