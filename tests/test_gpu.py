"""What only a GPU shows: sizing from its memory, and the demo model in bfloat16 against float32 goldens."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

GOLDENS = json.loads((Path(__file__).parent / "data" / "goldens_smollm2.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def llm(demo_path):
    return LLM(str(demo_path), dtype="bfloat16", gpu_memory_utilization=0.5, max_model_len=1024, max_num_seqs=16)


def test_the_pool_takes_the_share_of_the_memory_that_was_asked_for(llm):
    stats = jax.devices()[0].memory_stats()
    share = 0.5 * stats["bytes_limit"]
    assert stats["peak_bytes_in_use"] < 1.02 * share
    block_bytes = 16 * 2 * 30 * 3 * 64 * 2
    assert llm.cache_stats().num_blocks * block_bytes > 0.9 * share


def test_bfloat16_rates_the_goldens_as_float32_does(llm):
    """Teacher-forced: greedy tokens may part where two logits are close, log-probabilities must not."""
    prompts = [g["prompt_ids"] + g["tokens"] for g in GOLDENS]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    differences, same = [], []
    for golden, output in zip(GOLDENS, outputs, strict=True):
        for i, (token, expected) in enumerate(zip(golden["tokens"], golden["logprobs"], strict=True)):
            entry = output.prompt_logprobs[len(golden["prompt_ids"]) + i]
            differences.append(abs(entry[token].logprob - expected))
            same.append(entry[token].rank == 1)
    mean, worst = np.mean(differences), np.max(differences)
    print(f"bfloat16: mean |dlogprob| {mean:.4f}, max {worst:.4f}, greedy {np.mean(same):.4f}")
    assert np.mean(differences) < 0.05
    assert np.mean(same) > 0.95


def test_greedy_in_bfloat16_follows_the_goldens_from_the_start(llm):
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate([g["prompt_ids"] for g in GOLDENS], params, use_tqdm=False)
    agreed = []
    for golden, output in zip(GOLDENS, outputs, strict=True):
        pairs = zip(golden["tokens"], output.outputs[0].token_ids, strict=True)
        agreed.append(next((i for i, (a, b) in enumerate(pairs) if a != b), 48))
    print("bfloat16: tokens that agree before the first difference:", agreed)
    assert np.mean(agreed) > 16
