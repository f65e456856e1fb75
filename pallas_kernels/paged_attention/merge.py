"""Merging attention over disjoint parts of the keys, from each part's output and log-sum-exp."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.op import public_op
from pallas_kernels.options import check_sizes


@public_op
def merge_attention(
    outs: Float[Array, "parts tokens q_heads head_dim"], lses: Float[Array, "parts tokens q_heads"]
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]:
    """Attention over the union of the parts' keys.

    Args:
      outs: each part's attention output.
      lses: each part's natural log-sum-exp of the scores; `-inf` for a part without keys, whose output is ignored.

    Returns:
      The output in `outs`' dtype, zeros where no part has keys, and the log-sum-exp of all, float32.

    Raises:
      ValueError: the shapes disagree, or there are no parts.
    """
    if outs.ndim != 4 or lses.shape != outs.shape[:3]:
        raise ValueError(
            f"merge_attention: outs {outs.shape} must be [parts, tokens, q_heads, head_dim] and lses {lses.shape} "
            "its first three dimensions"
        )
    check_sizes("merge_attention", "outs", outs, {"parts": 0})
    lses = lses.astype(jnp.float32)
    maximum = lses.max(axis=0)
    finite = jnp.where(jnp.isneginf(maximum), 0, maximum)
    weights = jnp.exp(lses - finite[None])
    total = weights.sum(axis=0)
    weights = weights / jnp.where(total > 0, total, 1)[None]
    parts = jnp.where(weights[..., None] > 0, outs.astype(jnp.float32), 0)  # a part without keys may hold NaN
    out = (parts * weights[..., None]).sum(axis=0)
    return out.astype(outs.dtype), maximum + jnp.log(total)
