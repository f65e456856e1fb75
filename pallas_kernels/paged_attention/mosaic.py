"""Paged attention on Hopper: one of two Mosaic GPU kernels, by what a sequence can bring.

The decode kernel serves calls that promise one query a sequence (`max_query_len=1`), the prefill kernel all others.
Both are imported on first use, since only a GPU needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from pallas_kernels.paged_attention.spec import AttentionSpec


def refusal(*arrays_and_spec: Any, **extras: Array | None) -> str | None:
    """Why the kernel of a call can't serve it, or None. Takes the arguments of `mosaic_attention`."""
    _, kernel_refusal = _kernel(arrays_and_spec[-1])
    return kernel_refusal(*arrays_and_spec, **extras)


def mosaic_attention(*arrays_and_spec: Any, **extras: Any) -> tuple[Array, Array | None]:
    """Output and, if asked for, log-sum-exp; the arguments are those of `paged_attention_reference`."""
    run, _ = _kernel(arrays_and_spec[-1])
    return run(*arrays_and_spec, **extras)


def _kernel(spec: AttentionSpec) -> tuple[Callable[..., Any], Callable[..., str | None]]:
    """The kernel of a call, and its refusal."""
    if spec.max_query_len == 1:
        from pallas_kernels.paged_attention import mosaic_decode

        return mosaic_decode.mosaic_decode, mosaic_decode.refusal
    from pallas_kernels.paged_attention import mosaic_prefill

    return mosaic_prefill.mosaic_prefill, mosaic_prefill.refusal
