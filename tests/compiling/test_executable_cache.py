"""Executables from disk: the same program, ready to run; and files of no use, which cost a compilation only."""

import contextlib
import dataclasses
import functools
import logging
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache
from tiny import GREEDY, PROMPT, TOKENS, tokens_of

from jaxpaged import LLM, SamplingParams, build
from jaxpaged.batch import Bucket
from jaxpaged.compiling import ExecutableCache, Program
from jaxpaged.compiling import cache as module
from jaxpaged.executables import step_programs


def double(x, y):
    return 2 * x, {"sum": x.sum() + y["one"]}


VECTOR = jax.ShapeDtypeStruct((8,), jnp.float32)
PROGRAM = Program("double", double, (VECTOR, {"one": VECTOR}), donate=(0,))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept" / "here"


@contextlib.contextmanager
def jax_cache_in(path):
    """JAX's cache, keeping whatever is compiled; or none."""
    names = {"jax_compilation_cache_dir": path, "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in names}
    for settings in (names, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is names:
            yield


@pytest.fixture(autouse=True)
def no_jax_cache():
    """The user's may hold our programs, from a time when the machine was slow."""
    with jax_cache_in(None):
        yield


@pytest.fixture
def jax_cache(tmp_path, no_jax_cache):
    with jax_cache_in(str(tmp_path / "jax")):
        yield


@pytest.fixture
def kept(folder):
    """A cache that holds `PROGRAM`."""
    cache = ExecutableCache(folder, "an engine")
    cache.compile(PROGRAM, PROGRAM.lower())
    return cache


def files(folder):
    return sorted(folder.iterdir())


def runs(compiled) -> bool:
    x = jnp.arange(8, dtype=jnp.float32)
    doubled, rest = compiled(x, {"one": np.ones(8, np.float32)})
    assert x.is_deleted()  # given away
    return doubled.tolist() == list(range(0, 16, 2)) and rest["sum"].tolist() == [29] * 8


def test_what_was_kept_runs_as_before(kept, folder, caplog):
    loaded = kept.load(PROGRAM)
    assert runs(loaded)
    assert runs(ExecutableCache(folder, "an engine").load(PROGRAM))
    assert loaded.out_info[0].shape == (8,)
    assert loaded.memory_analysis().temp_size_in_bytes >= 0
    assert not caplog.records
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.stat().st_mode & 0o077 for path in files(folder)] == [0]


@pytest.mark.parametrize(
    "other",
    [
        Program("triple", double, PROGRAM.args, donate=(0,)),
        Program("double", double, PROGRAM.args),
        dataclasses.replace(PROGRAM, options=(("xla_gpu_enable_triton_gemm", False),)),
        Program("double", double, (VECTOR, {"two": VECTOR}), donate=(0,)),
        Program("double", double, (jax.ShapeDtypeStruct((9,), jnp.float32), {"one": VECTOR}), donate=(0,)),
        Program("double", double, (jax.ShapeDtypeStruct((8,), jnp.int32), {"one": VECTOR}), donate=(0,)),
    ],
    ids=["name", "donation", "options", "structure", "shape", "dtype"],
)
def test_another_program_is_not_found(kept, other):
    assert kept.load(other) is None


def test_another_engine_or_environment_finds_nothing(kept, folder, monkeypatch):
    assert ExecutableCache(folder, "another engine").load(PROGRAM) is None
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_min_max=true")
    assert ExecutableCache(folder, "an engine").load(PROGRAM) is None


@pytest.mark.parametrize(
    "change",
    [
        (module, "_sources_digest", lambda: "of other sources"),
        (module.importlib.metadata, "version", lambda name: "0.0.0"),
        (module, "_processor", lambda: "another processor"),
    ],
    ids=["sources", "versions", "processor"],
)
def test_the_environment_tells_what_executables_depend_on(monkeypatch, change):
    before = module.environment()
    assert module.environment() == before
    monkeypatch.setattr(*change)
    assert module.environment() != before


def test_settings_of_jax_count_as_they_are_in_the_thread():
    before = module.environment()
    with jax.default_matmul_precision("highest"):
        assert module.environment() != before
    with jax.log_compiles():
        assert module.environment() == before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("cut", "it is damaged"),
        ("bit", "it is damaged"),
        ("empty", "it holds another program"),
        ("foreign", "it holds another program"),
        ("pickle", "could not find MARK|invalid load key"),
    ],
)
def test_a_file_of_no_use_is_ignored_with_one_line_and_replaced(kept, folder, caplog, damage, reason):
    (path,) = files(folder)
    content = path.read_bytes()
    other = ExecutableCache(folder, "another engine")
    other.compile(PROGRAM, PROGRAM.lower())
    foreign = next(p for p in files(folder) if p != path).read_bytes()
    bad = b"not a pickle"
    path.write_bytes(
        {
            "cut": content[:-1],
            "bit": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
            "empty": b"",
            "foreign": foreign,
            "pickle": content[: -len(content) + len(module._MAGIC) + 32] + module.hashlib.sha256(bad).digest() + bad,
        }[damage]
    )
    assert kept.load(PROGRAM) is None
    assert len(caplog.records) == 1
    assert re.search(f"{path} is of no use: .*({reason})", caplog.text)
    assert kept.load(PROGRAM) is None  # the file is gone
    assert len(caplog.records) == 1
    kept.compile(PROGRAM, PROGRAM.lower())
    assert runs(kept.load(PROGRAM))


