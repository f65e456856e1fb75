"""The Triton kernels: interpreted on the CPU, lowered for GPUs that are not there, and run on one that is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.triton import lowering
from paged import Case, dense_attention, make_case

from pallas_kernels.devices import compute_capability
from pallas_kernels.paged_attention import triton, triton_decode
from pallas_kernels.paged_attention.spec import AttentionSpec
from pallas_kernels.paged_attention.triton import refusal, triton_attention

TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2, "float16": 2e-3}
FP8 = "float8_e4m3fn"
KERNELS = {"decode": 1, "prefill": None}  # by max_query_len; the prefill kernel with the other, where it may help
BATCHES = {
    "decode": ([1, 15, 16, 17, 33, 64, 65, 200, 700], [1, 1, 1, 1, 0, 1, 1, 1, 1]),
    "prefill": ([300, 5, 48, 129, 90, 16, 33], [1, 5, 1, 40, 0, 16, 1]),
}
LONE = {"decode": ([90], [1]), "prefill": ([90], [33])}  # where the prefill kernel comes without the other
SMALL = {"decode": ([1, 15, 16, 33, 0, 150], [1, 1, 1, 1, 0, 1]), "prefill": ([90, 5, 33, 60], [1, 5, 0, 40])}
FEATURES = {
    "plain": {},
    "scale": {"scale": -0.5},
    "not causal": {"causal": False},
    "window": {"sliding_window": 100},
    "window of one": {"sliding_window": 1},
    "soft cap": {"logit_soft_cap": 2.0, "scale": 3.0},
    "sinks": {"sinks": True},
    "scales": {"scales": True},
    "all": {"sliding_window": 70, "logit_soft_cap": 5.0, "sinks": True, "scales": True},
}
SHAPES = {
    "GQA": {"q_heads": 32, "kv_heads": 8},
    "MHA": {"q_heads": 3, "kv_heads": 3},
    "MQA": {"q_heads": 24, "kv_heads": 1},
    "MQA of many heads": {"q_heads": 72, "kv_heads": 1},
    "groups of 5": {"q_heads": 10, "kv_heads": 2},
    "groups of 12": {"q_heads": 24, "kv_heads": 2},
    **{f"blocks of {n}": {"block_size": n} for n in (8, 32, 64, 128)},
    **{f"head_dim {n}": {"head_dim": n} for n in (64, 80, 96, 112, 256)},
}
DTYPES = {
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "float32": ("float32", "float32"),
    "FP8 for bfloat16": ("bfloat16", FP8),
    "FP8 for float16": ("float16", FP8),
    "FP8 for float32": ("float32", FP8),
    "bfloat16 for float32": ("float32", "bfloat16"),
}


def attend(arrays, kernel: str, scale=None, sinks=False, scales=False, interpret=False, **options):
    """What the op gives, log-sum-exp included, and its keyword arguments for `dense_attention`."""
    q_heads, kv_heads, head_dim = arrays[0].shape[1], *arrays[1].shape[2:]
    options["scale"] = head_dim**-0.5 if scale is None else scale
    spec = AttentionSpec(**options, max_query_len=KERNELS[kernel], return_lse=True)
    extras = {"sinks": np.linspace(-2, 3, q_heads, dtype=np.float32)} if sinks else {}
    if scales:
        extras["k_scale"] = np.linspace(0.5, 2, kv_heads, dtype=np.float32)
        extras["v_scale"] = np.linspace(3, 0.25, kv_heads, dtype=np.float32)
    quickly = {"xla_backend_optimization_level": 0} if interpret else None  # compiling takes most of the time
    run = jax.jit(lambda a, e: triton_attention(*a, spec, **e, interpret=interpret), compiler_options=quickly)
    return run, extras, options | extras


def cast(case: Case, dtype: str, pool_dtype: str) -> tuple[tuple, Case]:
    """The arrays of a call, and the case that these hold, so that only the op's own rounding counts."""
    arrays = list(case.arrays(dtype))
    arrays[1:3] = (jnp.asarray(x).astype(pool_dtype) for x in (case.k_pool, case.v_pool))
    names = ("q", "k_pool", "v_pool")
    held = {n: np.asarray(a.astype(jnp.float32)) for n, a in zip(names, arrays, strict=False)}
    return tuple(arrays), dataclasses.replace(case, **held)


