"""Paged attention on Hopper: one of two Mosaic GPU kernels, by what a sequence can bring.

The decode kernel serves calls that promise one query a sequence (`max_query_len=1`), the prefill kernel all others.
Both are imported on first use, since only a GPU needs them.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Array

from pallas_kernels.paged_attention.spec import AttentionSpec


def refusal(*arrays_and_spec: Any, **extras: Array | None) -> str | None:
    """Why neither kernel can serve a call, or None. Takes the arguments of `mosaic_attention`."""
    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    spec: AttentionSpec = arrays_and_spec[-1]
    kernel = mosaic_decode if spec.max_query_len == 1 else mosaic_prefill
    return kernel.refusal(*arrays_and_spec, **extras)


def mosaic_attention(*arrays_and_spec: Any, **extras: Any) -> tuple[Array, Array | None]:
    """Output and, if asked for, log-sum-exp; the arguments are those of `paged_attention_reference`."""
    from pallas_kernels.paged_attention import mosaic_decode, mosaic_prefill

    spec: AttentionSpec = arrays_and_spec[-1]
    if spec.max_query_len == 1:
        return mosaic_decode.mosaic_decode(*arrays_and_spec, **extras)
    return mosaic_prefill.mosaic_prefill(*arrays_and_spec, **extras)
