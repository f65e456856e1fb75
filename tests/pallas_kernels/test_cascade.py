"""Cascade attention is paged attention, whatever the groups; where nothing is shared, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import Case, dense_attention, make_case

from pallas_kernels import cascade_attention, debug_checks, paged_attention

BLOCK_SIZE = 8
H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)

# Of each group: tokens shared, and of each member: tokens in the pool, queries.
GROUPS = {
    "one group of decodes": [(40, [(41, 1), (60, 1), (44, 1)])],
    "groups of one": [(16, [(17, 1)]), (32, [(70, 1)]), (8, [(9, 1)])],
    "nothing shared": [(0, [(5, 1), (30, 2)]), (0, [(64, 64)])],
    "some share, some do not": [(24, [(30, 1), (25, 1)]), (0, [(9, 1)]), (64, [(65, 1), (90, 1), (70, 1)])],
    "chunks with an offset": [(16, [(40, 7), (17, 1), (33, 17)]), (48, [(130, 64), (49, 1)])],
    "a member without queries": [(16, [(20, 1), (30, 0), (24, 8)])],
    "an empty group": [(16, [(20, 1), (24, 8)]), (0, []), (8, [(12, 3), (9, 1)])],
}


def make_groups(groups: list, **shapes) -> tuple[Case, jax.Array, jax.Array]:
    """A case in which the members of a group have their first blocks in common, and the arrays of the groups."""
    members = [member for _, group in groups for member in group]
    lens, queries = (list(x) for x in zip(*members, strict=True))
    case = make_case(np.random.default_rng(len(members)), lens, queries, block_size=BLOCK_SIZE, **shapes)
    starts = np.cumsum([0, *(len(group) for _, group in groups)])
    for (shared, _), first, end in zip(groups, starts[:-1], starts[1:], strict=True):
        case.block_tables[first:end, : shared // BLOCK_SIZE] = case.block_tables[first:end][:1, : shared // BLOCK_SIZE]
    return case, jnp.asarray(starts, jnp.int32), jnp.asarray([shared for shared, _ in groups], jnp.int32)


def attend(*arrays, **options):
    return jax.jit(lambda *a: cascade_attention(*a, **options))(*arrays)  # op by op takes seconds


def check(groups: list, shapes: dict | None = None, **options) -> None:
    case, *of_groups = make_groups(groups, **(shapes or {}))
    out, lse = attend(*case.arrays("float32"), *of_groups, **options, return_lse=True)
    for name in ("max_query_len", "prefix_splits"):
        options.pop(name, None)
    expected, expected_lse = dense_attention(case, **options)
    np.testing.assert_allclose(out, expected, atol=5e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups):
    check(GROUPS[groups])


@pytest.mark.parametrize("groups", ["some share, some do not", "chunks with an offset", "nothing shared"])
@pytest.mark.parametrize("splits", [2, 5])
def test_prefixes_may_be_cut_in_pieces(groups, splits):
    check(GROUPS[groups], prefix_splits=splits)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.5},
        {"logit_soft_cap": 2.0, "scale": 3.0},
        {"sinks": np.array([-3.0, 0.0, 2.0, 9.0], np.float32)},
        {"sinks": np.array([-3.0, 0.0, 2.0, 9.0], np.float32), "logit_soft_cap": 2.0, "prefix_splits": 2},
        {"max_query_len": 64},
    ],
)
def test_features(options):
    check(GROUPS["chunks with an offset"], **options)


@pytest.mark.parametrize("padding", [(0, 0, 0), (4, 20, 5)])
def test_padding(padding):
    rows, tokens, slack = padding
    check(GROUPS["an empty group"], {"padding_rows": rows, "padding_tokens": tokens, "table_slack": slack})


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_heads(heads):
    check(GROUPS["some share, some do not"], {"q_heads": heads[0], "kv_heads": heads[1]})


def test_decodes_alone_may_be_announced_though_a_group_has_many_queries():
    check(GROUPS["one group of decodes"], max_query_len=1)


def test_sequences_beyond_the_last_group_share_nothing():
    case, starts, prefix = make_groups(GROUPS["some share, some do not"])
    out = attend(*case.arrays("float32"), starts[:2], prefix[:1])
    np.testing.assert_allclose(out, dense_attention(case)[0], atol=5e-6)


def test_a_prefix_counts_in_whole_blocks():
    case, starts, prefix = make_groups(GROUPS["one group of decodes"])
    out = attend(*case.arrays("float32"), starts, prefix - 3)
    np.testing.assert_allclose(out, dense_attention(case)[0], atol=5e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_nothing_is_shared_it_is_paged_attention_to_the_bit(dtype):
    case, *of_groups = make_groups(GROUPS["nothing shared"])
    arrays = case.arrays(dtype)
    cascade = attend(*arrays, *of_groups, return_lse=True)
    whole = jax.jit(lambda *a: paged_attention(*a, return_lse=True))(*arrays)
    for got, plain in zip(cascade, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(plain, np.float32))


def test_fp8_pools_with_scales():
    case, *of_groups = make_groups(GROUPS["chunks with an offset"])
    arrays = list(case.arrays("float32"))
    arrays[1:3] = (x.astype(jnp.float8_e4m3fn) for x in arrays[1:3])
    case.k_pool, case.v_pool = (np.asarray(x, np.float32) for x in arrays[1:3])
    scales = {"k_scale": np.array([0.5, 2.0], np.float32), "v_scale": np.array([3.0, 0.25], np.float32)}
    out = attend(*arrays, *of_groups, **scales)
    np.testing.assert_allclose(out, dense_attention(case, **scales)[0], atol=1e-5)


def test_the_prefix_is_read_from_the_first_members_table():
    """The rest of the group's tables may hold anything there: proof that the prefix is not read once a sequence."""
    case, *of_groups = make_groups([(40, [(41, 1), (60, 1), (44, 1)])])
    expected = dense_attention(case)[0]
    case.block_tables[1:3, :5] = 0  # the null block, which is poisoned
    np.testing.assert_allclose(attend(*case.arrays("float32"), *of_groups), expected, atol=5e-6)


