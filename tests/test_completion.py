"""How completions end and what they report: stops, limits, log-probabilities, through the tiny model's engine."""

import dataclasses

import numpy as np
import pytest
import tiny
from tiny import EOS, GREEDY, PROMPT, TOKENS, fresh_engine, serve, tokens_of

from jaxpaged import SamplingParams

ALWAYS_EOS = {EOS: 100.0}


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture(scope="module")
def letters(tiny_llm):
    """Tokens of one or more lower-case letters, so that texts are readable and tokens vary in length."""
    texts = {i: tiny_llm.engine.tokenizer.decode([i], skip_special_tokens=False) for i in range(tiny.VOCAB)}
    return {i: text for i, text in texts.items() if text.isascii() and text.isalpha() and text.islower()}


@pytest.fixture(scope="module")
def story(tiny_llm, letters):
    """Ids and text of 40 tokens of letters."""
    completion = generate(tiny_llm, PROMPT, max_tokens=40, allowed_token_ids=list(letters))
    assert completion.text == "".join(letters[i] for i in completion.token_ids)
    return completion.token_ids, completion.text


def generate(llm, prompt, **fields):
    params = SamplingParams(**{"temperature": 0, **fields})
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]


def stop_across_tokens(ids, letters, first: int) -> tuple[str, int, int]:
    """A text of two letters that first appears at the border of two tokens; where it begins, and the token it ends."""
    text, at = "".join(letters[i] for i in ids), 0
    for k, token in enumerate(ids[:-1]):
        at += len(letters[token])
        if k >= first and text.find(stop := text[at - 1 : at + 1]) == at - 1:
            return stop, at - 1, k + 1
    raise AssertionError("no such text")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text_there(llm, story, letters, include):
    ids, text = story
    stop, start, last = stop_across_tokens(ids, letters, first=5)
    asked = {"stop": ["nowhere", stop], "include_stop_str_in_output": include, "allowed_token_ids": list(letters)}
    completion = generate(llm, PROMPT, max_tokens=40, **asked)
    expected = text[: start + 2 * include]
    assert completion.text == expected
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == ids[: last + 1]  # not the one that was in flight
    pieces = list(llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=40, **asked)))
    assert len(pieces) > 3
    assert "".join(pieces) == expected


def test_text_that_only_begins_a_stop_string_is_held_back_and_then_shown(llm, story, letters):
    _, text = story
    asked = SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=list(letters))

    def lengths(params: SamplingParams) -> set[int]:
        pieces = list(llm.stream(PROMPT, params))
        assert "".join(pieces) == text
        return {len("".join(pieces[:i])) for i in range(len(pieces) + 1)}

    begun = range(11, 14)
    assert lengths(asked) & {*begun}
    assert not lengths(dataclasses.replace(asked, stop=[text[10:14] + "?"])) & {*begun}


