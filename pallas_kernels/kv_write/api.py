"""The KV write op: new keys and values into the slots that the block manager chose for them."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.kv_write.reference import write_kv_reference

IMPLEMENTATIONS = (Implementation("reference", write_kv_reference, serves_all),)


def write_kv(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "blocks block_size kv_heads head_dim"], Float[Array, "blocks block_size kv_heads head_dim"]]:
    """Writes the keys and values of `tokens` into their slots; all other slots keep their contents.

    Slot `s` is row `s % block_size` of block `s // block_size`. Slots must differ from each other, save for
    padding: a token whose slot is `blocks * block_size` or more is dropped. (Never -1, which JAX reads as
    the last slot.) Inside a jit that donates the pools the write happens in place.

    Args:
      k_pool: keys of all blocks.
      v_pool: values of all blocks, shaped like `k_pool`.
      k: new keys; cast to the pool's dtype.
      v: new values; cast to the pool's dtype.
      slots: where each token goes.
      implementation: `"reference"`, or None for the best that serves this call.

    Returns:
      The new pools.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    if k_pool.ndim != 4 or k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            "write_kv: the pools must be [blocks, block_size, kv_heads, head_dim] and agree: k_pool is "
            f"{k_pool.dtype}{k_pool.shape}, v_pool {v_pool.dtype}{v_pool.shape}"
        )
    if k.shape != v.shape or k.shape != (*slots.shape, *k_pool.shape[2:]):
        raise ValueError(
            f"write_kv: k {k.shape} and v {v.shape} must be [tokens, kv_heads, head_dim] with the pool's "
            f"{k_pool.shape[2:]} and the {slots.shape} tokens of slots"
        )
    if slots.dtype != jnp.int32:
        raise ValueError(f"write_kv: slots must be int32, not {slots.dtype}")
    chosen = choose("write_kv", IMPLEMENTATIONS, implementation, k_pool, v_pool, k, v, slots)
    return chosen.run(k_pool, v_pool, k, v, slots)
