"""The kernel of Hopper decode: one warpgroup a program, for a piece of one sequence and one KV head.

It fetches the blocks of a tile with TMA into a ring in shared memory, multiplies with wgmma (the query heads of the KV
head are rows of a 64-row operand, the other rows are whatever lies there and never looked at), and keeps an online
softmax in registers. Where a sequence has several pieces, each leaves its output and log-sum-exp in a buffer, and the
program that finishes last merges them: with the log-sum-exps as scores and the outputs as values, merging is one
more attention, done by the same code.

Three programs fit a multiprocessor, by shared memory (so the unused query rows overlap the ring) and by registers (168
of them: what is loaded beside the accumulators, as in clearing hidden values, has to come before the scores).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref
from jaxtyping import Array

from pallas_kernels.paged_attention import plan
from pallas_kernels.paged_attention.mosaic_common import SMEM_BYTES, tiled_smem
from pallas_kernels.paged_attention.spec import AttentionSpec

TILE = 64  # KV tokens, and rows of a merge
OPERAND_ROWS = 64  # rows of the left operand of wgmma
STAGES = {64: 4, 80: 3, 96: 3, 112: 2, 128: 2, 256: 3}  # of the ring, by head_dim
LOG2_E = math.log2(math.e)
_LEAST = -1e30  # a maximum of nothing: finite, so that no -inf - -inf arises
_MATRIX, _ROWS, _COLUMNS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class DecodeShapes:
    """The static side of a call, from its arrays."""

    kv_heads: int
    group: int  # query heads a KV head
    head_dim: int
    block_size: int
    dtype: Any

    @property
    def pads_groups(self) -> bool:
        """Whether each group of query heads gets rows of its own, padded to 8, in a copy of q.

        TMA reads rows from multiples of 8, so that a program reads the aligned window around its group; for that q
        must have a multiple of 8 heads, and a row's offset in shared memory must be one that TMA can store from.
        """
        return bool(self.group * self.kv_heads % 8 or self.head_dim * self.dtype.itemsize % 128)

    @property
    def stride(self) -> int:
        """Rows of q from one group to the next."""
        return -(-self.group // 8) * 8 if self.pads_groups else self.group

    @property
    def rows(self) -> int:
        """Rows of the window that holds a group."""
        return max(
            -(-(s + self.group) // 8) * 8 - s // 8 * 8 for s in range(0, self.kv_heads * self.stride, self.stride)
        )

    @property
    def stages(self) -> int:
        return STAGES[self.head_dim]

    @property
    def programs_per_multiprocessor(self) -> int:
        ring = 2 * self.stages * TILE * self.head_dim + self.rows * self.head_dim
        return max(1, min(3, SMEM_BYTES // (ring * self.dtype.itemsize + 2048)))


def decode_kernel(
    shapes: DecodeShapes, spec: AttentionSpec, has_sinks: bool, tokens: int, pieces: int
) -> Callable[..., Any]:
    """The kernel: (q, k_pool, v_pool, tables, work[, sinks]) -> (out, part_out, part_lse[, lse])."""
    heads, dim, dtype = shapes.kv_heads, shapes.head_dim, shapes.dtype
    part_rows = pieces * shapes.rows + TILE  # merging reads whole tiles
    outputs = [
        jax.ShapeDtypeStruct((tokens, heads * shapes.group, dim), dtype),
        jax.ShapeDtypeStruct((heads, part_rows, dim), dtype),
        jax.ShapeDtypeStruct((heads, part_rows), jnp.float32),
    ]
    if spec.return_lse:
        outputs.append(jax.ShapeDtypeStruct((tokens, heads * shapes.group), jnp.float32))
    ring = tiled_smem((2 * shapes.stages, TILE, dim), dtype)
    copies = max(1, TILE // shapes.block_size)
    scratch = {
        "shared": plgpu.RefUnion(
            tiled_smem((OPERAND_ROWS, dim), dtype),
            (tiled_smem((shapes.rows, dim), dtype), ring),
            plgpu.SMEM((OPERAND_ROWS, dim), dtype),
        ),
        "row_smem": plgpu.SMEM((OPERAND_ROWS,), jnp.float32),
        "lse_smem": plgpu.SMEM((2 * shapes.stages, TILE), jnp.float32),
        "flag_smem": plgpu.SMEM((1,), jnp.int32),
        "full": plgpu.Barrier(num_arrivals=2 * copies, num_barriers=shapes.stages),
        "merge_full": plgpu.Barrier(num_arrivals=2, num_barriers=2 * shapes.stages),
        "q_full": plgpu.Barrier(),
        "together": plgpu.Barrier(),
    }

    def body(*refs: Any, **scratch_refs: Any) -> None:
        _Program(shapes, spec, has_sinks, tokens, pieces, refs, **scratch_refs).run()

    return plgpu.kernel(
        body,
        out_type=tuple(outputs),
        grid=(pieces, heads),
        grid_names=("piece", "head"),
        kernel_name="paged_decode",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )


@dataclasses.dataclass
class _Softmax:
    """Online softmax of up to 64 rows, in units of log2."""

    maximum: Array  # [64]
    total: Array  # [64]
    acc: Array  # [64, head_dim]

    def tree(self) -> tuple[Array, Array, Array]:
        return self.maximum, self.total, self.acc


class _Program:
    """One program of the kernel; its methods are traced into the kernel's body."""

    def __init__(
        self,
        shapes: DecodeShapes,
        spec: AttentionSpec,
        has_sinks: bool,
        tokens: int,
        pieces: int,
        refs: tuple[Any, ...],
        *,
        shared: Any,
        row_smem: Any,
        lse_smem: Any,
        flag_smem: Any,
        full: Any,
        merge_full: Any,
        q_full: Any,
        together: Any,
    ):
        self.shapes, self.spec, self.tokens, self.num_pieces = shapes, spec, tokens, pieces
        self.q, self.k_pool, self.v_pool, self.tables, self.work, *others = refs
        self.sinks = others.pop(0) if has_sinks else None  # [heads * stride + 64], in log2
        self.out, self.part_out, self.part_lse, *rest = others
        self.lse = rest[0] if rest else None
        # [64, D]; [rows, D], [2 * stages, tile, D]: keys and values in turn; [64, D] without tiles
        self.operand, (self.q_rows, self.ring), self.staging = shared
        self.row_smem, self.lse_smem, self.flag_smem = row_smem, lse_smem, flag_smem
        self.full, self.merge_full, self.q_full, self.together = full, merge_full, q_full, together

        self.piece, self.head = lax.axis_index("piece"), lax.axis_index("head")
        fields = [self.work[self.piece, field] for field in range(plan.COUNTERS)]
        self.seq, self.query, self.end, self.first_tile, end_tile, self.home, self.pieces = fields
        self.num_tiles = end_tile - self.first_tile
        window = spec.sliding_window
        self.begin = lax.max(self.end - window, 0) if window else 0  # first position that the query sees
        start = self.head * shapes.stride
        last_window = (shapes.kv_heads * shapes.stride - shapes.rows) // 8
        self.window = lax.min(lax.div(start, 8), last_window)  # in units of 8 rows of q
        self.row_offset = 0 if shapes.stride % 8 == 0 else start - self.window * 8  # of the group in its window

    def run(self) -> None:
        pl.when(self.pieces > 0)(self._attend)
        self._clear_padding()

    def _meet(self) -> None:
        """All threads of the warpgroup meet."""
        plgpu.barrier_arrive(self.together)
        plgpu.barrier_wait(self.together)

    def _attend(self) -> None:
        state = self._attend_to_tiles()
        self._meet()  # nobody reads the ring or the queries any more

        @pl.when(self.pieces == 1)
        def _alone() -> None:
            self._store(state)

        @pl.when(self.pieces > 1)
        def _with_others() -> None:
            self._store_part(state)
            pl.when(self._is_last())(lambda: self._store(self._merge(), meet=True))

    def _attend_to_tiles(self) -> _Softmax:
        stages = self.shapes.stages
        window = pl.ds(pl.multiple_of(self.window * 8, 8), self.shapes.rows)
        plgpu.copy_gmem_to_smem(self.q.at[self.query, window], self.q_rows, self.q_full)
        for stage in range(stages):
            pl.when(stage < self.num_tiles)(functools.partial(self._fetch, stage, stage))
        plgpu.barrier_wait(self.q_full)
        masks_all = self.spec.sliding_window is not None

        def step(i: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(self.full.at[slot])
            start = (self.first_tile + i) * TILE
            low, high = (self.begin - start if masks_all else 0), self.end - start  # what the query sees
            if masked:
                self._clear_hidden(2 * slot + 1, low, high)
            scores, factor = self._cap(self._scores(slot))
            if masked:
                column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_MATRIX)
                seen = column < high
                if masks_all:
                    seen &= column >= low
                scores = jnp.where(seen, scores, -jnp.inf)
            state = self._update(_Softmax(*carry), scores, factor, 2 * slot + 1)

            @pl.when(i + stages < self.num_tiles)
            def _refill() -> None:
                self._meet()
                self._fetch(i + stages, slot)

            return state.tree()

        last = self.num_tiles - 1
        carry = lax.fori_loop(0, last, functools.partial(step, masked=masks_all), self._fresh().tree())
        return _Softmax(*step(last, carry, masked=True))

    def _fetch(self, i: Array | int, slot: Array | int) -> None:
        """Starts the copies of a tile's blocks; those in which no position is seen only arrive.

        The plan brought the block ids of the first tiles, those with a static `i`; the others are in the block table.
        """
        block_size = self.shapes.block_size
        rows = min(block_size, TILE)
        tile = self.first_tile + i
        for j in range(TILE // rows):
            position = tile * TILE + j * rows
            seen = (position < self.end) & (position + rows > self.begin)
            if isinstance(i, int):
                known = plan.COUNTERS + self.shapes.kv_heads + i * (TILE // rows) + j
                block = self.work[self.piece, known]
            else:
                column = lax.min(lax.div(position, block_size), self.tables.shape[1] - 1)
                block = self.tables[self.seq, column]
            part = slice(None)
            if rows < block_size:
                part = pl.ds(pl.multiple_of(lax.rem(position, block_size), TILE), rows)
            for which, pool in enumerate((self.k_pool, self.v_pool)):
                plgpu.copy_gmem_to_smem(
                    pool.at[block, part, self.head],
                    self.ring.at[2 * slot + which, pl.ds(j * rows, rows)],
                    self.full.at[slot],
                    predicate=seen,
                )

    def _scores(self, slot: Array) -> Array:
        def multiply(acc: Any) -> Array:
            plgpu.wgmma(acc, self.operand, self.ring.at[2 * slot].T)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((OPERAND_ROWS, TILE), jnp.float32))

    def _cap(self, scores: Array) -> tuple[Array, float]:
        """The scores, capped if asked for, and the factor that brings them to units of log2."""
        scale, cap = self.spec.scale, self.spec.logit_soft_cap
        if cap is None:
            return scores, scale * LOG2_E
        # tanh(x) = 1 - 2 / (exp(2x) + 1): the approximate tanh is too coarse to be multiplied with a cap.
        grown = jnp.exp2(scores * (2 * scale / cap * LOG2_E))
        return 1 - 2 / (grown + 1), cap * LOG2_E

    def _clear_hidden(self, values: Array, low: Array | int, high: Array | int) -> None:
        """Zeros the values, in slot `values` of the ring, that nobody sees: their weights are 0, but 0 * NaN is NaN."""

        @pl.when((low > 0) | (high < TILE))
        def _clear() -> None:
            tile = self.ring.at[values]
            old = plgpu.load(tile, layout=_MATRIX)
            row = plgpu.broadcasted_iota(jnp.int32, old.shape, 0, layout=_MATRIX)
            seen = row < high if isinstance(low, int) else (row >= low) & (row < high)
            tile[...] = jnp.where(seen, old, jnp.zeros_like(old))
            plgpu.commit_smem()

    def _fresh(self) -> _Softmax:
        def full(shape: tuple[int, ...], value: float, layout: Any) -> Array:
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        rows, dim = OPERAND_ROWS, self.shapes.head_dim
        return _Softmax(full((rows,), _LEAST, _ROWS), full((rows,), 0, _ROWS), full((rows, dim), 0, _MATRIX))

    def _update(self, state: _Softmax, scores: Array, factor: float, values: Array) -> _Softmax:
        maximum = jnp.maximum(state.maximum, scores.max(axis=1) * factor)
        decay = jnp.exp2(state.maximum - maximum)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(maximum, scores.shape, [0]))
        total = state.total * decay + weights.sum(axis=1)
        acc = state.acc * lax.broadcast_in_dim(decay, state.acc.shape, [0])
        weights = weights.astype(self.shapes.dtype)
        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(acc)
        acc = pl.run_state(lambda ref: plgpu.wgmma(ref, weights, self.ring.at[values]))(accumulator)
        return _Softmax(maximum, total, acc)

    def _store(self, state: _Softmax, meet: bool = False) -> None:
        """The group's rows to the output."""
        if meet:
            self._meet()
        maximum, total, acc = state.tree()
        if self.sinks is not None:
            window = pl.ds(pl.multiple_of(self.window * 8, 8), OPERAND_ROWS)
            sinks = plgpu.load(self.sinks.at[window], layout=_ROWS, optimized=False)
            grown = jnp.maximum(maximum, sinks)
            decay = jnp.exp2(maximum - grown)
            maximum, total = grown, total * decay + jnp.exp2(sinks - grown)
            acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        inverse = jnp.where(total > 0, 1 / total, 0.0)
        self.staging[...] = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(self.shapes.dtype)
        if self.lse is not None:
            lse = (maximum + jnp.log2(total)) / LOG2_E
            self.row_smem[...] = jnp.where(total > 0, lse, -jnp.inf)
        plgpu.commit_smem()
        group, first = self.shapes.group, self.head * self.shapes.group
        plgpu.copy_smem_to_gmem(
            self.staging.at[pl.ds(self.row_offset, group)], self.out.at[self.query, pl.ds(first, group)]
        )
        if (lse_ref := self.lse) is not None:

            @pl.loop(0, group)
            def _store_lse(i: Array) -> None:
                lse_ref[self.query, first + i] = self.row_smem[self.row_offset + i]

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _store_part(self, state: _Softmax) -> None:
        """The rows of the window to the piece's place in the buffers of parts."""
        rows = self.shapes.rows
        place = pl.ds(pl.multiple_of(self.piece * rows, 8), rows)
        inverse = jnp.where(state.total > 0, 1 / state.total, 0.0)
        acc = state.acc * lax.broadcast_in_dim(inverse, state.acc.shape, [0])
        self.operand[...] = acc.astype(self.shapes.dtype)
        self.row_smem[...] = state.maximum + jnp.log2(state.total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.operand.at[pl.ds(0, rows)], self.part_out.at[self.head, place])
        plgpu.copy_smem_to_gmem(self.row_smem.at[pl.ds(0, rows)], self.part_lse.at[self.head, place])
        plgpu.wait_smem_to_gmem(0)

    def _is_last(self) -> Array:
        """Whether this program is the last of the sequence's to store its part; counts it."""
        counter = self.work.at[self.home, pl.ds(plan.COUNTERS + self.head, 1)]
        self.flag_smem[0] = self.pieces - 1
        self._meet()  # whichever thread counts, the stores are done
        _count(counter, self.flag_smem)
        self._meet()
        return self.flag_smem[0] == self.pieces - 1

    def _merge(self) -> _Softmax:
        """Attention over the parts: row `r` of part `p` is key `p * rows + r`, and row `r` sees its own."""
        _order_parts_before_tma()
        rows, slots = self.shapes.rows, 2 * self.shapes.stages
        start, end = self.home * rows, self.pieces * rows
        tiles = lax.div(end + (TILE - 1), TILE)

        def fetch(i: Array | int, slot: Array | int) -> None:
            place = pl.ds(pl.multiple_of(start + i * TILE, 8), TILE)
            arrived = self.merge_full.at[slot]
            plgpu.copy_gmem_to_smem(self.part_out.at[self.head, place], self.ring.at[slot], arrived)
            plgpu.copy_gmem_to_smem(self.part_lse.at[self.head, place], self.lse_smem.at[slot], arrived)

        for slot in range(slots):
            pl.when(slot < tiles)(functools.partial(fetch, slot, slot))

        def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(self.merge_full.at[slot])
            self._clear_hidden(slot, 0, end - i * TILE)
            lse = plgpu.load(self.lse_smem.at[slot], layout=_COLUMNS, optimized=False)
            shape = (OPERAND_ROWS, TILE)
            column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_MATRIX)
            row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_MATRIX)
            part_row = lax.rem(column + lax.rem(i * TILE, rows), jnp.full_like(column, rows))
            seen = (part_row == row) & (column < end - i * TILE)
            scores = jnp.where(seen, lax.broadcast_in_dim(lse, shape, [1]), -jnp.inf)
            state = self._update(_Softmax(*carry), scores, 1.0, slot)

            @pl.when(i + slots < tiles)
            def _refill() -> None:
                self._meet()
                fetch(i + slots, slot)

            return state.tree()

        return _Softmax(*lax.fori_loop(0, tiles, step, self._fresh().tree()))

    def _clear_padding(self) -> None:
        """Zeros (and a log-sum-exp of -inf) in the rows past the last query, shared among the programs."""
        first = self.work[self.num_pieces, 0] + self.piece

        @pl.when(first < self.tokens)
        def _clear() -> None:
            group, head = self.shapes.group, self.head * self.shapes.group
            zeros = jnp.zeros((OPERAND_ROWS, self.shapes.head_dim), self.shapes.dtype)
            self.staging[...] = plgpu.layout_cast(zeros, _MATRIX)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(self.tokens - first + (self.num_pieces - 1), self.num_pieces))
            def _row(i: Array) -> None:
                row = first + i * self.num_pieces
                plgpu.copy_smem_to_gmem(self.staging.at[pl.ds(0, group)], self.out.at[row, pl.ds(head, group)])
                if (lse_ref := self.lse) is not None:

                    @pl.loop(0, group)
                    def _no_lse(j: Array) -> None:
                        lse_ref[row, head + j] = jnp.float32(-jnp.inf)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _emit_count(_: Any, counter: Any, flag: Any) -> None:
    with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
        zero = mgpu_utils.c(0, ir.IndexType.get())
        count = mgpu_utils.inline_ptx(
            "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
            mgpu_utils.memref_ptr(counter),
            memref.load(flag, [zero]),
            result_types=ir.IntegerType.get_signless(32),
            has_side_effects=True,
        )
        memref.store(count, flag, [zero])


def _emit_fence(_: Any) -> None:
    mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)


_count: Callable[..., Any] = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))(_emit_count)
"""Counts in `counter` [1] in global memory and puts what it was into `flag` [1] in shared memory. Whoever finds what
`flag` held leaves 0, as the first found it: so one plan's counters serve call after call. Releases what this program
stored and acquires what those that came before it did."""

_order_parts_before_tma: Callable[..., Any] = plgpu.inline_mgpu()(_emit_fence)
"""Orders what other programs' stores made visible before the TMA loads that follow."""
