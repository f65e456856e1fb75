"""`debug_checks`: wrong numbers in tables and lengths are found before a kernel reads by them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import dense_attention, make_case

from pallas_kernels import debug_checks, paged_attention


def make():
    return make_case(np.random.default_rng(0), [40, 20], [1, 5], table_slack=0)  # rows of 3 blocks, pool of 9


def spoilt(name: str, index, value: int):
    case = make()
    array = getattr(case, name).copy()
    array[index] = value
    return dataclasses.replace(case, **{name: array}).arrays("float32")


AT_RUN_TIME = (ValueError, jax.errors.JaxRuntimeError)  # which of them is up to JAX: it differs from call to call
WRONG = {
    "id past the pool": ("block_tables", (1, 0), 9, r"block_tables\[1, 0\] is 9, but the pool has blocks 0 to 8"),
    "negative id": ("block_tables", (0, 2), -1, r"block_tables\[0, 2\] is -1"),
    "id behind a sequence's end": ("block_tables", (1, 2), 77, r"block_tables\[1, 2\] is 77.*must be valid ids as"),
    "id in a padding row": ("block_tables", (3, 1), 9, r"block_tables\[3, 1\] is 9"),
    "length past the table": ("kv_lens", 1, 49, r"kv_lens\[1\] is 49, but a row of block_tables holds 0 to 48 tokens"),
    "negative length": ("kv_lens", 2, -1, r"kv_lens\[2\] is -1"),
    "starts that fall": ("query_starts", 1, 7, r"query_starts must be non-decreasing from 0 to at most the 9"),
    "starts past q": ("query_starts", -1, 10, r"query_starts must be non-decreasing"),
    "starts not from 0": ("query_starts", 0, 1, r"query_starts must be non-decreasing"),
    "more queries than tokens": ("kv_lens", 1, 4, r"sequence 1 has 5 queries but kv_lens of 4"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arrays_get_a_value_error(wrong):
    name, index, value, message = WRONG[wrong]
    with debug_checks(), pytest.raises(ValueError, match=message):
        paged_attention(*spoilt(name, index, value))


@pytest.mark.parametrize("wrong", ["id past the pool", "starts that fall"])
def test_within_a_jit_the_same_message_comes_at_run_time(wrong):
    name, index, value, message = WRONG[wrong]
    attend = jax.jit(paged_attention)
    with debug_checks(), pytest.raises(AT_RUN_TIME, match=message):
        attend(*spoilt(name, index, value)).block_until_ready()


def test_a_broken_promise_of_decodes_alone_is_found():
    with debug_checks(), pytest.raises(ValueError, match="sequence 1 has 5 queries, more than max_query_len=1"):
        paged_attention(*make().arrays("float32"), max_query_len=1)


def test_more_queries_than_tokens_are_fine_where_nothing_is_causal():
    with debug_checks():
        paged_attention(*spoilt("kv_lens", 1, 4), causal=False)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_right_arrays_pass_and_the_result_is_the_same(wrap):
    case = make()
    with debug_checks():
        out = wrap(paged_attention)(*case.arrays("float32"))
    np.testing.assert_allclose(out, dense_attention(case)[0], atol=1e-5)


def test_jitted_functions_are_traced_anew_when_checks_are_turned_on_and_off():
    traces = []

    @jax.jit
    def attend(*arrays):
        traces.append(1)
        return paged_attention(*arrays)

    arrays, wrong = make().arrays("float32"), spoilt("block_tables", (1, 2), 77)
    attend(*wrong)  # off: nothing is looked at
    with debug_checks():
        attend(*arrays)
        with pytest.raises(AT_RUN_TIME, match="is 77"):
            attend(*wrong).block_until_ready()
        with debug_checks(False):
            attend(*wrong)
    attend(*wrong)
    assert len(traces) == 2


def test_large_tables_in_several_layers():
    """The callback's copies must not wait for the threads that the step holds."""
    rng = np.random.default_rng(1)
    tables = jnp.asarray(rng.integers(0, 9, size=(512, 600)), jnp.int32)
    pool = jnp.zeros((9, 8, 1, 8))
    lens, starts = jnp.full(512, 9, jnp.int32), jnp.arange(513, dtype=jnp.int32)

    @jax.jit
    def layers(q):
        for _ in range(3):
            q = q + paged_attention(q, pool, pool, tables, lens, starts, max_query_len=1)
        return q

    with debug_checks():
        assert not np.asarray(layers(jnp.zeros((512, 1, 8)))).any()
