"""Programs compiled in the background: with workers and without, and whatever a worker does."""

import os
import time

import jax
import jax.numpy as jnp
import pytest
import tiny
from tiny import GREEDY, PROMPT, TOKENS, tokens_of

from jaxpaged import LLM, build, kv_cache
from jaxpaged.batch import Bucket, StepShape
from jaxpaged.compiling import Compilation, Program
from jaxpaged.compiling.compilation import _workers_agree
from jaxpaged.compiling.worker import Setup, lower
from jaxpaged.executables import StepFunctions, step_programs
from jaxpaged.models.loading import abstract_params
from jaxpaged.models.registry import FAMILIES
from jaxpaged.models.shapes import shape
from jaxpaged.startup import StartupTimes
from pallas_kernels import debug_checks

VECTOR = jax.ShapeDtypeStruct((4,), jnp.float32)


def is_a_worker() -> bool:
    return os.environ.get("JAXPAGED_TEST_PARENT") not in (None, str(os.getpid()))


def double(x):
    return x * 2


def double_again(x):
    return x * 2


def fails_elsewhere(x):
    if is_a_worker():
        raise RuntimeError("not here")
    return x + 10


def dies_elsewhere(x):
    if is_a_worker():
        os._exit(3)
    return x + 20


def sleeps_elsewhere(x):
    if is_a_worker():
        time.sleep(600)
    return x + 30


def wrong(x):
    raise TypeError("a program that can't be")


@pytest.fixture(autouse=True)
def parent(monkeypatch):
    monkeypatch.setenv("JAXPAGED_TEST_PARENT", str(os.getpid()))


def compiled(*functions, num_workers=1):
    programs = {f.__name__: Program(f.__name__, f, (VECTOR,), donate=(0,)) for f in functions}
    with Compilation(programs, num_workers=num_workers) as compilation:
        executables = compilation.result(StartupTimes())
    assert all(worker._process.poll() is not None for worker in compilation._workers)
    return {name: executable(jnp.ones(4)).tolist()[0] for name, executable in executables.items()}


def test_a_program_that_a_worker_cannot_lower_is_lowered_here():
    def local(x):  # which does not pickle
        return x + 40

    assert compiled(double, fails_elsewhere, local, dies_elsewhere, double_again) == {
        "double": 2,
        "fails_elsewhere": 11,
        "local": 41,
        "dies_elsewhere": 21,
        "double_again": 2,
    }


@pytest.mark.parametrize("num_workers", [0, 1])
def test_options_reach_the_compiler(num_workers):
    program = Program("double", double, (VECTOR,), options=(("xla_gpu_no_such_option", True),))
    with (
        Compilation({"double": program}, num_workers=num_workers) as compilation,
        pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_gpu_no_such_option'"),
    ):
        compilation.result(StartupTimes())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_wrong_with_a_program_is_told(num_workers):
    with pytest.raises(TypeError, match="a program that can't be"):
        compiled(wrong, num_workers=num_workers)


def test_leaving_ends_workers_whatever_they_do():
    programs = {f: Program(f.__name__, f, (VECTOR,)) for f in (double, sleeps_elsewhere)}
    with Compilation(programs, num_workers=1) as compilation:
        compilation._lowered[double].result()
        start = time.perf_counter()
    assert time.perf_counter() - start < 10
    assert [worker._process.poll() is not None for worker in compilation._workers] == [True]


def test_an_engine_from_workers_gives_the_same_tokens(monkeypatch):
    """Whose process traces nothing at all."""
    monkeypatch.setattr(build, "Compilation", lambda programs, cache: Compilation(programs, cache, num_workers=1))
    llm = LLM(tiny.PATH, dtype="float32", max_model_len=128, block_size=8, num_kv_blocks=24, max_num_seqs=1,
              max_num_batched_tokens=8)  # fmt: skip
    assert llm.engine.runner.num_traces == 0
    addresses = llm.engine.runner.addresses()
    assert tokens_of(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]) == TOKENS
    assert llm.engine.runner.addresses() == addresses


H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


def test_workers_are_for_gpus_that_jax_knows_by_name():
    def agrees(kind: str, here: str = "NVIDIA H200") -> bool:
        there, here_too = (jax.sharding.AbstractDevice(k, platform="gpu", num_cores=132) for k in (kind, here))
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=here_too)):
            return _workers_agree(Setup("cuda", there, {}))

    assert agrees("NVIDIA H200")
    assert not agrees("NVIDIA A100-SXM4-40GB")  # other kernels
    assert not agrees("NVIDIA X9000")
    with debug_checks():
        assert not agrees("NVIDIA H200")
    assert not _workers_agree(Setup("cpu", None, {}))


def test_a_step_for_a_gpu_is_lowered_with_its_kernels():
    """As workers do it, in a process without one: in bfloat16 and with heads that the Hopper kernels take."""
    model, dtype = shape("llama-3.2-1b"), jnp.dtype("bfloat16")
    family = FAMILIES[model.architecture]
    functions = StepFunctions(family.module(model, dtype), model, dtype, StepShape(4, 16, 64 * 16), 2, 20)
    params, pool = abstract_params(family.weights(model), dtype), kv_cache.abstract(model, 64, 16, dtype)
    bucket = Bucket(2, 2, True)
    program = step_programs(functions, params, pool, [bucket])["forward", bucket]
    text = lower(Setup("cuda", H200, {}), program).mlir_module()
    assert "mosaic_gpu_v2" in text
    assert "triton" in text