def test_a_stop_string_before_min_tokens_does_not_count(llm, story, letters):
    ids, _ = story
    stop, _, last = stop_across_tokens(ids, letters, first=3)
    asked = {"stop": stop, "allowed_token_ids": list(letters), "max_tokens": 40}
    assert generate(llm, PROMPT, **asked, min_tokens=last - 1).token_ids == ids[: last + 1]
    later = generate(llm, PROMPT, **asked, min_tokens=last + 1).token_ids
    assert later == ids[: len(later)]
    assert len(later) > last + 1


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_output(llm, story, letters, include):
    ids, _ = story
    stop = ids[6]
    first = ids.index(stop)
    completion = generate(
        llm, PROMPT, max_tokens=40, stop_token_ids=[stop], allowed_token_ids=list(letters),
        include_stop_str_in_output=include,
    )  # fmt: skip
    assert completion.token_ids == ids[: first + 1]
    assert completion.text == "".join(letters[i] for i in ids[: first + include])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_end_of_sequence_ends_the_output(llm):
    completion = generate(llm, PROMPT, logit_bias=ALWAYS_EOS)
    assert (completion.token_ids, completion.text) == ([EOS], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on_past_it(llm):
    completion = generate(llm, PROMPT, logit_bias=ALWAYS_EOS, ignore_eos=True, max_tokens=5)
    assert (completion.token_ids, completion.text) == ([EOS] * 5, "")
    assert completion.finish_reason == "length"
    shown = generate(llm, PROMPT, logit_bias=ALWAYS_EOS, ignore_eos=True, max_tokens=2, skip_special_tokens=False)
    assert shown.text == "<|im_end|>" * 2


def test_ignore_eos_leaves_it_as_a_stop_token_that_was_asked_for(llm):
    completion = generate(llm, PROMPT, logit_bias=ALWAYS_EOS, ignore_eos=True, stop_token_ids=[EOS])
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == ([EOS], "stop", EOS)


@pytest.mark.parametrize("min_tokens", [1, 2, 7])
@pytest.mark.parametrize("ending", [EOS, 99])
def test_min_tokens_holds_the_end_back_for_exactly_that_long(llm, min_tokens, ending):
    """One step ahead: tokens in flight count, or the end would come one token late."""
    completion = generate(llm, PROMPT, logit_bias={ending: 100.0}, stop_token_ids=[99], min_tokens=min_tokens)
    assert ending not in completion.token_ids[:-1]
    assert len(completion.token_ids) == min_tokens + 1
    assert completion.token_ids[-1] == ending
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(("num_blocks", "expected"), [(24, 118), (4, 23)])
def test_no_max_tokens_goes_to_what_fits_the_model_and_the_pool(llm, num_blocks, expected):
    asked = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = serve(fresh_engine(llm, num_blocks=num_blocks), (tiny.prompt(10), asked))
    assert len(tokens_of(output)) == expected
    assert output.outputs[0].finish_reason == "length"
    assert output.finished


def test_without_detokenisation_there_is_no_text(llm):
    completion = generate(llm, PROMPT, detokenize=False, max_tokens=4, logprobs=1)
    assert (completion.token_ids, completion.text) == (TOKENS[:4], "")
    assert all(x.decoded_token is None for entry in completion.logprobs for x in entry.values())


@pytest.mark.parametrize("num", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_raw_distribution(llm, num):
    """Temperature, filters and biases change what is sampled, not how it is rated."""
    completion = generate(
        llm, PROMPT, temperature=1.5, top_k=100, seed=2, logit_bias={7: 3.0}, max_tokens=30, ignore_eos=True,
        logprobs=num,
    )  # fmt: skip
    ids = completion.token_ids
    expected = tiny.log_softmax(tiny.raw_logits(PROMPT + ids))[len(PROMPT) - 1 : -1]
    outside = 0
    for token, entry, logprobs in zip(ids, completion.logprobs, expected, strict=True):
        best = np.argsort(-logprobs, kind="stable")
        assert next(iter(entry)) == token
        assert set(entry) == {token, *best[:num].tolist()}
        outside += token not in best[:num]
        for i, rated in entry.items():
            assert rated.logprob == pytest.approx(logprobs[i], abs=1e-4)
            assert best[rated.rank - 1] == i
            assert rated.decoded_token == llm.engine.tokenizer.decode([i], skip_special_tokens=False)
    assert outside > 0  # some sampled tokens are none of the best, and yet rated
    total = sum(entry[i].logprob for i, entry in zip(ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-6)


def test_logprobs_are_given_only_when_asked_for(llm):
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert output.outputs[0].logprobs is None
    assert output.prompt_logprobs is None
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(tiny.GOLDEN["logprobs"]), abs=1e-3)


def check_prompt_logprobs(output, prompt, num):
    expected = tiny.log_softmax(tiny.raw_logits(prompt))
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for i in range(1, len(prompt)):
        entry, logprobs = output.prompt_logprobs[i], expected[i - 1]
        best = np.argsort(-logprobs, kind="stable")
        assert set(entry) == {prompt[i], *best[:num].tolist()}
        assert entry[prompt[i]].rank == 1 + np.sum(logprobs > logprobs[prompt[i]])
        for token, rated in entry.items():
            assert rated.logprob == pytest.approx(logprobs[token], abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 66, 120])
@pytest.mark.parametrize("num", [0, 3])
def test_prompt_logprobs_of_prompts_in_one_chunk_and_in_several(llm, length, num):
    prompt = tiny.prompt(length, 3)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=num), use_tqdm=False)
    check_prompt_logprobs(output, prompt, num)


def test_prompt_logprobs_in_a_batch_and_after_a_preemption(llm):
    older = (tiny.prompt(20, 1), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, prompt_logprobs=0))
    asked = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2, logprobs=2)
    first, second = serve(fresh_engine(llm, num_blocks=17), older, (PROMPT, asked))
    assert second.num_preemptions > 0
    check_prompt_logprobs(first, older[0], 0)
    check_prompt_logprobs(second, PROMPT, 2)
    assert len(second.outputs[0].logprobs) == 30


def test_prompt_logprobs_agree_with_the_logprobs_of_the_same_tokens_generated(llm):
    completion = generate(llm, PROMPT, temperature=1, seed=3, max_tokens=50, ignore_eos=True, logprobs=2)
    whole = PROMPT + completion.token_ids
    (output,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    for generated, read in zip(completion.logprobs, output.prompt_logprobs[len(PROMPT) :], strict=True):
        assert [(i, x.rank) for i, x in generated.items()] == [(i, x.rank) for i, x in read.items()]
        for i, rated in generated.items():
            assert rated.logprob == pytest.approx(read[i].logprob, abs=1e-4)


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_counts(llm, story, letters):
    ids, text = story
    stop, start, last = stop_across_tokens(ids, letters, first=3)
    completion = generate(llm, PROMPT, stop=stop, allowed_token_ids=list(letters), max_tokens=40, min_tokens=last)
    assert completion.token_ids == ids[: last + 1]
    assert completion.text == text[:start]
