"""The demo model against golden outputs of HF Transformers (`scripts/make_goldens.py`), through the whole engine."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxpaged import SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "data" / "goldens_smollm2.json").read_text())["prompts"]
NAMES = [g["name"] for g in GOLDENS]
TOLERANCE = 1e-3


def params(golden: dict) -> SamplingParams:
    rated = golden.get("prompt_logprobs")
    return SamplingParams(
        temperature=0,
        max_tokens=len(golden["tokens"]),
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=5,
        prompt_logprobs=0 if rated else None,
    )


def check(golden: dict, output) -> None:
    completion = output.outputs[0]
    assert completion.token_ids == golden["tokens"]
    assert completion.finish_reason == "length"
    logprobs = [entry[token].logprob for token, entry in zip(golden["tokens"], completion.logprobs, strict=True)]
    np.testing.assert_allclose(logprobs, golden["logprobs"], atol=TOLERANCE)
    assert all(entry[token].rank == 1 for token, entry in zip(golden["tokens"], completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(sum(golden["logprobs"]), abs=48 * TOLERANCE)
    for top in golden["top"]:
        entry = completion.logprobs[top["step"]]
        assert list(entry) == top["ids"]
        np.testing.assert_allclose([x.logprob for x in entry.values()], top["logprobs"], atol=TOLERANCE)
    assert completion.text == golden["output_text"]
    if golden.get("prompt_logprobs"):
        rated = zip(golden["prompt_ids"][1:], output.prompt_logprobs[1:], golden["prompt_logprobs"][1:], strict=True)
        assert output.prompt_logprobs[0] is None
        for token, entry, expected in rated:
            assert entry[token].logprob == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("golden", GOLDENS, ids=NAMES)
def test_tokenizer_and_chat_template_give_the_same_ids(demo_llm, golden):
    tokenizer = demo_llm.engine.tokenizer
    if golden["kind"] == "chat":
        assert tokenizer.apply_chat_template(golden["messages"]) == golden["prompt_ids"]
    elif golden["kind"] == "plain":
        assert tokenizer.encode(golden["text"]) == golden["prompt_ids"]


@pytest.mark.parametrize("golden", GOLDENS, ids=NAMES)
def test_alone(demo_llm, golden):
    check(golden, demo_llm.generate(golden["prompt_ids"], params(golden), use_tqdm=False)[0])
    assert demo_llm.cache_stats().num_blocks_used == 0


def test_all_together_in_a_pool_that_forces_preemption_and_chunks(demo_llm):
    before = demo_llm.cache_stats().num_preemptions
    prompts = [g["prompt_ids"] for g in GOLDENS]
    outputs = demo_llm.generate(prompts, [params(g) for g in GOLDENS], use_tqdm=False)
    stats = demo_llm.cache_stats()
    assert stats.num_preemptions > before
    assert max(map(len, prompts)) > demo_llm.engine.scheduler.config.max_num_batched_tokens  # chunked
    assert any(o.num_preemptions for o in outputs)
    for golden, output in zip(GOLDENS, outputs, strict=True):
        check(golden, output)
    demo_llm.engine.scheduler.check_integrity()
    assert stats.num_blocks_used == 0


def test_two_ways_to_ask(demo_llm):
    golden = GOLDENS[0]
    (output,) = demo_llm.chat(golden["messages"], params(golden), use_tqdm=False)
    check(golden, output)
    (output,) = demo_llm.generate(golden["text"], params(golden), use_tqdm=False)
    check(golden, output)
    assert output.prompt == golden["text"]


def test_an_answer_ends_at_its_end_of_sequence(demo_llm):
    golden = GOLDENS[0]
    (output,) = demo_llm.chat(golden["messages"], SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == "The capital of France is Paris."
    assert completion.token_ids == golden["tokens"][:8]  # the end of sequence is the last
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_nothing_compiles_after_warm_up(demo_llm):
    before = demo_llm.engine.runner.num_traces
    everything = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, max_tokens=4, min_tokens=2, logprobs=3,
        prompt_logprobs=2, presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1,
        logit_bias={5: 1.0}, bad_words=["the"], stop=["zzz"],
    )  # fmt: skip
    prompts = [[7] * n for n in (1, 15, 16, 17, 33, 100)]
    demo_llm.generate(prompts, everything, use_tqdm=False)
    demo_llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    assert demo_llm.engine.runner.num_traces == before


def test_the_pool_stays_where_it_is(demo_llm):
    before = demo_llm.engine.runner.addresses()
    demo_llm.generate([[3, 4, 5]] * 3, SamplingParams(max_tokens=5), use_tqdm=False)
    assert demo_llm.engine.runner.addresses() == before
