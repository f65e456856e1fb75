"""The block copy op: what copy-on-write does to the pools."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.block_copy.reference import copy_blocks_reference
from pallas_kernels.devices import triton_refusal
from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.kv_write.checks import check_pools
from pallas_kernels.op import public_op


def _triton(*arrays: Array) -> tuple[Array, Array]:
    from pallas_kernels.block_copy.triton import copy_blocks_triton  # only a GPU needs it

    return copy_blocks_triton(*arrays)


IMPLEMENTATIONS = (
    Implementation("triton", _triton, triton_refusal),
    Implementation("reference", copy_blocks_reference, serves_all),
)


@public_op
def copy_blocks(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    sources: Int32[Array, " pairs"],
    destinations: Int32[Array, " pairs"],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "blocks block_size kv_heads head_dim"], Float[Array, "blocks block_size kv_heads head_dim"]]:
    """Copies block `sources[i]` of both pools over block `destinations[i]`; all other blocks keep their contents.

    A pair whose destination is no block of the pool (`blocks` or more, or negative) is padding and copies nothing.
    A block may be the source of several pairs. Destinations must differ from each other, and none may be a source in
    the same call: what ends up in a block that is the destination of two pairs, or in the destination of a pair whose
    source another pair overwrites, is unspecified (some source's contents, or a mixture). A source that is no block
    of the pool counts as the nearest block. Inside a jit that donates the pools the copy happens in place.

    Args:
      k_pool: keys of all blocks; float32, bfloat16, float16 or float8_e4m3fn.
      v_pool: values of all blocks, shaped like `k_pool`.
      sources: blocks to copy.
      destinations: blocks to overwrite.
      implementation: `"triton"` (one kernel; NVIDIA GPUs from sm_80 on), `"reference"` (XLA, any device), or None for
        the best that serves this call.

    Returns:
      The new pools.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    check_pools("copy_blocks", k_pool, v_pool)
    if sources.ndim != 1 or sources.shape != destinations.shape:
        raise ValueError(
            f"copy_blocks: sources {sources.shape} and destinations {destinations.shape} must be [pairs] and agree"
        )
    for name, x in {"sources": sources, "destinations": destinations}.items():
        if x.dtype != jnp.int32:
            raise ValueError(f"copy_blocks: {name} must be int32, not {x.dtype}")
    arrays = (k_pool, v_pool, sources, destinations)
    return choose("copy_blocks", IMPLEMENTATIONS, implementation, *arrays).run(*arrays)
