"""Block copies in one Pallas-Triton kernel for K and V, bound by its launch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

_CHUNK_BYTES = 8192  # of a block's K, and as much of its V, that a program copies: 4 times 16 bytes a thread
_WARPS = 4


@functools.partial(jax.jit, static_argnames=("interpret",))  # one trace for all layers of a model
def copy_blocks_triton(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    sources: Int32[Array, " pairs"],
    destinations: Int32[Array, " pairs"],
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.copy_blocks`. With `interpret` it runs on any device, slowly."""
    if sources.shape[0] == 0:  # a grid has programs
        return k_pool, v_pool
    blocks = k_pool.shape[0]
    size = k_pool.size // blocks
    chunk = min(_CHUNK_BYTES // k_pool.dtype.itemsize, pl.next_power_of_2(size))

    def copy_blocks(sources_ref: Any, destinations_ref: Any, _k_in: Any, _v_in: Any, k_out: Any, v_out: Any) -> None:
        pair, part = pl.program_id(0), pl.program_id(1)
        source, destination = jnp.clip(sources_ref[pair], 0, blocks - 1), destinations_ref[pair]

        @pl.when((destination >= 0) & (destination < blocks))
        def _copy() -> None:
            element = part * chunk + jnp.arange(chunk, dtype=jnp.int32)
            mask = None if size % chunk == 0 else element < size
            both = [pltriton.load(pool.at[source, element], mask=mask) for pool in (k_out, v_out)]
            for pool, x in zip((k_out, v_out), both, strict=True):
                pltriton.store(pool.at[destination, element], x, mask=mask)

    flat = jax.ShapeDtypeStruct((blocks, size), k_pool.dtype)
    pools = pl.pallas_call(
        copy_blocks,  # the kernel's name in profiles
        grid=(sources.shape[0], pl.cdiv(size, chunk)),
        out_shape=(flat, flat),
        input_output_aliases={2: 0, 3: 1},
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(sources, destinations, k_pool.reshape(flat.shape), v_pool.reshape(flat.shape))
    return pools[0].reshape(k_pool.shape), pools[1].reshape(v_pool.shape)
