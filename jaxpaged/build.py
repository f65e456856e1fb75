"""From options to a running engine: checkpoint, parameters, pool size, compiled steps.

The pool's size: a number of blocks or bytes if the user gives one; on a GPU what `gpu_memory_utilization` of the
device memory leaves beside the weights and the largest step's temporaries, which XLA tells; on a CPU 1 GiB.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import kv_cache
from jaxpaged.batch import Buckets, StepShape
from jaxpaged.compilation_cache import use_compilation_cache
from jaxpaged.config import EngineConfig, SchedulerConfig, blocks_for
from jaxpaged.engine import Engine
from jaxpaged.executables import StepFunctions, step_temporaries
from jaxpaged.model_source import open_model
from jaxpaged.models.config import ModelConfig
from jaxpaged.runner import Runner
from jaxpaged.scheduler import Scheduler
from jaxpaged.startup import StartupTimes

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Defaults that depend on the device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    smallest_bucket: int
    bucket_ratio: int


_CPU = _Limits(max_num_seqs=32, max_num_batched_tokens=256, smallest_bucket=8, bucket_ratio=4)
_GPU = _Limits(max_num_seqs=256, max_num_batched_tokens=2048, smallest_bucket=1, bucket_ratio=2)


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

    with startup.phase("weights"):
        params = jax.block_until_ready(source.params(dtype))
    module = source.family.module(model, dtype)
    buckets = Buckets.for_limits(max_num_seqs, max_tokens, smallest=limits.smallest_bucket, ratio=limits.bucket_ratio)

    def step_functions(num_blocks: int) -> StepFunctions:
        shape = StepShape(
            blocks_for(max_model_len, config.block_size), config.block_size, num_blocks * config.block_size
        )
        return StepFunctions(module, shape, max_num_seqs, config.max_logprobs)

    def temporaries() -> int:
        functions = step_functions(2)
        cache = kv_cache.abstract(model, 2, config.block_size, dtype)
        return step_temporaries(functions, params, cache, buckets.largest)

    with startup.phase("sizing"):
        num_blocks = _num_pool_blocks(config, model, dtype, temporaries)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks - 1,  # the null block is nobody's
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_reservation=config.kv_reservation,
            static_batches=config.static_batches,
        )
    )
    with startup.phase("sizing"):
        cache = jax.block_until_ready(kv_cache.allocate(model, num_blocks, config.block_size, dtype))
    runner = Runner(step_functions(num_blocks), params, cache, buckets, source.eos_token_ids, startup)
    return Engine(
        scheduler=scheduler,
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


def _num_pool_blocks(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, temporaries: Any) -> int:
    """Blocks to allocate, null block included."""
    budget = config.kv_cache_memory_bytes
    if config.num_kv_blocks is not None:
        budget = (config.num_kv_blocks + 1) * config.block_size * model.kv_bytes_per_token(dtype.itemsize)
    if budget is not None and budget > (memory := _memory()):
        option = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
        raise ValueError(
            f"{option}={getattr(config, option)} makes a KV pool of {budget / 2**30:.1f} GiB, more than the "
            f"{memory / 2**30:.1f} GiB of memory; lower it"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if budget is None and jax.default_backend() == "cpu":
        budget = _CPU_POOL_BYTES
    if budget is None:
        stats = jax.devices()[0].memory_stats()
        if not stats:
            raise ValueError("the device does not tell its memory size; give num_kv_blocks or kv_cache_memory_bytes")
        step = temporaries()
        share = int(config.gpu_memory_utilization * stats["bytes_limit"])
        budget = share - stats["bytes_in_use"] - step
        logger.info(
            "device memory: %.2f GiB may be used, %.2f are in use, %.2f go to a step's temporaries",
            *(x / 2**30 for x in (share, stats["bytes_in_use"], step)),
        )
    num_blocks = kv_cache.blocks_in(max(budget, 0), model, config.block_size, dtype)
    if num_blocks < 2:
        least = 2 * config.block_size * model.kv_bytes_per_token(dtype.itemsize)
        needs = f"but the least KV pool, two blocks of {config.block_size} tokens, takes {least} bytes"
        if config.kv_cache_memory_bytes is not None:
            raise ValueError(f"kv_cache_memory_bytes={budget} is given, {needs}; raise it")
        raise ValueError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} leaves {max(budget, 0)} bytes, {needs}; raise it, "
            "or lower max_num_batched_tokens or max_num_seqs"
        )
    return num_blocks


def _memory() -> int:
    """Bytes that JAX may use on the default device."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None:
        return stats["bytes_limit"]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
