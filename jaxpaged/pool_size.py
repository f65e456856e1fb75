"""How many blocks the KV pool has: as many as the user says, or as the memory allows.

On a GPU, `gpu_memory_utilization` of the memory that JAX may use goes to weights, a step's temporaries, and the pool,
which takes the rest. All is known before anything is loaded: the weights by the model's shape, the temporaries by
`step_bytes`, an estimate that errs high. Once compiled, XLA tells what a step needs; should it be more, `fit` compiles
again for a smaller pool. On a CPU the pool takes 1 GiB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpaged import kv_cache
from jaxpaged.batch import Bucket
from jaxpaged.config import EngineConfig
from jaxpaged.device_memory import device_memory
from jaxpaged.executables import Executables
from jaxpaged.models.config import ModelConfig

logger = logging.getLogger(__name__)

_CPU_POOL_BYTES = 1 << 30
_STEP_MARGIN = 256 << 20  # workspaces of matrix products, plans of attention, what the allocator loses
_LOGITS_IMAGES = 6  # as large as the logits, at once: what `forward` leaves, and what sampling holds


def step_bytes(model: ModelConfig, dtype: jnp.dtype, bucket: Bucket) -> int:
    """Estimate of what a step needs beside weights and pool; more than XLA finds for it.

    A layer holds, of every token, the residual stream and its norm before and after, queries, keys and values as the
    projection gives them and rotated, and the two halves of the MLP with their product; then come the logits, in
    float32, and their images in sampling. XLA's buffers share memory, so that not all of this is there at once.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    token = 4 * model.hidden_size + heads + 3 * model.intermediate_size
    logits = 4 * bucket.rows * model.vocab_size
    return bucket.tokens * token * dtype.itemsize + _LOGITS_IMAGES * logits + _STEP_MARGIN


def num_pool_blocks(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, others: int) -> int:
    """Blocks to allocate, null block included.

    Args:
      config: the options.
      model: whose KV the blocks hold.
      dtype: of the KV.
      others: bytes that weights and a step will need; only asked where the memory decides.

    Raises:
      ValueError: a size that is given is more than the memory, or there is no room for two blocks.
    """
    budget = config.kv_cache_memory_bytes
    if config.num_kv_blocks is not None:
        budget = (config.num_kv_blocks + 1) * config.block_size * model.kv_bytes_per_token(dtype.itemsize)
    if budget is not None and budget > (memory := device_memory().limit):
        option = "kv_cache_memory_bytes" if config.num_kv_blocks is None else "num_kv_blocks"
        raise ValueError(
            f"{option}={getattr(config, option)} makes a KV pool of {budget / 2**30:.1f} GiB, more than the "
            f"{memory / 2**30:.1f} GiB of memory; lower it"
        )
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks + 1
    if budget is not None:
        return _at_least_two(config, model, dtype, budget)
    if jax.default_backend() == "cpu":
        return _at_least_two(config, model, dtype, _CPU_POOL_BYTES)
    stats = jax.devices()[0].memory_stats()
    if not stats:
        raise ValueError("the device does not tell its memory size; give num_kv_blocks or kv_cache_memory_bytes")
    share, in_use = int(config.gpu_memory_utilization * stats["bytes_limit"]), stats["bytes_in_use"]
    logger.info(
        "device memory: %.2f GiB may be used, %.2f are in use, %.2f go to weights and a step's temporaries",
        *(x / 2**30 for x in (share, in_use, others)),
    )
    return rounded(_at_least_two(config, model, dtype, share - in_use - others))


def rounded(num_blocks: int) -> int:
    """A number of blocks that is the same from start to start, though the memory in use varies a little: less than 1 %
    lower, a multiple of a power of two. (It is part of every compiled program.)"""
    step = 1 << max(0, (num_blocks // 128).bit_length() - 1)
    return num_blocks // step * step


def fit(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, num_blocks: int, compiled: Callable[[int], Executables]
) -> tuple[int, Executables]:
    """The executables for a pool, and its blocks: `num_blocks`, or fewer where the compiled steps need more memory than
    was estimated for them.

    Args: `compiled` loads the weights, the first time, and compiles for a number of blocks.

    Raises:
      ValueError: there is no room for two blocks beside the steps.
    """
    while True:
        executables = compiled(num_blocks)
        if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
            return num_blocks, executables
        if not (stats := jax.devices()[0].memory_stats()):  # a CPU
            return num_blocks, executables
        step = executables.step_bytes()
        room = int(config.gpu_memory_utilization * stats["bytes_limit"]) - stats["bytes_in_use"] - step
        if _blocks_in(config, model, dtype, room) >= num_blocks:
            return num_blocks, executables
        fewer = rounded(_at_least_two(config, model, dtype, room))
        logger.info("a step takes %.2f GiB, more than estimated: %d blocks, not %d", step / 2**30, fewer, num_blocks)
        num_blocks = fewer


def _at_least_two(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, budget: int) -> int:
    """Blocks in a number of bytes; raises ValueError unless there are two."""
    num_blocks = _blocks_in(config, model, dtype, budget)
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


def _blocks_in(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, budget: int) -> int:
    return kv_cache.blocks_in(max(budget, 0), model, config.block_size, dtype)
