import jax
import jax.numpy as jnp
import numpy as np
import pytest
from donation import check_in_place
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import copy_blocks
from pallas_kernels.block_copy.triton import copy_blocks_triton

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def reference(*arrays):
    return copy_blocks(*arrays, implementation="reference")


def triton(*arrays):
    return copy_blocks(*arrays, implementation="triton")


def interpreted(*arrays):
    return copy_blocks_triton(*arrays, interpret=True)


everywhere = pytest.mark.parametrize("copy", [reference, interpreted, pytest.param(triton, marks=on_a_gpu)])

BLOCKS, SHAPE = 20, (20, 8, 2, 4)


def make_pools(dtype=np.float32):
    """Two pools whose entries all differ, within what bfloat16 holds."""
    rng = np.random.default_rng(0)
    return [jnp.array(rng.normal(size=SHAPE), dtype) for _ in range(2)]


def as_ids(ids):
    return jnp.asarray(ids, jnp.int32)


@everywhere
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("seed", range(3))
def test_random_pairs(seed, dtype, copy):
    rng = np.random.default_rng(seed)
    ids = rng.permutation(BLOCKS)
    destinations = ids[:7]
    sources = rng.choice(ids[7:], 7)  # some of them several times
    padding = rng.random(7) < 0.3
    pools = make_pools(dtype)
    copied = copy(*pools, as_ids(sources), as_ids(np.where(padding, BLOCKS, destinations)))
    for before, after in zip(pools, copied, strict=True):
        expected = np.array(before, np.float32)
        expected[destinations[~padding]] = expected[sources[~padding]]
        np.testing.assert_array_equal(np.asarray(after, np.float32), expected)


@everywhere
@pytest.mark.parametrize("destination", [BLOCKS, BLOCKS + 1, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("source", [0, BLOCKS, 2**31 - 1, -1])
def test_padding_copies_nothing(source, destination, copy):
    pools = make_pools()
    copied = copy(*pools, as_ids([source] * 3), as_ids([destination] * 3))
    for before, after in zip(pools, copied, strict=True):
        np.testing.assert_array_equal(after, before)


@everywhere
def test_no_pairs_at_all(copy):
    pools = make_pools()
    for before, after in zip(pools, copy(*pools, as_ids([]), as_ids([])), strict=True):
        np.testing.assert_array_equal(after, before)


@everywhere
def test_what_nobody_can_see_is_copied_too(copy):
    """A block's unused rows may hold anything; a copy carries it along and harms no other block."""
    pools = [p.at[3, 5:].set(jnp.nan) for p in make_pools()]
    for before, after in zip(pools, copy(*pools, as_ids([3]), as_ids([9])), strict=True):
        np.testing.assert_array_equal(after, before.at[9].set(before[3]))


@everywhere
def test_blocks_of_any_size(copy):
    """More than a program takes, and no multiple of it."""
    pools = [jnp.arange(4 * 48 * 3 * 40, dtype=jnp.float32).reshape(4, 48, 3, 40) + i for i in range(2)]
    for before, after in zip(pools, copy(*pools, as_ids([3, 3]), as_ids([1, 0])), strict=True):
        np.testing.assert_array_equal(after, before[jnp.array([3, 3, 2, 3])])


@pytest.mark.parametrize("copy", [reference, pytest.param(triton, marks=on_a_gpu)])
def test_donated_pools_are_copied_in_place(copy):
    def step(pools, sources, destinations):
        return copy(*pools, sources, destinations), ()

    pools = [jnp.full((512, 8, 2, 16), i, jnp.bfloat16) for i in range(2)]
    check_in_place(step, pools, as_ids([1, 1, 2]), as_ids([5, 6, 512]))


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-40GB", "NVIDIA H200"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_lowers_without_a_gpu(dtype, kind):
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=100)
    pool = jax.ShapeDtypeStruct((999, 16, 5, 80), dtype)
    ids = jax.ShapeDtypeStruct((6,), jnp.int32)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(copy_blocks).trace(pool, pool, ids, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text
    assert text.count("#stablehlo.output_operand_alias") == 2  # both pools are written where they lie
    assert "scatter" not in text


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="asks what a CPU answers")
def test_a_cpu_gets_the_reference():
    with pytest.raises(ValueError, match="implementation='triton' can't serve this call: needs an NVIDIA GPU"):
        triton(*make_pools(), as_ids([1]), as_ids([2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_pool": jnp.zeros((4, 8, 2))}, "pools must be"),
        ({"v_pool": jnp.zeros((4, 8, 2, 4), jnp.bfloat16)}, "agree"),
        ({"sources": jnp.zeros(2, jnp.int32)}, r"sources \(2,\) and destinations \(3,\)"),
        ({"sources": jnp.zeros((3, 1), jnp.int32)}, r"sources \(3, 1\)"),
        ({"sources": jnp.zeros(3)}, "sources must be int32, not float32"),
        ({"destinations": jnp.zeros(3, jnp.int16)}, "destinations must be int32, not int16"),
        ({"implementation": "magic"}, "unknown"),
    ],
)
def test_bad_input_is_refused(change, message):
    arguments = {
        "k_pool": jnp.zeros((4, 8, 2, 4)),
        "v_pool": jnp.zeros((4, 8, 2, 4)),
        "sources": jnp.zeros(3, jnp.int32),
        "destinations": jnp.arange(3, dtype=jnp.int32),
    }
    with pytest.raises(ValueError, match=message):
        copy_blocks(**{**arguments, **change})
