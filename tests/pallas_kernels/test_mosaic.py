"""Which of the two Hopper kernels a call gets, and calls that get both. The numerics of one kernel by itself:
`test_mosaic_decode` and `test_mosaic_prefill`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from paged import dense_attention, make_case

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.mosaic_common import device_refusal

H200 = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


def lowered(kv_lens=(40, 100), query_lens=(1, 1), padding_rows=0, shapes=None, **options) -> str:
    shapes = {"q_heads": 8, "head_dim": 128} | (shapes or {})
    case = make_case(np.random.default_rng(0), [*kv_lens], [*query_lens], padding_rows=padding_rows, **shapes)
    arrays = case.arrays(jnp.bfloat16)

    def attend(*arrays):
        return paged_attention(*arrays, **options, implementation="mosaic")

    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_one_query_a_sequence_gets_the_decode_kernel():
    text = lowered(max_query_len=1)
    assert "paged_decode" in text
    assert "paged_prefill" not in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_lse": True, "sinks": jnp.ones(8)},
        {"causal": False, "return_lse": True},
        {"sliding_window": 9, "max_query_len": 7},
        {"shapes": {"head_dim": 80}, "return_lse": True},
        {"shapes": {"q_heads": 3, "kv_heads": 3, "head_dim": 64}},
        {"kv_lens": [500, 300], "query_lens": [200, 1]},
    ],
    ids=str,
)
def test_other_calls_get_both_kernels(options):
    text = lowered(**options)
    assert "paged_decode" in text
    assert "paged_prefill" in text


def test_a_sequence_alone_and_what_the_decode_kernel_refuses_get_the_prefill_kernel():
    for text in (lowered([40], [40]), lowered(shapes={"q_heads": 72, "kv_heads": 1})):
        assert "paged_prefill" in text
        assert "paged_decode" not in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
def test_without_a_hopper_gpu_it_says_so():
    arrays = make_case(np.random.default_rng(0), [9], [9], head_dim=64).arrays(jnp.bfloat16)
    with pytest.raises(ValueError, match="implementation='mosaic' can't serve this call: needs a Hopper GPU"):
        paged_attention(*arrays, implementation="mosaic")


def check(case, attend=None, **options) -> None:
    """Against dense attention; `attend` may bring the arrays along in its own way."""
    for name in ("q", "k_pool", "v_pool"):  # what the op sees, so that only its own rounding counts
        setattr(case, name, np.array(jnp.asarray(getattr(case, name), jnp.bfloat16), np.float32))

    def plain(*arrays):
        return paged_attention(*arrays, **options, return_lse=True, implementation="mosaic")

    out, lse = jax.jit(plain if attend is None else lambda *arrays: attend(plain, *arrays))(*case.arrays(jnp.bfloat16))
    expected, expected_lse = dense_attention(case, **{k: v for k, v in options.items() if k != "max_query_len"})
    out = np.asarray(out, np.float64)
    assert np.linalg.norm(out - expected) < 6e-3 * np.linalg.norm(expected)
    assert not out[case.query_starts[-1] :].any()
    np.testing.assert_allclose(lse, expected_lse, atol=1e-2, rtol=1e-3)


MIXES = {
    "decodes around a chunk": ([300, 5, 48, 129, 90, 700, 1, 128, 256], [1, 5, 1, 40, 1, 700, 1, 128, 130]),
    "a long decode, which is split": ([6000, 20, 300, 64], [1, 20, 1, 1]),
    "decodes only": ([40, 700, 1, 64], [1, 1, 1, 1]),
    "chunks only": ([40, 700, 64], [2, 300, 64]),
    "sequences without queries": ([40, 700, 100, 64], [0, 300, 0, 1]),
    "fewer tokens than a tile": ([40, 70], [1, 2]),
}
OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "sinks and window": {"sinks": np.linspace(-2, 3, 8).astype(np.float32), "sliding_window": 133},
}


@pytest.mark.gpu
@pytest.mark.skipif(device_refusal() is not None, reason=device_refusal() or "")
class TestOnHopper:
    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("options", OPTIONS)
    def test_both_kernels_together_agree_with_dense_attention(self, mix, options):
        case = make_case(np.random.default_rng(len(mix)), *MIXES[mix], q_heads=8, head_dim=128, padding_tokens=40)
        check(case, **OPTIONS[options])

    @pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 256])
    def test_head_dims(self, head_dim):
        mix = MIXES["decodes around a chunk"]
        check(make_case(np.random.default_rng(head_dim), *mix, q_heads=6, head_dim=head_dim))

    @pytest.mark.parametrize("heads", [(3, 3), (8, 2)])
    @pytest.mark.parametrize("max_query_len", [1, None])
    def test_arrays_may_be_slices_of_others_at_any_offset(self, heads, max_query_len):
        """XLA hands kernels slices by pointer, with offsets that are multiples of 128 bytes; Mosaic needs 256. Tokens
        of three heads of 64 and tables of 32 entries are odd multiples of 128 bytes."""
        kv_lens, query_lens = [40, 200, 70, 300], [1, 1, 1, 1] if max_query_len == 1 else [1, 20, 1, 300]
        shapes = {"q_heads": heads[0], "kv_heads": heads[1], "head_dim": 64, "padding_rows": 28}
        case = make_case(np.random.default_rng(7), kv_lens, query_lens, table_slack=13, **shapes)
        assert case.block_tables.shape == (32, 32)

        def sliced(attend, q, k_pool, v_pool, tables, kv_lens, starts):
            big = jnp.concatenate([q[:1], q])
            pools = jnp.stack([k_pool, v_pool])
            ints = jnp.concatenate([jnp.zeros(32, jnp.int32), tables.reshape(-1), kv_lens, starts])
            big, pools, ints = jax.lax.optimization_barrier((big, pools, ints))
            tables, kv_lens, starts = jnp.split(ints[32:], [32 * 32, 32 * 33])
            return attend(big[1:], pools[0], pools[1], tables.reshape(32, 32), kv_lens, starts)

        check(case, sliced, max_query_len=max_query_len)
