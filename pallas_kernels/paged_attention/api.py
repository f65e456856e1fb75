"""The paged attention op: what it computes, what it refuses, and who computes it."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, choose, serves_all
from pallas_kernels.op import public_op
from pallas_kernels.options import check_pool_dtype, check_sizes, finite_float, positive_int
from pallas_kernels.paged_attention import mosaic, triton
from pallas_kernels.paged_attention.debug import checked_tables
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.spec import AttentionSpec

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_LEAST_SOFT_CAP = float(jnp.finfo(jnp.float32).tiny)  # scores are divided by it
_OP = "paged_attention"


IMPLEMENTATIONS = (
    Implementation("mosaic", mosaic.mosaic_attention, mosaic.refusal),
    Implementation("triton", triton.triton_attention, triton.refusal),
    Implementation("reference", paged_attention_reference, serves_all),
)


@public_op
def paged_attention(
    q: Float[Array, "tokens q_heads head_dim"],
    k_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    v_pool: Float[Array, "blocks block_size kv_heads head_dim"],
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    *,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Attention, causal by default, of ragged queries over keys and values in a paged pool.

    Sequence `i` owns the queries `q[query_starts[i]:query_starts[i + 1]]`: one row for a decode, many for a
    (chunk of a) prefill, in any mix. They are its last tokens: the newest has position `kv_lens[i] - 1`, and
    each attends to every position up to its own. The keys and values of position `p` lie in block
    `block_tables[i, p // block_size]` at row `p % block_size`, those of the queries themselves included
    (`write_kv` comes first).

    Grouped-query attention: `q_heads` is a multiple of `kv_heads`; query head `h` reads KV head
    `h // (q_heads // kv_heads)`.

    Not differentiable: it serves, it does not train.

    Args:
      q: queries; float32, bfloat16 or float16. Rows from `query_starts[-1]` on are padding.
      k_pool: keys of all blocks; one of these dtypes, or float8_e4m3fn with scales.
      v_pool: values of all blocks, shaped like `k_pool`.
      block_tables: block ids; entries past a sequence's last block are never used, but must be valid ids
        (0, the null block, by convention).
      kv_lens: tokens of each sequence that are in the pool, its queries included; 0 for a padding row.
      query_starts: where each sequence's queries start, non-decreasing from 0, `seqs + 1` entries.
      scale: factor on the scores; `head_dim ** -0.5` if None.
      causal: False lets every query see all `kv_lens` tokens of its sequence: for keys that all its queries share,
        such as a common prefix, without `sliding_window`.
      sliding_window: each query sees this many positions, its own included; all if None.
      logit_soft_cap: scores become `cap * tanh(scores / cap)` (Gemma 2).
      sinks: a logit for each query head that takes part in the softmax and brings no value (gpt-oss).
      k_scale: the keys are `k_pool * k_scale`, by KV head.
      v_scale: likewise for the values.
      max_query_len: most queries that any sequence has, if known at trace time: 1 for a step of decodes
        alone. It is a promise, and lets kernels do less.
      return_lse: also return the log-sum-exp of the scores, sinks included, for `merge_attention`.
      implementation: `"mosaic"` (Hopper kernels), `"triton"` (portable kernels, NVIDIA GPUs from sm_80 on),
        `"reference"` (XLA, any device), or None for the best that serves this call.

    Returns:
      The attention output in `q`'s shape and dtype, zeros in padding rows; with `return_lse` also the natural
      log-sum-exp, float32, `-inf` in padding rows.

    Raises:
      ValueError: shapes or dtypes disagree, or `implementation` can't serve the call; in `debug_checks` also numbers
        in `block_tables`, `kv_lens` or `query_starts` that break what is said above.
    """
    _check(q, k_pool, v_pool, block_tables, kv_lens, query_starts)
    _check_extras(q, k_pool, sinks, k_scale, v_scale)
    max_query_len = positive_int(_OP, "max_query_len", max_query_len)
    if (sliding_window := positive_int(_OP, "sliding_window", sliding_window)) is not None:
        if not causal:
            raise ValueError(f"paged_attention: sliding_window={sliding_window} needs causal=True")
        sliding_window = min(sliding_window, block_tables.shape[1] * k_pool.shape[1])  # else past int32, at some size
    scale, logit_soft_cap = (
        finite_float(_OP, name, x) for name, x in (("scale", scale), ("logit_soft_cap", logit_soft_cap))
    )
    if logit_soft_cap is not None and not logit_soft_cap >= _LEAST_SOFT_CAP:
        raise ValueError(f"paged_attention: logit_soft_cap={logit_soft_cap} must be above 0, or None")
    spec = AttentionSpec(
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        causal=causal,
        sliding_window=sliding_window,
        logit_soft_cap=logit_soft_cap,
        max_query_len=max_query_len,
        return_lse=return_lse,
    )
    block_tables = checked_tables(
        block_tables,
        kv_lens,
        query_starts,
        num_tokens=q.shape[0],
        num_blocks=k_pool.shape[0],
        block_size=k_pool.shape[1],
        causal=causal,
        max_query_len=max_query_len,
    )
    arrays = (q, k_pool, v_pool, block_tables, kv_lens, query_starts)
    extras = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    chosen = choose("paged_attention", IMPLEMENTATIONS, implementation, *arrays, spec, **extras)
    if q.shape[0] == 0 or block_tables.shape[0] == 0:  # padding is all there is, and no kernel has a grid of 0
        out, lse = jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
    else:
        out, lse = chosen.run(*arrays, spec, **extras)
    return (out, lse) if return_lse else out


