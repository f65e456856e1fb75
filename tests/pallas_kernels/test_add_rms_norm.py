"""`add_rms_norm` against float64, its kernel in interpret mode and on a GPU, its gradients, its errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import add_rms_norm
from pallas_kernels.norm.triton import add_rms_norm_triton

EPSILON = 1e-5
on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]
reference = functools.partial(add_rms_norm, implementation="reference", epsilon=EPSILON)
triton = functools.partial(add_rms_norm, implementation="triton", epsilon=EPSILON)
interpreted = functools.partial(add_rms_norm_triton, epsilon=EPSILON, interpret=True)
everywhere = pytest.mark.parametrize("norm", [reference, interpreted, pytest.param(triton, marks=on_a_gpu)])


def make_arrays(tokens, hidden, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x, delta = (rng.normal(size=(tokens, hidden)) * rng.choice([0.01, 1, 100], (tokens, 1)) for _ in range(2))
    return [jnp.asarray(a, dtype) for a in (x, delta, rng.uniform(0.5, 2, hidden))]


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (5, 576), (3, 4096), (2, 5120)])
def test_agrees_with_float64(tokens, hidden, dtype, norm):
    x, delta, scale = make_arrays(tokens, hidden, dtype)
    total, normed = norm(x, delta, scale)
    assert total.dtype == normed.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(total, x + delta)
    wide = np.asarray(total, np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON) * np.asarray(scale, np.float64)
    tolerance = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=tolerance, atol=1e-6)


@everywhere
def test_a_row_that_is_not_finite_harms_no_other(norm):
    x, delta, scale = make_arrays(4, 96, "float32")
    spoiled = x.at[2, 5].set(jnp.nan)
    keep = jnp.array([0, 1, 3])
    for got, wanted in zip(norm(spoiled, delta, scale), norm(x, delta, scale), strict=True):
        np.testing.assert_array_equal(got[keep], wanted[keep])


@everywhere
def test_no_tokens(norm):
    x, delta, scale = make_arrays(0, 64, "float32")
    assert [y.shape for y in norm(x, delta, scale)] == [(0, 64)] * 2


@pytest.mark.parametrize("norm", [reference, pytest.param(triton, marks=on_a_gpu)])
def test_gradients(norm):
    arrays = make_arrays(3, 32, "float32")
    weights = jax.random.normal(jax.random.key(0), (2, 3, 32))

    def loss(x, delta, scale, f):
        return sum(jnp.sum(w * y) for w, y in zip(weights, f(x, delta, scale), strict=True))

    def exact(x, delta, scale):
        total = x + delta
        return total, total / jnp.sqrt(jnp.mean(total**2, axis=1, keepdims=True) + EPSILON) * scale[None]

    found, wanted = (jax.grad(loss, argnums=(0, 1, 2))(*arrays, f) for f in (norm, exact))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-40GB", "NVIDIA H200"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lowers_without_a_gpu(dtype, kind):
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    x = jax.ShapeDtypeStruct((7, 5120), dtype)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(functools.partial(add_rms_norm, epsilon=EPSILON)).trace(
            x, x, jax.ShapeDtypeStruct((5120,), dtype)
        )
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("xla.gpu.triton") == 1
    assert "stablehlo.rsqrt" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"delta": jnp.zeros((2, 7))}, r"x \(2, 8\), delta \(2, 7\)"),
        ({"scale": jnp.zeros(7)}, r"scale \(7,\)"),
        ({"x": jnp.zeros((2, 8), jnp.bfloat16)}, "x is bfloat16, delta float32"),
        ({"epsilon": None}, "epsilon=None must be above 0"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be above 0"),
        ({"epsilon": float("nan")}, "epsilon=nan must be finite"),
        ({"implementation": "cuda"}, "implementation='cuda' is unknown"),
    ],
)
def test_bad_calls(change, message):
    args = {"x": jnp.zeros((2, 8)), "delta": jnp.zeros((2, 8)), "scale": jnp.ones(8), "epsilon": EPSILON, **change}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**args)
