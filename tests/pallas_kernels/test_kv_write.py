import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_padding_is_dropped(beyond, implementation):
    k_pool, v_pool = make_pools()
    new = jnp.full((4, HEADS, DIM), jnp.nan)
    slots = jnp.full(4, BLOCKS * BLOCK_SIZE + beyond, jnp.int32)
    k_new, v_new = write_kv(k_pool, v_pool, new, new, slots, implementation=implementation)
    np.testing.assert_array_equal(k_new, k_pool)
    np.testing.assert_array_equal(v_new, v_pool)


def test_casts_to_the_pools_dtype(implementation):
    new = jnp.full((1, HEADS, DIM), 1 / 3)
    k_pool, _ = write_kv(*make_pools(jnp.bfloat16), new, new, jnp.array([5], jnp.int32), implementation=implementation)
    assert k_pool.dtype == jnp.bfloat16
    np.testing.assert_array_equal(k_pool[0, 5], new[0].astype(jnp.bfloat16))


def test_donated_pools_are_written_in_place(implementation):
    step = jax.jit(lambda k, v, n, s: write_kv(k, v, n, n, s, implementation=implementation), donate_argnums=(0, 1))
    pools = make_pools()
    addresses = [p.unsafe_buffer_pointer() for p in pools]
    new = jnp.ones((3, HEADS, DIM))
    for first in range(3):
        pools = step(*pools, new, jnp.arange(first, first + 3, dtype=jnp.int32))
        assert [p.unsafe_buffer_pointer() for p in pools] == addresses


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pool": jnp.zeros((2, 16, 2))}, "pools must be"),
        ({"v_pool": jnp.zeros((2, 16, 2, 8), jnp.bfloat16)}, "agree"),
        ({"k": jnp.zeros((3, 2, 4))}, r"k \(3, 2, 4\) and v"),
        ({"slots": jnp.zeros(4, jnp.int32)}, r"the \(4,\) tokens of slots"),
        ({"slots": jnp.zeros(3, jnp.float32)}, "slots must be int32"),
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
