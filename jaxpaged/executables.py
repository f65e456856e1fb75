"""The step's device functions, compiled ahead for every bucket, so that nothing compiles while serving.

A step is two executables that run back to back: `forward` (KV write, attention, logits of each row's last token;
the pool is donated) and `sample`. Apart, because requests with logit edits or penalties pass through
`logit_passes` between the two, and the variants of sampling must not multiply the large executables. What only some
steps ask for runs for them alone: block copies before `forward`, alternatives and prompt log-probabilities after it.
Nothing branches on the device, where the host would wait for the branch to be known.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxpaged import batch
from jaxpaged.batch import Bucket, StepInputs, StepShape
from jaxpaged.kv_cache import KVCache, LayerKV, PagedAttend
from jaxpaged.sampler import Alternatives, Draws, Rating, SampleOutput, SamplingInputs, alternatives, rate, sample
from jaxpaged.startup import StartupTimes
from pallas_kernels import copy_blocks

_FEW_COPIES = 16
_LOGPROB_CHUNK = 64  # prompt tokens whose logits are held at once


class ForwardOutput(NamedTuple):
    """What `forward` leaves on the device."""

    hidden: Float[Array, "tokens hidden"]
    logits: Float[Array, "rows vocab"]  # of each row's last token, float32
    sampling: SamplingInputs
    cache: KVCache


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The traceable functions of a step, for one model and pool layout."""

    module: nn.Module
    shape: StepShape
    max_rows: int
    max_logprobs: int
    traces: Counter[str] = dataclasses.field(default_factory=Counter)
    """How often each function was traced: after warm-up these numbers stand still."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `apply`, whose declared return type knows of no method but `__call__`."""
        return self.module.apply(*args, **kwargs)

    def forward(self, params: Any, cache: KVCache, buffer: Array, previous: Array, *, bucket: Bucket) -> ForwardOutput:
        """Runs the model on a packed step; `previous` holds the ids that the step before sampled, by row."""
        self.traces["forward"] += 1
        x = batch.unpack(buffer, bucket, self.shape)
        tokens = jnp.where(x.sources >= 0, previous[x.sources.clip(0)], x.tokens)
        attend = PagedAttend(
            x.slots, x.block_tables, x.kv_lens, x.query_starts, max_query_len=1 if bucket.decode else None
        )
        hidden, cache = self._apply(params, tokens, x.positions, cache, attend)
        logits = self._apply(params, hidden[x.last_tokens], method="logits")
        return ForwardOutput(hidden, logits, _sampling_inputs(x), cache)

    def copy_blocks(self, cache: KVCache, pairs: Int32[Array, "2 pairs"]) -> KVCache:
        """Copies blocks `pairs[0]` over blocks `pairs[1]` in all layers; a destination past the pool is padding."""
        self.traces["copy_blocks"] += 1
        copy_layer = jax.jit(copy_blocks)  # one trace for all layers
        return tuple(LayerKV(*copy_layer(kv.k, kv.v, pairs[0], pairs[1])) for kv in cache)

    def sample(
        self, raw: Array, edited: Array, sampling: SamplingInputs, *, draws: Draws
    ) -> tuple[Array, SampleOutput]:
        """Token ids by row, padded to `max_rows` (the next step's `previous`), and all that was sampled."""
        self.traces["sample"] += 1
        output = sample(raw, edited, sampling, draws=draws)
        return jnp.pad(output.token_ids, (0, self.max_rows - raw.shape[0])), output

    def alternatives(self, raw: Array) -> Alternatives:
        """The likeliest tokens of each row."""
        self.traces["alternatives"] += 1
        return alternatives(raw, self.max_logprobs)

    def prompt_logprobs(self, params: Any, hidden: Array, targets: Array) -> tuple[Rating, Alternatives]:
        """Rates `targets[t]` by the distribution that follows token `t`, a few tokens at a time."""
        self.traces["prompt_logprobs"] += 1

        def one(chunk: tuple[Array, Array]) -> tuple[Rating, Alternatives]:
            logits = self._apply(params, chunk[0], method="logits")
            return rate(logits, chunk[1]), alternatives(logits, self.max_logprobs)

        tokens = hidden.shape[0]
        size = min(_LOGPROB_CHUNK, tokens)
        padding = -tokens % size
        chunks = (
            jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, size, hidden.shape[1]),
            jnp.pad(targets, (0, padding)).reshape(-1, size),
        )
        return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:tokens], jax.lax.map(one, chunks))


