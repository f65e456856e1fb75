"""What the Triton attention kernels share: their shapes, loads of KV tiles through the block table, online softmax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.spec import AttentionSpec

LOG2_E = math.log2(math.e)
LEAST = -1e30  # a maximum of nothing: finite, so that no -inf - -inf arises
_SMALL = 1e-30  # what queries are divided by at least
_FP8_SHIFT = 256  # between the exponents of e4m3 and float16


@dataclasses.dataclass(frozen=True)
class Device:
    """What a kernel runs on."""

    multiprocessors: int
    capability: int  # compute capability, times ten
    interpret: bool = False  # whether kernels are interpreted there, for tests

    @property
    def native_fp8(self) -> bool:
        """Whether it converts e4m3."""
        return self.capability >= 89

    @property
    def is_hopper(self) -> bool:
        return self.capability == 90


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is cut and compiled."""

    tile: int  # KV tokens
    warps: int
    stages: int  # of the software pipeline: one less are tiles on their way
    rows: int = 16  # of queries
    programs: int = 4  # that a multiprocessor runs at a time, about


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static side of a call, from its arrays."""

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: Any
    pool_dtype: Any
    native_fp8: bool

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Of matrices in registers: Triton's sizes are powers of two, and its products at least 16 wide."""
        return max(16, pl.next_power_of_2(self.head_dim))

    @property
    def operand(self) -> Any:
        """The dtype in which products are taken."""
        if self.scales_queries:
            return jnp.dtype(jnp.float16)
        return self.dtype if self.is_fp8 else jnp.promote_types(self.dtype, self.pool_dtype)

    @property
    def is_fp8(self) -> bool:
        return self.pool_dtype == jnp.float8_e4m3fn

    @property
    def scales_queries(self) -> bool:
        """Whether queries become float16, to which FP8 converts in far fewer instructions than to bfloat16."""
        return self.is_fp8 and self.dtype == jnp.bfloat16

    @property
    def fp8_factor(self) -> int:
        """By which loaded keys and values are too small."""
        return _FP8_SHIFT if self.is_fp8 and not self.native_fp8 else 1

    @classmethod
    def of(cls, q: Array, k_pool: Array, native_fp8: bool) -> Shapes:
        _, block_size, kv_heads, head_dim = k_pool.shape
        dtypes = jnp.dtype(q.dtype), jnp.dtype(k_pool.dtype)
        return cls(q.shape[0], q.shape[1], kv_heads, head_dim, block_size, *dtypes, native_fp8)


class Inputs(NamedTuple):
    """What a kernel reads; as refs inside of it."""

    q: Float[Array, "tokens q_heads head_dim"]
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"]
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"]
    tables: Int32[Array, "seqs table_width"]
    work: Int32[Array, "items columns"]
    sinks: Float[Array, " q_heads"] | None
    k_scale: Float[Array, " kv_heads"] | None
    v_scale: Float[Array, " kv_heads"] | None


class Softmax(NamedTuple):
    """Online softmax of some rows (Milakov and Gimelshein, 2018, arXiv:1805.02867), in units of log2."""

    maximum: Float[Array, " rows"]
    total: Float[Array, " rows"]
    acc: Float[Array, "rows columns"]

    @classmethod
    def fresh(cls, rows: int, columns: int) -> Softmax:
        return cls(jnp.full(rows, LEAST), jnp.zeros(rows), jnp.zeros((rows, columns)))

    def log_sum(self) -> Array:
        return jnp.where(self.total > 0, self.maximum + jnp.log2(self.total), -jnp.inf)

    def normalised(self) -> Array:
        return self.acc * jnp.where(self.total > 0, 1 / self.total, 0.0)[:, None]


