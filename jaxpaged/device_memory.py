"""Memory that JAX may use on the default device."""

from __future__ import annotations

import os
from typing import NamedTuple

import jax


class DeviceMemory(NamedTuple):
    """Bytes."""

    limit: int
    in_use: int

    @property
    def free(self) -> int:
        return self.limit - self.in_use


def device_memory() -> DeviceMemory:
    """As the device tells; of one that does not, such as a CPU, all of the machine's, none of it in use."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None:
        return DeviceMemory(stats["bytes_limit"], stats["bytes_in_use"])
    return DeviceMemory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0)
