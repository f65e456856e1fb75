"""The Hopper decode kernel: it lowers for an H200 without one, and on one it agrees with dense attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import Case, dense_attention, make_case

from pallas_kernels.paged_attention.mosaic_decode import mosaic_decode, refusal
from pallas_kernels.paged_attention.spec import AttentionSpec

TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}
H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)
FEATURES = {
    "plain": {},
    "scale": {"scale": 0.5},
    "log-sum-exp": {"return_lse": True},
    "window": {"sliding_window": 100},
    "soft cap": {"logit_soft_cap": 2.0, "scale": 3.0},
    "sinks": {"sinks": True, "return_lse": True},
    "all": {"sliding_window": 70, "logit_soft_cap": 5.0, "sinks": True, "return_lse": True},
}
SHAPES = {
    "GQA": {},
    "MHA": {"q_heads": 8, "kv_heads": 8},
    "MHA of few heads": {"q_heads": 3, "kv_heads": 3},
    "MQA": {"q_heads": 64, "kv_heads": 1},
    "groups of 5": {"q_heads": 40, "kv_heads": 8},
    "groups of 7": {"q_heads": 28, "kv_heads": 4},
    "groups of 12": {"q_heads": 24, "kv_heads": 2},
    "few heads": {"q_heads": 4, "kv_heads": 2},
    "blocks of 8": {"block_size": 8},
    "blocks of 32": {"block_size": 32},
    "blocks of 64": {"block_size": 64},
    "blocks of 128": {"block_size": 128},
    **{f"head_dim {dim}": {"head_dim": dim} for dim in (64, 80, 96, 112, 256)},
}


def make_spec(head_dim: int = 128, sinks: bool = False, **options) -> AttentionSpec:
    return AttentionSpec(**{"scale": head_dim**-0.5, "max_query_len": 1, **options})


def abstract_arrays(q_heads=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", pool_dtype=None):
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((6, 40), (6,), (7,))]
    pool = jax.ShapeDtypeStruct((99, block_size, kv_heads, head_dim), pool_dtype or dtype)
    return jax.ShapeDtypeStruct((9, q_heads, head_dim), dtype), pool, pool, *ints


def lower(feature: str = "plain", **shapes) -> str:
    arrays, options = abstract_arrays(**shapes), FEATURES[feature]
    spec = make_spec(shapes.get("head_dim", 128), **options)
    sinks = jax.ShapeDtypeStruct((arrays[0].shape[1],), jnp.float32) if "sinks" in options else None
    with jax.sharding.use_abstract_mesh(H200):
        assert refusal(*arrays, spec, sinks=sinks) is None
        traced = jax.jit(lambda sinks, *a: mosaic_decode(*a, spec, sinks=sinks)).trace(sinks, *arrays)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("feature", FEATURES)
def test_features_lower_without_a_gpu(feature):
    assert "mosaic_gpu" in lower(feature)


@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes_lower_without_a_gpu(shapes):
    assert "mosaic_gpu" in lower(**SHAPES[shapes])


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ({}, {"max_query_len": None}, "needs max_query_len=1"),
        ({}, {"scale": 0.0}, "scale must be above 0"),
        ({"dtype": "float32"}, {}, "not float32 and float32"),
        ({"pool_dtype": "float8_e4m3fn"}, {}, "not bfloat16 and float8_e4m3fn"),
        ({"head_dim": 72}, {}, "head_dim must be one of"),
        ({"block_size": 48}, {}, "block_size must be"),
        ({"block_size": 4}, {}, "block_size must be"),
        ({"q_heads": 65, "kv_heads": 1}, {}, "at most 64 query heads"),
    ],
)
def test_what_it_can_not_serve_it_refuses(change, options, reason):
    with jax.sharding.use_abstract_mesh(H200):
        assert reason in refusal(*abstract_arrays(**change), make_spec(**options))


def test_scales_are_refused():
    with jax.sharding.use_abstract_mesh(H200):
        assert "k_scale" in refusal(*abstract_arrays(), make_spec(), k_scale=jnp.ones(8))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what a CPU answers")
def test_other_devices_are_refused():
    assert "Hopper" in refusal(*abstract_arrays(), make_spec())
    a100 = jax.sharding.AbstractDevice(device_kind="NVIDIA A100", platform="gpu", num_cores=108)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=a100)):
        assert "Hopper" in refusal(*abstract_arrays(), make_spec())


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" or jax.devices()[0].compute_capability != "9.0", reason="needs a Hopper GPU"
    ),
]
LENGTHS = [1, 15, 16, 17, 33, 64, 65, 200, 700]


def make(kv_lens: list[int], queries: list[int] | None = None, **shapes) -> Case:
    shapes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, **shapes}
    return make_case(np.random.default_rng(len(kv_lens)), kv_lens, queries or [1] * len(kv_lens), **shapes)


def check(case: Case, dtype: str = "bfloat16", sinks: bool = False, **options) -> None:
    arrays = case.arrays(dtype)
    seen = dataclasses.replace(  # what the op sees, so that only its own rounding counts
        case, **{n: np.asarray(a.astype(jnp.float32)) for n, a in zip(("q", "k_pool", "v_pool"), arrays, strict=False)}
    )
    spec = make_spec(case.q.shape[2], **options)
    logits = np.linspace(-2, 3, case.q.shape[1], dtype=np.float32) if sinks else None
    out, lse = jax.jit(lambda *a: mosaic_decode(*a, spec, sinks=logits))(*arrays)
    options.pop("return_lse", None)
    expected, expected_lse = dense_attention(seen, **options, sinks=logits)
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert np.isfinite(error).all()
    assert error.max() < TOLERANCE[dtype] * np.abs(expected).max()
    padding = np.isneginf(expected_lse).all(axis=1)
    assert not np.asarray(out, np.float32)[padding].any()
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, atol=1e-2, rtol=1e-3)


class TestOnHopper:
    pytestmark = gpu

    @pytest.mark.parametrize("feature", FEATURES)
    def test_features(self, feature):
        check(make(LENGTHS), **FEATURES[feature])

    @pytest.mark.parametrize("shapes", SHAPES)
    def test_shapes(self, shapes):
        check(make(LENGTHS, **SHAPES[shapes]), return_lse=True)

    @pytest.mark.parametrize(
        "shapes", ["MHA", "MQA", "groups of 5", "groups of 7", "groups of 12", "head_dim 80", "head_dim 256"]
    )
    def test_long_rows_are_split_and_merged(self, shapes):
        check(make([4000, 3, 900], **SHAPES[shapes]), return_lse=True)

    @pytest.mark.parametrize("feature", FEATURES)
    def test_features_of_split_rows(self, feature):
        check(make([3000, 64]), **FEATURES[feature])

    def test_float16(self):
        check(make(LENGTHS), "float16")

    def test_many_rows_of_which_one_is_long(self):
        check(make([*range(1, 120), 3000]), return_lse=True)

    def test_sequences_without_queries_and_much_padding(self):
        case = make([30, 200, 70], [1, 0, 1], padding_rows=3, padding_tokens=400, table_slack=9)
        check(case, return_lse=True)

    def test_what_a_window_hides_may_be_poisoned(self):
        case = make([100, 700], table_slack=0)
        for i, n in enumerate([100, 700]):
            for position in range(n - 16):
                block = case.block_tables[i, position // 16]
                case.k_pool[block, position % 16] = case.v_pool[block, position % 16] = np.nan
        arrays = case.arrays("bfloat16")
        out, _ = jax.jit(lambda *a: mosaic_decode(*a, make_spec(sliding_window=16)))(*arrays)
        assert np.isfinite(np.asarray(out, np.float32)).all()

    def test_repeats_agree_to_the_bit(self):
        """Whichever program merges, it merges the same parts in the same order."""
        arrays = make([3000, 2000, 1000]).arrays("bfloat16")
        run = jax.jit(lambda *a: mosaic_decode(*a, make_spec())[0])
        first = np.asarray(run(*arrays), np.float32)
        for _ in range(50):
            np.testing.assert_array_equal(np.asarray(run(*arrays), np.float32), first)
