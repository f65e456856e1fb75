import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import dense_attention, make_case

from pallas_kernels import paged_attention
from pallas_kernels.devices import compute_capability
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS

needs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(compute_capability() is None, reason="Triton kernels need an NVIDIA GPU"),
]
# The Hopper kernels have suites of their own, for dtypes and sizes that they serve, on a GPU.
pytestmark = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(i.name, marks=needs_triton if i.name == "triton" else ())
        for i in IMPLEMENTATIONS
        if i.name != "mosaic"
    ],
)

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
    out, lse = paged_attention(*case.arrays(dtype), implementation=implementation, return_lse=True, **options)
    assert out.dtype == dtype
    options.pop("max_query_len", None)
    expected, expected_lse = dense_attention(case, **options)
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert np.isfinite(error).all()
    assert error.max() < TOLERANCE[dtype] * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(lse, expected_lse, atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


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


FEATURES = {
    "scale": {"scale": 0.5},
    "not causal": {"causal": False},
    "window": {"sliding_window": 20},
    "window of one": {"sliding_window": 1},
    "window wider than all": {"sliding_window": 1000},
    "soft cap": {"logit_soft_cap": 2.0, "scale": 3.0},
    "sinks": {"sinks": np.array([-3.0, 0.0, 2.0, 200.0], np.float32)},
    "all": {"sliding_window": 33, "logit_soft_cap": 5.0, "sinks": np.array([0.5, -1.0, 1.0, 2.0], np.float32)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, implementation):
    case = make_case(np.random.default_rng(5), [300, 5, 48, 129, 90], [1, 5, 1, 40, 1])
    check(case, implementation, **FEATURES[feature])


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 10**30, np.int64(2**40)])
def test_a_window_may_be_of_any_size(window, implementation):
    case = make_case(np.random.default_rng(11), [40, 9], [5, 1])
    whole, windowed = (
        paged_attention(*case.arrays("float32"), implementation=implementation, **options)
        for options in ({}, {"sliding_window": window})
    )
    np.testing.assert_allclose(windowed, whole, atol=1e-6)


def test_options_may_be_numpy_scalars(implementation):
    case = make_case(np.random.default_rng(12), [40, 9], [1, 1])
    options = {"scale": np.float32(0.5), "logit_soft_cap": np.float32(4), "sliding_window": np.int32(8)}
    check(case, implementation, **options, max_query_len=np.int64(1))


@pytest.mark.parametrize("max_query_len", [None, 1])
def test_sinks_of_minus_infinity_are_none(max_query_len, implementation):
    """Also of a sequence without keys, where nothing at all takes part in the softmax."""
    case = make_case(np.random.default_rng(13), [40, 9], [1, 1], padding_rows=1, padding_tokens=1)
    case.query_starts[-1] += 1  # the padding row gets a query, of 0 keys
    case.q[2] = 1
    options = {"causal": False, "max_query_len": max_query_len, "return_lse": True, "implementation": implementation}
    out, lse = paged_attention(*case.arrays("float32"), sinks=jnp.full(4, -jnp.inf), **options)
    without, without_lse = paged_attention(*case.arrays("float32"), **options)
    assert not np.asarray(out[2]).any()
    assert np.isneginf(lse[2]).all()
    np.testing.assert_allclose(out, without, atol=1e-6)
    np.testing.assert_allclose(lse, without_lse, atol=1e-6)


def test_what_a_window_hides_may_be_poisoned(implementation):
    case = make_case(np.random.default_rng(8), [100, 70], [3, 1], table_slack=0)
    for i, (n, queries) in enumerate([(100, 3), (70, 1)]):
        for position in range(n - queries + 1 - 16):
            block = case.block_tables[i, position // 16]
            case.k_pool[block, position % 16] = case.v_pool[block, position % 16] = np.nan
    out = paged_attention(*case.arrays("float32"), sliding_window=16, implementation=implementation)
    assert np.isfinite(np.asarray(out)).all()


def test_decodes_alone_may_be_announced(implementation):
    case = make_case(np.random.default_rng(9), [1, 40, 129], [1, 1, 1])
    check(case, implementation, max_query_len=1)


def test_fp8_pools_with_scales(implementation):
    case = make_case(np.random.default_rng(10), [40, 100, 7], [1, 30, 7])
    arrays = list(case.arrays("float32"))
    arrays[1:3] = (x.astype(jnp.float8_e4m3fn) for x in arrays[1:3])
    case.k_pool, case.v_pool = (np.asarray(x, np.float32) for x in arrays[1:3])
    scales = {"k_scale": np.array([0.5, 2.0], np.float32), "v_scale": np.array([3.0, 0.25], np.float32)}
    out = paged_attention(*arrays, **scales, implementation=implementation)
    np.testing.assert_allclose(out, dense_attention(case, **scales)[0], atol=1e-5)


def test_gradients_are_refused(implementation):
    arrays = make_case(np.random.default_rng(11), [9], [9]).arrays("float32")
    with pytest.raises(ValueError, match="paged_attention is not differentiable"):
        jax.grad(lambda q: paged_attention(q, *arrays[1:], implementation=implementation).sum())(arrays[0])


def test_random_shapes(implementation):
    rng = np.random.default_rng(6)
    for _ in range(12):
        kv_lens = rng.integers(1, 90, size=rng.integers(1, 8))
        query_lens = [int(rng.choice([1, n, rng.integers(1, n + 1)])) for n in kv_lens]
        check(make_case(rng, kv_lens.tolist(), query_lens, block_size=int(rng.choice([8, 16, 32]))), implementation)


def test_runs_inside_the_users_jit(implementation):
    case = make_case(np.random.default_rng(7), [30, 9], [1, 9])
    jitted = jax.jit(lambda *a: paged_attention(*a, implementation=implementation))
    assert np.abs(np.asarray(jitted(*case.arrays("float32"))) - dense_attention(case)[0]).max() < 1e-5


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
        ({"v_pool": jnp.zeros((3, 16, 2, 16), jnp.bfloat16)}, "must agree in shape and dtype"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"sliding_window": 8, "causal": False}, "sliding_window=8 needs causal=True"),
        ({"max_query_len": -1}, "max_query_len=-1 must be at least 1"),
        ({"sliding_window": 2.5}, "sliding_window=2.5 must be an int"),
        ({"max_query_len": "1"}, "max_query_len='1' must be an int"),
        ({"logit_soft_cap": float("inf")}, "logit_soft_cap=inf must be finite"),
        ({"logit_soft_cap": 1e-300}, "logit_soft_cap=1e-300 must be above 0"),
        ({"scale": float("nan")}, "scale=nan must be finite"),
        ({"scale": 1e300}, r"scale=1e\+300 must be finite in float32"),
        ({"scale": "big"}, "scale='big' must be a number"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0 must be above 0"),
        ({"sinks": jnp.zeros(2)}, r"sinks must have shape \(4,\)"),
        ({"k_scale": jnp.zeros(4)}, r"k_scale must have shape \(2,\)"),
        (
            {"implementation": "magic"},
            "implementation='magic' is unknown; choose one of 'mosaic', 'triton', 'reference'",
        ),
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
