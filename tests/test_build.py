"""From options to an engine: sizes, dtypes, layouts. Most engines here have one bucket of one token: quick to build."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import GREEDY, PROMPT, TOKENS, tokens_of

from jaxpaged import LLM, SamplingParams, build

ONE = {"max_num_seqs": 1, "max_num_batched_tokens": 1}


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
