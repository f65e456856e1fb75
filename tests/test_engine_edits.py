"""Penalties, biases, allowed tokens and bad words through the engine, against a slow recomputation in numpy.

Greedy outputs are followed token by token: the raw logits come from dense attention, the edits from the rules as
vLLM documents them, and each token must be the best one of the edited logits.
"""

import dataclasses

import numpy as np
import pytest
import tiny
from tiny import EOS, PROMPT, fresh_engine, serve, tokens_of

from jaxpaged import SamplingParams

PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
TIE = 1e-3  # logits this close may come out in either order


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture(scope="module")
def plain(tiny_llm):
    return tokens_of(serve(fresh_engine(tiny_llm), (PROMPT, PLAIN))[0])


def edited(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], bad_words) -> np.ndarray:
    """One step's logits after the edits, rule by rule."""
    logits = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        kept = logits[list(params.allowed_token_ids)]
        logits[:] = -np.inf
        logits[list(params.allowed_token_ids)] = kept
    for word in bad_words:
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[[EOS, *(params.stop_token_ids or [])]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


def follow(prompt: list[int], output: list[int], params: SamplingParams, bad_words=()) -> None:
    raw = tiny.raw_logits(prompt + output)[len(prompt) - 1 : -1]
    for i, token in enumerate(output):
        logits = edited(raw[i], params, prompt, output[:i], bad_words)
        assert logits[token] > logits.max() - TIE, f"token {i}: {token} instead of {logits.argmax()}"


EDITS = {
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative frequency": {"frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.4},
    "repetition below 1": {"repetition_penalty": 0.7},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {7: 3.0, 26: -2.5, 158: 1.0}},
    "bias and penalties": {"logit_bias": {7: 6.0}, "frequency_penalty": 1.0},
    "allowed": {"allowed_token_ids": list(range(40, 70))},
    "allowed and penalties": {"allowed_token_ids": [40, 41, 42, 43], "frequency_penalty": 0.5},
    "min_tokens": {"ignore_eos": False, "logit_bias": {EOS: 5.0}, "min_tokens": 20, "stop_token_ids": [26]},
}


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_each_token_is_the_best_one_after_the_edits(llm, plain, edits):
    params = dataclasses.replace(PLAIN, **edits)
    (output,) = serve(fresh_engine(llm), (PROMPT, params))
    assert tokens_of(output) != plain
    follow(PROMPT, tokens_of(output), params)


def test_all_edits_in_one_batch_and_after_preemptions(llm):
    """Each row gets its own edits, and the history of a preempted request still counts."""
    requests = [(tiny.prompt(20, i), dataclasses.replace(PLAIN, **edits)) for i, edits in enumerate(EDITS.values())]
    outputs = serve(fresh_engine(llm, num_blocks=14), *requests)
    assert sum(o.num_preemptions for o in outputs) > 3
    for (prompt, params), output in zip(requests, outputs, strict=True):
        follow(prompt, tokens_of(output), params)


def test_only_allowed_tokens_are_ever_sampled(llm):
    allowed = [5, 50, 150, 250]
    asked = SamplingParams(temperature=5, seed=1, max_tokens=50, ignore_eos=True, allowed_token_ids=allowed)
    (output,) = serve(fresh_engine(llm), (PROMPT, asked))
    assert set(tokens_of(output)) == set(allowed)


def test_a_banned_token_is_never_sampled(llm):
    asked = SamplingParams(temperature=3, seed=1, max_tokens=100, ignore_eos=True, allowed_token_ids=[5, 50, 150])
    free, banned = (
        tokens_of(serve(fresh_engine(llm), (tiny.prompt(20), params))[0])
        for params in (asked, dataclasses.replace(asked, logit_bias={50: -100}))
    )
    assert set(free) == {5, 50, 150}
    assert set(banned) == {5, 150}


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_a_bad_word_is_left_out_at_its_last_token_only(llm, plain, num_tokens):
    tokenizer = llm.engine.tokenizer
    starts = range(len(plain) - num_tokens)
    words = ((k, plain[k : k + num_tokens], tokenizer.decode(plain[k : k + num_tokens])) for k in starts)
    start, ids, word = next((k, i, w) for k, i, w in words if w.isascii() and w.strip() and tokenizer.encode(w) == i)
    bad_words = [ids, tokenizer.encode(" " + word.lstrip())]
    params = dataclasses.replace(PLAIN, bad_words=[word])
    (output,) = serve(fresh_engine(llm), (PROMPT, params))
    tokens = tokens_of(output)
    assert tokens[: start + num_tokens - 1] == plain[: start + num_tokens - 1]
    assert tokens[start + num_tokens - 1] != plain[start + num_tokens - 1]
    assert not any(tokens[k : k + num_tokens] == ids for k in range(len(tokens)))
    follow(PROMPT, tokens, params, bad_words)
