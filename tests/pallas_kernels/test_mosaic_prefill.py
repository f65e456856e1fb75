"""The Hopper prefill kernel: lowered for an abstract H200 anywhere, run where there is one.

Interpret mode cannot run it: it has no predicated copies, no register operands of wgmma and no ref unions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged import dense_attention, make_case

from pallas_kernels.paged_attention.mosaic_common import device_refusal
from pallas_kernels.paged_attention.mosaic_prefill import mosaic_prefill, refusal
from pallas_kernels.paged_attention.mosaic_prefill_geometry import Geometry
from pallas_kernels.paged_attention.mosaic_prefill_items import kv_tiles
from pallas_kernels.paged_attention.prefill_plan import KV_LEN, POSITION, ROW, ROWS, SEQ, plan_prefill
from pallas_kernels.paged_attention.spec import AttentionSpec

H200 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
)
A100 = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA A100", platform="gpu", num_cores=108)
)


def make_arguments(
    tokens=300, heads=(8, 2), head_dim=128, block_size=16, dtype=jnp.bfloat16, pool_dtype=None, sinks=False, **spec
):
    pool = jax.ShapeDtypeStruct((40, block_size, heads[1], head_dim), pool_dtype or dtype)
    ints = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((5, 12), (5,), (6,)))
    arrays = (jax.ShapeDtypeStruct((tokens, heads[0], head_dim), dtype), pool, pool, *ints)
    extras = {"sinks": jax.ShapeDtypeStruct((heads[0],), jnp.float32) if sinks else None}
    return arrays, AttentionSpec(**{"scale": head_dim**-0.5, **spec}), {**extras, "k_scale": None, "v_scale": None}


VARIANTS = {
    "plain": {},
    "float16, head_dim 64, all features": {
        "dtype": jnp.float16,
        "head_dim": 64,
        "sinks": True,
        "sliding_window": 100,
        "logit_soft_cap": 5.0,
        "return_lse": True,
    },
    "head_dim 256": {"head_dim": 256, "return_lse": True},
    "head_dim 256, block_size 128": {"head_dim": 256, "block_size": 128},
    "multi-head, block_size 8": {"heads": (5, 5), "block_size": 8},
    "multi-query, block_size 128": {"heads": (16, 1), "block_size": 128},
    "fewer tokens than a tile": {"tokens": 3, "block_size": 32},
    "not causal": {"causal": False, "sinks": True, "return_lse": True},
    **{f"head_dim {dim}": {"head_dim": dim, "return_lse": True} for dim in (80, 96, 112)},
    "head_dim 80, multi-head": {"head_dim": 80, "heads": (3, 3)},
    "head_dim 112, all features": {
        "head_dim": 112,
        "sinks": True,
        "sliding_window": 100,
        "logit_soft_cap": 5.0,
        "return_lse": True,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lowers_for_an_h200_without_one(variant):
    arrays, spec, extras = make_arguments(**VARIANTS[variant])
    with jax.sharding.use_abstract_mesh(H200):
        assert refusal(*arrays, spec, **extras) is None
        traced = jax.jit(lambda a, e: mosaic_prefill(*a, spec, **e)).trace(arrays, extras)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "q and the pools must both be bfloat16 or float16, not float32 and float32"),
        (
            {"pool_dtype": jnp.float8_e4m3fn},
            "q and the pools must both be bfloat16 or float16, not bfloat16 and float8_e4m3fn",
        ),
        ({"head_dim": 72}, "head_dim must be one of [64, 80, 96, 112, 128, 256], not 72"),
        ({"scale": -1.0}, "scale must be above 0, not -1.0"),
        ({"block_size": 24}, "block_size must be 8, 16, 32, 64 or 128, not 24"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, reason):
    arrays, spec, extras = make_arguments(**change)
    with jax.sharding.use_abstract_mesh(H200):
        assert refusal(*arrays, spec, **extras) == reason


def test_scales_and_other_devices_are_refused():
    arrays, spec, extras = make_arguments()
    with jax.sharding.use_abstract_mesh(H200):
        assert "FP8" in refusal(*arrays, spec, **{**extras, "k_scale": jnp.ones(2)})
    with jax.sharding.use_abstract_mesh(A100):
        assert "needs a Hopper GPU" in refusal(*arrays, spec, **extras)


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_covers_every_query_once(seed):
    rng = np.random.default_rng(seed)
    queries = rng.choice([0, 1, 5, 31, 32, 33, 100, 300], size=6)
    kv_lens = queries + rng.integers(0, 200, size=6)
    starts = np.array([0, *np.cumsum(queries)])
    plan = plan_prefill(jnp.asarray(starts), jnp.asarray(kv_lens), int(starts[-1]) + 7, tile_tokens=32, bundle=4)
    tiles, (count, total) = np.asarray(plan.tiles), plan.counts.tolist()
    assert count == sum(-(-n // 32) for n in queries)
    assert total == starts[-1]
    assert not tiles[count:].any()
    covered = []
    for tile in tiles[:count]:
        seq, row, rows = tile[[SEQ, ROW, ROWS]]
        assert starts[seq] <= row < row + rows <= starts[seq + 1]
        assert tile[KV_LEN] == kv_lens[seq]
        assert tile[POSITION] == kv_lens[seq] - queries[seq] + row - starts[seq]
        covered += range(row, row + rows)
    assert sorted(covered) == list(range(starts[-1]))


def test_the_plan_starts_with_the_longest():
    starts, kv_lens = jnp.array([0, 64, 1088, 1089]), jnp.array([64, 1024, 5000])
    plan = plan_prefill(starts, kv_lens, 1089, tile_tokens=32, bundle=16)
    assert plan.tiles[:, SEQ].tolist() == [2] + [1] * 32 + [0, 0] + [0] * 2
    assert plan.tiles[1, POSITION] == 512  # the sequence's last bundle before its first


def test_the_plan_of_attention_that_is_not_causal_puts_most_keys_first_and_keeps_sequences_together():
    starts, kv_lens = jnp.array([0, 64, 1088, 1089, 1100]), jnp.array([64, 1024, 5000, 0])
    plan = plan_prefill(starts, kv_lens, 1100, tile_tokens=32, bundle=16, causal=False)
    count = int(plan.counts[0])
    assert count == 36
    assert plan.tiles[:count, SEQ].tolist() == [2] + [1] * 32 + [0, 0] + [3]
    assert plan.tiles[1:33, ROW].tolist() == list(range(64, 1088, 32))


def test_the_plan_leaves_out_sequences_with_fewer_queries_than_asked_for():
    starts, kv_lens = jnp.array([0, 1, 3, 3, 4, 40]), jnp.array([9, 70, 5, 300, 36])
    plan = plan_prefill(starts, kv_lens, 45, tile_tokens=32, bundle=16, fewest_queries=2)
    assert plan.counts.tolist() == [3, 40]
    assert plan.tiles[:3, SEQ].tolist() == [1, 4, 4]
    assert plan.tiles[:3, ROW].tolist() == [1, 4, 36]
    assert not plan.tiles[3:].any()


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 200), (False, None)])
def test_items_visit_what_any_row_sees_and_mask_all_but_what_every_row_sees(causal, window):
    spec = AttentionSpec(scale=1.0, causal=causal, sliding_window=window)
    g = Geometry(500, 8, 2, 128, jnp.bfloat16, 16, 99, 132, spec, has_sinks=False, zeroes_padding=True)
    rng = np.random.default_rng(0)
    for rows in rng.integers(1, g.tile_tokens + 1, 40):
        kv_len = int(rng.integers(rows if causal else 0, 700))
        position = int(rng.integers(0, kv_len - rows + 1)) if causal else int(rng.integers(-500, 500))
        arguments = (jnp.int32(x) for x in (position, rows, kv_len))
        first, last, low, high = (int(x) for x in kv_tiles(g, *arguments))
        columns = np.arange(1024)
        sees = position + np.arange(rows)[:, None] if causal else np.full((rows, 1), kv_len - 1)
        seen = (columns <= sees) & (columns > sees - (window or 1024))
        tiles = seen.reshape(rows, -1, g.kv_tile)
        any_row, every_row = tiles.any(axis=(0, 2)), tiles.all(axis=(0, 2))
        assert not any_row[:first].any()
        assert not any_row[last + 1 :].any()
        assert every_row[low:high].all()
        assert first <= low <= high <= last


needs_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_refusal() is not None, reason=device_refusal() or ""),
]
MIX = ([300, 5, 48, 129, 90, 700, 1, 128, 256], [1, 5, 1, 40, 1, 700, 1, 128, 130])
SINKS = np.linspace(-2, 3, 8).astype(np.float32)
RUNS = {
    "mixed": {},
    "float16, head_dim 64": {"dtype": "float16", "head_dim": 64},
    "head_dim 256": {"head_dim": 256},
    "head_dim 256, block_size 128": {"head_dim": 256, "block_size": 128},
    **{f"head_dim {dim}": {"head_dim": dim} for dim in (80, 96, 112)},
    "head_dim 80, float16, multi-head, block_size 128": {
        "head_dim": 80,
        "dtype": "float16",
        "heads": (3, 3),
        "block_size": 128,
    },
    "head_dim 112, window": {"head_dim": 112, "sliding_window": 50},
    "head_dim 112, multi-head, three rows over": {
        "head_dim": 112,
        "heads": (3, 3),
        "batch": ([300, 67, 200], [3, 67, 131]),
    },
    "multi-head": {"heads": (3, 3)},
    "multi-query": {"heads": (16, 1)},
    "six heads to two": {"heads": (6, 2)},
    "block_size 8": {"block_size": 8},
    "block_size 64": {"block_size": 64},
    "block_size 128": {"block_size": 128},
    "window": {"sliding_window": 50},
    "window of one": {"sliding_window": 1},
    "soft cap": {"logit_soft_cap": 2.0, "scale": 3.0},
    "sinks": {"sinks": SINKS},
    "all": {"sliding_window": 133, "logit_soft_cap": 5.0, "sinks": SINKS, "scale": 0.3},
    "not causal": {"causal": False},
    "not causal, more queries than keys": {"causal": False, "batch": ([300, 1, 128, 40], [700, 33, 128, 300])},
    "not causal, all": {"causal": False, "logit_soft_cap": 5.0, "sinks": SINKS, "head_dim": 256},
    "whole prefills": {"batch": ([1, 31, 257, 1000], [1, 31, 257, 1000])},
    "a tiny call without padding": {"batch": ([3], [2]), "padding": (0, 0, 0)},
    "much padding": {"batch": ([100, 200], [100, 20]), "padding": (5, 700, 17)},
    "more items than programs": {"batch": ([2100, 1500], [2100, 700]), "heads": (32, 8)},
}


@pytest.mark.parametrize("run", [pytest.param(r, marks=needs_hopper) for r in RUNS])
def test_agrees_with_dense_attention_on_the_device(run):
    options = dict(RUNS[run])
    dtype, heads = options.pop("dtype", "bfloat16"), options.pop("heads", (8, 2))
    rows, tokens, slack = options.pop("padding", (2, 3, 3))
    case = make_case(
        np.random.default_rng(len(run)),
        *options.pop("batch", MIX),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=options.pop("head_dim", 128),
        block_size=options.pop("block_size", 16),
        padding_rows=rows,
        padding_tokens=tokens,
        table_slack=slack,
    )
    check(case, dtype, **options)


@pytest.mark.parametrize("causal", [pytest.param(c, marks=needs_hopper) for c in (True, False)])
def test_queries_that_see_no_key_get_zeros_on_the_device(causal):
    """Such as those of a shared prefix of no blocks; a causal call should have none, but must not hang."""
    case = make_case(np.random.default_rng(9), [200, 100, 50], [100, 90, 40], q_heads=8, head_dim=128)
    case.kv_lens = np.array([200, 0, 50, 0, 0])
    spec = AttentionSpec(scale=0.1, causal=causal, return_lse=True)
    out, lse = jax.jit(lambda *a: mosaic_prefill(*a, spec))(*case.arrays("bfloat16"))
    assert not np.asarray(out, np.float32)[100:190].any()
    assert np.isneginf(lse[100:190]).all()
    assert np.isfinite(lse[:100]).all()
    assert np.isfinite(lse[190:230]).all()


@pytest.mark.parametrize("window", [pytest.param(w, marks=needs_hopper) for w in (1, 16, 100)])
def test_what_a_window_hides_may_be_poisoned_on_the_device(window):
    case = make_case(np.random.default_rng(8), *MIX, q_heads=8, head_dim=128)
    clean = {name: getattr(case, name).copy() for name in ("k_pool", "v_pool")}
    for i, (n, queries) in enumerate(zip(*MIX, strict=True)):
        for position in range(n - queries + 1 - window):
            slot = case.block_tables[i, position // 16], position % 16
            case.k_pool[slot] = case.v_pool[slot] = np.nan
    check(case, "bfloat16", expected_case=case.__class__(**{**vars(case), **clean}), sliding_window=window)


def check(case, dtype, expected_case=None, sinks=None, **options):
    for c in {id(c): c for c in (case, expected_case) if c is not None}.values():
        for name in ("q", "k_pool", "v_pool"):  # what the op sees, so that only its own rounding counts
            setattr(c, name, np.array(jnp.asarray(getattr(c, name), dtype), np.float32))
    scale = options.pop("scale", case.q.shape[-1] ** -0.5)
    spec = AttentionSpec(scale=scale, return_lse=True, **options)
    out, lse = jax.jit(lambda a, s: mosaic_prefill(*a, spec, sinks=s))(case.arrays(dtype), sinks)
    expected, expected_lse = dense_attention(expected_case or case, scale=scale, sinks=sinks, **options)
    out = np.asarray(out, np.float64)
    assert np.linalg.norm(out - expected) < (6e-3 if dtype == "bfloat16" else 1e-3) * np.linalg.norm(expected)
    assert not out[case.query_starts[-1] :].any()
    np.testing.assert_allclose(lse, expected_lse, atol=1e-3, rtol=1e-3)
