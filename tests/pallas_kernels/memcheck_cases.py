"""Small calls at the edges of exactly sized arrays, each a program for compute-sanitizer: `memcheck_cases.py CASE`.

Nothing is padded: tables are as wide as the longest row, the pool's last block is in use. A program ends with 1 if its
result differs from the reference, which runs on the CPU: under the sanitizer, cuBLAS takes minutes to load. `planted`
reads outside of its array, which the sanitizer must find.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import cascade_attention, copy_blocks, paged_attention, rope_and_write_kv

DECODES = ([1, 15, 16, 17, 65, 1500], [1] * 6)
CHUNKS = ([1, 17, 64, 200, 300], [1, 17, 3, 130, 1])


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)


def ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def batch(
    kv_lens: list[int], queries: list[int], q_heads=8, kv_heads=2, head_dim=128, block_size=16
) -> list[np.ndarray]:
    """Arguments of `paged_attention`."""
    counts = [-(-n // block_size) for n in kv_lens]
    blocks = sum(counts) + 1
    ids = np.random.default_rng(0).permutation(np.arange(1, blocks))
    tables = np.zeros((len(kv_lens), max(counts)), np.int32)
    for row, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        row[:count] = ids[end - count : end]
    pools = [random(blocks, block_size, kv_heads, head_dim) for _ in range(2)]
    q = random(sum(queries), q_heads, head_dim)
    return [q, *pools, *map(ints, (tables, kv_lens, [0, *np.cumsum(queries)]))]


def difference(got: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max()) for x, y in pairs)


def check(call: Callable[..., Any], reference: Callable[..., Any], *arrays: np.ndarray) -> float:
    got = jax.jit(call)(*arrays)
    with jax.default_device(jax.devices("cpu")[0]):
        return difference(got, jax.jit(reference)(*arrays))


def attention(implementation: str, work: tuple[list[int], list[int]], shapes: dict[str, int], **options: Any) -> float:
    def attend(name: str) -> Any:
        return lambda *a: paged_attention(*a, implementation=name, return_lse=True, **options)

    return check(attend(implementation), attend("reference"), *batch(*work, **shapes))


def rope() -> float:
    slots = np.random.default_rng(0).permutation(64)[:37]
    slots[[3, 5, 6]] = 64, 2**31 - 1, -1  # no slots of the pool
    arrays = (
        random(37, 12, 128),
        np.ones((37, 64), np.float32),
        np.zeros((37, 64), np.float32),
        random(4, 16, 2, 128),
        random(4, 16, 2, 128),
    )
    write, reference = (functools.partial(rope_and_write_kv, implementation=name) for name in ("triton", "reference"))
    return check(write, reference, *arrays, ints(slots))


def copies() -> float:
    pools = random(9, 16, 3, 80), random(9, 16, 3, 80)
    pairs = ints([1, 8, 0, 3]), ints([2, 4, 9, 2**31 - 1])
    copy, reference = (functools.partial(copy_blocks, implementation=name) for name in ("triton", "reference"))
    return check(copy, reference, *pools, *pairs)


def cascade() -> float:
    q, k, v, tables, lens, starts = batch([100, 90, 70], [1, 1, 1])
    tables[1:, :3] = tables[0, :3]
    return check(
        lambda *a: cascade_attention(*a, ints([0, 3]), ints([48]), max_query_len=1, prefix_splits=2),
        lambda *a: paged_attention(*a, implementation="reference"),
        *(q, k, v, tables, lens, starts),
    )


def planted() -> float:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as pltriton

    def read(at: Any, x: Any, out: Any) -> None:
        out[...] = pltriton.load(x.at[pl.ds(at[0], 128)])

    call = pl.pallas_call(read, out_shape=jax.ShapeDtypeStruct((128,), jnp.float32))
    jax.jit(call)(ints([2**24]), np.ones(256, np.float32)).block_until_ready()
    return 0.0


def _both_kernels(name: str) -> dict[str, Callable[[], float]]:
    narrow = {"q_heads": 6, "kv_heads": 3, "head_dim": 80, "block_size": 8}
    return {
        f"{name} decode": lambda: attention(name, DECODES, {}, max_query_len=1),
        f"{name} decode, head_dim 80": lambda: attention(name, DECODES, narrow, max_query_len=1, sliding_window=40),
        f"{name} prefill": lambda: attention(name, ([200], [130]), {}),
        f"{name} mixed": lambda: attention(name, CHUNKS, {}),
        f"{name} mixed, head_dim 80": lambda: attention(name, CHUNKS, narrow),
    }


CASES: dict[str, Callable[[], float]] = {
    **_both_kernels("mosaic"),
    **_both_kernels("triton"),
    "rope_and_write_kv": rope,
    "copy_blocks": copies,
    "cascade": cascade,
    "planted": planted,
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(not CASES[sys.argv[1]]() < 3e-2)
