"""`rope_and_write_kv`: the reference against numpy, the kernel interpreted, lowered, run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from donation import check_in_place
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import rope_and_write_kv
from pallas_kernels.kv_write.reference import rope_and_write_kv_reference
from pallas_kernels.kv_write.rope_api import IMPLEMENTATIONS
from pallas_kernels.kv_write.triton import rope_and_write_kv_triton

TRITON = IMPLEMENTATIONS[0]
SHAPES = {  # query heads, KV heads, head_dim, rotary_dim
    "GQA": (4, 2, 16, 16),
    "MHA": (3, 3, 16, 16),
    "MQA": (5, 1, 32, 32),
    "heads that fill no program": (6, 3, 16, 16),
    "head_dim 80": (3, 1, 80, 80),
    "head_dim 24": (2, 2, 24, 24),
    "half of the dimensions rotate": (4, 2, 32, 16),
    "a quarter rotates, and the rest is no power of two": (2, 1, 40, 8),
}
BLOCKS, BLOCK_SIZE, TOKENS = 5, 8, 9


def make(shape="GQA", dtype=jnp.float32, pool_dtype=None, tokens=TOKENS, blocks=BLOCKS, outside=None, seed=0):
    """Arguments of the op; the last tokens have no slot, and of those the keys and values are NaN."""
    q_heads, kv_heads, head_dim, rotary_dim = SHAPES[shape] if isinstance(shape, str) else shape
    if outside is None:
        outside = (blocks * BLOCK_SIZE, blocks * BLOCK_SIZE + 7, 2**31 - 1, -1)
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(tokens, q_heads + 2 * kv_heads, head_dim))
    qkv[tokens - len(outside) :, q_heads:] = np.nan
    angles = rng.uniform(0, 1000, size=(tokens, rotary_dim // 2)).astype(np.float32)
    pools = np.full((2, blocks, BLOCK_SIZE, kv_heads, head_dim), 0.5)
    slots = rng.permutation(blocks * BLOCK_SIZE)[:tokens].astype(np.int32)
    slots[tokens - len(outside) :] = outside
    arrays = (jnp.asarray(x, pool_dtype or dtype) for x in pools)
    return jnp.asarray(qkv, dtype), jnp.cos(angles), jnp.sin(angles), *arrays, jnp.asarray(slots)


def make_scales(kv_heads):
    return {"k_scale": jnp.linspace(0.01, 0.5, kv_heads), "v_scale": jnp.linspace(0.1, 2, kv_heads)}


def expected(qkv, cos, sin, k_pool, v_pool, slots, k_scale=None, v_scale=None):
    """The op in float64, each pair of dimensions turned as a complex number."""
    kv_heads = k_pool.shape[2]
    x = np.asarray(qkv, np.float64)
    half = cos.shape[1]
    turn = (np.asarray(cos, np.float64) + 1j * np.asarray(sin, np.float64))[:, None]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
    rotated = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)
    q_heads = x.shape[1] - 2 * kv_heads
    k, v = rotated[:, q_heads : q_heads + kv_heads], x[:, q_heads + kv_heads :]
    out = []
    for pool, new, scale in ((k_pool, k, k_scale), (v_pool, v, v_scale)):
        flat = np.asarray(pool, np.float64).reshape(-1, *pool.shape[2:])
        for token, slot in enumerate(np.asarray(slots)):
            if 0 <= slot < len(flat):
                flat[slot] = new[token] / (1 if scale is None else np.asarray(scale, np.float64)[:, None])
        out.append(flat.reshape(pool.shape))
    return rotated[:, :q_heads], *out


def check(got, arguments, scales=None, place=2.0**-24):
    """`place`: half of the last place of what is compared, relative."""
    for x, y in zip(got, expected(*arguments, **(scales or {})), strict=True):
        assert x.shape == y.shape
        largest = np.nanmax(np.abs(y), axis=-1, keepdims=True)  # a pair's sum may cancel
        assert (np.abs(np.asarray(x, np.float64) - y) <= 1.1 * place * np.abs(y) + 4e-7 * largest).all()


def interpreted(*arguments, k_scale=None, v_scale=None):
    return rope_and_write_kv_triton(*arguments, k_scale, v_scale, pairs=32, interpret=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", [rope_and_write_kv_reference, interpreted])
def test_shapes(run, shape):
    arguments = make(shape)
    check(run(*arguments), arguments)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("run", [rope_and_write_kv_reference, interpreted])
def test_rounds_once(run, dtype):
    arguments = make(dtype=dtype)
    q, k_pool, v_pool = run(*arguments)
    assert q.dtype == k_pool.dtype == v_pool.dtype == dtype
    check((q, k_pool, v_pool), arguments, place=float(jnp.finfo(dtype).eps) / 2)


@pytest.mark.parametrize("pool_dtype", [jnp.float32, jnp.float8_e4m3fn])
@pytest.mark.parametrize("run", [rope_and_write_kv_reference, interpreted])
def test_scales_divide_what_is_written(run, pool_dtype):
    arguments, scales = make(pool_dtype=pool_dtype), make_scales(2)
    q, *pools = run(*arguments, **scales)
    wanted_q, *wanted = expected(*arguments, **scales)
    np.testing.assert_allclose(q, wanted_q, atol=1e-5)
    eight_bit = pool_dtype == jnp.float8_e4m3fn
    for pool, y in zip(pools, wanted, strict=True):
        got = np.asarray(pool, np.float64)
        y = np.clip(y, -448, 448) if eight_bit else y
        np.testing.assert_allclose(got, y, rtol=2.0**-4 if eight_bit else 1e-5, atol=2.0**-10 if eight_bit else 1e-5)


def in_place(implementation, dtype=jnp.float32, layers=3, blocks=64):
    """Several layers, each reading its pools after the write, as attention does."""
    qkv, cos, sin, *_, slots = make(dtype=dtype, outside=(-1,), blocks=blocks)
    pools = [jnp.full((blocks, BLOCK_SIZE, 2, 16), i, dtype) for i in range(2 * layers)]

    def step(pools, qkv, cos, sin, slots):
        new = []
        for i in range(layers):
            q, k, v = rope_and_write_kv(qkv, cos, sin, *pools[2 * i : 2 * i + 2], slots, implementation=implementation)
            new += [k, v]
            read = (k[slots // BLOCK_SIZE, slots % BLOCK_SIZE] + v[0, 0][None]).sum().astype(dtype)
            qkv = qkv + jnp.pad(q, ((0, 0), (0, 4), (0, 0))) + read
        return new, qkv

    check_in_place(step, pools, qkv, cos, sin, slots)


def test_donated_pools_are_written_in_place():
    in_place("reference")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what a CPU answers")
def test_a_cpu_gets_the_reference():
    arguments = make()
    with pytest.raises(ValueError, match="implementation='triton' can't serve this call: needs an NVIDIA GPU"):
        rope_and_write_kv(*arguments, implementation="triton")
    check(rope_and_write_kv(*arguments), arguments)


def abstract(kind):
    return AbstractMesh((), (), abstract_device=AbstractDevice(device_kind=kind, platform="gpu", num_cores=100))


GPUS = {80: "NVIDIA A100-SXM4-40GB", 86: "NVIDIA A10", 89: "NVIDIA L4", 90: "NVIDIA H200"}
LOWERED = {
    "plain": {},
    "float16": {"dtype": jnp.float16},
    "float32 into bfloat16": {"dtype": jnp.float32, "pool_dtype": jnp.bfloat16},
    "head_dim 64": {"shape": (9, 3, 64, 64)},
    "head_dim 80": {"shape": (32, 8, 80, 80)},
    "head_dim 96, a third rotates": {"shape": (6, 2, 96, 32)},
    "head_dim 256": {"shape": (16, 8, 256, 256)},
    "MQA": {"shape": (64, 1, 128, 128)},
    "more tokens than a grid is wide": {"tokens": 70000},
    "more elements than 32 bits count": {"blocks": 2**20},
    "scales": {"scaled": True},
    "8 bits": {"pool_dtype": jnp.float8_e4m3fn, "scaled": True},
}


def make_abstract(
    shape=(32, 8, 128, 128), dtype=jnp.bfloat16, pool_dtype=None, scaled=False, blocks=99, block_size=16, tokens=33
):
    q_heads, kv_heads, head_dim, rotary_dim = shape
    angles = jax.ShapeDtypeStruct((tokens, rotary_dim // 2), jnp.float32)
    pool = jax.ShapeDtypeStruct((blocks, block_size, kv_heads, head_dim), pool_dtype or dtype)
    qkv = jax.ShapeDtypeStruct((tokens, q_heads + 2 * kv_heads, head_dim), dtype)
    scale = jax.ShapeDtypeStruct((kv_heads,), jnp.float32) if scaled else None
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    return (qkv, angles, angles, pool, pool, slots), {"k_scale": scale, "v_scale": scale}


@pytest.mark.parametrize("case", LOWERED)
@pytest.mark.parametrize("capability", [80, 90])
def test_lowers_without_a_gpu(capability, case):
    if capability < 89 and LOWERED[case].get("pool_dtype") == jnp.float8_e4m3fn:
        pytest.skip("8-bit floats need sm_89")
    arrays, scales = make_abstract(**LOWERED[case])
    with jax.sharding.use_abstract_mesh(abstract(GPUS[capability])):
        traced = jax.jit(lambda a, s: rope_and_write_kv(*a, **s)).trace(arrays, scales)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    assert text.count("#stablehlo.output_operand_alias") == 2  # both pools are written where they lie
    assert "scatter" not in text


FP8 = {"pool_dtype": jnp.float8_e4m3fn}


@pytest.mark.parametrize(
    ("capability", "options", "reason"),
    [
        (80, {}, None),
        (86, {}, None),
        (80, FP8, "float8_e4m3fn pools need sm_89 or newer, not sm_80"),
        (86, FP8, "not sm_86"),
        (89, FP8, None),
        (90, {**FP8, "blocks": 2**17}, None),  # 2 GiB
        (90, {**FP8, "blocks": 2**17 + 1}, "can't address a float8_e4m3fn array of 2 to 4 GiB"),
        (90, {**FP8, "blocks": 2**18}, "of 2 to 4 GiB"),
        (90, {**FP8, "blocks": 2**18 + 1}, None),
        (90, {"blocks": 2**20}, None),
    ],
)
def test_what_the_kernel_refuses(capability, options, reason):
    arrays, scales = make_abstract(**options)
    with jax.sharding.use_abstract_mesh(abstract(GPUS[capability])):
        refusal = TRITON.refusal(*arrays, **scales)
    assert refusal is None if reason is None else reason in (refusal or "")


def test_old_and_other_devices_are_refused():
    arrays, scales = make_abstract()
    with jax.sharding.use_abstract_mesh(abstract("Tesla T4")):
        assert "needs an NVIDIA GPU, sm_80 or newer, not sm_75" in (TRITON.refusal(*arrays, **scales) or "")
    tpu = AbstractDevice(device_kind="TPU v5", platform="tpu", num_cores=1)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=tpu)):
        assert TRITON.refusal(*arrays, **scales) == "needs an NVIDIA GPU, sm_80 or newer, not TPU v5"


@pytest.mark.parametrize("run", [rope_and_write_kv_reference, interpreted])
def test_no_tokens(run):
    arguments = make(tokens=0, outside=())
    q, k_pool, _ = run(*arguments)
    assert q.shape == (0, 4, 16)
    np.testing.assert_array_equal(k_pool, arguments[3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pool": jnp.zeros((5, 8, 2))}, "pools must be"),
        ({"v_pool": jnp.zeros((5, 8, 2, 16), jnp.bfloat16)}, "agree"),
        ({"qkv": jnp.zeros((9, 8, 8))}, r"head_dim 16 .* not \(9, 8, 8\)"),
        ({"qkv": jnp.zeros((9, 128))}, r"not \(9, 128\)"),
        ({"qkv": jnp.zeros((8, 8, 16))}, r"the \(9,\) tokens of slots, not \(8, 8, 16\)"),
        ({"qkv": jnp.zeros((9, 4, 16))}, "qkv has 4 heads, which leaves no queries"),
        ({"qkv": jnp.zeros((9, 8, 16), jnp.int32)}, "qkv must be float32, bfloat16 or float16, not int32"),
        ({"cos": jnp.zeros((9, 8), jnp.bfloat16)}, "cos must be float32, not bfloat16"),
        ({"sin": jnp.zeros((9, 8), jnp.float16)}, "sin must be float32, not float16"),
        ({"cos": jnp.zeros((9, 4))}, r"cos \(9, 4\) and sin \(9, 8\)"),
        ({"cos": jnp.zeros((9, 9)), "sin": jnp.zeros((9, 9))}, "rotary_dim of at most head_dim 16"),
        ({"cos": jnp.zeros((9, 0)), "sin": jnp.zeros((9, 0))}, "rotary_dim"),
        ({"slots": jnp.zeros((9, 1), jnp.int32)}, r"slots must have shape \[tokens\]"),
        ({"slots": jnp.zeros(9)}, "slots must be int32"),
        ({"k_scale": jnp.ones(3)}, r"k_scale must have shape \(2,\)"),
        ({"implementation": "magic"}, "unknown"),
    ],
)
def test_bad_input_is_refused(change, message):
    names = ("qkv", "cos", "sin", "k_pool", "v_pool", "slots")
    arguments = dict(zip(names, make(), strict=True))
    with pytest.raises(ValueError, match=message):
        rope_and_write_kv(**{**arguments, **change})


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


class TestOnAGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("shape", [*SHAPES, (32, 8, 128, 128), (40, 40, 64, 64), (16, 8, 256, 128)])
    def test_shapes(self, shape):
        arguments = make(shape)
        check(rope_and_write_kv(*arguments, implementation="triton"), arguments)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_rounds_once(self, dtype):
        arguments = make((32, 8, 128, 128), dtype=dtype, tokens=300, blocks=60)
        got = rope_and_write_kv(*arguments, implementation="triton")
        check(got, arguments, place=float(jnp.finfo(dtype).eps) / 2)

    @pytest.mark.parametrize("pool_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
    def test_scales(self, pool_dtype):
        arguments, scales = make((32, 8, 128, 128), jnp.bfloat16, pool_dtype, tokens=300, blocks=60), make_scales(8)
        got = rope_and_write_kv(*arguments, **scales, implementation="triton")
        wanted = rope_and_write_kv(*arguments, **scales, implementation="reference")
        for x, y in zip(got, wanted, strict=True):
            # The kernel fuses multiplication and addition: a value in two thousand rounds to the other side.
            x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
            assert (x != y).mean() < 2e-3
            np.testing.assert_allclose(x, y, rtol=0.13, atol=2.0**-8)

    @pytest.mark.parametrize("implementation", ["triton", "reference"])
    def test_donated_pools_are_written_in_place(self, implementation):
        in_place(implementation, jnp.bfloat16, blocks=4096)

    def test_a_pool_of_more_than_two_to_the_31_elements(self):
        blocks = 2**31 // (16 * 8 * 128) + 16
        _, kv_heads, head_dim, _ = shape = (32, 8, 128, 128)
        qkv, cos, sin, *_ = make(shape, jnp.bfloat16, outside=())
        slots = blocks * 16 - 1 - jnp.arange(TOKENS, dtype=jnp.int32) * 16
        pools = [jnp.zeros((blocks, 16, kv_heads, head_dim), jnp.bfloat16) for _ in range(2)]
        step = jax.jit(
            lambda k, v: rope_and_write_kv(qkv, cos, sin, k, v, slots, implementation="triton"), donate_argnums=(0, 1)
        )
        q, *pools = step(*pools)
        small = [jnp.zeros((TOKENS, 1, kv_heads, head_dim), jnp.bfloat16) for _ in range(2)]
        wanted_q, *wanted = rope_and_write_kv(
            qkv, cos, sin, *small, jnp.arange(TOKENS, dtype=jnp.int32), implementation="triton"
        )
        np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(wanted_q, np.float32))
        for pool, rows in zip(pools, wanted, strict=True):
            got = pool[slots // 16, slots % 16]
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(rows[:, 0], np.float32))
            assert int(jnp.count_nonzero(pool)) == int(jnp.count_nonzero(rows))
