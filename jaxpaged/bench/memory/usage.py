"""A trace served by the real scheduler without a model: what the KV slots held, step by step."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxpaged.batch import sampling_words
from jaxpaged.bench.workload import Lengths
from jaxpaged.request import Request, Status
from jaxpaged.request import Sequence as Running
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler

WARM_SHARE = 0.1


class Moment(NamedTuple):
    """One step. All but the counts of requests are KV slots."""

    running: int
    waiting: int
    finished: int
    allocated: int
    """That nobody else can have."""
    held: int
    """Hold a token's KV."""
    coming: int
    """Allocated, and will hold a token of their sequence before it ends. The rest of what is allocated never will."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What a trace did to a pool."""

    num_slots: int
    num_preemptions: int
    moments: list[Moment]

    @property
    def window(self) -> list[Moment]:
        """The steps that the averages are of: requests wait, and a tenth have been answered. All steps, if there are
        no such ones: the queue of a short trace may be empty before."""
        warm = WARM_SHARE * (self.moments[-1].running + self.moments[-1].finished)
        return [m for m in self.moments if m.waiting and m.finished >= warm] or self.moments

    @property
    def held_of_pool(self) -> float:
        """Share of all slots of the pool that hold a token, averaged over the window, as all shares here."""
        return self._share_of_pool(lambda m: m.held)

    @property
    def coming_of_pool(self) -> float:
        return self._share_of_pool(lambda m: m.coming)

    @property
    def wasted_of_pool(self) -> float:
        """Allocated, and never to hold a token."""
        return self._share_of_pool(lambda m: m.allocated - m.held - m.coming)

    @property
    def free_of_pool(self) -> float:
        """Free, or lost between what is allocated."""
        return self._share_of_pool(lambda m: self.num_slots - m.allocated)

    @property
    def held_of_allocated(self) -> float:
        """Share of the allocated slots that hold a token."""
        return statistics.fmean(m.held / m.allocated for m in self.window)

    @property
    def mean_running(self) -> float:
        return statistics.fmean(m.running for m in self.window)

    def as_json(self) -> dict[str, Any]:
        """The averages, and about 100 moments of the whole run, a list for each field."""
        steps = range(0, len(self.moments), -(-len(self.moments) // 100))
        averages = (
            "held_of_pool",
            "coming_of_pool",
            "wasted_of_pool",
            "free_of_pool",
            "held_of_allocated",
            "mean_running",
        )
        return {
            **{name: getattr(self, name) for name in averages},
            "num_slots": self.num_slots,
            "num_preemptions": self.num_preemptions,
            "num_steps": len(self.moments),
            "num_steps_averaged": len(self.window),
            "moments": {"step": list(steps)}
            | {field: [getattr(self.moments[i], field) for i in steps] for field in Moment._fields},
        }

    def _share_of_pool(self, slots: Callable[[Moment], int]) -> float:
        return statistics.fmean(map(slots, self.window)) / self.num_slots


def serve(scheduler: Scheduler, trace: Sequence[Lengths]) -> Usage:
    """Serves a trace, all of it there at once, one step ahead as the engine does; every token is 0.

    Raises:
      ValueError: a request could never be served.
    """
    for arrival, (prompt, output) in enumerate(trace):
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        words = sampling_words(params, seed=0, vocab_size=1)
        scheduler.add(Running(Request(str(arrival), [0] * prompt, params, arrival, words, cache_salt=str(arrival))))
    block_size = scheduler.config.block_size
    moments: list[Moment] = []
    started: dict[Running, None] = {}  # and neither finished nor preempted
    num_finished, previous = 0, None
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan or previous, "nothing runs, and the first one that waits does not fit"
        if plan is not None:
            started.update((row.sequence, None) for row in plan.rows)
            for sequence in [s for s in started if s.status is not Status.RUNNING]:
                del started[sequence]
            held = sum(s.num_computed for s in started)
            coming = -held
            for s in started:
                end = s.num_prompt_tokens + s.max_tokens - 1  # the last token that is sampled needs no slot
                coming += min(len(s.block_table) * block_size, end)
            allocated = scheduler.blocks.num_used * block_size
            moments.append(Moment(len(started), scheduler.num_waiting, num_finished, allocated, held, coming))
        for row in previous.rows if previous else ():
            if row.samples:
                sequence = row.sequence
                scheduler.append(sequence, 0)
                if sequence.num_output_tokens == sequence.max_tokens and not sequence.num_in_flight:
                    scheduler.finish(sequence)
                    num_finished += 1
        previous = plan
    pool = scheduler.config.num_blocks * block_size
    return Usage(pool, scheduler.num_preemptions, moments)
