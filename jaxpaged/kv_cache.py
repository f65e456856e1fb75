"""The device pool: one K and one V array a layer, cut into blocks; its layout, and its size from a memory budget.

Layout: `[blocks, block_size, kv_heads, head_dim]`. A token's keys in a layer are one contiguous row, at slot
`block * block_size + offset`. Block 0 is the null block: padding points at it and nothing in it is ever used.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxpaged.models.config import ModelConfig
from pallas_kernels import paged_attention, rope_and_write_kv


class LayerKV(NamedTuple):
    """The pool of one layer."""

    k: Float[Array, "blocks block_size kv_heads head_dim"]
    v: Float[Array, "blocks block_size kv_heads head_dim"]


KVCache = tuple[LayerKV, ...]
"""The pools of all layers: a pytree that a jitted step takes by donation and gives back."""


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["max_query_len"],
    data_fields=["slots", "block_tables", "kv_lens", "query_starts"],
)
@dataclasses.dataclass(frozen=True)
class PagedAttend:
    """The `attend` of a model over the pool: where a flat batch of tokens lies; see `pallas_kernels`."""

    slots: Int32[Array, " tokens"]
    block_tables: Int32[Array, "seqs table_width"]
    kv_lens: Int32[Array, " seqs"]
    query_starts: Int32[Array, " seqs_plus_1"]
    max_query_len: int | None = None

    def __call__(self, qkv: Array, angles: tuple[Array, Array], kv: LayerKV) -> tuple[Array, LayerKV]:
        """Rotates Q and K, writes the batch's K and V, then attends through the block tables."""
        q, k, v = rope_and_write_kv(qkv, *angles, *kv, self.slots)
        kv = LayerKV(k, v)
        out = paged_attention(
            q, k, v, self.block_tables, self.kv_lens, self.query_starts, max_query_len=self.max_query_len
        )
        return cast(Array, out), kv


def allocate(config: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """Zeroed pools on the default device."""
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    # Every pool is a buffer of its own: donation takes each once.
    return tuple(LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))


def abstract(config: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """Shapes and dtypes of `allocate`'s pools, for compiling ahead."""
    return jax.eval_shape(lambda: allocate(config, num_blocks, block_size, dtype))


def blocks_in(budget_bytes: int, config: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Blocks, null block included, whose K and V of all layers fit in a number of bytes."""
    return budget_bytes // (block_size * config.kv_bytes_per_token(jnp.dtype(dtype).itemsize))
