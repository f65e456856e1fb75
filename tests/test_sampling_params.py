"""SamplingParams: vLLM's defaults, every rule with a message that names the field, and snapshots of lists."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from jaxpaged.sampling_params import SamplingParams, validate_for


def test_defaults_are_vllms() -> None:
    expected = {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
        "detokenize": True,
        "skip_special_tokens": True,
    }
    assert dataclasses.asdict(SamplingParams()) == expected


NAN, INF = float("nan"), float("inf")
NOT_INTS = [True, 1.0, "1", None, [1]]
NOT_FLOATS = [True, "1", None, [1.0], NAN, INF, -INF, 1j]
FORBIDDEN: dict[str, list[Any]] = {
    "n": [0, 1025, -1, *NOT_INTS],
    "temperature": [-0.1, 10**400, *NOT_FLOATS],
    "top_k": [-2, *NOT_INTS],
    "top_p": [0, -0.5, 1.0001, *NOT_FLOATS],
    "min_p": [-0.1, 1.1, *NOT_FLOATS],
    "seed": [True, 1.0, "1", 2**64, -(2**63) - 1],
    "max_tokens": [0, -1, True, 1.5, "16"],
    "min_tokens": [-1, 17, *NOT_INTS],
    "stop": ["", [""], ["a", ""], 3, b"x", [1], {"a": 1}],
    "stop_token_ids": ["12", [1.0], [True], [-1], ["1"], 3, {1: 2}],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "ignore_eos": [0, 1, None, "yes"],
    "logprobs": [-1, True, 1.0, "1"],
    "prompt_logprobs": [-1, True, 1.0, "1"],
    "presence_penalty": [-2.1, 2.1, *NOT_FLOATS],
    "frequency_penalty": [-2.1, 2.1, *NOT_FLOATS],
    "repetition_penalty": [0, -1, *NOT_FLOATS],
    "logit_bias": [[1], {"1": 1.0}, {1.0: 1.0}, {-1: 1.0}, {1: 100.5}, {1: NAN}, {1: "1"}, {1: True}],
    "allowed_token_ids": [[], "12", [1.0], [-1], 3],
    "bad_words": ["word", [""], [1], {"a": 1}],
    "detokenize": [0, 1, None],
    "skip_special_tokens": [0, 1, None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, vs in FORBIDDEN.items() for value in vs])
def test_forbidden_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field}[^\n]+: [^\n]+$"):
        SamplingParams(**{field: value})


def test_every_field_has_forbidden_values() -> None:
    assert set(FORBIDDEN) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    "allowed",
    [
        {"temperature": 0},
        {"temperature": np.float32(0.5)},
        {"top_k": -1},
        {"top_k": np.int32(5)},
        {"top_p": 1},
        {"min_p": 1},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 10_000},
        {"max_tokens": 5, "min_tokens": 5},
        {"stop": []},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.1},
        {"logit_bias": {0: -100, 1: 100}},
        {"stop_token_ids": range(3), "allowed_token_ids": {1, 2}},
        {"detokenize": False, "stop_token_ids": [1]},
    ],
)
def test_edges_are_allowed(allowed: dict[str, Any]) -> None:
    params = SamplingParams(**allowed)
    assert {name: getattr(params, name) for name in allowed} == allowed


def test_stop_strings_need_detokenisation() -> None:
    with pytest.raises(ValueError, match=r"^stop='x'.*detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_unknown_and_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        SamplingParams(1)  # pyright: ignore[reportCallIssue]


def test_messages_stay_on_one_short_line() -> None:
    with pytest.raises(ValueError, match="stop") as caught:
        SamplingParams(stop=["line\nbreak" * 1000] * 1000 + [""])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_properties_are_snapshots() -> None:
    stop, ids, bias, words = ["a", "b"], [3, 1, 3], {7: 1, 5: -100}, ["w"]
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias, allowed_token_ids=ids, bad_words=words)
    for given in (stop, ids, bias, words):
        given.clear()
    assert params.stop_strings == ("a", "b")
    assert params.stop_ids == params.allowed_ids == (3, 1)
    assert params.bias_items == ((7, 1.0), (5, -100.0))
    assert params.bad_word_strings == ("w",)
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams().stop_strings == SamplingParams().stop_ids == SamplingParams().bias_items == ()
    assert SamplingParams().allowed_ids is None


def test_params_are_values() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    assert hash(params) == hash(SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, stop=["b"]).stop_strings == ("b",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("given", "greedy", "history", "edits"),
    [
        ({}, False, False, False),
        ({"temperature": 0}, True, False, False),
        ({"temperature": 9e-6}, True, False, False),
        ({"temperature": 1e-5}, False, False, False),
        ({"presence_penalty": 0.1}, False, True, True),
        ({"frequency_penalty": -0.1}, False, True, True),
        ({"repetition_penalty": 0.9}, False, True, True),
        ({"bad_words": ["x"]}, False, True, True),
        ({"bad_words": []}, False, False, False),
        ({"logit_bias": {1: 1}}, False, False, True),
        ({"logit_bias": {}}, False, False, False),
        ({"allowed_token_ids": [1]}, False, False, True),
        ({"min_tokens": 1}, False, False, True),
    ],
)
def test_what_the_engine_asks(given: dict[str, Any], greedy: bool, history: bool, edits: bool) -> None:
    params = SamplingParams(**given)
    assert (params.is_greedy, params.needs_host_history, params.has_logit_edits) == (greedy, history, edits)


def test_seed_words() -> None:
    assert SamplingParams().seed_words is None
    assert SamplingParams(seed=-1).seed_words is None
    assert SamplingParams(seed=0).seed_words == (0, 0)
    assert SamplingParams(seed=(7 << 32) + 5).seed_words == (7, 5)
    assert SamplingParams(seed=-2).seed_words == (2**32 - 1, 2**32 - 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {100: 1}}, r"^logit_bias=100 .*0 to 99"),
        ({"allowed_token_ids": [5, 100]}, r"^allowed_token_ids=100 .*0 to 99"),
        ({"stop_token_ids": [2**40]}, rf"^stop_token_ids={2**40} .*0 to 99"),
        ({"logprobs": 21}, r"^logprobs=21 .*max_logprobs=20"),
        ({"prompt_logprobs": 21}, r"^prompt_logprobs=21 .*max_logprobs=20"),
    ],
)
def test_validate_for_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_for(SamplingParams(**given), vocab_size=100, max_logprobs=20)


def test_validate_for_accepts_the_edges() -> None:
    edges = SamplingParams(logit_bias={99: 1}, allowed_token_ids=[0, 99], stop_token_ids=[99], logprobs=20)
    validate_for(edges, vocab_size=100, max_logprobs=20)
    validate_for(SamplingParams(), vocab_size=1, max_logprobs=0)
    with pytest.raises(ValueError, match="logprobs=20 is more than there are tokens"):
        validate_for(SamplingParams(logprobs=20), vocab_size=10, max_logprobs=20)


def test_stop_strings_are_bounded() -> None:
    SamplingParams(stop=["x" * 4000])
    for stop in (["x" * 4001], ["ab"] * 2001):
        with pytest.raises(ValueError, match=r"stop=.* is longer than 4000 characters in all"):
            SamplingParams(stop=stop)