BROKEN_GROUPS = {
    "starts not from 0": ([1, 2, 3], [40, 16], r"group_starts must be non-decreasing from 0 to at most the 5 seq"),
    "starts that fall": ([0, 3, 2], [40, 16], r"group_starts must be .* not \[0, 3, 2\]"),
    "starts past the sequences": ([0, 2, 6], [40, 16], r"group_starts must be non-decreasing"),
    "a negative prefix": ([0, 2, 3], [40, -8], r"prefix_lens\[1\] is -8"),
    "a prefix past the table": ([0, 2, 2], [40, 900], r"prefix_lens\[1\] is 900, but a row of block_tables holds 0 to"),
    "a prefix that reaches into the queries": (
        [0, 2, 3],
        [48, 16],
        r"prefix_lens\[0\] is 48, but sequence 0 of that group has 40 tokens before its queries",
    ),
    "a prefix that is longer than a member": ([0, 1, 3], [40, 24], r"prefix_lens\[1\] is 24, but sequence 2 of that"),
    "a member with other blocks": ([0, 3, 3], [16, 0], r"block_tables\[2, 0\] is \d+, but sequence 0, the first of"),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("broken", BROKEN_GROUPS)
def test_debug_checks_see_broken_groups(broken, wrap):
    starts, prefix, message = BROKEN_GROUPS[broken]
    case, *of_groups = make_groups([(40, [(41, 1), (60, 1)]), (16, [(20, 1)])])  # and two rows of padding
    broken_groups = (jnp.asarray(x, jnp.int32) for x in (starts, prefix))
    with debug_checks():
        out = wrap(cascade_attention)(*case.arrays("float32"), *of_groups)
        np.testing.assert_allclose(out, dense_attention(case)[0], atol=5e-6)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="cascade_attention: " + message):
            wrap(cascade_attention)(*case.arrays("float32"), *broken_groups).block_until_ready()


def test_debug_checks_name_the_op_that_was_called():
    case, *of_groups = make_groups([(40, [(41, 1), (60, 1)])])
    case.block_tables[1, 6] = 99
    with debug_checks(), pytest.raises(ValueError, match=r"cascade_attention: block_tables\[1, 6\] is 99"):
        cascade_attention(*case.arrays("float32"), *of_groups)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("options", [{}, {"max_query_len": 1, "prefix_splits": 2}])
def test_lowers_without_a_gpu(implementation, options):
    case, *of_groups = make_groups(GROUPS["some share, some do not"], q_heads=8, head_dim=128)
    with jax.sharding.use_abstract_mesh(H200):
        call = jax.jit(lambda *a: cascade_attention(*a, implementation=implementation, **options))
        lowered = call.trace(*case.arrays(jnp.bfloat16), *of_groups).lower(lowering_platforms=("cuda",))
    assert "custom_call" in lowered.as_text()


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("splits", [1, 3])
def test_on_a_gpu(groups, implementation, splits):
    case, *of_groups = make_groups(GROUPS[groups], q_heads=8, head_dim=128)
    sinks = np.linspace(-2, 3, 8, dtype=np.float32)
    options = {"implementation": implementation, "prefix_splits": splits, "sinks": sinks, "return_lse": True}
    arrays = case.arrays("bfloat16")
    out, lse = attend(*arrays, *of_groups, **options)
    for name, array in zip(("q", "k_pool", "v_pool"), arrays, strict=False):  # what the op sees
        setattr(case, name, np.asarray(array, np.float32))
    expected, expected_lse = dense_attention(case, sinks=sinks)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=2e-2 * np.abs(expected).max())
    np.testing.assert_allclose(lse, expected_lse, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 16}, "sliding_window=16 is not served"),
        ({"prefix_splits": 0}, "prefix_splits=0 must be at least 1"),
        ({"prefix_splits": 1.5}, "prefix_splits=1.5 must be an int"),
        ({"group_starts": jnp.zeros((2, 1), jnp.int32)}, "group_starts must have 1 dimensions"),
        ({"group_starts": jnp.zeros(3, jnp.int32)}, "group_starts must have 2 entries, not 3"),
        ({"prefix_lens": jnp.zeros(1)}, "prefix_lens must be int32, not float32"),
        ({"block_tables": jnp.zeros((4, 9), jnp.int32)}, "block_tables has 4 rows, so kv_lens must have 4"),
        ({"implementation": "magic"}, "implementation='magic' is unknown"),
    ],
)
def test_bad_input_is_refused(change, message):
    case, starts, prefix = make_groups([(8, [(20, 1), (30, 1)])], padding_rows=0)
    names = ("q", "k_pool", "v_pool", "block_tables", "kv_lens", "query_starts")
    arguments = dict(zip(names, case.arrays("float32"), strict=True))
    arguments |= {"group_starts": starts, "prefix_lens": prefix, **change}
    with pytest.raises(ValueError, match=message):
        cascade_attention(**arguments)
