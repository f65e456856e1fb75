"""Proof that a jitted step writes into the pools that it is given, and not into copies of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax


def check_in_place(step: Callable[..., Any], pools: Sequence[jax.Array], *arguments: Any, calls: int = 3) -> list[Any]:
    """Runs `step(pools, *arguments) -> (pools, rest)` a few times under donation; gives the last pools.

    Fails where a pool's buffer moves, or where the step needs temporary memory in which a copy of one would fit.
    """
    jitted = jax.jit(step, donate_argnums=0)
    pools = list(pools)
    memory = jitted.lower(pools, *arguments).compile().memory_analysis()
    smallest = min(p.nbytes for p in pools)
    assert memory.temp_size_in_bytes < smallest, f"{memory.temp_size_in_bytes} bytes beside pools of {smallest}"
    addresses = [p.unsafe_buffer_pointer() for p in pools]
    assert len(set(addresses)) == len(addresses)
    for _ in range(calls):
        given = pools
        pools, _ = jitted(given, *arguments)
        assert all(p.is_deleted() for p in given)
        assert [p.unsafe_buffer_pointer() for p in pools] == addresses
    return list(pools)
