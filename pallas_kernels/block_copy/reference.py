"""Block copies as XLA's gather and scatter; in place where the pools are donated."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int32


def copy_blocks_reference(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    sources: Int32[Array, " pairs"],
    destinations: Int32[Array, " pairs"],
) -> tuple[Array, Array]:
    """See `pallas_kernels.copy_blocks`."""

    def copy(pool: Array) -> Array:
        # Kept apart from the scatter: a kernel that both gathers from the pool and scatters into it could not write in
        # place, and XLA would have to copy the whole pool first.
        copied = jax.lax.optimization_barrier(pool.at[sources].get(mode="clip", wrap_negative_indices=False))
        return pool.at[destinations].set(copied, mode="drop", wrap_negative_indices=False)

    return copy(k_pool), copy(v_pool)
