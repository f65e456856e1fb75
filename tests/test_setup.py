"""scripts/setup.sh on machines of every kind, played by fake interpreters: what it picks, says and leaves behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = [
    "awk", "cat", "cksum", "cp", "dirname", "env", "grep", "kill", "mkdir",
    "mv", "rm", "sed", "sh", "sleep", "sort", "tail", "tr",
]  # fmt: skip

FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-E -c") echo "{version} {age} {venv}"; echo "{self}" ;;
    "-m venv") mkdir -p "$3/bin"; cp "{self}" "$3/bin/python" ;;
    "-m pip")
        [ "$3" != --version ] || exit 0
        for last; do :; done
        echo "$last path=$PYTHONPATH venv=$VIRTUAL_ENV user=$PIP_USER" >>"$CALLS"
        [ -z "$INTERRUPT" ] || kill -9 "$PPID"
        echo "Collecting jax"; printf '%s\\n' "$PIP_SAYS"; exit "${{PIP_EXIT:-0}}" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""

NO_NETWORK = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(Failed to establish a new connection)'
ERROR: Could not find a version that satisfies the requirement jax (from versions: none)
ERROR: No matching distribution found for jax"""


class Machine:
    """A checkout in a path with a space, and a PATH that holds the tools, the fakes and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.checkout = folder / "a checkout"
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.calls = folder / "calls"
        for made in (self.checkout / "scripts", self.bin, self.home):
            made.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup.sh", self.checkout / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this test needs {tool}"
            (self.bin / tool).symlink_to(found)

    @property
    def venv(self) -> Path:
        return self.checkout / ".venv"

    @property
    def stamp(self) -> Path:
        return self.venv / "setup-stamp"

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, where: str | Path, version: str, *, venv: bool = True) -> Path:
        """A fake interpreter: a name on PATH, or a whole path."""
        path = self.bin / where
        age = "new" if tuple(map(int, version.split("."))) >= (3, 12) else "old"
        answers = {"version": version, "age": age, "venv": "yes" if venv else "no", "self": path}
        return self.script(path, FAKE_PYTHON.format(**answers))

    def nvidia(self, driver: str, capability: str = "9.0") -> None:
        case = f'case "$1" in *driver_version*) echo "{driver}" ;; *compute_cap*) echo "{capability}" ;; esac\n'
        self.script(self.bin / "nvidia-smi", "#!/bin/sh\n" + case)

    def setup(self, *extras: str, **environment: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "HOME": str(self.home), "CALLS": str(self.calls), **environment}
        shell = shutil.which("dash") or "/bin/sh"
        command = [shell, str(self.checkout / "scripts" / "setup.sh"), *extras]
        return subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=60)

    def installs(self) -> list[str]:
        """What pip was asked to install, call by call."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.split(" ")[0] for line in lines]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def the_error(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a failed run puts on stderr."""
    assert result.returncode == 1, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("setup: ")
    return lines[0]


def assert_ready(result: subprocess.CompletedProcess[str]) -> None:
    assert (result.returncode, result.stderr) == (0, ""), result
    assert result.stdout.endswith("setup: ready\n")


# --- which Python


