"""The op between the QKV projection and attention: rotary embedding of Q and K, and K and V into their slots."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.devices import compute_capability, triton_refusal
from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.kv_write.checks import check_pools, check_scales, check_slots
from pallas_kernels.kv_write.reference import rope_and_write_kv_reference
from pallas_kernels.op import public_op


def _triton_refusal(qkv: Array, cos: Array, sin: Array, k_pool: Array, *_: Array, **__: Array | None) -> str | None:
    """Why the Triton kernel can't serve a call, or None."""
    if (reason := triton_refusal(k_pool)) is not None:
        return reason
    if k_pool.dtype == jnp.float8_e4m3fn and (capability := compute_capability() or 0) < 89:
        return f"float8_e4m3fn pools need sm_89 or newer, not sm_{capability}"
    return None


def _triton(*arrays: Array, k_scale: Array | None, v_scale: Array | None) -> tuple[Array, Array, Array]:
    from pallas_kernels.kv_write.triton import rope_and_write_kv_triton  # only a GPU needs it

    return rope_and_write_kv_triton(*arrays, k_scale, v_scale)


IMPLEMENTATIONS = (
    Implementation("triton", _triton, _triton_refusal),
    Implementation("reference", rope_and_write_kv_reference, serves_all),
)


@public_op
def rope_and_write_kv(
    qkv: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half_rotary_dim"],
    sin: Float[Array, "tokens half_rotary_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    *,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "tokens q_heads head_dim"],
    Float[Array, "blocks block_size kv_heads head_dim"],
    Float[Array, "blocks block_size kv_heads head_dim"],
]:
    """Rotates queries and keys by their positions, and writes keys and values into their slots.

    Rotary embedding (Su et al., 2021, arXiv:2104.09864), pairing dimension `i` with `i + rotary_dim / 2`: in float32,
    rounded once to `qkv`'s dtype. What is written is what `write_kv` would write, of `k` rotated and `v`.

    Queries, keys and values come as one array, the fused projection's output reshaped, so that none of them has to
    be copied out of it first.

    Args:
      qkv: float32, bfloat16 or float16: the query heads, then the key heads, then the value heads of each token;
        `q_heads + 2 * kv_heads` in all.
      cos: cosine of each token's angles, float32. `rotary_dim` is twice its columns, and `head_dim` at most; the
        dimensions of a head beyond it are left as they are.
      sin: sine of the same angles.
      k_pool: keys of all blocks; float32, bfloat16, float16 or float8_e4m3fn.
      v_pool: values of all blocks, shaped like `k_pool`.
      slots: where each token's key and value go, as in `write_kv`: all different, save for those that are no slot of
        the pool, whose tokens are not written. (Their queries are rotated like all others.)
      k_scale: the keys are `k_pool * k_scale`, by KV head: the rotated key divided by it is written (undivided
        where it is 0).
      v_scale: likewise for the values.
      implementation: `"triton"` (one kernel; NVIDIA GPUs from sm_80 on), `"reference"` (XLA, any device), or None for
        the best that serves this call.

    Returns:
      The rotated queries in `qkv`'s dtype, and the new pools: in place, inside a jit that donates them.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    check_pools("rope_and_write_kv", k_pool, v_pool)
    _check(qkv, cos, sin, k_pool, slots)
    check_slots("rope_and_write_kv", slots)
    check_scales("rope_and_write_kv", k_pool.shape[2], k_scale, v_scale)
    arrays, scales = (qkv, cos, sin, k_pool, v_pool, slots), {"k_scale": k_scale, "v_scale": v_scale}
    return choose("rope_and_write_kv", IMPLEMENTATIONS, implementation, *arrays, **scales).run(*arrays, **scales)


def _check(qkv: Array, cos: Array, sin: Array, k_pool: Array, slots: Array) -> None:
    kv_heads, head_dim = k_pool.shape[2:]
    if qkv.ndim != 3 or qkv.shape[2] != head_dim or qkv.shape[0] != slots.shape[0]:
        raise ValueError(
            f"rope_and_write_kv: qkv must be [tokens, q_heads + 2 * kv_heads, head_dim] with the pool's head_dim "
            f"{head_dim} and the {slots.shape} tokens of slots, not {qkv.shape}"
        )
    if qkv.shape[1] <= 2 * kv_heads:
        raise ValueError(
            f"rope_and_write_kv: qkv has {qkv.shape[1]} heads, which leaves no queries beside the keys and values of "
            f"{kv_heads} KV heads"
        )
    if qkv.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"rope_and_write_kv: qkv must be float32, bfloat16 or float16, not {qkv.dtype}")
    for name, x in {"cos": cos, "sin": sin}.items():
        if x.dtype != jnp.float32:
            raise ValueError(f"rope_and_write_kv: {name} must be float32, not {x.dtype}")
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != qkv.shape[0] or not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"rope_and_write_kv: cos {cos.shape} and sin {sin.shape} must be [tokens, rotary_dim / 2] for the "
            f"{qkv.shape[0]} tokens of qkv, with a rotary_dim of at most head_dim {head_dim}"
        )
