"""From checkpoint tensors to a parameter pytree: names, shapes, fusing and casting.

A family declares a `WeightMap`; the checks and the errors are the same for all. A parameter whose path ends in
`kernel` is the transpose of its tensors (`[out, in]` in checkpoints), joined along `out`; any other parameter
is one tensor as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict


class Source(NamedTuple):
    """A checkpoint tensor and the shape that it must have."""

    name: str
    shape: tuple[int, ...]


WeightMap = dict[str, tuple[Source, ...]]
"""Parameter path, joined by '/', to the tensors it is made of."""


class TensorReader(Protocol):
    """What loading needs of a checkpoint reader."""

    path: Any

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


def load_params(reader: TensorReader, weights: WeightMap, ignored: str, dtype: jnp.dtype) -> dict[str, Any]:
    """Reads every parameter onto the default device, one tensor at a time, cast to `dtype`.

    Args:
      reader: the checkpoint.
      weights: the family's map for the model's shape.
      ignored: regular expression of tensor names that a checkpoint may hold without use.
      dtype: of all parameters.

    Raises:
      ValueError: a tensor is missing, unexpected, or shaped otherwise than the configuration says.
    """
    check_tensors(reader, weights.values(), ignored)
    flat = {}
    for path, sources in weights.items():
        tensors = [jnp.asarray(reader.read(s.name)).astype(dtype) for s in sources]
        if path.endswith("/kernel"):
            flat[path] = jnp.concatenate([t.T for t in tensors], axis=1)
        else:
            (flat[path],) = tensors
    return {"params": unflatten_dict(flat, sep="/")}


def abstract_params(weights: WeightMap, dtype: jnp.dtype) -> dict[str, Any]:
    """Shapes and dtypes of all parameters."""
    flat = {path: jax.ShapeDtypeStruct(shape_of(path, sources), dtype) for path, sources in weights.items()}
    return {"params": unflatten_dict(flat, sep="/")}


def shape_of(path: str, sources: tuple[Source, ...]) -> tuple[int, ...]:
    """Of a parameter."""
    if path.endswith("/kernel"):
        return sources[0].shape[1], sum(s.shape[0] for s in sources)
    return sources[0].shape


def num_bytes(weights: WeightMap, dtype: jnp.dtype) -> int:
    """Of all parameters."""
    return dtype.itemsize * sum(math.prod(s.shape) for sources in weights.values() for s in sources)


def check_tensors(reader: TensorReader, sources: Iterable[tuple[Source, ...]], ignored: str) -> None:
    """Compares the checkpoint's tensors with those that the model needs; raises ValueError at a difference."""
    found = reader.shapes()
    expected = {s.name: s.shape for group in sources for s in group}
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ValueError(f"{reader.path}: {_some(missing)} missing from the checkpoint")
    unexpected = sorted(n for n in found.keys() - expected.keys() if not re.fullmatch(ignored, n))
    if unexpected:
        raise ValueError(f"{reader.path}: {_some(unexpected)} in the checkpoint, but the model has no use for it")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{reader.path}: tensor {name} has shape {tuple(found[name])}, the model needs {shape}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"
