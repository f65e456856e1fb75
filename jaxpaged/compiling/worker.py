"""A process that traces and lowers programs, for a device that it need not have.

Tracing and lowering is Python and takes one core: seconds for a step with Mosaic GPU kernels. Processes do it side by
side; they bring back what `jax.export` makes of a program, which takes its caller hundredths of a second to lower
again. `python -m jaxpaged.compiling.worker` serves: a `Setup` first, then programs, from standard input, pickled; the
answers go to standard output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from typing import Any, NamedTuple

import jax
from jax import export

from jaxpaged.compiling.program import Program

# Not among the calls that `jax.export` lets pass: they promise no compatibility between versions, which nobody needs.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call")


class WorkerError(RuntimeError):
    """A program that a worker could not lower, or a worker that is gone."""


class Setup(NamedTuple):
    """What a worker lowers for."""

    platform: str
    """As JAX calls it when lowering: "cpu" or "cuda"."""
    device: jax.sharding.AbstractDevice | None
    settings: dict[str, Any]
    """JAX's, by name."""


class Worker:
    """A process of one's own. Not for several threads at a time."""

    def __init__(self, setup: Setup) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        # On the CPU, so that it takes no GPU memory; and finding its modules where this process found them.
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxpaged.compiling.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        )
        self._send(setup)

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The program, lowered.

        Raises:
          WorkerError: it was not; lowered in this process it may be, or raise what is wrong with it.
        """
        self._send(program)
        assert self._process.stdout is not None
        try:
            exported, error = pickle.load(self._process.stdout)
        except Exception as gone:
            raise WorkerError(f"the process ended: {self._last_words()}") from gone
        if error:
            raise WorkerError(error)

        def call(*args: Any) -> Any:
            return exported.call(*args)

        call.__name__ = program.name
        return jax.jit(call, donate_argnums=program.donate, keep_unused=True).lower(*program.args)

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not yet sent to it
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
        self._process.wait()
        self._errors.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except (OSError, ValueError) as gone:  # a pipe broken there, or closed here
            raise WorkerError(f"the process ended: {self._last_words()}") from gone

    def _last_words(self) -> str:
        if self._errors.closed:
            return "it was told to"
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "without a word"


def lower(setup: Setup, program: Program) -> export.Exported:
    """What a worker does with a program."""
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=setup.device)
    with jax.sharding.use_abstract_mesh(mesh) if setup.device else contextlib.nullcontext():
        exported = export.export(program.jitted(), platforms=[setup.platform], disabled_checks=checks)(*program.args)
    return dataclasses.replace(exported, _get_vjp=None)  # which does not pickle, and nobody needs


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints must not get in between
    receive = functools.partial(pickle.load, sys.stdin.buffer)
    setup: Setup = receive()
    for name, value in setup.settings.items():
        jax.config.update(name, value)
    with contextlib.suppress(EOFError):
        while True:
            program = receive()
            try:
                answer = lower(setup, program), None
            except Exception:
                answer = None, traceback.format_exc(limit=-3)
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    main()
