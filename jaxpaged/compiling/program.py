"""A function with the shapes to compile it for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with the shapes to compile it for. Pickles if the function does, to be lowered in another process."""

    name: str
    """Its name among the programs of an engine; also in profiles."""
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Pytrees of `jax.ShapeDtypeStruct`."""
    donate: tuple[int, ...] = ()
    """Arguments that are given away."""
    options: tuple[tuple[str, bool], ...] = ()
    """XLA's options, by name, that it is compiled with."""

    def jitted(self) -> Any:
        # A new function for JAX, which else may give what was compiled for another engine of the process, and by then
        # nobody knows whether that came from a file (see `ExecutableCache.compile`).
        # Arguments that are not read are kept: they may be where the result goes.
        return jax.jit(functools.partial(self.function), donate_argnums=self.donate, keep_unused=True)

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers it for the default device."""
        return self.jitted().lower(*self.args)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compiles it, once it is lowered."""
        return lowered.compile(compiler_options=dict(self.options))

    def signature(self) -> str:
        """Name, arguments and donation, as text: the same for the same program in every process."""
        leaves, structure = jax.tree.flatten(self.args)
        return f"{self.name} {[(x.shape, str(x.dtype)) for x in leaves]} {structure} {self.donate} {self.options}"
