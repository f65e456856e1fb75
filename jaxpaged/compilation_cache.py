"""Where compiled programs are kept from start to start, by default: a second start compiles nothing that a first one
did.

There are two caches in one folder: JAX's own, by traced program, and that of `jaxpaged.compiling`, which saves the
tracing too. Both are on unless the process has turned JAX's off (`JAX_ENABLE_COMPILATION_CACHE=0`), and both go where
it has configured JAX's to be (`JAX_COMPILATION_CACHE_DIR`), if it has.
"""

from __future__ import annotations

from pathlib import Path

import jax

from jaxpaged.checkpoints.demo import default_cache_dir


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless the process has configured a cache of its own."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def executables_folder() -> Path | None:
    """Where executables that are ready to run are kept; None: nowhere, nor if JAX's cache is in no local folder."""
    folder = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache or folder is None or "://" in folder:
        return None
    return Path(folder).absolute() / "executables"
