"""The step's device functions, compiled ahead for every bucket, so that nothing compiles while serving.

A step is two executables that run back to back, after a small one that moves its input into place (`stage`): `forward`
(KV write, attention, logits of each row's last token; the pool is donated) and `sample`. Apart, because requests with
logit edits or penalties pass through `logit_passes` between the two, and the variants of sampling must not multiply the
large executables. What only some steps ask for runs for them alone: block copies before `forward`, alternatives and
prompt log-probabilities after it. What passes from one to the next stays in its place (`step_buffers`).
Nothing branches on the device, where the host would wait for the branch to be known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from jaxpaged import batch, logit_passes
from jaxpaged.batch import Bucket, StepInputs, StepShape
from jaxpaged.compiling import Program
from jaxpaged.kv_cache import KVCache, LayerKV, PagedAttend
from jaxpaged.models.config import ModelConfig
from jaxpaged.sampler import Alternatives, Draws, Rating, SampleOutput, SamplingInputs, alternatives, rate, sample
from pallas_kernels import copy_blocks

_SAMPLING_IMAGES = 4  # as large as the logits, at once: raw, edited, scaled, weights
_FEW_COPIES = 16
_LOGPROB_CHUNK = 64  # prompt tokens whose logits are held at once
# From so many tokens on, matrix products are cuBLAS's: XLA's own Triton kernels gain nothing (docs/performance.md), and
# to choose among dozens of them for every product of every bucket makes a start long.
_CUBLAS_TOKENS = 64


class ForwardOutput(NamedTuple):
    """What `forward` leaves on the device."""

    hidden: Float[Array, "tokens hidden"]
    logits: Float[Array, "rows vocab"]  # of each row's last token, float32
    cache: KVCache


@dataclasses.dataclass(frozen=True)
class StepFunctions:
    """The traceable functions of a step, for one model and pool layout."""

    module: nn.Module
    model: ModelConfig
    dtype: jnp.dtype
    """Of activations, as of the parameters."""
    shape: StepShape
    max_rows: int
    max_logprobs: int
    traces: Counter[str] = dataclasses.field(default_factory=Counter)
    """How often each function was traced: after start-up these numbers stand still."""

    def describe(self) -> str:
        """All that makes these functions other than those of another engine, as text."""
        return f"{self.module} {self.model} {self.dtype} {self.shape} {self.max_rows} {self.max_logprobs}"

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `apply`, whose declared return type knows of no method but `__call__`."""
        return self.module.apply(*args, **kwargs)

    def stage(self, packed: Array, place: Array, *, bucket: Bucket) -> tuple[Array, SamplingInputs]:
        """A packed step, in the place of the last one of its bucket; and what `sample` needs of it."""
        self.traces["stage"] += 1
        del place
        return packed, _sampling_inputs(batch.unpack(packed, bucket, self.shape))

    def forward(
        self,
        params: Any,
        cache: KVCache,
        packed: Array,
        previous: Array,
        hidden: Array,
        logits: Array,
        *,
        bucket: Bucket,
    ) -> ForwardOutput:
        """Runs the model on a packed step; `previous` holds the ids that the step before sampled, by row.

        `hidden` and `logits` are those of an earlier step, in whose places the new ones come.
        """
        self.traces["forward"] += 1
        del hidden, logits
        x = batch.unpack(packed, bucket, self.shape)
        tokens = jnp.where(x.sources >= 0, previous[x.sources.clip(0)], x.tokens)
        attend = PagedAttend(
            x.slots, x.block_tables, x.kv_lens, x.query_starts, max_query_len=1 if bucket.decode else None
        )
        new_hidden, cache = self._apply(params, tokens, x.positions, cache, attend)
        new_logits = self._apply(params, new_hidden[x.last_tokens], method="logits")
        return ForwardOutput(new_hidden, new_logits, cache)

    def copy_blocks(self, cache: KVCache, pairs: Int32[Array, "2 pairs"]) -> KVCache:
        """Copies blocks `pairs[0]` over blocks `pairs[1]` in all layers; a destination past the pool is padding."""
        self.traces["copy_blocks"] += 1
        copy_layer = jax.jit(copy_blocks)  # one trace for all layers
        return tuple(LayerKV(*copy_layer(kv.k, kv.v, pairs[0], pairs[1])) for kv in cache)

    def sample(
        self, raw: Array, edited: Array, sampling: SamplingInputs, previous: Array, *, draws: Draws
    ) -> tuple[Array, SampleOutput]:
        """Token ids by row, padded to `max_rows`, in the place of the `previous` ones, and all that was sampled."""
        self.traces["sample"] += 1
        del previous
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
    """Compiled step functions: `stage` and `forward` by bucket, `sample` by rows and draws, `alternatives` by rows,
    `edits` (the passes of `logit_passes`, by name) by rows, `prompt_logprobs` by tokens, `copy_blocks` by pairs."""

    def __init__(self, functions: StepFunctions, compiled: Mapping[tuple[str, Any], jax.stages.Compiled]) -> None:
        """Of all `step_programs` of the functions, compiled."""
        self.functions = functions

        def of(kind: str) -> dict[Any, jax.stages.Compiled]:
            return {size: executable for (k, size), executable in compiled.items() if k == kind}

        self.stage = of("stage")
        self.forward = of("forward")
        self.sample = of("sample")
        self.alternatives = of("alternatives")
        self.prompt_logprobs = of("prompt_logprobs")
        self.copy_blocks = dict(sorted(of("copy_blocks").items()))
        self.edits: dict[int, dict[str, jax.stages.Compiled]] = {}
        for (rows, name), executable in of("edits").items():
            self.edits.setdefault(rows, {})[name] = executable

    def step_bytes(self) -> int:
        """Bytes that the largest step needs beside parameters and pool, as XLA tells, and the buffers between steps."""
        outputs = [executable.out_info for executable in self.forward.values()]
        buffers = {x.shape: math.prod(x.shape) * x.dtype.itemsize for out in outputs for x in (out.hidden, out.logits)}
        return sum(buffers.values()) + max(_step_bytes(executable) for executable in self.forward.values())


