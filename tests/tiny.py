"""The tiny model for tests of the whole engine: goldens, raw logits by dense attention, engines, a check.

`fresh_engine` shares the compiled runner of the session's `tiny_llm`, so that a test may have an engine with a
smaller pool, fewer sequences or another seed without compiling anything.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged import LLM, RequestOutput, SamplingParams
from jaxpaged.checkpoints.reader import open_checkpoint
from jaxpaged.engine import Engine
from jaxpaged.models.loading import load_params
from jaxpaged.models.registry import family_of
from jaxpaged.scheduler import Scheduler

PATH = Path(__file__).parent / "data" / "tiny" / "llama_tied_sharded"
GOLDEN = json.loads((PATH / "golden.json").read_text())
PROMPT, TOKENS = GOLDEN["prompt_ids"], GOLDEN["tokens"]
EOS = 2
VOCAB = 288
MAX_LEN = 128
HEADS = KV_HEADS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=len(TOKENS), ignore_eos=True)


def prompt(length: int, salt: int = 0) -> list[int]:
    """Token ids that look arbitrary, none of them special."""
    return [3 + (salt * 61 + i * i * 7 + i * 13) % (VOCAB - 3) for i in range(length)]


def fresh_engine(llm: LLM, *, seed: int = 0, **limits: int) -> Engine:
    """An engine of its own on the compiled runner; `limits` are fields of SchedulerConfig, at most those compiled.

    Admission leaves no reserve, so that a small pool soon preempts.
    """
    engine = llm.engine
    llm.reset_prefix_cache()  # the new engine will write into blocks that the other one remembers
    return Engine(
        scheduler=Scheduler(dataclasses.replace(engine.scheduler.config, **{"growth_reserve": 0, **limits})),
        runner=engine.runner,
        tokenizer=engine.tokenizer,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
        seed=seed,
        max_logprobs=20,
    )


def serve(engine: Engine, *requests: tuple[list[int] | str, SamplingParams]) -> list[RequestOutput]:
    """Adds the requests, steps until all have ended, and checks the books after each step."""
    completions = [engine.add_request(f"serve {i}", p, params) for i, (p, params) in enumerate(requests)]
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return [c.output() for c in completions]


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def leaves_nothing_behind(llm: LLM) -> Iterator[LLM]:
    """Body of a fixture: after the test no block is in use, nothing was traced, and the pool lies where it lay."""
    runner = llm.engine.runner
    traces, addresses = runner.num_traces, runner.addresses()
    yield llm
    assert not llm.engine.has_unfinished
    assert llm.cache_stats().num_blocks_used == 0
    llm.engine.scheduler.check_integrity()
    assert runner.num_traces == traces
    assert runner.addresses() == addresses


def rotated(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding by complex multiplication: dimension `i` and `i + head_dim / 2` are real and imaginary part."""
    real, imaginary = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (real + 1j * imaginary) * (angles[0] + 1j * angles[1])[:, None]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


class _DenseAttend(NamedTuple):
    """Causal attention over one sequence, no cache."""

    def __call__(self, qkv: jax.Array, angles: tuple[jax.Array, jax.Array], kv: None) -> tuple[jax.Array, None]:
        q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
        q, k = rotated(q, angles), rotated(k, angles)
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * q.shape[-1] ** -0.5
        causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest"), kv


@functools.cache
def _dense_logits():
    reader = open_checkpoint(PATH)
    family = family_of(reader.hf_config, "tiny")
    config = family.config(reader.hf_config, "tiny")
    dtype = jnp.dtype("float32")
    params = load_params(reader, family.weights(config), family.ignored_tensors, dtype)
    module = family.module(config, dtype)

    @jax.jit
    def logits(tokens):
        caches = (None,) * config.num_layers
        hidden, _ = module.apply(params, tokens, jnp.arange(MAX_LEN, dtype=jnp.int32), caches, _DenseAttend())
        return module.apply(params, hidden, method="logits")

    return logits


def raw_logits(tokens: list[int]) -> np.ndarray:
    """The model's logits after each token, without pool, scheduler or sampler: float32 [len(tokens), VOCAB]."""
    padded = np.zeros(MAX_LEN, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_dense_logits()(padded))[: len(tokens)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
