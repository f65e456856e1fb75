"""What every public op does with its arguments before it looks at them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


def public_op[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes a public op of a function of arrays and options: a decorator.

    NumPy arrays, lists and tuples become JAX arrays. Asking for a gradient raises a ValueError that names the op. And
    the op is traced without 64-bit types, whatever `jax_enable_x64` says: all that it computes is narrower, and
    kernels mix Python numbers with int32 and float32 in places where JAX promotes nothing. (A 64-bit JAX array stays
    what it is, for the op to refuse.)
    """
    return _public(function, has_gradients=False)


def differentiable_op[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The same of an op that has gradients."""
    return _public(function, has_gradients=True)


def _public[**P, R](function: Callable[P, R], *, has_gradients: bool) -> Callable[P, R]:
    name = function.__name__
    run: Callable[..., R] = function

    def enter(x: Any) -> Any:
        if isinstance(x, np.ndarray | list | tuple):
            with jax.enable_x64(False):
                return jnp.asarray(x)
        if not has_gradients and isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating):
            return _no_gradient(name, x)
        return x

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        entered: Any = [enter(x) for x in args]
        options: Any = {key: enter(x) for key, x in kwargs.items()}
        with jax.enable_x64(False):
            return run(*entered, **options)

    return call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _no_gradient(op: str, x: jax.Array) -> jax.Array:
    return x


def _refuse_gradient(op: str, *_: object) -> NoReturn:
    raise ValueError(
        f"{op} is not differentiable: it works on a KV cache, which a training step does not have; "
        "use dense attention where you need gradients"
    )


_no_gradient.defvjp(_refuse_gradient, _refuse_gradient)
