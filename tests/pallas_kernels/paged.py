"""Random ragged paged batches with poison wherever nothing may look, and dense attention in float64 to compare."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Case:
    """One call of paged attention, in numpy; pools and padding hold NaN where no token lies."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    kv_lens: np.ndarray
    query_starts: np.ndarray

    def arrays(self, dtype) -> tuple:
        floats = (jnp.asarray(x, dtype) for x in (self.q, self.k_pool, self.v_pool))
        return (*floats, *(jnp.asarray(x, jnp.int32) for x in (self.block_tables, self.kv_lens, self.query_starts)))


def make_case(
    rng: np.random.Generator,
    kv_lens: list[int],
    query_lens: list[int],
    *,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    padding_rows: int = 2,
    padding_tokens: int = 3,
    table_slack: int = 3,
) -> Case:
    """Sequences with `kv_lens` tokens in the pool, the last `query_lens` of which are queried; tables permuted."""
    blocks = [-(-n // block_size) for n in kv_lens]
    ids = rng.permutation(np.arange(1, sum(blocks) + 4))  # a few blocks belong to nobody
    pools = np.full((2, sum(blocks) + 4, block_size, kv_heads, head_dim), np.nan, np.float32)
    tables = np.zeros((len(kv_lens) + padding_rows, max(blocks) + table_slack), np.int32)
    taken = 0
    for i, (n, count) in enumerate(zip(kv_lens, blocks, strict=True)):
        tables[i, :count] = ids[taken : taken + count]
        taken += count
        for p in range(n):
            pools[:, tables[i, p // block_size], p % block_size] = rng.normal(size=(2, kv_heads, head_dim))
    total = sum(query_lens)
    q = np.full((total + padding_tokens, q_heads, head_dim), np.nan, np.float32)
    q[:total] = rng.normal(size=(total, q_heads, head_dim))
    starts = np.array([0, *np.cumsum(query_lens), *[total] * padding_rows])
    return Case(q, *pools, tables, np.array([*kv_lens, *[0] * padding_rows]), starts)


def dense_attention(
    case: Case,
    scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """What the op must give, each sequence by itself, in float64: output (zeros in padding) and log-sum-exp."""
    tokens, q_heads, head_dim = case.q.shape
    block_size, kv_heads = case.k_pool.shape[1:3]
    out, lse = np.zeros(case.q.shape), np.full((tokens, q_heads), -np.inf)
    scale = head_dim**-0.5 if scale is None else scale
    k_scale, v_scale = (np.ones(kv_heads) if s is None else np.asarray(s, np.float64) for s in (k_scale, v_scale))
    sinks = np.full(q_heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    for i, n in enumerate(case.kv_lens):
        lo, hi = case.query_starts[i : i + 2]
        if lo == hi:
            continue
        positions = np.arange(n)
        where = (case.block_tables[i, positions // block_size], positions % block_size)
        k, v = (
            (pool[where].astype(np.float64) * s[:, None]).repeat(q_heads // kv_heads, axis=1)
            for pool, s in ((case.k_pool, k_scale), (case.v_pool, v_scale))
        )
        scores = np.einsum("qhd,khd->hqk", case.q[lo:hi].astype(np.float64), k) * scale
        if logit_soft_cap is not None:
            scores = logit_soft_cap * np.tanh(scores / logit_soft_cap)
        sees = np.arange(n - (hi - lo), n) if causal else np.full(hi - lo, n - 1)
        distance = sees[:, None] - positions
        seen = (distance >= 0) & (distance < (sliding_window or n))
        scores = np.where(seen, scores, -np.inf)
        maximum = np.maximum(scores.max(-1), sinks[:, None])
        weights = np.exp(scores - maximum[..., None])
        total = weights.sum(-1) + np.exp(sinks[:, None] - maximum)
        out[lo:hi] = np.einsum("hqk,khd->qhd", weights / total[..., None], v)
        lse[lo:hi] = (maximum + np.log(total)).T
    return out, lse
