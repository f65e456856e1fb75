"""Published shapes with random weights: their sizes, how parameters are made, an engine without a tokenizer."""

import dataclasses
import logging
import math
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.device_memory import DeviceMemory, device_memory
from jaxpaged.models import random_params as random_params_module
from jaxpaged.models.random_params import random_params
from jaxpaged.models.registry import FAMILIES
from jaxpaged.models.shapes import SHAPES, shape, with_random_weights
from jaxpaged.startup import StartupTimes, summary

PUBLISHED = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
}
IDS = SamplingParams(temperature=0, max_tokens=4, detokenize=False)


class _QueriesAlone(NamedTuple):
    """An `attend` that gives the queries back, the first four heads."""

    def __call__(self, qkv, angles, kv):
        return qkv[:, :4], kv


@pytest.fixture(scope="module")
def random_llm():
    return LLM("random:tiny", max_model_len=32, num_kv_blocks=4, max_num_seqs=1, max_num_batched_tokens=1)


def weights_of(name: str):
    config = shape(name)
    return FAMILIES[config.architecture].weights(config)


def test_every_shape_but_the_tiny_one_has_as_many_parameters_as_published():
    counted = {name: sum(math.prod(s.shape) for group in weights_of(name).values() for s in group) for name in SHAPES}
    del counted["tiny"]
    assert counted == PUBLISHED


def test_an_unknown_shape_names_those_that_there_are():
    with pytest.raises(ValueError, match=r"there is no shape 'opt-13b'; there are llama-7b, llama-13b, .*, tiny") as e:
        LLM("random:opt-13b")
    assert "model='random:opt-13b'" in str(e.value)


def test_a_shapes_name_means_random_weights_where_that_is_asked_for():
    assert with_random_weights("llama-13b") == "random:llama-13b"
    assert with_random_weights("./llama-13b") == "./llama-13b"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_have_the_models_tree_and_the_documented_spread(dtype):
    c = dataclasses.replace(shape("tiny"), num_layers=1)
    family = FAMILIES[c.architecture]
    params = random_params(family.weights(c), jnp.dtype(dtype))
    module = family.module(c, jnp.dtype(dtype))

    tokens = jnp.arange(3, dtype=jnp.int32)

    def init(key):
        return module.init(key, tokens, tokens, (None,), _QueriesAlone())

    expected = jax.eval_shape(init, jax.random.key(0))["params"]
    ours = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params["params"])
    ours.pop("head")  # which `init` does not reach
    assert ours == expected
    layer = params["params"]["layers_0"]
    kernel = np.asarray(layer["mlp"]["down"]["kernel"], np.float32)
    assert kernel.std() == pytest.approx(128**-0.5, rel=0.05)
    assert abs(kernel.mean()) < 0.01
    assert np.isfinite(kernel).all()
    assert np.asarray(params["params"]["embed"]["embedding"], np.float32).std() == pytest.approx(0.02, rel=0.05)
    assert (np.asarray(layer["mlp_norm"]["scale"], np.float32) == 1).all()
    assert not np.array_equal(kernel[:64, :64], np.asarray(layer["attention"]["out"]["kernel"], np.float32)[:64, :64])


def test_the_same_seed_gives_the_same_parameters():
    weights = weights_of("tiny")
    one, two, other = (
        np.asarray(random_params(weights, jnp.dtype("float32"), seed)["params"]["head"]["embedding"])
        for seed in (0, 0, 1)
    )
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_weights_that_do_not_fit_are_refused_with_the_numbers_before_any_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(random_params_module, "_normal", lambda *args, **kwargs: made.append(args))
    monkeypatch.setattr(random_params_module, "device_memory", lambda: DeviceMemory(110 * 2**30, 10 * 2**30))
    message = "weights take 131.4 GiB in bfloat16, more than the 100.0 GiB of memory that are free"
    with pytest.raises(ValueError, match=message):
        LLM("random:llama-3-70b", dtype="bfloat16", max_model_len=128)
    assert not made
    random_params(weights_of("llama-3-8b"), jnp.dtype("bfloat16"))  # 15.0 GiB
    assert made


@pytest.mark.parametrize("stats", [{"bytes_limit": 10 * 2**20, "bytes_in_use": 9 * 2**20}, None])
def test_free_memory_is_what_the_device_tells_or_the_machines(monkeypatch, stats):
    class Device:
        def memory_stats(self):
            return stats

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    free = device_memory().free
    assert free == 2**20 if stats else 2**30 < free < 2**50


def test_token_ids_are_served_without_a_tokenizer(random_llm):
    (output,) = random_llm.generate([1, 2, 3], dataclasses.replace(IDS, logprobs=2), use_tqdm=False)
    completion = output.outputs[0]
    assert (len(completion.token_ids), completion.text, completion.finish_reason) == (4, "", "length")
    assert all(np.isfinite(entry.logprob) for token in completion.logprobs for entry in token.values())
    assert all(entry.decoded_token is None for token in completion.logprobs for entry in token.values())


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("text", IDS),
        ([1, 2], dataclasses.replace(IDS, detokenize=True)),
        ([1, 2], dataclasses.replace(IDS, bad_words=["bad"])),
    ],
)
def test_what_needs_a_tokenizer_is_refused(random_llm, prompt, params):
    with pytest.raises(ValueError, match=r"prompt 0: the model has no tokenizer: give token ids, and SamplingParams\("):
        random_llm.generate([prompt], params, use_tqdm=False)
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        random_llm.chat([{"role": "user", "content": "hello"}])
    assert not random_llm.engine.has_unfinished


def test_the_start_is_told_by_phase(random_llm):
    phases = ["device", "checkpoint", "sizing", "weights", "loading", "tracing", "compiling", "pool"]
    assert list(random_llm.startup.seconds) == phases
    assert min(random_llm.startup.seconds.values()) >= 0
    assert random_llm.startup.seconds["tracing"] > 0
    assert random_llm.startup.total == pytest.approx(sum(random_llm.startup.seconds.values()))


def test_phases_add_up_and_count_when_their_body_fails(caplog):
    times = StartupTimes()
    with caplog.at_level(logging.INFO, "jaxpaged"):
        for _ in range(2):
            with times.phase("sleeping"):
                time.sleep(0.01)
        with pytest.raises(RuntimeError), times.phase("failing"):
            raise RuntimeError
    assert 0.02 <= times.seconds["sleeping"] < 1
    assert list(times.seconds) == ["sleeping", "failing"]
    assert [record.message.split(":")[0] for record in caplog.records] == ["sleeping", "sleeping", "failing"]
    assert summary({"weights": 2.0, "device": 0.04, "compiling": 3.21}) == "5.2 s (weights 2.0, compiling 3.2)"
    assert summary({}) == "0.0 s"
