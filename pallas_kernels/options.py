"""Checks of what is known of a call at trace time: options and sizes."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

_LARGEST = float(np.finfo(np.float32).max)


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


def check_sizes(op: str, name: str, x: Array, dimensions: Mapping[str, int]) -> None:
    """Raises ValueError where one of the dimensions of `x`, given by name and index, is 0."""
    for dimension, axis in dimensions.items():
        if x.shape[axis] == 0:
            raise ValueError(f"{op}: {dimension} must not be 0, but {name} has shape {x.shape}")