def _step_bytes(forward: jax.stages.Compiled) -> int:
    analysis, logits = forward.memory_analysis(), forward.out_info.logits
    assert analysis is not None, "XLA tells the memory of every program on CPU and GPU"
    return analysis.temp_size_in_bytes + _SAMPLING_IMAGES * 4 * math.prod(logits.shape)


def step_programs(
    functions: StepFunctions, params: Any, cache: KVCache, buckets: Iterable[Bucket]
) -> dict[tuple[str, Any], Program]:
    """All that has to be compiled, largest first. Of `params` and `cache` only shapes and dtypes are read."""
    params, cache = _abstract(params), _abstract(cache)
    previous, row_sizes = _ints(functions.max_rows), {}
    programs: dict[tuple[str, Any], Program] = {}
    for bucket in buckets:
        packed = _ints(batch.buffer_size(bucket, functions.shape))
        hidden = jax.ShapeDtypeStruct((bucket.tokens, functions.model.hidden_size), functions.dtype)
        logits = jax.ShapeDtypeStruct((bucket.rows, functions.model.vocab_size), jnp.float32)
        size = f"{bucket.tokens}x{bucket.rows}" + ("_decode" if bucket.decode else "")
        stage, forward = (functools.partial(f, bucket=bucket) for f in (functions.stage, functions.forward))
        args = params, cache, packed, previous, hidden, logits
        options = (("xla_gpu_enable_triton_gemm", False),) if bucket.tokens >= _CUBLAS_TOKENS else ()
        programs["forward", bucket] = Program(f"forward_{size}", forward, args, donate=(1, 4, 5), options=options)
        programs["stage", bucket] = Program(f"stage_{size}", stage, (packed, packed), donate=(1,))
        row_sizes[bucket.rows] = None
        if not bucket.decode and ("prompt_logprobs", bucket.tokens) not in programs:
            args = params, hidden, _ints(bucket.tokens)
            programs["prompt_logprobs", bucket.tokens] = Program("prompt_logprobs", functions.prompt_logprobs, args)
    for rows in row_sizes:
        logits = jax.ShapeDtypeStruct((rows, functions.model.vocab_size), jnp.float32)
        sampling = _abstract_sampling(rows)
        for draws in Draws:
            sample = functools.partial(functions.sample, draws=draws)
            args = logits, logits, sampling, previous
            programs["sample", (rows, draws)] = Program(f"sample_{draws.value}", sample, args, donate=(3,))
        programs["alternatives", rows] = Program("alternatives", functions.alternatives, (logits,))
        for name, edit in logit_passes.programs(*logits.shape).items():
            programs["edits", (rows, name)] = edit
    for size in {min(_FEW_COPIES, functions.max_rows), functions.max_rows}:  # few for a fork, and one for each row
        pairs = jax.ShapeDtypeStruct((2, size), jnp.int32)
        programs["copy_blocks", size] = Program("copy_blocks", functions.copy_blocks, (cache, pairs), donate=(0,))
    return programs


def _abstract_sampling(rows: int) -> SamplingInputs:
    floats, ints = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.float32, jnp.int32))
    return SamplingInputs(floats, ints, floats, floats, jax.ShapeDtypeStruct((rows, 2), jnp.uint32), ints)  # pyright: ignore


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _ints(size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.int32)
