"""Checks of what is known of a call at trace time: options, sizes, and the dtype of the pools."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

_LARGEST = float(np.finfo(np.float32).max)
_POOL_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)


def positive_int(op: str, name: str, value: Any) -> int | None:
    """`value` as a Python int of 1 or more, or None; raises ValueError for anything else."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError as error:  # a tracer's, too
        raise ValueError(f"{op}: {name}={value!r} must be an int that is known at trace time, or None") from error
    if number < 1:
        raise ValueError(f"{op}: {name}={number} must be at least 1, or None")
    return number


def finite_float(op: str, name: str, value: Any) -> float | None:
    """`value` as a Python float that float32 holds, or None; raises ValueError for anything else."""
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{op}: {name}={value!r} must be a number that is known at trace time, or None") from error
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{op}: {name}={number} must be finite in float32, or None")
    return number


def check_pool_dtype(op: str, k_pool: Array) -> None:
    """Raises ValueError unless pools may have the dtype of `k_pool`."""
    if k_pool.dtype not in _POOL_FLOATS:
        raise ValueError(f"{op}: k_pool must be float32, bfloat16, float16 or float8_e4m3fn, not {k_pool.dtype}")


def check_sizes(op: str, name: str, x: Array, dimensions: Mapping[str, int]) -> None:
    """Raises ValueError where one of the dimensions of `x`, given by name and index, is 0."""
    for dimension, axis in dimensions.items():
        if x.shape[axis] == 0:
            raise ValueError(f"{op}: {dimension} must not be 0, but {name} has shape {x.shape}")
