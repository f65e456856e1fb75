"""Paged attention on Hopper: one of two Mosaic GPU kernels, or both, by what a sequence can bring.

The decode kernel serves calls that promise one query a sequence (`max_query_len=1`). In all others, it serves the
sequences that have one, and the prefill kernel those that have more: a decode row would fill a small part of the tile
that it takes there, and read all its KV by one program. Which are which only the device knows, so both run, each with a
plan that leaves out the other's sequences, and write rows of one output.

The kernels are imported on first use, since only a GPU needs them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from pallas_kernels.paged_attention.spec import AttentionSpec


def refusal(*arrays_and_spec: Any, **extras: Array | None) -> str | None:
    """Why the kernel of a call can't serve it, or None. Takes the arguments of `mosaic_attention`."""
    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    kernel = mosaic_decode if arrays_and_spec[-1].max_query_len == 1 else mosaic_prefill
    return kernel.refusal(*arrays_and_spec, **extras)


def mosaic_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    spec: AttentionSpec,
    **extras: Any,
) -> tuple[Array, Array | None]:
    """Output and, if asked for, log-sum-exp; the arguments are those of `paged_attention_reference`."""
    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    arrays = (q, k_pool, v_pool, block_tables, kv_lens, query_starts)
    if spec.max_query_len == 1:
        return mosaic_decode.mosaic_decode(*arrays, spec, **extras)
    decodes, decoded = dataclasses.replace(spec, max_query_len=1), None
    # A sequence alone, of which nothing was promised, is hardly a decode.
    if kv_lens.shape[0] > 1 and mosaic_decode.refusal(*arrays, decodes, **extras) is None:
        decoded = mosaic_decode.mosaic_decode(*arrays, decodes, **extras)  # leaves the rows of the others unwritten
    return mosaic_prefill.mosaic_prefill(*arrays, spec, **extras, decoded=decoded)