class KeysAndValues:
    """One sequence's KV for one KV head, read a tile at a time for some queries; traced into a kernel's body."""

    def __init__(self, shapes: Shapes, spec: AttentionSpec, tile: int, inputs: Inputs, seq: Any, head: Any, q: Array):
        self.shapes, self.spec, self.tile = shapes, spec, tile
        self.inputs, self.seq, self.head = inputs, seq, head
        factor = spec.scale * shapes.fp8_factor
        self.factor = factor if inputs.k_scale is None else inputs.k_scale[head].astype(jnp.float32) * factor
        if shapes.scales_queries:
            q = q.astype(jnp.float32)  # divided by its largest element, so that none leaves float16's range
            largest = jnp.maximum(jnp.abs(q).max(axis=1, keepdims=True), _SMALL)
            q, self.factor = q / largest, largest * self.factor
        self.q = q.astype(shapes.operand)

    def positions(self, i: Any) -> Array:
        """Of tile `i`: int32 [tile]."""
        return i * self.tile + jnp.arange(self.tile, dtype=jnp.int32)

    def block_ids(self, i: Any, end: Any) -> Array:
        """Of tile `i`, int32 [tile]: one a token, the null block from position `end` on."""
        position = self.positions(i)
        block = lax.div(position, jnp.full_like(position, self.shapes.block_size))
        return load(self.inputs.tables, (self.seq, block), position < end)

    def keys(self, i: Any, blocks: Array, seen: Array | None) -> Array:
        """Of tile `i`, where `seen` (bool [tile]; None: everywhere), others finite: [tile, columns]."""
        return self._load(self.inputs.k_pool, i, blocks, seen)

    def values(self, i: Any, blocks: Array, seen: Array | None) -> Array:
        """As `keys`."""
        v = self._load(self.inputs.v_pool, i, blocks, seen)
        if not self.shapes.is_fp8:
            return v
        # Times one, which only we know: else Triton would first arrange the values for the product, byte by byte, and
        # then convert them.
        return v * (self.positions(i) >= 0).astype(v.dtype)[:, None]

    def _load(self, pool: Any, i: Any, blocks: Array, seen: Array | None) -> Array:
        position = self.positions(i)
        offset = lax.rem(position, jnp.full_like(position, self.shapes.block_size))
        column = jnp.arange(self.shapes.columns, dtype=jnp.int32)
        index = blocks[:, None], offset[:, None], self.head, column[None]
        mask = None if seen is None else jnp.broadcast_to(seen[:, None], (self.tile, self.shapes.columns))
        if self.shapes.columns != self.shapes.head_dim:
            inside = jnp.broadcast_to((column < self.shapes.head_dim)[None], (self.tile, self.shapes.columns))
            mask = inside if mask is None else mask & inside
        if not self.shapes.is_fp8 or self.shapes.native_fp8:
            return load(pool, index, mask).astype(self.shapes.operand)
        # An older GPU: no zero of that dtype, so something for what is masked; finite, as all that comes of it.
        return _from_fp8_bits(pltriton.load(pool.at[index], mask=mask)).astype(self.shapes.operand)

    def attend(self, state: Softmax, k: Array, v: Array, seen: Array | None) -> Softmax:
        """`state` after a tile's keys and values of which each query sees `seen` (bool [rows, tile]; None: all)."""
        scores = self._log2(dot(self.q, k, transposed=True))
        if seen is not None:
            scores = jnp.where(seen, scores, -jnp.inf)
        maximum = jnp.maximum(state.maximum, scores.max(axis=1))
        weights = jnp.exp2(scores - maximum[:, None])
        decay = jnp.exp2(state.maximum - maximum)
        acc = state.acc * decay[:, None] + dot(weights.astype(self.shapes.operand), v)
        return Softmax(maximum, state.total * decay + weights.sum(axis=1), acc)

    def _log2(self, products: Array) -> Array:
        """Scores in units of log2."""
        cap = self.spec.logit_soft_cap
        if cap is None:
            return products * (self.factor * LOG2_E)
        if self.shapes.operand == jnp.float32:
            return jnp.tanh(products * (self.factor / cap)) * (cap * LOG2_E)
        # The same in fewer instructions, to about 1e-7 of the cap.
        return cap * LOG2_E - (2 * cap * LOG2_E) / (jnp.exp2(products * (self.factor * (2 * LOG2_E / cap))) + 1)

    def finish(self, state: Softmax, sinks: Array | None) -> Softmax:
        """`state` with the sinks ([rows]) and the scale of the values."""
        maximum, total, acc = state
        if sinks is not None:
            sinks = sinks.astype(jnp.float32) * LOG2_E
            maximum = jnp.maximum(maximum, sinks)
            decay = jnp.exp2(state.maximum - maximum)
            total, acc = total * decay + jnp.exp2(sinks - maximum), acc * decay[:, None]
        if self.inputs.v_scale is not None:
            acc = acc * self.inputs.v_scale[self.head].astype(jnp.float32)
        if self.shapes.fp8_factor != 1:
            acc = acc * float(self.shapes.fp8_factor)
        return Softmax(maximum, total, acc)


def dot(a: Array, b: Array, transposed: bool = False) -> Array:
    """`a @ b`, or `a @ b.T`, in float32; float32 operands by true float32 products."""
    numbers = (((1,), (1 if transposed else 0,)), ((), ()))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _from_fp8_bits(x: Array) -> Array:
    """e4m3 as float16, too small by `_FP8_SHIFT`, on a GPU that can't convert; NaN as 480."""
    # Its bits are those of a float16 with another bias, subnormals included.
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16)


def load(ref: Any, index: tuple[Any, ...], mask: Array | None) -> Array:
    """`ref[index]`, 0 where masked (mask None: nowhere)."""
    other = None if mask is None else (0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0)
    return pltriton.load(ref.at[index], mask=mask, other=other)
