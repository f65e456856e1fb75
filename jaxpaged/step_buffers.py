"""Where a step's executables read and leave what passes between them: arrays that stay where they are.

A CUDA graph holds addresses. If those of a step are not the last one's, XLA writes the graph anew, which takes the host
milliseconds and makes the device wait. So what passes from one executable to the next is written over what lay there,
by donation, as the pool is.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged import batch
from jaxpaged.batch import Buckets, StepShape
from jaxpaged.models.config import ModelConfig


class StepBuffers:
    """The arrays of all shapes of steps; after each executable, the one that it gave in place of the one it took."""

    def __init__(self, model: ModelConfig, dtype: jnp.dtype, shape: StepShape, max_rows: int, buckets: Buckets) -> None:
        self.packed = {b: jnp.zeros(batch.buffer_size(b, shape), jnp.int32) for b in buckets.all}
        """The step as `batch.pack` made it, by bucket."""
        self.hidden = {t: jnp.zeros((t, model.hidden_size), dtype) for t in _token_sizes(buckets)}
        """The model's output, by tokens of the bucket."""
        self.logits = {r: jnp.zeros((r, model.vocab_size), jnp.float32) for r in _row_sizes(buckets)}
        """Logits of each row, by rows of the bucket."""
        self.previous = jnp.zeros(max_rows, jnp.int32)
        """The ids that the last step sampled, by row."""

    def replace_lost(self) -> None:
        """Puts new arrays where a step that broke off took one and gave none."""

        def alive(x: Any) -> Any:
            return jnp.zeros(x.shape, x.dtype) if x.is_deleted() else x

        self.packed, self.hidden, self.logits, self.previous = jax.tree.map(alive, self._all())

    def addresses(self) -> list[int]:
        """Where they lie: the same before and after any step."""
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(self._all())]

    def _all(self) -> tuple[Any, ...]:
        return self.packed, self.hidden, self.logits, self.previous


def num_bytes(model: ModelConfig, dtype: jnp.dtype, buckets: Buckets) -> int:
    """Memory that the arrays take, but for the small ones."""
    hidden = sum(_token_sizes(buckets)) * model.hidden_size * dtype.itemsize
    return hidden + sum(math.prod((r, model.vocab_size, 4)) for r in _row_sizes(buckets))


def _token_sizes(buckets: Buckets) -> set[int]:
    return {bucket.tokens for bucket in buckets.all}


def _row_sizes(buckets: Buckets) -> set[int]:
    return {bucket.rows for bucket in buckets.all}
