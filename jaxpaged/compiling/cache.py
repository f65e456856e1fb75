"""Compiled programs on disk: a start that finds all of them traces nothing and compiles nothing.

JAX's own persistent cache saves compiling but not tracing, since its key is the traced program. Here the key says what
the program comes from: the sources of both packages, the versions, device and settings, the engine and the shapes.

Files are pickles. Whoever can write into the folder can run code in this process; so it is the user's own, made
readable for no one else, and files of other owners are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental import serialize_executable

from jaxpaged.compiling.program import Program
from pallas_kernels.devices import default_device

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 30
"""Of all files; beyond it the ones that were not used for longest go."""
_SUFFIX = ".executable"
_MAGIC = b"jaxpaged executable 1\n"
_DIGEST_BYTES = 32
# Settings of JAX that change no program.
_IRRELEVANT = ("cache", "log", "traceback", "dump", "explain", "source_", "profiling", "leak", "timeout", "jax2tf")
_ENVIRONMENT = ("XLA_", "TRITON_", "NVIDIA_TF32", "CUBLAS", "CUDNN")


class _ThisThread(threading.local):
    was_hit = False  # whether what this thread compiles came from JAX's cache


_this_thread = _ThisThread()


def _note_event(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _this_thread.was_hit = True


jax.monitoring.register_event_listener(_note_event)


class ExecutableCache:
    """The executables of one engine in a folder that engines, and processes, share.

    Never raises: what can't be read is compiled again, and what can't be written is not kept.
    """

    def __init__(self, folder: Path, engine: str, max_bytes: int = MAX_BYTES) -> None:
        """`engine` says all that programs of the same signature may differ by: model, pool, options."""
        self._folder = folder
        self._context = environment() + engine
        self._max_bytes = max_bytes
        self._writes = True

    def load(self, program: Program) -> jax.stages.Compiled | None:
        """The program, ready to run on the default device; or None."""
        digest = self._digest(program)
        path = self._path(digest)
        try:
            content = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("ignoring a compiled program that can't be read: %s", error)
            return None
        head = _MAGIC + digest
        body = content[len(head) + _DIGEST_BYTES :]
        try:
            if not content.startswith(head):
                raise ValueError("it holds another program")
            if content[len(head) : len(head) + _DIGEST_BYTES] != hashlib.sha256(body).digest():
                raise ValueError("it is damaged")
            device = default_device()
            return serialize_executable.deserialize_and_load(
                *pickle.loads(body), backend=device.client, execution_devices=[device]
            )
        except Exception as error:
            logger.warning("compiling again, since %s is of no use: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def compile(self, program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles a program and keeps it for the next start."""
        _this_thread.was_hit = False
        compiled = program.compile(lowered)
        # What XLA's CPU backend serialises anew after JAX's cache has loaded it fails when it is run: functions are
        # "not found". So there it stays with JAX's cache.
        if not (_this_thread.was_hit and default_device().platform == "cpu"):
            self._store(program, compiled)
        return compiled

    def _store(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """By a rename, so that nobody reads half of it."""
        if not self._writes:
            return
        try:
            body = pickle.dumps(serialize_executable.serialize(compiled))
            digest = self._digest(program)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False) as file:
                try:
                    file.writelines((_MAGIC, digest, hashlib.sha256(body).digest(), body))
                    file.close()
                    os.replace(file.name, self._path(digest))
                except BaseException:
                    os.unlink(file.name)
                    raise
        except Exception as error:  # a full disk, or an executable of a kind that does not serialise
            self._writes = False
            logger.warning("compiled programs are not kept in %s: %s", self._folder, error)

    def trim(self) -> None:
        """Deletes the files that were not used for longest, as far as they are beyond the size that is allowed."""
        with contextlib.suppress(OSError):
            files = [(path.stat(), path) for path in self._folder.glob("*" + _SUFFIX)]
            excess = sum(stat.st_size for stat, _ in files) - self._max_bytes
            for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
                if excess <= 0:
                    break
                path.unlink(missing_ok=True)
                excess -= stat.st_size

    def _digest(self, program: Program) -> bytes:
        return hashlib.sha256((self._context + program.signature()).encode()).digest()

    def _path(self, digest: bytes) -> Path:
        return self._folder / (digest.hex() + _SUFFIX)


def _read(path: Path) -> bytes:
    """The content; notes that it was used."""
    with path.open("rb") as file:
        if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        content = file.read()
    with contextlib.suppress(OSError):
        os.utime(path)
    return content


def environment() -> str:
    """All outside an engine that its executables depend on, as text."""
    device = default_device()
    lines = [
        _sources_digest(),
        sys.version,
        *(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")),
        f"{device.platform} {device.device_kind} {device.id} of {jax.device_count()}",
        device.client.platform_version,
        _processor() if device.platform == "cpu" else _driver(),
        *(f"{name}={value!r}" for name, value in sorted(settings().items())),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)),
    ]
    return "\n".join(lines) + "\n"


def settings() -> dict[str, object]:
    """JAX's settings that may change a program, as they are in this thread."""
    names = (name for name in jax.config.values if not any(word in name for word in _IRRELEVANT))
    return {name: getattr(jax.config, name) for name in names if hasattr(jax.config, name)}


@functools.cache
def _sources_digest() -> str:
    """Of all sources of both packages, names included."""
    import pallas_kernels

    digest = hashlib.sha256()
    packages = [Path(__file__).parents[1], *map(Path, pallas_kernels.__path__)]
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(f"{path.relative_to(package.parent)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """XLA compiles for the features of the CPU that it finds, and home folders are shared among machines."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), platform.machine())
    return f"{platform.machine()} {platform.processor()}"


def _driver() -> str:
    """The NVIDIA driver's version, where it tells."""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        return file.readline().strip()
    return "unknown driver"
