"""Every kernel under compute-sanitizer's memcheck, one small call a program."""

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from memcheck_cases import CASES

SANITIZER = shutil.which("compute-sanitizer") or next(iter(glob.glob("/usr/local/cuda*/bin/compute-sanitizer")), None)
ROOT = Path(__file__).parents[2]
FOUND = 9  # exit code of the sanitizer where it found an error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, which comes with CUDA"),
]


def memcheck(case: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        # Each array by itself, or reads beyond one end in the next unnoticed.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        # No CUDA graphs; no autotuning, which runs kernels that are not ours.
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    }
    program = [sys.executable, str(Path(__file__).with_name("memcheck_cases.py")), case]
    command = [str(SANITIZER), "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "4", *program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("case", [case for case in CASES if case != "planted"])
def test_nothing_is_read_or_written_out_of_bounds(case):
    done = memcheck(case)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_the_sanitizer_sees_what_pallas_kernels_read():
    done = memcheck("planted")
    assert done.returncode == FOUND, (done.stdout + done.stderr)[-3000:]
    assert "out of bounds" in done.stdout
