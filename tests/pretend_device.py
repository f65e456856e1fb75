"""A pretend device, which shows whether every row reads what its own tokens would have written.

It runs plans in the order in which they were dispatched: block copies, then all writes, then reads. A slot holds all
tokens up to its own, as real KV depends on them, so that a block that is shared wrongly, written while others read it,
copied too late, published too early or handed out while it is in use shows as other contents.
"""

from __future__ import annotations

from host import is_done, next_token
from hypothesis import strategies as st
from toy_beams import ToyModel, best_continuations

from jaxpaged.beam_group import BeamGroup
from jaxpaged.beams import BeamSearch, num_candidates
from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Sequence
from jaxpaged.scheduler import Scheduler, StepPlan


class Device:
    def __init__(self, scheduler: Scheduler, stop: int = 0) -> None:
        """Tokens that `stop` divides end a sequence; 0 is for none."""
        self.scheduler = scheduler
        self.slots: dict[int, tuple[int, ...]] = {}
        self.in_flight: StepPlan | None = None
        self.num_copies = 0
        self.searches: dict[BeamGroup, tuple[BeamSearch, ToyModel]] = {}
        """Of groups that were added to the scheduler the search and its model; the test puts them here."""
        self._stop = stop

    def step(self, *, ahead: bool) -> StepPlan | None:
        """Plans and dispatches a step, then takes in the one before, or with `ahead=False` that very one."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self._run(plan)
        read, self.in_flight = (self.in_flight, plan) if ahead else (plan, None)
        beams = {beam for group, _ in read.searches for beam in group.members} if read else set()
        for group, first in read.searches if read else ():
            assert [row.sequence for row in read.rows[first : first + len(group.members)]] == group.members
            if not group.leader.is_finished:
                self._advance(group)
        for row in read.rows if read else ():
            if row.samples and row.sequence not in beams and not row.sequence.is_finished:
                token = next_token(row.sequence, row.start + row.count)
                self.scheduler.append(row.sequence, token)
                if is_done(row.sequence) or (self._stop and token % self._stop == 0):
                    self.scheduler.finish(row.sequence)
        self.scheduler.check_integrity()
        return plan

    def run(self, *, ahead: bool = False) -> None:
        for _ in range(3000):
            if not self.scheduler.has_unfinished:
                assert self.scheduler.blocks.num_used == 0
                return
            self.step(ahead=ahead)
        raise AssertionError("no progress")

    def _advance(self, group: BeamGroup) -> None:
        search, model = self.searches[group]
        outputs = [tuple(beam.output_token_ids) for beam in group.members]
        beams = list(zip(outputs, search.logprobs, strict=True))
        survivors = search.advance(best_continuations(model.logprobs, beams, num_candidates(group.width, 1)))
        if survivors:
            self.scheduler.advance_beams(group, [(c.parent, c.token_id) for c in survivors])
        else:
            self.scheduler.finish(group.leader)

    def _run(self, plan: StepPlan) -> None:
        """All writes of a step come before any reading, as in a layer."""
        assert plan.num_tokens == sum(row.count for row in plan.rows) <= self.scheduler.config.max_num_batched_tokens
        assert len(plan.rows) <= self.scheduler.config.max_num_seqs
        self._copy(plan.copies)
        tokens = [self._tokens(row.sequence, row.start + row.count) for row in plan.rows]
        written: set[int] = set()
        for row, known in zip(plan.rows, tokens, strict=True):
            for position in range(row.start, row.start + row.count):
                slot = self._slot(row.sequence, position)
                assert slot not in written, "two tokens share a slot"
                written.add(slot)
                self.slots[slot] = known[: position + 1]
        for row, known in zip(plan.rows, tokens, strict=True):
            for position in range(row.start + row.count):
                assert self.slots.get(self._slot(row.sequence, position)) == known[: position + 1]
        running = [b for s in self.scheduler._running.values() for b in (s.beams.members if s.beams else [s])]
        used = {self._slot(s, p) for s in running for p in range(s.num_computed)}
        assert plan.num_tokens_held == len(used)

    def _copy(self, copies: tuple[tuple[int, int], ...]) -> None:
        """What may lie in a block that is source and destination, or twice a destination, is not specified."""
        sources, destinations = {s for s, _ in copies}, {d for _, d in copies}
        assert not sources & destinations
        assert len(destinations) == len(copies)
        self.num_copies += len(copies)
        size = self.scheduler.config.block_size
        for source, destination in copies:
            for offset in range(size):
                self.slots.pop(destination * size + offset, None)
                if (contents := self.slots.get(source * size + offset)) is not None:
                    self.slots[destination * size + offset] = contents

    def _tokens(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        known = sequence.token_ids[:count].tolist()
        return (*known, *(next_token(sequence, position) for position in range(len(known), count)))

    def _slot(self, sequence: Sequence, position: int) -> int:
        size = self.scheduler.config.block_size
        return sequence.block_table[position // size] * size + position % size


def make_device(num_blocks=64, block_size=16, max_num_seqs=32, budget=64, stop=0, **options) -> Device:
    options = {"max_model_len": 256, "growth_reserve": 0, **options}
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **options,
    )
    return Device(Scheduler(config), stop)


def prompts_that_begin_alike(longest: int) -> st.SearchStrategy[list[int]]:
    """One of two beginnings, cut after at most `longest` tokens, and one of a few endings."""
    return st.builds(
        lambda which, cut, ending: [1000 + which] * cut + [2000 + ending] * ending,
        st.integers(0, 1),
        st.integers(0, longest),
        st.integers(1, 6),
    )
