"""Rotary embedding and KV write in one Pallas-Triton kernel, bound by latency for a decode step and by bandwidth for
a prefill.

A program takes one token and some of its query heads, or some of its key heads with the value heads beside them. All
that it reads and writes is rows of `head_dim` contiguous elements, straight from the projection's output into the
queries or a pool's row, through registers alone.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.kv_write.reference import divisor, to_pool

_PAIRS = 1024  # of rotated elements a program: 8 a thread, which are 16 bytes of bfloat16
_WARPS = 4


@functools.partial(jax.jit, static_argnames=("pairs", "warps", "interpret"))  # one trace for all layers of a model
def rope_and_write_kv_triton(
    qkv: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half_rotary_dim"],
    sin: Float[Array, "tokens half_rotary_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    slots: Int32[Array, " tokens"],
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    *,
    pairs: int = _PAIRS,
    warps: int = _WARPS,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.rope_and_write_kv`.

    Args:
      pairs: elements of a program's heads, halved, at most; a power of two.
      warps: of a program.
      interpret: run on any device, slowly.
    """
    tokens, heads, head_dim = qkv.shape
    blocks, block_size, kv_heads, _ = k_pool.shape
    q_heads = heads - 2 * kv_heads
    if tokens == 0:  # a grid has programs
        return qkv[:, :q_heads], k_pool, v_pool
    rows = max(1, pairs // _power_of_two(cos.shape[1]))  # heads of a program
    q_rows, kv_rows = min(rows, _power_of_two(q_heads)), min(rows, _power_of_two(kv_heads))
    q_programs, kv_programs = pl.cdiv(q_heads, q_rows), pl.cdiv(kv_heads, kv_rows)
    flat_shape = (blocks * block_size, kv_heads, head_dim)
    scales = {n: s.astype(jnp.float32) for n, s in (("k_scale", k_scale), ("v_scale", v_scale)) if s is not None}

    def rope_and_write_kv(*refs: Any) -> None:  # the kernel's name in profiles
        qkv_ref, cos_ref, sin_ref, slots_ref, *scale_refs = refs[:-5]  # refs[-5:-3]: the pools that go in
        q_ref, *pool_refs = refs[-3:]
        scale_of = dict(zip(scales, scale_refs, strict=True))
        token, program = pl.program_id(0), pl.program_id(1)
        heads_of = _Token(qkv_ref, cos_ref, sin_ref, token)

        @pl.when(program < q_programs)
        def _queries() -> None:
            heads_of.move(_Heads(program * q_rows, q_rows, q_heads, 0), True, q_ref, token)

        @pl.when(program >= q_programs)
        def _keys_and_values() -> None:
            slot, start = slots_ref[token], (program - q_programs) * kv_rows
            for i, (name, pool_ref) in enumerate(zip(("k_scale", "v_scale"), pool_refs, strict=True)):
                heads = _Heads(start, kv_rows, kv_heads, q_heads + i * kv_heads)
                heads_of.move(heads, i == 0, pool_ref, slot, scale_of.get(name))

    inputs = (qkv, cos, sin, slots, *scales.values(), k_pool.reshape(flat_shape), v_pool.reshape(flat_shape))
    flat = jax.ShapeDtypeStruct(flat_shape, k_pool.dtype)
    q, *pools = pl.pallas_call(
        rope_and_write_kv,
        grid=(tokens, q_programs + kv_programs),
        out_shape=(jax.ShapeDtypeStruct((tokens, q_heads, head_dim), qkv.dtype), flat, flat),
        input_output_aliases={len(inputs) - 2: 1, len(inputs) - 1: 2},
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )(*inputs)
    return q, *(p.reshape(k_pool.shape) for p in pools)


class _Heads(NamedTuple):
    """The heads that a program moves: up to `rows` from `start` on of the `count` that stand at `offset` of a token."""

    start: Any
    rows: int
    count: int
    offset: int

    def index(self) -> tuple[Array, Array | None]:
        """Of each among the `count`, and which are there; None: all."""
        index = self.start + jnp.arange(self.rows, dtype=jnp.int32)
        return index, index < self.count if self.count % self.rows else None


class _Token:
    """One token's heads and angles, inside the kernel."""

    def __init__(self, qkv_ref: Any, cos_ref: Any, sin_ref: Any, token: Any) -> None:
        self.qkv, self.token = qkv_ref, token
        self.half, self.head_dim = cos_ref.shape[1], qkv_ref.shape[2]
        column, inside = _range(self.half)
        self.cos, self.sin = (_load(x.at[token, column], inside)[None] for x in (cos_ref, sin_ref))

    def move(
        self,
        heads: _Heads,
        rotates: bool,
        out_ref: Any,  # [rows of out, count, head_dim]
        out_row: Any,
        scale_ref: Any | None = None,  # [count]
    ) -> None:
        """The heads, rotated or not, divided by their scales, into `out_ref[out_row]` if there is such a row."""
        head, present = heads.index()
        scale = None if scale_ref is None else divisor(_load(scale_ref.at[head], present))[:, None]
        row_exists = (out_row >= 0) & (out_row < out_ref.shape[0])

        def load(first: int, size: int) -> tuple[Array, Any, Array]:
            """The columns from `first` on, where they go, and which of them do."""
            column, inside = _range(size)
            column = column[None] + first
            mask = _both(None if present is None else present[:, None], None if inside is None else inside[None])
            # Without waiting for `row_exists`, which for keys and values hangs on a load itself.
            x = _load(self.qkv.at[self.token, head[:, None] + heads.offset, column], mask)
            return x, out_ref.at[out_row, head[:, None], column], row_exists if mask is None else mask & row_exists

        def store(x: Array, place: Any, mask: Array) -> None:
            if scale is not None:
                x = x.astype(jnp.float32) / scale
            pltriton.store(place, to_pool(x, out_ref.dtype), mask=jnp.broadcast_to(mask, x.shape))

        if not rotates:
            store(*load(0, self.head_dim))
            return
        (first, *to_first), (second, *to_second) = load(0, self.half), load(self.half, self.half)
        dtype, first, second = first.dtype, first.astype(jnp.float32), second.astype(jnp.float32)
        store((first * self.cos - second * self.sin).astype(dtype), *to_first)
        store((second * self.cos + first * self.sin).astype(dtype), *to_second)
        if 2 * self.half < self.head_dim:
            store(*load(2 * self.half, self.head_dim - 2 * self.half))


def _load(place: Any, mask: Array | None) -> Array:
    """Ones where the mask is not set."""
    if mask is None:
        return pltriton.load(place)
    return pltriton.load(place, mask=jnp.broadcast_to(mask, place.shape), other=1)


def _both(x: Array | None, y: Array | None) -> Array | None:
    if x is None or y is None:
        return y if x is None else x
    return x & y


def _power_of_two(n: int) -> int:
    """The next from `n` on; Triton's blocks have no other sizes."""
    return 1 << (n - 1).bit_length()


def _range(size: int) -> tuple[Array, Array | None]:
    """A range padded to a power of two, and which of it is inside; None: all."""
    index = jnp.arange(_power_of_two(size), dtype=jnp.int32)
    return index, None if index.size == size else index < size
