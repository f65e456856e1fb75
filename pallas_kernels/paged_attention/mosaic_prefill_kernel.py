"""The prefill kernel as one launch: its programs, their warpgroups, and the arrays that go in and out.

One program a multiprocessor, which stays: two compute warpgroups of 64 rows each and one of loaders.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_prefill_attend import Attention
from pallas_kernels.paged_attention.mosaic_prefill_geometry import (
    KV_SLOTS,
    ROWS,
    WARPGROUPS,
    Geometry,
    Memory,
    scratch_types,
)
from pallas_kernels.paged_attention.mosaic_prefill_items import Items
from pallas_kernels.paged_attention.mosaic_prefill_load import load
from pallas_kernels.paged_attention.mosaic_prefill_store import Output
from pallas_kernels.paged_attention.prefill_plan import PrefillPlan


def prefill_kernel(
    g: Geometry, plan: PrefillPlan, arrays: tuple[Array, ...], sinks: Array | None, into: Array | None
) -> tuple[Array, Array | None]:
    """The output, and the log-sum-exp by tiles [tiles, groups, warpgroups, 64] if the spec asks for it.

    Args:
      g: of the launch.
      plan: the tiles.
      arrays: q, k_pool, v_pool and block_tables. A copy of queries must not be larger than q.
      sinks: [groups, 64], a logit for each row of a warpgroup.
      into: an output whose other rows are kept; written in place where XLA can.
    """
    scratch = scratch_types(g)
    inputs = (*arrays, plan.tiles, plan.counts, *([] if sinks is None else [sinks]))
    out_types = []
    if into is None:
        out_types.append(jax.ShapeDtypeStruct((g.tokens, g.q_heads, g.head_dim), g.dtype))
    if g.spec.return_lse:
        out_types.append(jax.ShapeDtypeStruct((plan.tiles.shape[0], g.groups, WARPGROUPS, ROWS), jnp.float32))

    def body(*refs: Any) -> None:  # inputs, the output (a last input or a first result), log-sum-exp, scratch
        ins, outs = refs[: len(inputs)], refs[len(inputs) : -len(scratch)]
        memory = Memory.of(dict(zip(scratch, refs[-len(scratch) :], strict=True)))
        _program(g, (*ins, None)[:7], outs[0], outs[1] if g.spec.return_lse else None, memory)

    kernel = plgpu.kernel(
        body,
        out_type=tuple(out_types),
        grid=(g.programs,),
        grid_names=("program",),
        kernel_name="paged_prefill",
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
    )
    if into is None:
        out, *lse = kernel(*inputs)
    else:
        ref = jax.new_ref(into)
        lse = kernel(*inputs, ref)
        out = jax.freeze(ref)
    return out, lse[0] if g.spec.return_lse else None


def _program(g: Geometry, inputs: tuple[Any, ...], out: Any, lse: Any, memory: Memory) -> None:
    q, k_pool, v_pool, tables, tiles, counts, sinks = inputs
    warpgroup = lax.axis_index("warpgroup")
    items = Items(g, tiles, counts[0])
    num = items.num

    @pl.when(warpgroup == WARPGROUPS)
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        load(g, memory, items, q, k_pool, v_pool, tables)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        for empty, slots in ((memory.q_empty, g.q_slots), (memory.k_empty, KV_SLOTS), (memory.v_empty, KV_SLOTS)):
            for slot in range(slots):
                plgpu.barrier_arrive(empty.at[slot])
        output = Output(g, memory, out, lse, warpgroup)
        pl.when(num > 0)(lambda: Attention(g, memory, items, sinks, output, warpgroup).run(num))
        if g.zeroes_padding:
            output.zero_padding(counts[1])
        plgpu.wait_smem_to_gmem(0)
