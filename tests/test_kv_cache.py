import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxpaged import kv_cache
from jaxpaged.models.config import ModelConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_layer_has_zeroed_pools_of_its_own(dtype):
    cache = kv_cache.allocate(CONFIG, num_blocks=5, block_size=8, dtype=jnp.dtype(dtype))
    pools = jax.tree.leaves(cache)
    assert len(cache) == 3
    assert [(x.shape, x.dtype.name) for x in pools] == [((5, 8, 2, 4), dtype)] * 6
    assert len({x.unsafe_buffer_pointer() for x in pools}) == 6
    assert not any(np.asarray(x).any() for x in pools)
    assert kv_cache.abstract(CONFIG, 5, 8, jnp.dtype(dtype)) == jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cache
    )


@pytest.mark.parametrize(("dtype", "block_bytes"), [("float32", 1536), ("bfloat16", 768)])
def test_as_many_blocks_as_fit_the_bytes(dtype, block_bytes):
    dtype = jnp.dtype(dtype)
    taken = sum(x.nbytes for x in jax.tree.leaves(kv_cache.allocate(CONFIG, 5, 8, dtype)))
    assert taken == 5 * block_bytes
    assert kv_cache.blocks_in(taken, CONFIG, 8, dtype) == 5
    assert kv_cache.blocks_in(taken - 1, CONFIG, 8, dtype) == 4
    assert kv_cache.blocks_in(0, CONFIG, 8, dtype) == 0


def test_a_batch_is_written_and_then_attended_through_the_tables():
    """Tokens of two sequences, one with a past: each sees its own tokens up to itself, and padding writes nothing."""
    layer = kv_cache.allocate(CONFIG, 4, 8, jnp.dtype("float32"))[0]
    rng = np.random.default_rng(0)
    past = rng.normal(size=(2, 2, 4)).astype(np.float32)
    layer = kv_cache.LayerKV(*(x.at[3, :2].set(p) for x, p in zip(layer, (past, 2 * past), strict=True)))
    q = rng.normal(size=(4, 4, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 4, 2, 4)).astype(np.float32)
    angles = rng.normal(size=(4, 2)).astype(np.float32)
    attend = kv_cache.PagedAttend(
        slots=jnp.array([3 * 8 + 2, 8, 9, 4 * 8]),  # the last one is padding
        block_tables=jnp.array([[3, 0], [1, 0]]),
        kv_lens=jnp.array([3, 2]),
        query_starts=jnp.array([0, 1, 3]),
    )
    qkv = np.concatenate([q, k, v], axis=1)
    out, written = jax.jit(lambda *args: attend(*args))(qkv, (np.cos(angles), np.sin(angles)), layer)
    q, k = (np.asarray(tiny.rotated(x, (np.cos(angles), np.sin(angles)))) for x in (q, k))
    np.testing.assert_allclose(written.k[3, :3], np.concatenate([past, k[:1]]), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(written.v[1, :2], v[1:3])
    assert not written.k[0].any()
    assert not written.k[2].any()
    assert not written.k[1, 2:].any()

    def expected(token, keys, values):
        heads = []
        for head in range(4):
            scores = np.exp(keys[:, head // 2] @ q[token, head] / 2)
            heads.append(scores / scores.sum() @ values[:, head // 2])
        return np.stack(heads)

    with_past = np.concatenate([past, k[:1]]), np.concatenate([2 * past, v[:1]])
    np.testing.assert_allclose(out[0], expected(0, *with_past), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[1], expected(1, k[1:2], v[1:2]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[2], expected(2, k[1:3], v[1:3]), rtol=1e-5, atol=1e-6)
