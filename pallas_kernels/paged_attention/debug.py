"""Checks of what is in the arrays of a call, which costs a wait for them: off unless a user turns them on.

Shapes and dtypes are checked in every call, by `api`. The numbers that lie in block tables and lengths are known on
the device only, and wrong ones make kernels read another sequence's cache, or memory that is nobody's.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Int32

_enabled = jax.make_user_context(default_value=False)  # part of jit's cache key: turning it on traces anew


def debug_checks(enabled: bool = True) -> AbstractContextManager[None]:
    """A context in which `paged_attention`, and what is made of it, checks its block tables and lengths.

        with pallas_kernels.debug_checks():
            out = step(...)  # jitted or not

    A call on arrays raises a ValueError before anything is launched. Within a jit the check is a callback to the host
    that the kernel waits for: no kernel reads through a bad table, and the run ends, where its results are awaited at
    the latest, with an error that holds the same message: a ValueError or a `jax.errors.JaxRuntimeError`, as JAX
    passes it on. Jitted functions are traced anew in the context. It holds for the current thread, and makes every
    call wait for the host: for debugging only.
    """
    return _enabled(enabled)


def debug_checks_enabled() -> bool:
    """Whether this thread is in `debug_checks`, so that what it traces calls back to the host."""
    return _enabled.value


def checked_tables(
    block_tables: Int32[Array, "seqs table_width"],
    kv_lens: Int32[Array, " seqs"],
    query_starts: Int32[Array, " seqs_plus_1"],
    *,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    causal: bool,
    max_query_len: int | None,
    groups: tuple[Array, Array] | None = None,
) -> Int32[Array, "seqs table_width"]:
    """`block_tables` as they are; in `debug_checks`, once all arrays have been found to be right.

    Args:
      groups: `group_starts` and `prefix_lens` of `cascade_attention`, which errors then name.

    Raises:
      ValueError: in `debug_checks`, for arrays that are no tracers: one of them is wrong.
    """
    if not _enabled.value:
        return block_tables
    check = functools.partial(
        check_values,
        op="paged_attention" if groups is None else "cascade_attention",
        num_tokens=num_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        causal=causal,
        max_query_len=max_query_len,
    )
    arrays = (block_tables, kv_lens, query_starts, *(groups or ()))
    if not any(isinstance(x, Tracer) for x in arrays):
        check(*arrays)
        return block_tables

    def check_then_pass(tables: ArrayLike, *others: ArrayLike) -> np.ndarray:
        check(tables, *others)
        return np.asarray(tables)

    # The kernel reads the tables that come out of the callback, so it can't start before the check.
    shape = jax.ShapeDtypeStruct(block_tables.shape, block_tables.dtype)
    return jax.pure_callback(check_then_pass, shape, *arrays, vmap_method="sequential")


def check_values(
    block_tables: ArrayLike,
    kv_lens: ArrayLike,
    query_starts: ArrayLike,
    *groups: ArrayLike,
    op: str = "paged_attention",
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    causal: bool,
    max_query_len: int | None,
) -> None:
    """Raises a ValueError that names the first entry that breaks the contract of `op`."""
    tables, lens, starts = (np.asarray(x) for x in (block_tables, kv_lens, query_starts))
    if (bad := np.argwhere((tables < 0) | (tables >= num_blocks))).size:
        row, entry = bad[0]
        raise ValueError(
            f"{op}: block_tables[{row}, {entry}] is {tables[row, entry]}, but the pool has blocks 0 to "
            f"{num_blocks - 1}; entries past a sequence's last block must be valid ids as well (0 by convention)"
        )
    most = tables.shape[1] * block_size
    if (bad := np.flatnonzero((lens < 0) | (lens > most))).size:
        raise ValueError(
            f"{op}: kv_lens[{bad[0]}] is {lens[bad[0]]}, but a row of block_tables holds 0 to {most} tokens "
            f"({tables.shape[1]} blocks of {block_size})"
        )
    counts = np.diff(starts)
    if starts[0] != 0 or (counts < 0).any() or starts[-1] > num_tokens:
        raise ValueError(
            f"{op}: query_starts must be non-decreasing from 0 to at most the {num_tokens} rows of q, not "
            f"{starts.tolist()}"
        )
    if max_query_len is not None and (bad := np.flatnonzero(counts > max_query_len)).size:
        raise ValueError(
            f"{op}: sequence {bad[0]} has {counts[bad[0]]} queries, more than max_query_len={max_query_len}"
        )
    if causal and (bad := np.flatnonzero(counts > lens)).size:
        raise ValueError(
            f"{op}: sequence {bad[0]} has {counts[bad[0]]} queries but kv_lens of {lens[bad[0]]}, which "
            "counts the queries in"
        )
    if groups:
        group_starts, prefix_lens = (np.asarray(x) for x in groups)
        _check_groups(tables, lens, counts, group_starts, prefix_lens, block_size)


def _check_groups(
    tables: np.ndarray,
    lens: np.ndarray,
    counts: np.ndarray,
    group_starts: np.ndarray,
    prefix_lens: np.ndarray,
    block_size: int,
) -> None:
    """As `check_values`, of what is `cascade_attention`'s alone; `counts` are each sequence's queries."""
    if group_starts[0] != 0 or (np.diff(group_starts) < 0).any() or group_starts[-1] > len(lens):
        raise ValueError(
            f"cascade_attention: group_starts must be non-decreasing from 0 to at most the {len(lens)} sequences, not "
            f"{group_starts.tolist()}"
        )
    most = tables.shape[1] * block_size
    for group, prefix in enumerate(prefix_lens):
        if not 0 <= prefix <= most:
            raise ValueError(
                f"cascade_attention: prefix_lens[{group}] is {prefix}, but a row of block_tables holds 0 to {most} "
                "tokens"
            )
        first, end = group_starts[group : group + 2]
        if (bad := np.flatnonzero(prefix > lens[first:end] - counts[first:end])).size:
            seq = first + bad[0]
            raise ValueError(
                f"cascade_attention: prefix_lens[{group}] is {prefix}, but sequence {seq} of that group has "
                f"{lens[seq] - counts[seq]} tokens before its queries (kv_lens {lens[seq]}, queries {counts[seq]})"
            )
        shared = tables[first:end, : prefix // block_size]
        if (bad := np.argwhere(shared != shared[:1])).size:
            seq, entry = first + bad[0][0], bad[0][1]
            raise ValueError(
                f"cascade_attention: block_tables[{seq}, {entry}] is {tables[seq, entry]}, but sequence {first}, the "
                f"first of its group, has block {tables[first, entry]} there, within the {prefix} tokens that group "
                f"{group} shares"
            )
