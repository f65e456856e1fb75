"""JAX's persistent compilation cache, on by default: a second start compiles nothing that a first one did."""

from __future__ import annotations

import jax

from jaxpaged.checkpoints.demo import default_cache_dir


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, unless the process has configured a cache of its own."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
