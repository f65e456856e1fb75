"""scripts/test_oldest.sh: what it installs, and when; played by a fake interpreter in .venv."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-E -c"*) echo "${FAKE_VERSION:-3.12.4}" ;;
    "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "venv" >>"$CALLS" ;;
    "-m pip"*) echo "pip $*" >>"$CALLS"; echo "$PIP_SAYS"; exit "${PIP_EXIT:-0}" ;;
    "-m pytest"*) echo "pytest $0 $* path=$PYTHONPATH" >>"$CALLS"; exit "${PYTEST_EXIT:-0}" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


class Checkout:
    """One in a path with a space, with a fake .venv."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a checkout"
        self.calls = folder / "calls"
        (self.folder / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "test_oldest.sh", self.folder / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        python = self.folder / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON)
        python.chmod(0o755)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Notes the calls of this run alone in `calls`."""
        self.calls.write_text("")
        environment = {"PATH": os.environ["PATH"], "CALLS": str(self.calls), **environment}
        command = [shutil.which("dash") or "/bin/sh", str(self.folder / "scripts" / "test_oldest.sh")]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    def steps(self) -> list[str]:
        return [line.split(" ")[0] for line in self.calls.read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def oldest_jax() -> str:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (jax,) = (d for d in dependencies if d.startswith("jax>="))
    return jax.removeprefix("jax>=").split(",")[0]


def test_installs_the_oldest_jax_and_lowers_with_it(checkout: Checkout) -> None:
    done = checkout.run(PYTHONPATH="/elsewhere")
    assert (done.returncode, done.stderr) == (0, "")
    venv, pip, tests = checkout.calls.read_text().splitlines()
    assert venv == "venv"
    words = pip.split(" ")
    assert words[words.index("--python") + 1] == ".venv-oldest/bin/python"
    assert f"jax=={oldest_jax()}" in words
    assert f"jaxlib=={oldest_jax()}" in words
    assert {w.split(">=")[0] for w in words if ">=" in w} == {"jaxtyping", "ml_dtypes", "numpy", "pytest"}
    assert tests.startswith("pytest .venv-oldest/bin/python -m pytest ")
    assert tests.endswith("-k lower tests/pallas_kernels path=")


def test_a_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.run()
    assert checkout.run().returncode == 0
    assert checkout.steps() == ["pytest"]


def test_other_versions_or_another_python_are_set_up_anew(checkout: Checkout) -> None:
    checkout.run()
    pyproject = checkout.folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace(f'"jax>={oldest_jax()},', '"jax>=0.11.9,'))
    assert checkout.run().returncode == 0
    assert checkout.steps() == ["venv", "pip", "pytest"]
    assert "jaxlib==0.11.9" in checkout.calls.read_text()
    assert checkout.run(FAKE_VERSION="3.13.1").returncode == 0
    assert checkout.steps() == ["venv", "pip", "pytest"]


def test_a_failed_installation_says_why_and_is_tried_again(checkout: Checkout) -> None:
    done = checkout.run(PIP_SAYS="ERROR: No matching distribution found for jax", PIP_EXIT="1")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip failed: ERROR: No matching distribution found for jax" in line
    assert str(checkout.folder / ".setup-oldest.log") in line
    assert checkout.steps() == ["venv", "pip"]
    assert checkout.run().returncode == 0
    assert checkout.steps() == ["venv", "pip", "pytest"]


def test_a_failed_test_shows_in_the_exit_code(checkout: Checkout) -> None:
    assert checkout.run(PYTEST_EXIT="1").returncode == 1
    assert checkout.run().returncode == 0
    assert checkout.steps() == ["pytest"]


def test_without_a_venv_it_says_what_to_run(checkout: Checkout) -> None:
    shutil.rmtree(checkout.folder / ".venv")
    done = checkout.run()
    assert done.returncode == 1
    assert "there is no .venv that works: run `make setup` first" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("oldest", "tests", "args", "expected"),
    [("0", "0", "", 0), ("1", "0", "", 2), ("0", "1", "", 2), ("1", "0", "tests", 0)],
)
def test_make_test_runs_it_before_the_tests_and_fails_with_either(checkout: Checkout, oldest, tests, args, expected):
    """`make` itself ends with 2 for a recipe that fails."""
    shutil.copy(ROOT / "Makefile", checkout.folder)
    scripts = {"setup.sh": "exit 0", "test_oldest.sh": f"echo oldest; exit {oldest}"}
    for name, line in scripts.items():
        (checkout.folder / "scripts" / name).write_text(line + "\n")
    python = checkout.folder / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho tests; exit {tests}\n")
    command = ["make", "-s", "test", f"ARGS={args}"]
    environment = {"PATH": os.environ["PATH"]}  # not MAKEFLAGS, where make runs this very test
    done = subprocess.run(command, env=environment, cwd=checkout.folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == expected
    assert done.stdout.splitlines() == (["tests"] if args else ["oldest", "tests"])
