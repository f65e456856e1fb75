"""Many programs compiled at once, in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxpaged.compiling.cache import ExecutableCache
from jaxpaged.compiling.program import Program
from jaxpaged.compiling.worker import Setup, Worker
from jaxpaged.startup import StartupTimes
from pallas_kernels.devices import compute_capability, default_device, num_multiprocessors
from pallas_kernels.paged_attention.debug import debug_checks_enabled

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_MAX_WORKERS = 8
_WORKER_PROGRAMS = 4  # a process takes seconds to start: it pays for so many
# Of JAX's settings, those that change how programs are traced and lowered.
_TRACE_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_softmax_custom_jvp",
    "jax_debug_nans",
    "jax_debug_infs",
)


class Compilation:
    """Loads programs from a cache, or lowers and compiles them; begins at once, in threads and processes.

    `result` gives the executables. Leave the context in any case, so that nothing goes on behind one's back.
    """

    def __init__(
        self,
        programs: Mapping[Any, Program],
        cache: ExecutableCache | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Begins.

        Args:
          programs: by any key; those that take longest first.
          cache: where executables are kept from start to start.
          num_workers: processes that trace and lower; 0: that is done in `result`, by its caller. None: as many as
            pay, for a GPU, and 0 for other devices.
        """
        self._programs = dict(programs)
        self._cache = cache if cache is not None and not debug_checks_enabled() else None  # callbacks don't serialise
        self._setup = _setup()
        self._default_device = jax.config.jax_default_device
        self._closed = threading.Event()
        self._workers: list[Worker] = []
        self._own = threading.local()  # a thread's worker
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if num_workers is None:
            wanted = min(_MAX_WORKERS, cores // 2, len(self._programs) // _WORKER_PROGRAMS)
            num_workers = wanted if wanted > 1 and _workers_agree(self._setup) else 0
        self._compiling = ThreadPoolExecutor(min(_MAX_THREADS, cores))
        self._lowering = ThreadPoolExecutor(num_workers) if num_workers else None
        self._loads = {key: self._compiling.submit(self._load, p) for key, p in self._programs.items()}
        self._lowered: dict[Hashable, Future[Future[Any] | None]] = {}
        if self._lowering is not None:
            self._lowered = {key: self._lowering.submit(self._lower, key) for key in self._programs}

    def result(self, startup: StartupTimes) -> dict[Any, jax.stages.Compiled]:
        """Waits for all; the executables, by key."""
        with startup.phase("loading"):
            found = {key: load.result() for key, load in self._loads.items()}
        compiling = {}
        with startup.phase("tracing"):
            for key, program in self._programs.items():
                if found[key] is not None:
                    continue
                future = self._lowered[key].result() if key in self._lowered else None
                compiling[key] = future or self._compiling.submit(self._compile, program, program.lower())
            self._close_workers()
        with startup.phase("compiling"):
            compiled = {key: future.result() for key, future in compiling.items()}
        if self._cache is not None and compiled:
            self._cache.trim()
        return compiled | {key: executable for key, executable in found.items() if executable is not None}

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends all that still goes on."""
        self._close_workers()
        for pool in (self._lowering, self._compiling):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _load(self, program: Program) -> jax.stages.Compiled | None:
        if self._cache is None:
            return None
        with jax.default_device(self._default_device):
            return self._cache.load(program)

    def _compile(self, program: Program, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        with jax.default_device(self._default_device):
            return program.compile(lowered) if self._cache is None else self._cache.compile(program, lowered)

    def _lower(self, key: Hashable) -> Future[jax.stages.Compiled] | None:
        """Lowers a program that was not loaded, in this thread's worker, and sends it on; None if that fails."""
        if self._loads[key].result() is not None:
            return None
        program = self._programs[key]
        try:
            with jax.default_device(self._default_device):
                lowered = self._worker().lower(program)
            return self._compiling.submit(self._compile, program, lowered)
        except Exception as error:  # if it is the program's, it comes again where it is lowered next
            if not self._closed.is_set():
                logger.info("%s is lowered in this process, since a worker failed: %s", program.name, error)
            return None

    def _worker(self) -> Worker:
        if not hasattr(self._own, "worker"):
            self._own.worker = Worker(self._setup)
            self._workers.append(self._own.worker)
            if self._closed.is_set():  # since before it was on the list
                self._own.worker.close()
        return self._own.worker

    def _close_workers(self) -> None:
        self._closed.set()
        for worker in self._workers:
            worker.close()


def _setup() -> Setup:
    """What programs of this thread are lowered for."""
    names = [name for name in _TRACE_SETTINGS if hasattr(jax.config, name)]
    device = default_device()
    if compute_capability() is None:
        return Setup(device.platform, None, {name: getattr(jax.config, name) for name in names})
    abstract = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, platform="gpu", num_cores=num_multiprocessors()
    )
    return Setup("cuda", abstract, {name: getattr(jax.config, name) for name in names})


def _workers_agree(setup: Setup) -> bool:
    """Whether a worker, which knows the GPU by its name only, chooses the kernels that this process would choose."""
    if setup.device is None or debug_checks_enabled():
        return False
    from pallas_kernels.paged_attention.mosaic_common import device_refusal  # only a GPU needs it

    here = compute_capability(), device_refusal() is None
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=setup.device)):
        return (compute_capability(), device_refusal() is None) == here
