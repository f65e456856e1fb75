"""Model families against golden logits of HF Transformers (`scripts/make_tiny_models.py`), through the paged cache."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged import kv_cache
from jaxpaged.checkpoints.reader import open_checkpoint
from jaxpaged.kv_cache import PagedAttend
from jaxpaged.models.layers import Embedding, Linear
from jaxpaged.models.llama import llama_config
from jaxpaged.models.loading import load_params
from jaxpaged.models.registry import FAMILIES, family_of

TINY = Path(__file__).parent / "data" / "tiny"
BLOCK_SIZE = 8


@functools.cache
def load(name: str, dtype="float32"):
    reader = open_checkpoint(TINY / name)
    family = family_of(reader.hf_config, name)
    config = family.config(reader.hf_config, name)
    params = load_params(reader, family.weights(config), family.ignored_tensors, jnp.dtype(dtype))
    return family.module(config, jnp.dtype(dtype)), params


@functools.partial(jax.jit, static_argnames="module")
def step(module, params, cache, tokens, positions, attend):
    hidden, cache = module.apply(params, tokens, positions, cache, attend)
    return module.apply(params, hidden, method="logits"), cache


def paged_logits(module, params, tokens: list[int], chunks: list[int]) -> np.ndarray:
    """Logits of all tokens, computed in chunks through a pool whose blocks lie in random order."""
    c = module.config
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = kv_cache.allocate(c, num_blocks + 1, BLOCK_SIZE, module.param_dtype)
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32) + 1

    logits, start = [], 0
    for count in chunks:
        positions = np.arange(start, start + count, dtype=np.int32)
        attend = PagedAttend(
            slots=jnp.asarray(table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE),
            block_tables=jnp.asarray(table[None]),
            kv_lens=jnp.array([start + count], jnp.int32),
            query_starts=jnp.array([0, count], jnp.int32),
        )
        chunk = jnp.asarray(tokens[start : start + count], jnp.int32)
        out, cache = step(module, params, cache, chunk, jnp.asarray(positions), attend)
        logits.append(np.asarray(out))
        start += count
    return np.concatenate(logits)


@pytest.mark.parametrize("chunks", [[70], [33, 33, 1, 1, 1, 1]], ids=["whole", "chunks and decodes"])
@pytest.mark.parametrize("name", sorted(p.name for p in TINY.iterdir()))
def test_logits_equal_transformers(name, chunks):
    module, params = load(name)
    golden = json.loads((TINY / name / "golden.json").read_text())
    expected = np.load(TINY / name / "golden_logits.npy")
    logits = paged_logits(module, params, golden["prompt_ids"], chunks)
    np.testing.assert_allclose(logits, expected, atol=2e-4)


@pytest.mark.parametrize("name", sorted(p.name for p in TINY.iterdir()))
def test_greedy_tokens_and_logprobs_equal_transformers(name):
    module, params = load(name)
    golden = json.loads((TINY / name / "golden.json").read_text())
    tokens = golden["prompt_ids"] + golden["tokens"]
    logits = paged_logits(module, params, tokens, [len(golden["prompt_ids"])] + [1] * len(golden["tokens"]))
    predicting = logits[len(golden["prompt_ids"]) - 1 : -1]
    assert predicting.argmax(-1).tolist() == golden["tokens"]
    logprobs = jax.nn.log_softmax(predicting)[np.arange(len(golden["tokens"])), golden["tokens"]]
    np.testing.assert_allclose(logprobs, golden["logprobs"], atol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_and_keeps_its_dtype(dtype):
    module, params = load("llama_gqa", dtype)
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {dtype}
    golden = json.loads((TINY / "llama_gqa" / "golden.json").read_text())
    expected = np.load(TINY / "llama_gqa" / "golden_logits.npy")
    logits = paged_logits(module, params, golden["prompt_ids"], [70])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).mean() < {"bfloat16": 0.08, "float16": 0.01}[dtype]


def test_layers_are_traced_once():
    module, params = load("llama_gqa")
    cache = kv_cache.allocate(module.config, 3, BLOCK_SIZE, jnp.float32)
    ints = jnp.zeros(4, jnp.int32)
    attend = PagedAttend(ints, jnp.zeros((2, 2), jnp.int32), ints[:2], ints[:3])
    text = jax.jit(module.apply).lower(params, ints, ints, cache, attend).as_text()
    assert text.count("func.func private @core_fn(") == 1  # Flax's name for what nn.jit wraps
    assert text.count("call @core_fn(") == module.config.num_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_float32_products_ask_for_a_precision(dtype):
    linear, head = Linear(8, jnp.dtype(dtype)), Embedding(8, 4, jnp.dtype(dtype))
    x = jnp.zeros((2, 4), dtype)

    def products(x):
        first = linear.apply({"params": {"kernel": jnp.zeros((4, 8), dtype)}}, x)
        return first, head.apply({"params": {"embedding": jnp.zeros((8, 4), dtype)}}, x, method="attend")

    text = jax.jit(products).lower(x).as_text()
    assert text.count("stablehlo.dot_general") == 2
    assert text.count("HIGHEST, HIGHEST") == (2 if dtype == "float32" else 0)


class Tensors:
    """A checkpoint in memory."""

    path = "here"

    def __init__(self, config):
        sources = [s for group in FAMILIES["LlamaForCausalLM"].weights(config).values() for s in group]
        self.tensors = {s.name: np.zeros(s.shape, np.float32) for s in sources}

    def shapes(self):
        return {name: x.shape for name, x in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


HF = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def load_altered(alter):
    config = llama_config(HF, "here")
    tensors = Tensors(config)
    alter(tensors.tensors)
    family = FAMILIES["LlamaForCausalLM"]
    return load_params(tensors, family.weights(config), family.ignored_tensors, jnp.dtype("float32"))


def test_a_missing_tensor_is_named():
    with pytest.raises(ValueError, match=r"here: tensor model\.norm\.weight missing from the checkpoint"):
        load_altered(lambda t: t.pop("model.norm.weight"))


def test_an_unexpected_tensor_is_named():
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\.7\.mystery in the checkpoint, but the model has no use"
    ):
        load_altered(lambda t: t.update({"model.layers.7.mystery": np.zeros(1)}))


def test_a_wrong_shape_is_named_with_both_shapes():
    with pytest.raises(ValueError, match=r"q_proj\.weight has shape \(16, 8\), the model needs \(16, 16\)"):
        load_altered(lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": np.zeros((16, 8))}))


def test_buffers_and_a_tied_head_are_left_unread():
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4), "lm_head.weight": np.zeros((32, 16))}
    params = load_altered(lambda t: t.update(extra))
    assert "head" not in params["params"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "here: hidden_size=None must be an integer from 1"),
        ({"hidden_size": True}, "hidden_size=True must be"),
        ({"vocab_size": 0}, "vocab_size=0 must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be an integer from 1 to 1024"),
        ({"num_attention_heads": -4}, "num_attention_heads=-4 must be"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads='x' must be"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings=1000000000000 must be"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be a positive number"),
        ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
        ({"dtype": "int3"}, "dtype='int3' is not supported"),
        ({"eos_token_id": [[1]]}, r"eos_token_id: \[\[1\]\] must be a token id"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported; supported: 'default', 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "lacks low_freq_factor"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
    ],
)
def test_configurations_that_are_not_supported_say_so(change, message):
    with pytest.raises(ValueError, match=message):
        llama_config({**HF, **change}, "here")


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"architectures \['GPT9'\] are not supported; supported: LlamaForCausalLM"):
        family_of({"architectures": ["GPT9"]}, "here")
    for odd in (5, "LlamaForCausalLM", [["a"]], None):
        with pytest.raises(ValueError, match="are not supported; supported: LlamaForCausalLM"):
            family_of({"architectures": odd}, "here")
