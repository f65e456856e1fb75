"""Which of the two Hopper kernels a call gets. Their numerics: `test_mosaic_decode` and `test_mosaic_prefill`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh
from paged import make_case

from pallas_kernels import paged_attention

H200 = AbstractMesh((), (), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


def lowered(max_query_len: int | None) -> str:
    case = make_case(np.random.default_rng(0), [40, 100], [1, 1], q_heads=8, head_dim=128)
    arrays = case.arrays(jnp.bfloat16)

    def attend(*arrays):
        return paged_attention(*arrays, max_query_len=max_query_len, implementation="mosaic")

    with jax.sharding.use_abstract_mesh(H200):
        return jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_one_query_a_sequence_gets_the_decode_kernel_and_all_else_the_prefill_kernel():
    assert "paged_decode" in lowered(1)
    assert "paged_prefill" in lowered(None)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about machines without a GPU")
def test_without_a_hopper_gpu_it_says_so():
    arrays = make_case(np.random.default_rng(0), [9], [9], head_dim=64).arrays(jnp.bfloat16)
    with pytest.raises(ValueError, match="implementation='mosaic' can't serve this call: needs a Hopper GPU"):
        paged_attention(*arrays, implementation="mosaic")
