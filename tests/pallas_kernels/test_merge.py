import jax.numpy as jnp
import numpy as np
import pytest
from paged import dense_attention, make_case

from pallas_kernels import merge_attention, paged_attention


def test_parts_of_the_keys_merge_to_the_whole():
    """Decodes over the first 32 positions and over the rest, by tables that hold only these."""
    case = make_case(np.random.default_rng(0), [70, 33, 32, 90], [1, 1, 1, 1], padding_rows=0, padding_tokens=0)
    q, k, v, tables, lens, starts = case.arrays("float32")
    first = paged_attention(q, k, v, tables, jnp.minimum(lens, 32), starts, return_lse=True)
    rest_starts = jnp.array([0, 1, 2, 2, 3], jnp.int32)  # the third has no keys beyond
    rest_q = q[jnp.array([0, 1, 3, 3])]
    out, lse = paged_attention(rest_q, k, v, tables[:, 2:], lens - 32, rest_starts, return_lse=True)
    rows = jnp.array([0, 1, 3, 2])
    rest = jnp.full_like(out, jnp.nan).at[rows[:3]].set(out[:3]), jnp.full_like(lse, -jnp.inf).at[rows[:3]].set(lse[:3])
    merged, merged_lse = merge_attention(*(jnp.stack(x) for x in zip(first, rest, strict=True)))
    expected, expected_lse = dense_attention(case)
    np.testing.assert_allclose(merged, expected, atol=1e-5)
    np.testing.assert_allclose(merged_lse, expected_lse, atol=1e-5)


def test_no_part_with_keys_gives_zeros():
    out, lse = merge_attention(jnp.full((2, 1, 1, 4), jnp.nan), jnp.full((2, 1, 1), -jnp.inf))
    assert not out.any()
    assert lse.tolist() == [[-np.inf]]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="merge_attention: outs"):
        merge_attention(jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 3, 5)))
