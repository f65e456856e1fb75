"""Paged attention for prefill on Hopper, in Pallas Mosaic GPU: ragged chunks on the tensor cores.

A tile of 128 rows holds `pack` query heads of one KV head for `128 // pack` tokens of one sequence (`prefill_plan`
cuts them), so that short chunks fill it better. An item is a tile and a group of heads; programs take items in snake
order, about the longest first, which balances them (`mosaic_prefill_items`).

Of an item, the KV tiles are visited from the last to the first, with the running maximum and sum of online softmax
(Milakov and Gimelshein, 2018, arXiv:1805.02867): only those at both ends need a mask. The scores of the next KV tile,
also of the next item, are issued before the product with the values of this one (as in FlashAttention-3,
arXiv:2407.08608), so that the tensor cores work while the softmax runs (`mosaic_prefill_attend`).

Serves any mix of chunks and decode rows; the latter are right, not fast: `mosaic` leaves them to the decode kernel.
Here is which calls it serves, and the call.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.devices import num_multiprocessors
from pallas_kernels.paged_attention.mosaic_common import common_refusal
from pallas_kernels.paged_attention.mosaic_prefill_geometry import Geometry
from pallas_kernels.paged_attention.mosaic_prefill_kernel import prefill_kernel
from pallas_kernels.paged_attention.prefill_plan import ROW, ROWS, PrefillPlan, plan_prefill
from pallas_kernels.paged_attention.spec import AttentionSpec

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64, 128)
_ALIGNMENT = 256  # bytes: of the arrays that Mosaic takes


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
    """Why this implementation can't serve a call, or None."""
    if (reason := common_refusal(q, k_pool, spec, HEAD_DIMS, k_scale, v_scale)) is not None:
        return reason
    if k_pool.shape[1] not in BLOCK_SIZES:
        return f"block_size must be 8, 16, 32, 64 or 128, not {k_pool.shape[1]}"
    return None


def mosaic_prefill(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: None = None,
    v_scale: None = None,
    decoded: tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None] | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """Output, and log-sum-exp if `spec.return_lse`, else None; see `pallas_kernels.paged_attention`.

    For calls that `refusal` has nothing against. With `decoded`, the output and log-sum-exp of the sequences that have
    one query and of the padding, only the other rows are computed, and written into it.
    """
    return _prefill(q, k_pool, v_pool, block_tables, kv_lens, query_starts, sinks, decoded, spec, num_multiprocessors())


@functools.partial(jax.jit, static_argnames=("spec", "multiprocessors"))  # one trace for all layers of a model
def _prefill(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    block_tables: Array,
    kv_lens: Array,
    query_starts: Array,
    sinks: Array | None,
    decoded: tuple[Array, Array | None] | None,
    spec: AttentionSpec,
    multiprocessors: int,
) -> tuple[Array, Array | None]:
    tokens, q_heads, head_dim = q.shape
    blocks, block_size, kv_heads, _ = k_pool.shape
    g = Geometry(
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        block_size=block_size,
        table_width=block_tables.shape[1],
        programs=multiprocessors,
        spec=spec,
        has_sinks=sinks is not None,
        zeroes_padding=decoded is None,
    )
    fewest = 1 if decoded is None else 2
    plan = plan_prefill(query_starts, kv_lens, tokens, g.tile_tokens, g.bundle, spec.causal, fewest)
    # Ids outside the pool read some block of it instead of faulting. And an operand that is computed is aligned as
    # Mosaic wants it, which a slice of an array, as callers pass it, need not be: so is that of q by tokens, where a
    # token's bytes allow less, and so q gets a row. (A slice of pools by layers is a multiple of 256 bytes.)
    block_tables = jnp.clip(block_tables, 0, blocks - 1)
    missing = max(g.tile_tokens - tokens, 0)  # a copy is no larger than what it reads
    q = _pad_rows(q, max(missing, 1 if q_heads * head_dim * q.dtype.itemsize % _ALIGNMENT else 0))
    into = None if decoded is None else _pad_rows(decoded[0], missing)
    if sinks is not None:  # one a row of a warpgroup
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(g.groups, g.pack), (1, g.warpgroup_tokens))
    g = dataclasses.replace(g, tokens=tokens + missing)
    out, lse = prefill_kernel(g, plan, (q, k_pool, v_pool, block_tables), sinks, into)
    if lse is not None:
        others = decoded[1] if decoded is not None else None
        lse = _by_token(g, plan, lse, jnp.full((tokens, q_heads), -jnp.inf) if others is None else others)
    return out[:tokens], lse


def _pad_rows(x: Array, rows: int) -> Array:
    return jnp.pad(x, ((0, rows), (0, 0), (0, 0))) if rows else x


def _by_token(g: Geometry, plan: PrefillPlan, lse: Array, others: Array) -> Float[Array, "tokens q_heads"]:
    """The log-sum-exp from one a row of a tile to one a token; tokens of no tile get that of `others`."""
    lse = lse.reshape(-1, g.groups, g.tile_tokens, g.pack).swapaxes(1, 2).reshape(-1, g.tile_tokens, g.q_heads)
    offset = jnp.arange(g.tile_tokens, dtype=jnp.int32)[None]
    target = jnp.where(offset < plan.tiles[:, ROWS, None], plan.tiles[:, ROW, None] + offset, others.shape[0])
    return others.at[target].set(lse, mode="drop")
