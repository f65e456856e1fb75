"""The KV write op: new keys and values into the slots that the block manager chose for them."""

from __future__ import annotations

from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.kv_write.checks import check_float, check_pools, check_scales, check_slots
from pallas_kernels.kv_write.reference import write_kv_reference
from pallas_kernels.op import public_op

IMPLEMENTATIONS = (Implementation("reference", write_kv_reference, serves_all),)


@public_op
def write_kv(
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "blocks block_size kv_heads head_dim"], Float[Array, "blocks block_size kv_heads head_dim"]]:
    """Writes the keys and values of `tokens` into their slots; all other slots keep their contents.

    Slot `s` is row `s % block_size` of block `s // block_size`. Slots must differ from each other, save for
    padding: a token whose slot is no slot of the pool (`blocks * block_size` or more, or negative) is dropped.
    Inside a jit that donates the pools the write happens in place.

    Args:
      k_pool: keys of all blocks; float32, bfloat16, float16 or float8_e4m3fn.
      v_pool: values of all blocks, shaped like `k_pool`.
      k: new keys, floats; cast to the pool's dtype, saturating where that is an 8-bit float.
      v: new values; likewise.
      slots: where each token goes.
      k_scale: the keys are `k_pool * k_scale`, by KV head, as `paged_attention` reads them: `k / k_scale` is written
        (`k` itself where the scale is 0).
      v_scale: likewise for the values.
      implementation: `"reference"`, or None for the best that serves this call.

    Returns:
      The new pools.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    check_pools("write_kv", k_pool, v_pool)
    if k.shape != v.shape or k.shape != (*slots.shape, *k_pool.shape[2:]):
        raise ValueError(
            f"write_kv: k {k.shape} and v {v.shape} must be [tokens, kv_heads, head_dim] with the pool's "
            f"{k_pool.shape[2:]} and the {slots.shape} tokens of slots"
        )
    check_float("write_kv", "k", k)
    check_float("write_kv", "v", v)
    check_slots("write_kv", slots)
    check_scales("write_kv", k_pool.shape[2], k_scale, v_scale)
    arrays, scales = (k_pool, v_pool, k, v, slots), {"k_scale": k_scale, "v_scale": v_scale}
    return choose("write_kv", IMPLEMENTATIONS, implementation, *arrays, **scales).run(*arrays, **scales)