def test_installs_and_stamps(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    result = machine.setup("dev")
    assert_ready(result)
    assert len(result.stdout.splitlines()) <= 3
    assert machine.installs() == [".[dev]"]
    assert machine.stamp.exists()
    assert "Collecting jax" in (machine.checkout / ".setup.log").read_text()


@pytest.mark.parametrize(
    ("version", "serves"), [("3.11.9", False), ("3.12.0", True), ("3.13.5", True), ("3.9.18", False), ("2.7.18", False)]
)
def test_age_is_told_from_the_version(machine: Machine, version: str, serves: bool) -> None:
    machine.python("python3", version)
    assert (machine.setup().returncode == 0) is serves


def test_too_old(machine: Machine) -> None:
    old = machine.python("python3", "3.11.7")
    error = the_error(machine.setup())
    assert f"3.12 or newer is needed, found 3.11.7 ({old})" in error
    assert "pyenv install 3.12" in error
    assert "uv python install 3.12" in error
    assert not machine.venv.exists()


def test_no_python_at_all(machine: Machine) -> None:
    assert "found none" in the_error(machine.setup())


def test_a_shim_that_fails_is_passed_over_for_pyenvs_own_versions(machine: Machine) -> None:
    for name in ("python3.12", "python3", "python"):
        machine.script(machine.bin / name, "#!/bin/sh\necho 'pyenv: version 3.12 is not installed' >&2\nexit 127\n")
    machine.python(machine.home / ".pyenv/versions/3.13.0/bin/python", "3.13.0")
    result = machine.setup()
    assert_ready(result)
    assert "3.13.0" in result.stdout


def test_pyenv_elsewhere(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3", "3.11.7")
    machine.python(tmp_path / "my pyenv/versions/3.12.1/bin/python", "3.12.1")
    assert_ready(machine.setup(PYENV_ROOT=str(tmp_path / "my pyenv")))


def test_the_given_python_comes_first(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3.12", "3.12.4")
    mine = machine.python(tmp_path / "mine" / "python", "3.14.0")
    assert "Python 3.14.0" in machine.setup(PYTHON=str(mine)).stdout


def test_another_given_python_rebuilds(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3.12", "3.12.4")
    assert_ready(machine.setup())
    mine = machine.python(tmp_path / "mine" / "python", "3.14.0")
    assert "making .venv with Python 3.14.0" in machine.setup(PYTHON=str(mine)).stdout
    assert machine.setup(PYTHON=str(mine)).stdout == ""


def test_a_given_python_that_cannot_serve_is_named(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3.12", "3.12.4")
    result = machine.setup(PYTHON=str(machine.python(tmp_path / "old" / "python", "3.10.1")))
    assert f"PYTHON={tmp_path}/old/python cannot serve" in result.stdout
    assert "Python 3.12.4" in result.stdout


def test_no_venv_module(machine: Machine) -> None:
    machine.python("python3", "3.13.5", venv=False)
    error = the_error(machine.setup())
    assert "has no venv module" in error
    assert "apt install python3.13-venv" in error
    assert not machine.venv.exists()


def test_one_without_venv_is_passed_over(machine: Machine) -> None:
    machine.python("python3.12", "3.12.3", venv=False)
    machine.python("python3.13", "3.13.1")
    assert "Python 3.13.1" in machine.setup().stdout


@pytest.mark.parametrize("there_already", [True, False])
def test_uv_finds_or_fetches(machine: Machine, tmp_path: Path, there_already: bool) -> None:
    machine.python("python3", "3.11.7")
    managed = machine.python(tmp_path / "uv" / "python", "3.12.9")
    hidden = managed if there_already else managed.rename(tmp_path / "not yet")
    fetch = f'mkdir -p "{tmp_path}/uv" && mv "{hidden}" "{managed}"'
    find = f'[ -e "{managed}" ] && echo "{managed}"'
    machine.script(machine.bin / "uv", f'#!/bin/sh\ncase "$2" in find) {find} ;; install) {fetch} ;; esac\n')
    result = machine.setup()
    assert_ready(result)
    assert "Python 3.12.9" in result.stdout
    assert ("uv fetches one" in result.stdout) is not there_already


def test_uv_that_fetches_nothing(machine: Machine) -> None:
    machine.python("python3", "3.11.7")
    machine.script(machine.bin / "uv", "#!/bin/sh\necho 'error: no network' >&2\nexit 2\n")
    assert "found 3.11.7" in the_error(machine.setup())


# --- pip fails


def test_no_network_then_repair(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    error = the_error(machine.setup(PIP_SAYS=NO_NETWORK, PIP_EXIT="1"))
    assert "package index cannot be reached" in error
    assert str(machine.checkout / ".setup.log") in error
    assert not machine.stamp.exists()
    assert_ready(machine.setup())


@pytest.mark.parametrize(
    ("pip_says", "words"),
    [
        ("ERROR: first\nERROR: Cannot install jax and flax\nbye", "pip failed: ERROR: Cannot install jax and flax"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk is full"),
        (NO_NETWORK.splitlines()[1], "has no jax or cannot be reached"),
        ("Killed", "pip failed: Killed"),
    ],
)
def test_other_failures(machine: Machine, pip_says: str, words: str) -> None:
    machine.python("python3.12", "3.12.4")
    error = the_error(machine.setup(PIP_SAYS=pip_says, PIP_EXIT="1"))
    assert words in error
    assert ".setup.log" in error
    assert not machine.stamp.exists()


def test_a_failed_update_takes_the_stamp_away(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    assert_ready(machine.setup())
    the_error(machine.setup("dev", PIP_SAYS="ERROR: no", PIP_EXIT="1"))
    assert not machine.stamp.exists()
    result = machine.setup("dev")
    assert_ready(result)
    assert "making .venv" in result.stdout  # pip may have stopped halfway: from nothing


def test_an_update_without_a_network_leaves_what_is_there(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    assert_ready(machine.setup())
    (machine.venv / "kept").touch()
    the_error(machine.setup("dev", PIP_SAYS=NO_NETWORK, PIP_EXIT="1"))
    assert not machine.stamp.exists()
    assert_ready(machine.setup("dev"))
    assert (machine.venv / "kept").exists()


@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="this Python cannot make environments")
def test_the_real_interpreter_and_pip_without_a_network(machine: Machine) -> None:
    index = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    result = machine.setup(PYTHON=sys.executable, **index)
    assert "package index cannot be reached" in the_error(result)
    assert f"Python {sys.version.split()[0]}" in result.stdout
    assert not machine.stamp.exists()


# --- which CUDA


@pytest.mark.parametrize(
    ("driver", "capability", "installed"),
    [
        ("580.65.06", "9.0", ".[cuda13]"),
        ("590.1.1", "10.0", ".[cuda13]"),
        ("580.65.06", "7.5", ".[cuda13]"),
        ("580.65.06", "7.0", ".[cuda12]"),
        ("580.65.06\n580.65.06", "9.0\n6.1", ".[cuda12]"),
        ("570.124.06", "9.0", ".[cuda12]"),
        ("525.60.13", "8.0", ".[cuda12]"),
        ("525.53", "8.0", "."),
        ("470.256.02", "8.0", "."),
    ],
)
def test_cuda_extra(machine: Machine, driver: str, capability: str, installed: str) -> None:
    machine.python("python3.12", "3.12.4")
    machine.nvidia(driver, capability)
    result = machine.setup()
    assert_ready(result)
    assert machine.installs() == [installed]
    assert (f"NVIDIA driver {driver} is older than" in result.stdout) is (installed == ".")


def test_nvidia_smi_that_fails(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    machine.script(machine.bin / "nvidia-smi", '#!/bin/sh\necho "couldn\'t communicate with the driver"\nexit 9\n')
    result = machine.setup("dev")
    assert_ready(result)
    assert "no working NVIDIA driver" in result.stdout
    assert machine.installs() == [".[dev]"]


def test_a_driver_that_comes_later_is_seen(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    assert_ready(machine.setup("dev"))
    machine.nvidia("570.1.1")
    assert_ready(machine.setup())
    machine.nvidia("580.1.1")
    result = machine.setup("dev")
    assert "making .venv" in result.stdout  # the plugins of two CUDA versions do not live side by side
    assert machine.installs() == [".[dev]", ".[cuda12,dev]", ".[cuda13,dev]"]


# --- what is there already


def test_a_second_run_does_nothing(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    machine.setup("dev")
    for extras in (["dev"], []):
        again = machine.setup(*extras)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert len(machine.installs()) == 1


def test_a_changed_pyproject_or_a_new_extra_updates_in_place(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    machine.setup()
    (machine.venv / "kept").touch()
    assert_ready(machine.setup("dev"))
    with (machine.checkout / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    assert_ready(machine.setup())
    assert machine.installs() == [".", ".[dev]", ".[dev]"]
    assert (machine.venv / "kept").exists()


def test_an_interrupted_run_starts_over(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    assert machine.setup(INTERRUPT="1").returncode == -9
    assert not machine.stamp.exists()
    (machine.venv / "half").touch()
    assert_ready(machine.setup())
    assert not (machine.venv / "half").exists()
    assert machine.setup().stdout == ""


@pytest.mark.parametrize("how", ["interpreter gone", "empty", "a file"])
def test_a_broken_venv_is_rebuilt(machine: Machine, how: str) -> None:
    machine.python("python3.12", "3.12.4")
    machine.setup()
    if how == "interpreter gone":
        (machine.venv / "bin" / "python").unlink()
    else:
        shutil.rmtree(machine.venv)
        machine.venv.mkdir() if how == "empty" else machine.venv.touch()
    assert_ready(machine.setup())
    assert machine.setup().stdout == ""


def test_an_old_python_in_the_venv_is_replaced(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    machine.python(machine.venv / "bin" / "python", "3.11.7")
    assert "making .venv with Python 3.12.4" in machine.setup().stdout


def test_a_moved_checkout_is_set_up_anew(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3.12", "3.12.4")
    machine.setup()
    machine.checkout = machine.checkout.rename(tmp_path / "moved")
    assert "making .venv" in machine.setup().stdout


def test_a_working_venv_made_by_hand_is_kept(machine: Machine) -> None:
    machine.python(machine.venv / "bin" / "python", "3.13.1")
    (machine.venv / "mine").touch()
    assert_ready(machine.setup("dev"))
    assert (machine.venv / "mine").exists()
    assert machine.setup("dev").stdout == ""


def test_the_callers_python_settings_stay_out(machine: Machine) -> None:
    machine.python("python3.12", "3.12.4")
    assert_ready(machine.setup(PYTHONPATH="/elsewhere", VIRTUAL_ENV="/other", PIP_USER="1", CDPATH="/tmp"))
    assert machine.calls.read_text() == ". path= venv= user=0\n"
