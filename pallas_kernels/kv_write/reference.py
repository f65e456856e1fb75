"""KV write as XLA's scatter; in place where the pools are donated."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32


def write_kv_reference(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
) -> tuple[Array, Array]:
    """See `pallas_kernels.write_kv`."""

    def write(pool: Array, new: Array) -> Array:
        blocks, block_size, *row = pool.shape
        flat = pool.reshape(blocks * block_size, *row)
        return flat.at[slots].set(new.astype(pool.dtype), mode="drop").reshape(pool.shape)

    return write(k_pool, k), write(v_pool, v)