def _check(q: Array, k_pool: Array, v_pool: Array, block_tables: Array, kv_lens: Array, query_starts: Array) -> None:
    ranks = {"q": (q, 3), "k_pool": (k_pool, 4), "v_pool": (v_pool, 4), "block_tables": (block_tables, 2)}
    ranks |= {"kv_lens": (kv_lens, 1), "query_starts": (query_starts, 1)}
    for name, (x, rank) in ranks.items():
        if x.ndim != rank:
            raise ValueError(f"paged_attention: {name} must have {rank} dimensions, not shape {x.shape}")
    for name, x, sizes in (
        ("q", q, {"q_heads": 1, "head_dim": 2}),
        ("k_pool", k_pool, {"blocks": 0, "block_size": 1, "kv_heads": 2, "head_dim": 3}),
        ("block_tables", block_tables, {"table_width": 1}),
    ):
        check_sizes(_OP, name, x, sizes)
    if q.dtype not in _FLOATS:
        raise ValueError(f"paged_attention: q must be float32, bfloat16 or float16, not {q.dtype}")
    check_pool_dtype(_OP, k_pool)
    for name, x in {"block_tables": block_tables, "kv_lens": kv_lens, "query_starts": query_starts}.items():
        if x.dtype != jnp.int32:
            raise ValueError(f"paged_attention: {name} must be int32, not {x.dtype}")
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        raise ValueError(
            f"paged_attention: k_pool {k_pool.dtype}{k_pool.shape} and v_pool {v_pool.dtype}{v_pool.shape} "
            "must agree in shape and dtype"
        )
    if q.shape[2] != k_pool.shape[3]:
        raise ValueError(f"paged_attention: head_dim of q ({q.shape[2]}) and of k_pool ({k_pool.shape[3]}) differ")
    if q.shape[1] % k_pool.shape[2]:
        raise ValueError(
            f"paged_attention: q has {q.shape[1]} heads, which must be a multiple of the {k_pool.shape[2]} KV heads"
        )
    seqs = block_tables.shape[0]
    if kv_lens.shape[0] != seqs or query_starts.shape[0] != seqs + 1:
        raise ValueError(
            f"paged_attention: block_tables has {seqs} rows, so kv_lens must have {seqs} entries (has "
            f"{kv_lens.shape[0]}) and query_starts {seqs + 1} (has {query_starts.shape[0]})"
        )


def _check_extras(q: Array, k_pool: Array, sinks: Array | None, k_scale: Array | None, v_scale: Array | None) -> None:
    for name, x, size in (
        ("sinks", sinks, q.shape[1]),
        ("k_scale", k_scale, k_pool.shape[2]),
        ("v_scale", v_scale, k_pool.shape[2]),
    ):
        if x is not None and x.shape != (size,):
            raise ValueError(f"paged_attention: {name} must have shape ({size},), one a head, not {x.shape}")
