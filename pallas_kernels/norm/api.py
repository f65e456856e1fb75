"""Residual addition and RMS normalisation in one op: what stands between two matrix products of a decoder."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.devices import triton_refusal
from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.norm.reference import add_rms_norm_reference
from pallas_kernels.op import differentiable_op
from pallas_kernels.options import finite_float


def _triton_refusal(x: Array, delta: Array, scale: Array, epsilon: float) -> str | None:
    return triton_refusal(x, delta, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _triton(x: Array, delta: Array, scale: Array, epsilon: float) -> Any:
    from pallas_kernels.norm.triton import add_rms_norm_triton  # only a GPU needs it

    return add_rms_norm_triton(x, delta, scale, epsilon)


@_triton.defjvp
def _differentiate(epsilon: float, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda x, delta, scale: add_rms_norm_reference(x, delta, scale, epsilon), primals, tangents)


IMPLEMENTATIONS = (
    Implementation("triton", _triton, _triton_refusal),
    Implementation("reference", add_rms_norm_reference, serves_all),
)


@differentiable_op
def add_rms_norm(
    x: Float[Array, "tokens hidden"],
    delta: Float[Array, "tokens hidden"],
    scale: Float[Array, " hidden"],
    *,
    epsilon: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """The residual stream after a block, and what the next block reads: `x + delta`, and its RMS norm (Zhang and
    Sennrich, 2019).

    The mean of squares and the division are float32, the scaling is in the arrays' dtype. Differentiable.

    Args:
      x: the residual stream; float32, bfloat16 or float16.
      delta: what the block before gave, shaped like `x`.
      scale: weights of the norm.
      epsilon: added to the mean of squares; above 0.
      implementation: `"triton"` (one kernel; NVIDIA GPUs from sm_80 on), `"reference"` (XLA, any device), or None for
        the best that serves this call.

    Returns:
      `(x + delta, norm)`, both `[tokens, hidden]` in the dtype of `x`.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call.
    """
    if x.ndim != 2 or delta.shape != x.shape or scale.shape != x.shape[1:]:
        raise ValueError(
            f"add_rms_norm: x {x.shape}, delta {delta.shape} and scale {scale.shape} must be [tokens, hidden], the "
            "same, and [hidden]"
        )
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or not x.dtype == delta.dtype == scale.dtype:
        raise ValueError(
            f"add_rms_norm: x is {x.dtype}, delta {delta.dtype} and scale {scale.dtype}; give float32, bfloat16 or "
            "float16, all the same"
        )
    number = finite_float("add_rms_norm", "epsilon", epsilon)
    if number is None or number <= 0:
        raise ValueError(f"add_rms_norm: epsilon={epsilon} must be above 0")
    args = (x, delta, scale, number)
    return choose("add_rms_norm", IMPLEMENTATIONS, implementation, *args).run(*args)
