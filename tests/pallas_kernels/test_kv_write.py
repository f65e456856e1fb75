import jax.numpy as jnp
import numpy as np
import pytest
from donation import check_in_place

from pallas_kernels import write_kv
from pallas_kernels.kv_write.api import IMPLEMENTATIONS

pytestmark = pytest.mark.parametrize("implementation", [i.name for i in IMPLEMENTATIONS])

BLOCKS, BLOCK_SIZE, HEADS, DIM = 6, 16, 2, 8


def make_pools(dtype=jnp.float32):
    shape = (BLOCKS, BLOCK_SIZE, HEADS, DIM)
    return jnp.full(shape, 1.0, dtype), jnp.full(shape, 2.0, dtype)


def test_writes_its_slots_and_no_others(implementation):
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(9, HEADS, DIM)).astype(np.float32) for _ in range(2))
    slots = rng.permutation(BLOCKS * BLOCK_SIZE)[:9].astype(np.int32)
    pools = write_kv(*make_pools(), k, v, jnp.asarray(slots), implementation=implementation)
    for pool, new in zip(pools, (k, v), strict=True):
        flat = np.asarray(pool).reshape(-1, HEADS, DIM)
        np.testing.assert_array_equal(flat[slots], new)
        assert np.delete(flat, slots, axis=0).std() == 0


@pytest.mark.parametrize("slot", [BLOCKS * BLOCK_SIZE, BLOCKS * BLOCK_SIZE + 1, 2**31 - 1, -1, -(2**31)])
def test_padding_is_dropped(slot, implementation):
    k_pool, v_pool = make_pools()
    new = jnp.full((4, HEADS, DIM), jnp.nan)
    slots = jnp.full(4, slot, jnp.int32)
    k_new, v_new = write_kv(k_pool, v_pool, new, new, slots, implementation=implementation)
    np.testing.assert_array_equal(k_new, k_pool)
    np.testing.assert_array_equal(v_new, v_pool)


def test_casts_to_the_pools_dtype(implementation):
    new = jnp.full((1, HEADS, DIM), 1 / 3)
    k_pool, _ = write_kv(*make_pools(jnp.bfloat16), new, new, jnp.array([5], jnp.int32), implementation=implementation)
    assert k_pool.dtype == jnp.bfloat16
    np.testing.assert_array_equal(k_pool[0, 5], new[0].astype(jnp.bfloat16))


@pytest.mark.parametrize("pool_dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_scales_divide_what_is_written(pool_dtype, implementation):
    """So that `pool * scale` is what `paged_attention` gets to see."""
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(7, HEADS, DIM)).astype(np.float32) for _ in range(2))
    scales = {"k_scale": np.array([0.25, 3.0], np.float32), "v_scale": np.array([0.7, 0.01], np.float32)}
    slots = rng.permutation(BLOCKS * BLOCK_SIZE)[:7].astype(np.int32)
    pools = write_kv(*make_pools(pool_dtype), k, v, jnp.asarray(slots), **scales, implementation=implementation)
    step = 2.0**-4 if pool_dtype == jnp.float8_e4m3fn else 1e-6  # half of the last place, relative
    for pool, new, scale in zip(pools, (k, v), scales.values(), strict=True):
        read = np.asarray(pool, np.float32).reshape(-1, HEADS, DIM)[slots] * scale[:, None]
        np.testing.assert_allclose(read, new, rtol=step, atol=2.0**-10 * scale.max())


def test_eight_bit_pools_saturate(implementation):
    new = jnp.array([1e4, -1e4, 448, 460, jnp.inf, -jnp.inf, jnp.nan, 0.5])
    new = jnp.broadcast_to(new, (1, HEADS, DIM))
    slots = jnp.array([5], jnp.int32)
    pool, _ = write_kv(*make_pools(jnp.float8_e4m3fn), new, new, slots, implementation=implementation)
    expected = [448, -448, 448, 448, 448, -448, np.nan, 0.5]
    np.testing.assert_array_equal(np.asarray(pool, np.float32)[0, 5, 0], expected)


def test_donated_pools_are_written_in_place(implementation):
    shape = (64, BLOCK_SIZE, HEADS, DIM)
    new, slots = jnp.ones((3, HEADS, DIM)), jnp.arange(3, dtype=jnp.int32)

    def step(pools, new, slots):
        return write_kv(*pools, new, new, slots, implementation=implementation), ()

    check_in_place(step, (jnp.zeros(shape), jnp.ones(shape)), new, slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pool": jnp.zeros((2, 16, 2))}, "pools must be"),
        ({"v_pool": jnp.zeros((2, 16, 2, 8), jnp.bfloat16)}, "agree"),
        ({"k": jnp.zeros((3, 2, 4))}, r"k \(3, 2, 4\) and v"),
        ({"slots": jnp.zeros(4, jnp.int32)}, r"the \(4,\) tokens of slots"),
        ({"slots": jnp.zeros(3, jnp.float32)}, "slots must be int32"),
        ({"k_scale": jnp.ones(3)}, r"k_scale must have shape \(2,\)"),
        ({"v_scale": jnp.ones((2, 1))}, r"v_scale must have shape \(2,\)"),
        ({"implementation": "magic"}, "unknown"),
    ],
)
def test_bad_input_is_refused(change, message, implementation):
    arguments = {
        "k_pool": jnp.zeros((2, 16, 2, 8)),
        "v_pool": jnp.zeros((2, 16, 2, 8)),
        "k": jnp.zeros((3, 2, 8)),
        "v": jnp.zeros((3, 2, 8)),
        "slots": jnp.zeros(3, jnp.int32),
        "implementation": implementation,
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **change})
