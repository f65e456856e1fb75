"""What holds for every public op: 64-bit mode, NumPy arguments, gradients, sizes of 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import make_case

import pallas_kernels
from pallas_kernels import cascade_attention, debug_checks, paged_attention, rope_and_write_kv

H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)
POOL = ("k_pool", "v_pool")


def make_calls() -> dict:
    """Arguments of every op, in NumPy: one sequence of 20 tokens, 5 of them queries, and a decode."""
    rng = np.random.default_rng(0)
    case = make_case(rng, [20, 9], [5, 1], padding_rows=0, padding_tokens=0)
    pools = {"k_pool": np.nan_to_num(case.k_pool), "v_pool": np.nan_to_num(case.v_pool)}
    tables = {"block_tables": case.block_tables, "kv_lens": case.kv_lens.astype(np.int32)}
    attention = {"q": case.q, **pools, **tables, "query_starts": case.query_starts.astype(np.int32)}
    groups = {"group_starts": np.array([0, 1, 2], np.int32), "prefix_lens": np.zeros(2, np.int32)}
    slots = {"slots": np.array([3, 17, 40], np.int32)}
    rows = {name: rng.normal(size=(3, 2, 16)).astype(np.float32) for name in "kv"}
    rope = {"qkv": rng.normal(size=(3, 8, 16)).astype(np.float32)}
    rope |= {name: rng.normal(size=(3, 8)).astype(np.float32) for name in ("cos", "sin")}
    ids = {"sources": np.array([1, 2], np.int32), "destinations": np.array([3, 4], np.int32)}
    return {
        "paged_attention": attention,
        "cascade_attention": {**attention, **groups},
        "merge_attention": {"outs": np.ones((2, 3, 4, 16), np.float32), "lses": np.ones((2, 3, 4), np.float32)},
        "write_kv": {**pools, **rows, **slots},
        "rope_and_write_kv": {**rope, **pools, **slots},
        "copy_blocks": {**pools, **ids},
        "add_rms_norm": {"x": rows["k"][:, 0], "delta": rows["v"][:, 0], "scale": rows["k"][0, 1]},
    }


CALLS = make_calls()
every_op = pytest.mark.parametrize("op", CALLS)


def call(op: str, **changes):
    return getattr(pallas_kernels, op)(**{**CALLS[op], **changes})


def as_jax(arguments: dict) -> dict:
    return {name: jnp.asarray(x) for name, x in arguments.items()}


def test_every_public_op_is_here():
    assert set(CALLS) == set(pallas_kernels.__all__) - {"debug_checks"}


@every_op
def test_numpy_arrays_are_arrays(op):
    got, wanted = call(op), call(op, **as_jax(CALLS[op]))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, y)


@every_op
@pytest.mark.parametrize("checks", [False, True])
def test_64_bit_mode_changes_nothing(op, checks):
    wanted = jax.tree.leaves(call(op))
    options = {"return_lse": True} if "attention" in op and "merge" not in op else {}
    with jax.enable_x64(True), debug_checks(checks):
        arguments = as_jax(CALLS[op])
        for function in (getattr(pallas_kernels, op), jax.jit(lambda **a: call(op, **a, **options))):
            got = jax.tree.leaves(function(**arguments))
            assert {x.dtype for x in got} == {jnp.dtype("float32")}
            for x, y in zip(got, wanted, strict=False):
                np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("name", ["block_tables", "kv_lens", "query_starts"])
def test_64_bit_arrays_are_refused(name):
    with jax.enable_x64(True), pytest.raises(ValueError, match=f"{name} must be int32, not int64"):
        call("paged_attention", **{name: jnp.asarray(CALLS["paged_attention"][name], jnp.int64)})


def test_scales_and_sinks_of_64_bits_are_rounded():
    extras = {"sinks": np.ones(4), "k_scale": np.full(2, 0.5), "v_scale": np.full(2, 2.0)}
    wanted = call("paged_attention", **extras)
    with jax.enable_x64(True):
        got = call("paged_attention", **as_jax(extras))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("options", [{}, {"max_query_len": 1}, {"sliding_window": 40, "logit_soft_cap": 5.0}])
def test_attention_kernels_lower_in_64_bit_mode(implementation, options):
    bfloat16, int32 = jnp.bfloat16, jnp.int32
    shapes = [((9, 32, 128), bfloat16), *[((99, 16, 8, 128), bfloat16)] * 2, ((6, 40), int32), ((6,), int32)]
    arrays = [jax.ShapeDtypeStruct(*x) for x in (*shapes, ((7,), int32))]
    sinks = jax.ShapeDtypeStruct((32,), jnp.float32)

    def attend(sinks, *arrays):
        return paged_attention(*arrays, sinks=sinks, return_lse=True, implementation=implementation, **options)

    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(H200):
        lowered = jax.jit(attend).trace(sinks, *arrays).lower(lowering_platforms=("cuda",))
    assert [x.dtype for x in lowered.out_info] == [jnp.bfloat16, jnp.float32]
    assert ("mosaic_gpu" if implementation == "mosaic" else "xla.gpu.triton") in lowered.as_text()


@pytest.mark.parametrize("op", ["rope_and_write_kv", "copy_blocks", "add_rms_norm"])
def test_other_kernels_lower_in_64_bit_mode(op):
    arguments = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in CALLS[op].items()}
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda **a: call(op, **a, implementation="triton")).trace(**arguments)
        assert "xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("op", sorted(set(CALLS) - {"add_rms_norm"}))
def test_no_op_on_a_cache_is_differentiable_and_each_says_so(op):
    for name, x in CALLS[op].items():
        if x.dtype != np.float32:
            continue

        def total(x, name=name):
            return sum(y.sum() for y in jax.tree.leaves(call(op, **{name: x})))

        with pytest.raises(ValueError, match=f"{op} is not differentiable"):
            jax.grad(total)(jnp.asarray(x))


attentions = pytest.mark.parametrize("op", ["paged_attention", "cascade_attention"])


@attentions
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
@pytest.mark.parametrize("checks", [False, True])
def test_no_tokens_give_an_empty_result(op, wrap, checks):
    q, starts = jnp.zeros((0, 4, 16)), np.zeros(3, np.int32)
    with debug_checks(checks):
        out, lse = wrap(lambda q: call(op, q=q, query_starts=starts, return_lse=True))(q)
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


@attentions
@pytest.mark.parametrize("max_query_len", [None, 1])
@pytest.mark.parametrize("checks", [False, True])
def test_no_sequences_give_zeros(op, max_query_len, checks):
    empty = {"block_tables": np.zeros((0, 3), np.int32), "kv_lens": np.zeros(0, np.int32)}
    empty["query_starts"] = np.zeros(1, np.int32)
    if op == "cascade_attention":
        empty |= {"group_starts": np.zeros(1, np.int32), "prefix_lens": np.zeros(0, np.int32)}
    with debug_checks(checks):
        out, lse = call(op, **empty, max_query_len=max_query_len, return_lse=True)
    assert out.shape == CALLS[op]["q"].shape
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()


def test_no_groups_share_nothing():
    arguments = {"group_starts": np.zeros(1, np.int32), "prefix_lens": np.zeros(0, np.int32)}
    np.testing.assert_allclose(call("cascade_attention", **arguments), call("paged_attention"), atol=1e-6)


@pytest.mark.parametrize("implementation", ["mosaic", "triton"])
@pytest.mark.parametrize("op", [paged_attention, cascade_attention])
@pytest.mark.parametrize("sizes", [(0, 6), (9, 0), (0, 0)])
def test_sizes_of_0_lower_for_a_gpu(op, sizes, implementation):
    tokens, seqs = sizes
    pool = jax.ShapeDtypeStruct((99, 16, 8, 128), jnp.bfloat16)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((seqs, 40), (seqs,), (seqs + 1,))]
    arrays = [jax.ShapeDtypeStruct((tokens, 32, 128), jnp.bfloat16), pool, pool, *ints]
    if op is cascade_attention:
        arrays += [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (3, 2)]
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(lambda *a: op(*a, implementation=implementation)).trace(*arrays)
        assert traced.lower(lowering_platforms=("cuda",)).out_info.shape == (tokens, 32, 128)


@pytest.mark.parametrize("op", ["write_kv", "rope_and_write_kv", "copy_blocks"])
def test_nothing_to_write_leaves_the_pools_alone(op):
    arguments = {name: x if name in POOL else x[:0] for name, x in CALLS[op].items()}
    for name, pool in zip(POOL, call(op, **arguments)[-2:], strict=True):
        np.testing.assert_array_equal(pool, CALLS[op][name])


@pytest.mark.parametrize("op", [op for op, arrays in CALLS.items() if "k_pool" in arrays])
@pytest.mark.parametrize(("axis", "size"), [*enumerate(("blocks", "block_size", "kv_heads", "head_dim"))])
def test_an_empty_pool_is_refused(op, axis, size):
    """Whichever dimension of everything it is that is 0."""
    shape = list(CALLS[op]["k_pool"].shape)
    shape[axis] = 0
    changes: dict = {name: np.zeros(shape, np.float32) for name in POOL}
    per_row = {"kv_heads": (3, 0, 16), "head_dim": (3, 2, 0)}.get(size)
    if op == "write_kv" and per_row:
        changes |= {name: np.zeros(per_row, np.float32) for name in "kv"}
    if size == "head_dim" and "attention" in op:
        changes["q"] = np.zeros((6, 4, 0), np.float32)
    with pytest.raises(ValueError, match=f"{op}: {size} must not be 0, but "):
        call(op, **changes)


@attentions
@pytest.mark.parametrize(("name", "axis", "size"), [("q", 1, "q_heads"), ("block_tables", 1, "table_width")])
def test_empty_rows_are_refused(op, name, axis, size):
    shape = list(CALLS[op][name].shape)
    shape[axis] = 0
    with pytest.raises(ValueError, match=f"{op}: {size} must not be 0, but {name} has shape"):
        call(op, **{name: np.zeros(shape, CALLS[op][name].dtype)})


def test_no_parts_are_refused():
    arguments = {name: x[:0] for name, x in CALLS["merge_attention"].items()}
    with pytest.raises(ValueError, match="merge_attention: parts must not be 0, but outs has shape"):
        call("merge_attention", **arguments)


@pytest.mark.parametrize("op", ["write_kv", "rope_and_write_kv", "copy_blocks"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2"])
def test_pools_of_other_dtypes_are_refused(op, dtype):
    pools = {name: jnp.zeros(CALLS[op][name].shape, dtype) for name in POOL}
    wanted = f"{op}: k_pool must be float32, bfloat16, float16 or float8_e4m3fn, not {dtype}"
    with pytest.raises(ValueError, match=wanted):
        call(op, **pools)


@pytest.mark.parametrize("op", ["write_kv", "rope_and_write_kv"])
@pytest.mark.parametrize("name", ["k", "v", "k_scale", "v_scale"])
def test_integers_are_refused_where_floats_belong(op, name):
    if op == "rope_and_write_kv" and "scale" not in name:
        name, shape = "qkv", CALLS[op]["qkv"].shape
    else:
        shape = (2,) if "scale" in name else CALLS[op][name].shape
    with pytest.raises(ValueError, match=rf"{op}: {name} must be .*float.*, not int32"):
        call(op, **{name: jnp.ones(shape, jnp.int32)})


@pytest.mark.parametrize("op", ["write_kv", "rope_and_write_kv", "rope_and_write_kv interpreted"])
@pytest.mark.parametrize("pool_dtype", ["float32", "float8_e4m3fn"])
def test_a_scale_of_0_writes_zeros_of_a_head_of_zeros(op, pool_dtype):
    """Which gets that scale where it is the greatest value by the greatest of the dtype."""
    op, _, interpreted = op.partition(" ")
    arguments = {**CALLS[op], **{name: jnp.ones(CALLS[op][name].shape, pool_dtype) for name in POOL}}
    scales = {name: np.array([0, 0.5], np.float32) for name in ("k_scale", "v_scale")}
    if op == "write_kv":
        arguments |= {name: arguments[name] * np.array([[0], [1]], np.float32) for name in "kv"}
    else:  # 4 query heads, 2 of keys, 2 of values
        arguments["qkv"] = arguments["qkv"] * np.array([1, 1, 1, 1, 0, 1, 0, 1], np.float32)[:, None]
    if interpreted:
        from pallas_kernels.kv_write.triton import rope_and_write_kv_triton

        pools = rope_and_write_kv_triton(**as_jax({**arguments, **scales}), interpret=True)[-2:]
    else:
        pools = call(op, **arguments, **scales)[-2:]
    for pool in pools:
        rows = np.asarray(pool, np.float32).reshape(-1, 2, 16)[arguments["slots"]]
        assert not rows[:, 0].any()
        assert np.isfinite(rows).all()
        assert rows[:, 1].any()


def test_checks_work_under_vmap():
    arguments = CALLS["paged_attention"]
    batch = {name: jnp.stack([jnp.asarray(x)] * 2) for name, x in arguments.items()}
    attend = jax.vmap(lambda a: paged_attention(**a))
    with debug_checks():
        out = attend(batch)
        wrong = {**batch, "kv_lens": batch["kv_lens"].at[1, 0].set(99)}
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"kv_lens\[0\] is 99"):
            jax.block_until_ready(attend(wrong))
    np.testing.assert_allclose(out, jnp.stack([paged_attention(**arguments)] * 2), atol=1e-6)


def test_options_must_be_known_at_trace_time_and_of_their_kind():
    with pytest.raises(ValueError, match="must be an int that is known at trace time"):
        jax.jit(lambda n: call("paged_attention", sliding_window=n))(3)
    with pytest.raises(ValueError, match="must be a number that is known at trace time"):
        jax.jit(lambda x: call("paged_attention", scale=x))(0.5)
    for prefix_splits in (1.5, "2", 0):
        with pytest.raises(ValueError, match="prefix_splits"):
            call("cascade_attention", prefix_splits=prefix_splits)


def test_rope_alone_takes_numpy_slots_of_any_int_that_fits():
    """As JAX makes int32 of them everywhere."""
    arguments = CALLS["rope_and_write_kv"]
    got = rope_and_write_kv(**{**arguments, "slots": arguments["slots"].astype(np.int64)})
    for x, y in zip(got, call("rope_and_write_kv"), strict=True):
        np.testing.assert_array_equal(x, y)
