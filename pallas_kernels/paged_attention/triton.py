"""Paged attention on any NVIDIA GPU from Ampere on (sm_80), through Pallas-Triton: one of two kernels, or both.

The decode kernel serves calls that promise one query a sequence (`max_query_len=1`). In all others, it serves the
sequences that have one, and the prefill kernel those that have more, which would do the former's work with most of its
rows idle and by one program a sequence. Which are which only the device knows, so both run.

The kernels are imported on first use, since only a GPU needs them. They go through JAX's Triton backend for Pallas,
which JAX has deprecated and still ships; tests that turn warnings into errors have to let its DeprecationWarning pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.paged_attention.spec import AttentionSpec

MAX_HEAD_DIM = 256
_OLDEST, _OLDEST_WITH_FP8 = 80, 89  # compute capability times 10


def compute_capability() -> int | str:
    """Ten times that of the NVIDIA GPU which this trace is for, such as 90; the device's name where it is none."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = abstract or jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str) or device.platform not in ("gpu", "cuda"):
        return str(device)
    from jax.experimental.pallas import triton as pltriton

    try:
        capability = pltriton.get_gpu_info().compute_capability
    except ValueError:  # an abstract device of a kind that JAX does not know
        capability = 0
    return capability or device.device_kind


def num_multiprocessors() -> int:
    """Of the device that this trace is for; of an A100 where that is unknown."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = abstract or jax.config.jax_default_device or jax.devices()[0]
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or 108


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
    capability = compute_capability()
    if isinstance(capability, str):
        return f"needs an NVIDIA GPU of sm_80 or newer, not {capability}"
    if capability < _OLDEST:
        return f"needs an NVIDIA GPU of sm_80 or newer, not sm_{capability}"
    if q.shape[2] > MAX_HEAD_DIM:
        return f"head_dim must be at most {MAX_HEAD_DIM}, not {q.shape[2]}"
    # Pallas computes offsets in 64 bits only for arrays of more than 2^32 bytes.
    if 2**31 < k_pool.size <= 2**32 and k_pool.dtype == jnp.float8_e4m3fn:
        return f"FP8 pools must have at most 2^31 or more than 2^32 elements, not {k_pool.size}"
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

    capability = compute_capability()
    native_fp8 = isinstance(capability, str) or capability >= _OLDEST_WITH_FP8
    device = Device(num_multiprocessors(), native_fp8, interpret)
    arrays, extras = (q, k_pool, v_pool, block_tables), (sinks, k_scale, v_scale)
    if spec.max_query_len == 1:
        return triton_decode(*arrays, kv_lens, query_starts, *extras, spec=spec, device=device)
    decoded = None
    if kv_lens.shape[0] > 1:  # a sequence alone, of which nothing was promised, is hardly a decode
        # The decode kernel takes the others for sequences without keys, which cost next to nothing; what it leaves in
        # the first of their rows, the prefill kernel overwrites.
        decode_lens = jnp.where(query_starts[1:] - query_starts[:-1] == 1, kv_lens, 0)
        decoded = triton_decode(*arrays, decode_lens, query_starts, *extras, spec=spec, device=device)
    return triton_prefill(*arrays, kv_lens, query_starts, *extras, decoded, spec=spec, device=device)
