"""From options to a running engine: checkpoint, parameters, pool size, compiled steps.

Programs are loaded or compiled while the weights are read: their shapes are known from the model's alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import kv_cache, pool_size, step_buffers
from jaxpaged.batch import Buckets, StepShape
from jaxpaged.compilation_cache import executables_folder, use_compilation_cache
from jaxpaged.compiling import Compilation, ExecutableCache
from jaxpaged.config import EngineConfig, SchedulerConfig
from jaxpaged.engine import Engine
from jaxpaged.executables import Executables, StepFunctions, step_programs
from jaxpaged.model_source import open_model
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.loading import abstract_params, num_bytes
from jaxpaged.runner import Runner
from jaxpaged.scheduler import Scheduler
from jaxpaged.startup import StartupTimes


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Defaults that depend on the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    buckets: Callable[[int, int], Buckets]


_CPU = _Limits(max_num_seqs=32, max_num_batched_tokens=256, buckets=Buckets.coarse)
_GPU = _Limits(max_num_seqs=256, max_num_batched_tokens=2048, buckets=Buckets.fine)


def build_engine(config: EngineConfig, startup: StartupTimes | None = None) -> Engine:
    """Loads the model and compiles everything.

    Args:
      config: the options.
      startup: takes down how long each phase takes.

    Raises:
      ValueError: an option doesn't fit the model or the device, or the checkpoint is at fault.
    """
    startup = StartupTimes() if startup is None else startup
    use_compilation_cache()
    with startup.phase("device"):
        jax.devices()
    with startup.phase("checkpoint"):
        source = open_model(config.model)
    model = source.config
    dtype = resolve_dtype(config.dtype, model.dtype)
    max_model_len = _max_model_len(config, model)
    limits = _CPU if jax.default_backend() == "cpu" else _GPU
    max_num_seqs = config.max_num_seqs or limits.max_num_seqs
    max_tokens = config.max_num_batched_tokens or max(limits.max_num_batched_tokens, max_num_seqs)
    weights = source.family.weights(model)
    module = source.family.module(model, dtype)
    buckets = limits.buckets(max_num_seqs, max_tokens)

    with startup.phase("sizing"):
        step = pool_size.step_bytes(model, dtype, buckets.largest) + step_buffers.num_bytes(model, dtype, buckets)
        others = num_bytes(weights, dtype) + step
        num_blocks = pool_size.num_pool_blocks(config, model, dtype, others)
    scheduler_config = SchedulerConfig(
        num_blocks=num_blocks - 1,  # the null block is nobody's
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        kv_reservation=config.kv_reservation,
        static_batches=config.static_batches,
    )
    params: list[Any] = []

    def compiled(num_blocks: int) -> Executables:
        shape = StepShape(scheduler_config.table_width, config.block_size, num_blocks * config.block_size)
        functions = StepFunctions(module, model, dtype, shape, max_num_seqs, config.max_logprobs)
        pool = kv_cache.abstract(model, num_blocks, config.block_size, dtype)
        programs = step_programs(functions, abstract_params(weights, dtype), pool, buckets.all)
        folder = executables_folder()
        cache = None if folder is None else ExecutableCache(folder, functions.describe())
        with Compilation(programs, cache) as compilation:
            if not params:  # while programs compile
                with startup.phase("weights"):
                    params.append(jax.block_until_ready(source.params(dtype)))
            return Executables(functions, compilation.result(startup))

    num_blocks, executables = pool_size.fit(config, model, dtype, num_blocks, compiled)
    with startup.phase("pool"):
        cache = jax.block_until_ready(kv_cache.allocate(model, num_blocks, config.block_size, dtype))
    runner = Runner(executables, params[0], cache, buckets, source.eos_token_ids)
    return Engine(
        scheduler=Scheduler(dataclasses.replace(scheduler_config, num_blocks=num_blocks - 1)),
        runner=runner,
        tokenizer=source.tokenizer,
        vocab_size=model.vocab_size,
        eos_token_ids=source.eos_token_ids,
        seed=config.seed,
        max_logprobs=config.max_logprobs,
    )


def resolve_dtype(wanted: str, stored: str) -> jnp.dtype:
    """The dtype to run in: as wanted; for "auto" float32 on a CPU, else the stored one, bfloat16 for float32."""
    if wanted != "auto":
        return jnp.dtype(wanted)
    if jax.default_backend() == "cpu":
        return jnp.dtype("float32")
    return jnp.dtype("bfloat16" if stored == "float32" else stored)


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {longest} positions the model was trained for; "
            "lower it"
        )
    return config.max_model_len or longest
