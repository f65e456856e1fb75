"""Paged attention on any NVIDIA GPU from Ampere on (sm_80), through Pallas-Triton: one of two kernels, or both.

The decode kernel serves calls that promise one query a sequence (`max_query_len=1`). In all others, it serves the
sequences that have one, and the prefill kernel those that have more, which would do the former's work with most of its
rows idle and by one program a sequence. Which are which only the device knows, so both run.

The kernels are imported on first use, since only a GPU needs them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.devices import compute_capability, num_multiprocessors, triton_refusal
from pallas_kernels.paged_attention.spec import AttentionSpec

MAX_HEAD_DIM = 256


def refusal(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
) -> str | None:
    """Why this implementation can't serve a call, or None. Takes the arguments of `triton_attention`."""
    if (reason := triton_refusal(k_pool)) is not None:
        return reason
    if q.shape[2] > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, not {q.shape[2]}"
    return None


def triton_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """Output and, if `spec.return_lse`, log-sum-exp; see `pallas_kernels.paged_attention`.

    Products of half-width floats accumulate in float32; those of float32 are true float32 products, on no tensor core.

    For calls that `refusal` has nothing against; with `interpret` any device runs the kernels, slowly, for tests.
    """
    from pallas_kernels.paged_attention.triton_common import Device
    from pallas_kernels.paged_attention.triton_decode import triton_decode
    from pallas_kernels.paged_attention.triton_prefill import triton_prefill

    device = Device(num_multiprocessors(), compute_capability() or 90, interpret)  # of no GPU: tests interpret
    # Ids outside the pool read some block of it instead of faulting.
    block_tables = jnp.clip(block_tables, 0, k_pool.shape[0] - 1)
    arrays, extras = (q, k_pool, v_pool, block_tables), (sinks, k_scale, v_scale)
    if spec.max_query_len == 1:
        return triton_decode(*arrays, kv_lens, query_starts, *extras, spec=spec, device=device)
    decoded = None
    if kv_lens.shape[0] > 1:  # a sequence alone, of which nothing was promised, is hardly a decode
        # Which sequences have one query only the device knows: its plan leaves out the others, whose rows the prefill
        # kernel writes.
        decoded = triton_decode(*arrays, kv_lens, query_starts, *extras, spec=spec, device=device)
    return triton_prefill(*arrays, kv_lens, query_starts, *extras, decoded, spec=spec, device=device)
