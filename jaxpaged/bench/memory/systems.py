"""Ways to manage KV memory, each as a scheduler over a pool of the same size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpaged.bench.memory.contiguous import ContiguousBlocks, PaddedBlocks
from jaxpaged.bench.workload import Lengths
from jaxpaged.config import SchedulerConfig
from jaxpaged.reservation import KVReservation
from jaxpaged.scheduler import Scheduler

MAX_NUM_SEQS = 256
BUDGET = 2048


class Memory(NamedTuple):
    """What all systems have alike."""

    num_slots: int = 15_700
    """KV slots; by default those of OPT-13B on a GPU with 40 GB (PagedAttention paper, table 1)."""
    max_model_len: int = 2048
    """Tokens of the longest sequence; by default OPT's."""
    block_size: int = 16


def paged(memory: Memory, trace: Sequence[Lengths]) -> Scheduler:
    """This engine with its defaults."""
    return _scheduler(memory, block_size=memory.block_size)


def orca(memory: Memory, trace: Sequence[Lengths], policy: KVReservation) -> Scheduler:
    """Each request's space is reserved at its admission, in chunks of a buddy allocator."""
    scheduler = reserving(memory, trace, policy)
    scheduler.blocks = ContiguousBlocks(memory.num_slots)
    return scheduler


def reserving(memory: Memory, trace: Sequence[Lengths], policy: KVReservation) -> Scheduler:
    """The same if it could be had without losses between the requests: this engine with `--kv-reservation`."""
    return _scheduler(memory, growth_reserve=0, kv_reservation=policy)


def static(memory: Memory, trace: Sequence[Lengths]) -> Scheduler:
    """Padded static batches in the trace's order, as large as the pool allows for all of them."""
    size = static_batch_size(memory.num_slots, trace)
    scheduler = _scheduler(
        memory,
        growth_reserve=0,
        static_batches=True,
        max_num_seqs=size,
        max_num_batched_tokens=max(size, memory.num_slots),  # all prompts in one step
    )
    scheduler.blocks = PaddedBlocks(memory.num_slots)
    return scheduler


SYSTEMS: Mapping[str, Callable[[Memory, Sequence[Lengths]], Scheduler]] = {
    "static batches (HF)": static,
    "Orca (Max)": functools.partial(orca, policy="max"),
    "Orca (Pow2)": functools.partial(orca, policy="pow2"),
    "Orca (Oracle)": functools.partial(orca, policy="oracle"),
    "Pow2 without fragmentation": functools.partial(reserving, policy="pow2"),
    "Oracle without fragmentation": functools.partial(reserving, policy="oracle"),
    "paged": paged,
}
"""By the names that the report shows. Max without fragmentation has as many requests as with it."""


def static_batch_size(num_slots: int, trace: Sequence[Lengths]) -> int:
    """The most requests a batch with which no batch of the trace needs more slots than there are.

    Raises:
      ValueError: a single request needs more.
    """
    size = 0
    while size < min(MAX_NUM_SEQS, len(trace)) and all(
        rectangle(trace[start : start + size + 1]) <= num_slots for start in range(0, len(trace), size + 1)
    ):
        size += 1
    if not size:
        longest = max(rectangle([request]) for request in trace)
        raise ValueError(f"num_slots={num_slots} is less than the {longest} of the longest request; raise it")
    return size


def rectangle(batch: Sequence[Lengths]) -> int:
    """Slots of a padded batch at its end: a row each for the longest prompt and the longest output; the last token
    that is sampled needs none."""
    return len(batch) * (max(r.prompt for r in batch) + max(r.output for r in batch) - 1)


def _scheduler(memory: Memory, *, block_size: int = 1, **options: Any) -> Scheduler:
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": BUDGET}
    config = SchedulerConfig(
        num_blocks=memory.num_slots // block_size,
        block_size=block_size,
        max_model_len=memory.max_model_len,
        enable_prefix_caching=False,  # no two requests have anything in common
        **{**limits, **options},
    )
    return Scheduler(config)