def check(case: Case, kernel: str, dtype="bfloat16", pool_dtype=None, expect: Case | None = None, **options):
    arrays, held = cast(case, dtype, pool_dtype or dtype)
    run, extras, known = attend(arrays, kernel, **options)
    out, lse = run(arrays, extras)
    if expect is not None:
        held = cast(expect, dtype, pool_dtype or dtype)[1]
    expected, expected_lse = dense_attention(held, **known)
    assert out.dtype == dtype
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert np.isfinite(error).all()
    assert error.max() < TOLERANCE[dtype] * max(1.0, np.abs(expected).max())
    padding = np.isneginf(expected_lse).all(axis=1)
    assert not np.asarray(out, np.float32)[padding].any()
    np.testing.assert_allclose(lse, expected_lse, atol=10 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def make(batch, seed=0, **shapes) -> Case:
    return make_case(np.random.default_rng(seed), *batch, **{"q_heads": 8, "kv_heads": 2, "head_dim": 128, **shapes})


def with_queries_times(case: Case, factor: float) -> Case:
    return dataclasses.replace(case, q=case.q * np.float32(factor))


def poison_before_window(case: Case, batch, window: int) -> Case:
    """The case with NaN wherever no query looks."""
    poisoned = dataclasses.replace(case, k_pool=case.k_pool.copy(), v_pool=case.v_pool.copy())
    block_size = case.k_pool.shape[1]
    for i, (n, queries) in enumerate(zip(*batch, strict=True)):
        for position in range(n - queries + 1 - window):
            slot = case.block_tables[i, position // block_size], position % block_size
            poisoned.k_pool[slot] = poisoned.v_pool[slot] = np.nan
    return poisoned


class TestInterpreted:
    """On the CPU, in small; float32 unless something else is at stake."""

    def check(self, kernel: str, dtype="float32", heads=(4, 2), head_dim=16, block_size=8, batches=SMALL, **options):
        shapes = {"q_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "block_size": block_size}
        check(make(batches[kernel], **shapes), kernel, dtype, interpret=True, **options)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_all_features_and_a_head_dim_that_is_no_power_of_two(self, kernel):
        options = {"sliding_window": 20, "logit_soft_cap": 5.0, "sinks": True, "scales": True}
        self.check(kernel, heads=(6, 2), head_dim=24, block_size=16, **options)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_plain_and_multi_head(self, kernel):
        self.check(kernel, heads=(3, 3))

    def test_not_causal(self):
        self.check("prefill", heads=(12, 1), causal=False)

    def test_more_query_heads_than_a_program_takes(self):
        self.check("decode", heads=(72, 1))

    def test_bfloat16(self):
        self.check("decode", "bfloat16")

    @pytest.mark.parametrize(("kernel", "capability"), [("decode", 80), ("decode", 90), ("prefill", 80)])
    def test_fp8_pools_where_the_gpu_converts_and_where_it_can_not(self, kernel, capability, monkeypatch):
        monkeypatch.setattr(triton, "compute_capability", lambda: capability)
        self.check(kernel, "bfloat16", pool_dtype=FP8, head_dim=24, scales=True, batches=LONE)

    @pytest.mark.parametrize(("kernel", "magnitude"), [("decode", 1e6), ("prefill", 1e-9)])
    def test_fp8_pools_and_queries_beyond_float16(self, kernel, magnitude):
        case = with_queries_times(make(LONE[kernel], head_dim=16), magnitude)
        check(case, kernel, "bfloat16", FP8, interpret=True, scale=0.25 / magnitude)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_what_a_window_hides_may_be_poisoned(self, kernel):
        case = make(LONE[kernel], head_dim=16)
        poisoned = poison_before_window(case, LONE[kernel], 7)
        check(poisoned, kernel, "float32", expect=case, interpret=True, sliding_window=7)

    @pytest.mark.parametrize(("features", "single_heads"), [({}, True), ({"sinks": True, "scales": True}, False)])
    def test_long_rows_are_split_and_merged(self, features, single_heads, monkeypatch):
        monkeypatch.setattr(triton, "num_multiprocessors", lambda: 20)
        monkeypatch.setattr(triton_decode, "_MERGE_PROGRAMS", 10**6 if single_heads else 0)
        case = make(([2000, 3], [1, 1]), q_heads=6, head_dim=24, padding_tokens=90)
        check(case, "decode", "float32", interpret=True, **features)


def device(kind: str, cores: int) -> jax.sharding.AbstractMesh:
    abstract = jax.sharding.AbstractDevice(device_kind=kind, platform="gpu", num_cores=cores)
    return jax.sharding.AbstractMesh((), (), abstract_device=abstract)


DEVICES = {"A100": device("NVIDIA A100-SXM4-40GB", 108), "H200": device("NVIDIA H200", 132)}


def abstract_arrays(
    q_heads=32, kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16", pool_dtype=None, blocks=99, seqs=6
) -> tuple:
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((seqs, 40), (seqs,), (seqs + 1,))]
    pool = jax.ShapeDtypeStruct((blocks, block_size, kv_heads, head_dim), pool_dtype or dtype)
    return jax.ShapeDtypeStruct((9, q_heads, head_dim), dtype), pool, pool, *ints


def lower(kernel: str, on: str, features=(), **shapes) -> str:
    arrays = abstract_arrays(**{"seqs": 6 if kernel == "decode" else 1, **shapes})  # the prefill kernel alone
    with jax.sharding.use_abstract_mesh(DEVICES[on]):
        assert refusal(*arrays, AttentionSpec(scale=1.0)) is None
        run, extras, _ = attend(arrays, kernel, **dict(features))
        return run.trace(arrays, extras).lower(lowering_platforms=("cuda",)).as_text()


VARIANTS = {  # "plain" is bfloat16 and GQA
    **{name: {"features": features} for name, features in FEATURES.items() if name != "window of one"},
    **{name: shapes for name, shapes in SHAPES.items() if name != "GQA"},
    **{name: {"dtype": q, "pool_dtype": pool} for name, (q, pool) in DTYPES.items() if name != "bfloat16"},
    "a pool of more than 2^31 elements": {"blocks": 2**18},
}


FOR_EACH_GPU = ["plain", "not causal", "all", "head_dim 80", *(name for name in VARIANTS if "FP8" in name)]


@pytest.mark.parametrize(
    ("on", "variant"), [*(("H200", name) for name in VARIANTS), *(("A100", name) for name in FOR_EACH_GPU)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_lowers_without_a_gpu(kernel, on, variant):
    text = lower(kernel, on, **VARIANTS[variant])
    assert "xla.gpu.triton" in text
    assert ("paged_decode_merge" in text) == (kernel == "decode")


@pytest.mark.parametrize("feature", ["plain", "all"])
def test_several_sequences_get_both_kernels(feature):
    text = lower("prefill", "A100", FEATURES[feature], seqs=6)
    assert text.index("paged_decode") < text.index("paged_decode_merge") < text.index("paged_prefill")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("blocks", "bits"), [(2**17, 32), (2**17 + 1, 64)])
def test_offsets_into_pools_beyond_2_to_the_31_have_64_bits(kernel, blocks, bits, monkeypatch):
    modules = []
    lower_module = lowering.lower_jaxpr_to_triton_module

    def spy(*args, **kwargs):
        result = lower_module(*args, **kwargs)
        modules.append(str(result.module))
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", spy)
    lower(kernel, "H200", blocks=blocks)
    tile = {"decode": "64x128", "prefill": "32x128"}[kernel]
    adds = [line for line in modules[0].splitlines() if "tt.addptr" in line and f"tensor<{tile}x!tt.ptr<bf16>" in line]
    assert len(adds) == (2 if kernel == "decode" else 4)  # keys and values, in each loop
    assert all(f"tensor<{tile}xi{bits}>" in line for line in adds)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 512}, "head_dim must be at most 256, not 512"),
        ({"pool_dtype": FP8, "blocks": 2**18}, "can't address a float8_e4m3fn array of 2 to 4 GiB"),
    ],
)
def test_what_it_can_not_serve_it_refuses(change, reason):
    with jax.sharding.use_abstract_mesh(DEVICES["H200"]):
        assert reason in refusal(*abstract_arrays(**change), AttentionSpec(scale=1.0))