def _sampling_inputs(x: StepInputs) -> SamplingInputs:
    def as_float(words: Array) -> Array:
        return jax.lax.bitcast_convert_type(words, jnp.float32)

    return SamplingInputs(
        temperature=as_float(x.sampling[:, 0]),
        top_k=x.sampling[:, 1],
        top_p=as_float(x.sampling[:, 2]),
        min_p=as_float(x.sampling[:, 3]),
        seeds=jax.lax.bitcast_convert_type(x.sampling[:, 4:6], jnp.uint32),
        positions=x.sample_positions,
    )


def draws_of(sampling: np.ndarray, vocab_size: int) -> Draws:
    """The most that the rows of a packed step (`StepInputs.sampling`) ask of the sampler."""
    temperature, top_k, top_p = sampling[:, 0], sampling[:, 1], sampling[:, 2].view(np.float32)
    is_random = temperature != 0
    if not is_random.any():
        return Draws.GREEDY
    return Draws.CUT if (is_random & ((top_k < vocab_size) | (top_p < 1))).any() else Draws.PLAIN


class Executables:
    """Compiled step functions: `forward` by bucket, `sample` by rows and draws, `alternatives` by rows,
    `prompt_logprobs` by tokens, `copy_blocks` by pairs."""

    def __init__(
        self,
        functions: StepFunctions,
        params: Any,
        cache: KVCache,
        buckets: Iterable[Bucket],
        startup: StartupTimes,
    ) -> None:
        """Compiles everything. Of `params` and `cache` only shapes and dtypes are read."""
        params, cache = _abstract(params), _abstract(cache)
        # Tracing takes one core, compiling as many as there are.
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            forward, sample, alternatives, prompt_logprobs, copy_blocks = {}, {}, {}, {}, {}
            with startup.phase("tracing"):
                for bucket in buckets:
                    lowered = lower_forward(functions, params, cache, bucket)
                    forward[bucket] = pool.submit(lowered.compile)
                    out = lowered.out_info
                    if bucket.rows not in alternatives:
                        for draws in Draws:
                            jitted = jax.jit(functools.partial(functions.sample, draws=draws))
                            lowered = jitted.lower(out.logits, out.logits, out.sampling)
                            sample[bucket.rows, draws] = pool.submit(lowered.compile)
                        lowered = jax.jit(functions.alternatives).lower(out.logits)
                        alternatives[bucket.rows] = pool.submit(lowered.compile)
                    if not bucket.decode:
                        lowered = jax.jit(functions.prompt_logprobs).lower(params, out.hidden, _ints(bucket.tokens))
                        prompt_logprobs[bucket.tokens] = pool.submit(lowered.compile)
                for size in _copy_sizes(functions.max_rows):
                    pairs = jax.ShapeDtypeStruct((2, size), jnp.int32)
                    lowered = jax.jit(functions.copy_blocks, donate_argnames="cache").lower(cache, pairs)
                    copy_blocks[size] = pool.submit(lowered.compile)
            with startup.phase("compiling"):
                self.forward = {key: future.result() for key, future in forward.items()}
                self.sample = {key: future.result() for key, future in sample.items()}
                self.alternatives = {key: future.result() for key, future in alternatives.items()}
                self.prompt_logprobs = {key: future.result() for key, future in prompt_logprobs.items()}
                self.copy_blocks = {key: future.result() for key, future in copy_blocks.items()}


def _copy_sizes(max_rows: int) -> list[int]:
    """Numbers of pairs to compile for, ascending: few for a fork, and one for each row of a step."""
    return sorted({min(_FEW_COPIES, max_rows), max_rows})


def lower_forward(functions: StepFunctions, params: Any, cache: KVCache, bucket: Bucket) -> jax.stages.Lowered:
    """`StepFunctions.forward` for one bucket, lowered for the default device; takes the cache by donation."""
    forward = jax.jit(functools.partial(functions.forward, bucket=bucket), donate_argnames="cache")
    buffer = _ints(batch.buffer_size(bucket, functions.shape))
    return forward.lower(params, cache, buffer, _ints(functions.max_rows))


def step_temporaries(functions: StepFunctions, params: Any, cache: KVCache, bucket: Bucket) -> int:
    """Bytes that a step of a bucket needs beside parameters and pool, as XLA tells."""
    lowered = lower_forward(functions, _abstract(params), _abstract(cache), bucket)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None, "XLA tells the memory of every program on CPU and GPU"
    out = lowered.out_info
    kept = sum(math.prod(x.shape) * x.dtype.itemsize for x in (out.hidden, out.logits))
    # Sampling holds a few images of the logits: raw, edited, scaled, weights.
    return analysis.temp_size_in_bytes + kept + 4 * math.prod(out.logits.shape) * 4


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _ints(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)
