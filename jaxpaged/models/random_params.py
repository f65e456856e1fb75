"""Random parameters in the shapes of a model, made on the device: to measure without a checkpoint."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from jaxpaged.device_memory import device_memory
from jaxpaged.models.loading import WeightMap, num_bytes, shape_of

_EMBEDDING_SCALE = 0.02


def random_params(weights: WeightMap, dtype: jnp.dtype, seed: int = 0) -> dict[str, Any]:
    """Makes every parameter on the default device, in its final dtype and layout; nothing passes through the host.

    Matrices are normal with variance 1 / inputs and embeddings with standard deviation 0.02, so that activations keep
    their size from layer to layer; scales are 1.

    Args:
      weights: the family's map for the model's shape.
      dtype: of all parameters.
      seed: same seed, same parameters.

    Raises:
      ValueError: they take more than the device's free memory; says how much, and makes none.
    """
    needed = num_bytes(weights, dtype)
    if needed > (free := device_memory().free):
        raise ValueError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype.name}, more than the {free / 2**30:.1f} GiB of "
            "memory that are free; choose a smaller model or dtype"
        )
    key = jax.random.key(seed)
    flat = {}
    for i, (path, sources) in enumerate(weights.items()):
        shape = shape_of(path, sources)
        if len(shape) == 1:
            flat[path] = jnp.ones(shape, dtype)
        else:
            scale = shape[0] ** -0.5 if path.endswith("/kernel") else _EMBEDDING_SCALE
            flat[path] = _normal(jax.random.fold_in(key, i), scale, shape=shape, dtype=dtype)
    return {"params": unflatten_dict(flat, sep="/")}


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))  # one executable a shape
def _normal(key: jax.Array, scale: float, *, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)