@pytest.mark.parametrize(("kind", "name"), [("Tesla T4", "sm_75"), ("NVIDIA Unheard Of",) * 2])
def test_older_and_unknown_gpus_are_refused(kind, name):
    with jax.sharding.use_abstract_mesh(device(kind, 40)):
        reason = refusal(*abstract_arrays(), AttentionSpec(scale=1.0))
    assert reason == f"needs an NVIDIA GPU, sm_80 or newer, not {name}"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what a CPU answers")
def test_a_cpu_is_refused():
    assert "needs an NVIDIA GPU, sm_80 or newer, not cpu" in refusal(*abstract_arrays(), AttentionSpec(scale=1.0))


gpu = [pytest.mark.gpu, pytest.mark.skipif(compute_capability() is None, reason="needs an NVIDIA GPU")]


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_features(self, kernel, feature):
        check(make(BATCHES[kernel]), kernel, **FEATURES[feature])

    @pytest.mark.parametrize("shapes", SHAPES)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_shapes(self, kernel, shapes):
        check(make(BATCHES[kernel], **SHAPES[shapes]), kernel)

    @pytest.mark.parametrize("dtypes", DTYPES)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_dtypes(self, kernel, dtypes):
        check(make(BATCHES[kernel], head_dim=96), kernel, *DTYPES[dtypes], scales=True)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_fp8_by_its_bits(self, kernel, monkeypatch):
        monkeypatch.setattr(triton, "compute_capability", lambda: 80)
        check(make(BATCHES[kernel]), kernel, "bfloat16", FP8, scales=True)

    @pytest.mark.parametrize("magnitude", [1e6, 1e-9])
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_fp8_pools_and_queries_beyond_float16(self, kernel, magnitude):
        case = with_queries_times(make(BATCHES[kernel]), magnitude)
        check(case, kernel, "bfloat16", FP8, scale=0.1 / magnitude)

    @pytest.mark.parametrize("feature", FEATURES)
    def test_long_rows_are_split_and_merged(self, feature):
        check(make(([4000, 3, 900], [1] * 3)), "decode", **FEATURES[feature])

    @pytest.mark.parametrize("feature", ["plain", "all", "not causal"])
    def test_long_chunks(self, feature):
        check(make(([1100, 700, 300], [1100, 257, 1])), "prefill", **FEATURES[feature])

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_much_padding(self, kernel):
        case = make(([30, 200, 70], [1, 0, 1]), padding_rows=3, padding_tokens=400, table_slack=9)
        check(case, kernel)

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("window", [1, 16, 100])
    def test_what_a_window_hides_may_be_poisoned(self, kernel, window):
        case = make(BATCHES[kernel])
        check(poison_before_window(case, BATCHES[kernel], window), kernel, expect=case, sliding_window=window)

    @pytest.mark.parametrize("kernel", KERNELS)
    def test_a_pool_of_more_than_2_to_the_31_elements(self, kernel):
        case = make(([700, 40], [1, 1]), kv_heads=8)
        arrays, _ = cast(case, "bfloat16", "bfloat16")
        blocks = 2**17 + 1024
        k_pool = jnp.zeros((blocks, *case.k_pool.shape[1:]), jnp.bfloat16)  # 4.3 GB, for both
        k_pool = k_pool.at[blocks - arrays[1].shape[0] :].set(arrays[1])
        tables = np.where(case.block_tables > 0, case.block_tables + (blocks - arrays[1].shape[0]), 0)
        run, extras, _ = attend(arrays, kernel)
        near, _ = run((arrays[0], arrays[1], arrays[1], *arrays[3:]), extras)
        far, _ = run((arrays[0], k_pool, k_pool, jnp.asarray(tables, jnp.int32), *arrays[4:]), extras)
        np.testing.assert_array_equal(np.asarray(far, np.float32), np.asarray(near, np.float32))
