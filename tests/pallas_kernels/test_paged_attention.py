import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import dense_attention, make_case

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS

pytestmark = pytest.mark.parametrize("implementation", [i.name for i in IMPLEMENTATIONS])

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}

BATCHES = {
    "decodes": ([1, 15, 16, 17, 33, 200], [1] * 6),
    "whole prefills": ([1, 15, 16, 17, 33, 200], [1, 15, 16, 17, 33, 200]),
    "chunks with an offset": ([40, 130, 64], [7, 64, 16]),
    "decodes and chunks mixed": ([300, 5, 48, 129, 90], [1, 5, 1, 40, 1]),
    "a sequence without queries": ([20, 30, 10], [1, 0, 10]),
    "one row": ([77], [1]),
}


def check(case, implementation, dtype="float32", **options):
    out = paged_attention(*case.arrays(dtype), implementation=implementation, **options)
    assert out.dtype == dtype
    expected = dense_attention(case, options.get("scale"))
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert np.isfinite(error).all()
    assert error.max() < TOLERANCE[dtype] * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("batch", BATCHES)
def test_ragged_batches_with_poisoned_padding(batch, implementation):
    check(make_case(np.random.default_rng(1), *BATCHES[batch]), implementation)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1), (9, 3)])
@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
def test_heads_and_block_sizes(heads, block_size, implementation):
    q_heads, kv_heads = heads
    rng = np.random.default_rng(2)
    case = make_case(rng, [1, 63, 64, 150], [1, 63, 2, 9], q_heads=q_heads, kv_heads=kv_heads, block_size=block_size)
    check(case, implementation)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype, implementation):
    case = make_case(np.random.default_rng(3), [40, 100, 7], [1, 30, 7], head_dim=64)
    for name in ("q", "k_pool", "v_pool"):  # what the op sees, so that only its own rounding counts
        setattr(case, name, np.asarray(jnp.asarray(getattr(case, name), dtype), np.float32))
    check(case, implementation, dtype)


@pytest.mark.parametrize("padding", [(0, 0, 0), (5, 40, 17)])
def test_padding_of_rows_tokens_and_tables(padding, implementation):
    rows, tokens, slack = padding
    rng = np.random.default_rng(4)
    case = make_case(rng, [3, 50, 20], [3, 1, 20], padding_rows=rows, padding_tokens=tokens, table_slack=slack)
    check(case, implementation)


def test_scale(implementation):
    check(make_case(np.random.default_rng(5), [30], [30]), implementation, scale=0.5)


def test_random_shapes(implementation):
    rng = np.random.default_rng(6)
    for _ in range(12):
        kv_lens = rng.integers(1, 90, size=rng.integers(1, 8))
        query_lens = [int(rng.choice([1, n, rng.integers(1, n + 1)])) for n in kv_lens]
        check(make_case(rng, kv_lens.tolist(), query_lens, block_size=int(rng.choice([8, 16, 32]))), implementation)


def test_runs_inside_the_users_jit(implementation):
    case = make_case(np.random.default_rng(7), [30, 9], [1, 9])
    jitted = jax.jit(lambda *a: paged_attention(*a, implementation=implementation))
    assert np.abs(np.asarray(jitted(*case.arrays("float32"))) - dense_attention(case)).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 4))}, "q must have 3 dimensions"),
        ({"q": jnp.zeros((2, 4, 16), jnp.int32)}, "q must be float32, bfloat16 or float16, not int32"),
        ({"q": jnp.zeros((2, 3, 16))}, "q has 3 heads, which must be a multiple of the 2 KV heads"),
        ({"q": jnp.zeros((2, 4, 8))}, r"head_dim of q \(8\) and of k_pool \(16\) differ"),
        ({"v_pool": jnp.zeros((3, 16, 2, 8))}, "must agree in shape and dtype"),
        ({"kv_lens": jnp.zeros(5, jnp.int32)}, "kv_lens must have 1 entries"),
        ({"query_starts": jnp.zeros(1, jnp.int32)}, "query_starts 2"),
        ({"block_tables": jnp.zeros((1, 2), jnp.float32)}, "block_tables must be int32"),
        ({"implementation": "magic"}, "implementation='magic' is unknown; choose one of 'reference'"),
    ],
)
def test_bad_input_is_refused_before_any_launch(change, message, implementation):
    arguments = {
        "q": jnp.zeros((2, 4, 16)),
        "k_pool": jnp.zeros((3, 16, 2, 16)),
        "v_pool": jnp.zeros((3, 16, 2, 16)),
        "block_tables": jnp.zeros((1, 2), jnp.int32),
        "kv_lens": jnp.ones(1, jnp.int32),
        "query_starts": jnp.array([0, 1], jnp.int32),
        "implementation": implementation,
    }
    with pytest.raises(ValueError, match=message):
        paged_attention(**{**arguments, **change})