def test_a_file_of_another_user_is_left_alone(kept, folder, monkeypatch, caplog):
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert kept.load(PROGRAM) is None
    assert "belongs to another user" in caplog.text
    assert len(files(folder)) == 1


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "a file").write_text("")
    cache = ExecutableCache(tmp_path / "a file" / "folder", "an engine")
    for _ in range(2):
        cache.compile(PROGRAM, PROGRAM.lower())
    assert len(caplog.records) == 1
    assert "not kept in" in caplog.text
    caplog.clear()
    assert cache.load(PROGRAM) is None  # no folder: nothing is found, which is nothing to tell
    cache.trim()


def test_a_store_that_breaks_off_leaves_no_file(kept, folder, monkeypatch, caplog):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = files(folder)
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        kept.compile(PROGRAM, PROGRAM.lower())
    assert files(folder) == before


def test_beyond_the_allowed_size_what_was_not_used_for_longest_goes(kept, folder):
    size = files(folder)[0].stat().st_size
    cache = ExecutableCache(folder, "an engine", max_bytes=int(2.5 * size))
    programs = [Program(name, double, PROGRAM.args, donate=(0,)) for name in ("double", "b_____", "c_____")]
    for age, program in enumerate(programs):
        cache.compile(program, program.lower())
        os.utime(cache._path(cache._digest(program)), (1000 + age, 1000 + age))
    assert cache.load(programs[0]) is not None  # now it is the newest
    cache.trim()
    assert [cache.load(program) is not None for program in programs] == [True, False, True]


OPTIONS = {
    "dtype": "float32", "max_model_len": 128, "block_size": 8, "num_kv_blocks": 24,
    "max_num_seqs": 1, "max_num_batched_tokens": 8,
}  # fmt: skip
PENALISED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, repetition_penalty=1.3, prompt_logprobs=1)


def served(llm):
    outputs = llm.generate([PROMPT, PROMPT], [GREEDY, PENALISED], use_tqdm=False)
    assert tokens_of(outputs[0]) == TOKENS
    return tokens_of(outputs[1]), outputs[1].prompt_logprobs


def test_the_second_engine_traces_nothing_and_gives_the_same_tokens(monkeypatch, folder, caplog, jax_cache):
    monkeypatch.setattr(build, "executables_folder", lambda: folder)
    first = LLM(tiny.PATH, **OPTIONS)
    assert first.engine.runner.num_traces > 0
    expected = served(first)
    second = LLM(tiny.PATH, **OPTIONS)
    assert second.engine.runner.num_traces == 0
    addresses = second.engine.runner.addresses()
    assert served(second) == expected
    assert second.engine.runner.addresses() == addresses
    assert not caplog.records

    count = len(files(folder))
    for path in files(folder)[::2]:
        path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        third = LLM(tiny.PATH, **OPTIONS)
    assert len(caplog.records) == (count + 1) // 2
    assert third.engine.runner.num_traces > 0
    assert served(third) == expected


def test_on_a_cpu_what_comes_from_jax_s_cache_stays_there(folder, jax_cache):
    cache = ExecutableCache(folder, "an engine")
    cache.compile(PROGRAM, PROGRAM.lower())
    (path,) = files(folder)
    path.unlink()
    cache.compile(PROGRAM, PROGRAM.lower())
    assert files(folder) == []
    other = Program("double", double, PROGRAM.args)  # compiled by the same thread
    cache.compile(other, other.lower())
    assert len(files(folder)) == 1


def test_every_program_of_an_engine_has_a_key_of_its_own(tiny_llm):
    functions = tiny_llm.engine.runner._functions
    runner = tiny_llm.engine.runner
    buckets = [Bucket(4, 4, True), Bucket(4, 4, False), Bucket(8, 4, False)]
    programs = step_programs(functions, runner._params, runner._cache, buckets)
    assert len(programs) == 2 * 3 + 2 + 4 + 8 + 1  # steps in two stages, prompts, rows' sampling and edits, copies
    signatures = {program.signature() for program in programs.values()}
    assert len(signatures) == len(programs)


def test_the_switch_and_the_folder_are_those_of_jax_s_cache(tmp_path):
    from jaxpaged.compilation_cache import executables_folder

    def folder_with(**settings):
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            return executables_folder()
        finally:
            for name, value in before.items():
                jax.config.update(name, value)

    where = functools.partial(folder_with, jax_compilation_cache_dir=str(tmp_path))
    assert where() == tmp_path / "executables"
    assert where(jax_enable_compilation_cache=False) is None
    assert folder_with(jax_compilation_cache_dir="gs://bucket/cache") is None
    assert folder_with(jax_compilation_cache_dir=None) is None
