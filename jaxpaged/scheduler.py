"""Continuous batching: which tokens of which sequences the next step computes.

Every step shares one token budget among the running sequences, oldest first (one token for a decode, what is
left of the budget for a prefill, which may be cut into chunks), then admits waiting ones, first come, first
served. When the pool is full, the request that arrived last gives its blocks back and later computes its tokens
anew (preemption by recomputation); so the oldest always advances, and what a preempted sequence generates does
not change.

A request for several samples begins as one sequence. The step that ends its prompt forks the others from it: each
samples its first token from the same logits, in a row without tokens. Those for which `max_num_seqs` leaves no place
wait ahead of all later requests, and begin as any sequence does, with the blocks of the prompt if they can be shared.

A request for a beam search is in the queues as one sequence, which stands for all its beams (`beam_group`): they are
admitted, preempted and ended together, and keep as many places among the running as there may be beams.

The scheduler may run one step ahead of the tokens that were read: a sequence whose newest token is still in
flight is scheduled with that token taken from the step that samples it. A sequence whose next distribution
depends on the token itself (penalties, bad words) waits until it was read.

Two options make it worse on purpose, to measure what paging and continuous batching give: `kv_reservation` takes all
blocks of a sequence at its admission, `static_batches` admits only when nothing runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Ids
from typing import NamedTuple

from jaxpaged.beam_group import BeamGroup
from jaxpaged.block_manager import BlockManager
from jaxpaged.config import SchedulerConfig, blocks_for
from jaxpaged.request import Sequence, Status
from jaxpaged.reservation import reserved_tokens


class Row(NamedTuple):
    """A sequence's part of a step: tokens `start` to `start + count`."""

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether the row ends at the sequence's newest token, so that the next one is sampled."""
    source: int
    """Row of the previous step whose sampled token is this row's last input, or -1 if the host knows all. A row without
    tokens has that of the row before it, from whose logits it samples."""


class StepPlan(NamedTuple):
    """One step, and the state of the pool when it was planned."""

    rows: list[Row]
    num_tokens: int
    num_blocks_used: int
    num_tokens_held: int
    """Tokens whose KV is in the pool after the step, each slot counted once."""
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) of the blocks to copy before the step writes; no block is both."""
    num_empty_rows: int = 0
    """Rows without tokens: of sequences that were just forked."""
    searches: Ids[tuple[BeamGroup, int]] = ()
    """Groups whose beams are all sampled by this step, in rows of their order, and the row of the first."""


class Scheduler:
    """Owns the queues and the block manager; plain Python, called between steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, caches_prefixes=config.enable_prefix_caching)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of all requests admitted so far, each counted once."""
        self.num_cached_tokens = 0
        """Those of them that were found in the pool."""
        self._running: dict[tuple[int, int], Sequence] = {}  # by `Sequence.order`, and in that order
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap by order; aborted ones are skipped on top
        self._num_waiting = 0
        self._num_held = 0  # tokens computed of all that run
        self._num_empty_rows = 0  # of the step being planned
        self._searches: list[tuple[BeamGroup, int]] = []  # those of that step, see `StepPlan.searches`
        self._num_kept = 0  # places for beams, without that of the sequence which stands for them

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, without those that are still to be forked."""
        return self._num_waiting

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._num_waiting)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, and with it those in `unforked`.

        Raises:
          ValueError: it could never be served: longer than `max_model_len`, or than the whole pool; or it stands for
            more beams than there are places.
        """
        if sequence.beams is not None:
            self._check_beams(sequence.beams)
        sequence.max_tokens = self._checked_max_tokens(sequence)
        reserved = self._taken_at_once(sequence)
        if blocks_for(reserved, self.config.block_size) > self.config.num_blocks:
            raise ValueError(
                f"kv_reservation={self.config.kv_reservation!r} takes {reserved} tokens of KV space for the request, "
                f"but the whole pool has {self.config.num_blocks} blocks of {self.config.block_size}; give it more "
                "memory, or lower max_model_len or max_tokens"
            )
        self._enqueue(sequence)
        for sample in sequence.unforked:
            sample.max_tokens = sequence.max_tokens
        if self.config.kv_reservation != "none":  # what systems without paging do: each sample has space of its own
            self._enqueue_unforked(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, running or waiting, and frees its blocks; steps in flight may still hold its rows."""
        if sequence.status is Status.RUNNING:
            self._give_up(sequence)
        elif sequence.status is Status.WAITING:
            self._num_waiting -= 1
        sequence.status = Status.FINISHED

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Takes in the token that was in flight."""
        sequence.token_ids.append(token_id)
        sequence.num_in_flight -= 1
        # The block before this token is full, and its tokens are known now. (One that was preempted has none.)
        if not (len(sequence.token_ids) - 1) % self.config.block_size and sequence.status is Status.RUNNING:
            self.blocks.publish(sequence)

    def schedule(self) -> StepPlan | None:
        """Plans the next step and allocates every slot that it writes; None if no sequence can advance now."""
        rows: list[Row] = []
        self._num_empty_rows = 0
        self._searches = []
        budget = self.config.max_num_batched_tokens
        block_size = self.config.block_size
        preempted = self.num_preemptions
        admits = not self.config.static_batches or not self._running
        for sequence in list(self._running.values()):
            if budget == 0 or sequence.status is not Status.RUNNING:
                break  # all that follow arrived later, and were preempted too
            if sequence.beams is not None:
                budget = self._schedule_beams(sequence.beams, rows, budget)
                continue
            end, computed = sequence.num_tokens, sequence.num_computed
            if sequence.num_in_flight and (
                end - sequence.num_prompt_tokens >= sequence.max_tokens or sequence.needs_host_history
            ):
                continue  # nothing can be computed before its token in flight was read
            if end - computed > budget:
                end = computed + budget
            if end > sequence.num_writable and not self._make_room(sequence, end):
                continue
            budget -= end - computed
            self._take(sequence, end, rows)
        if admits and self.num_preemptions == preempted and self._waiting:
            budget = self._admit(rows, budget)
        if not rows:
            return None
        num_tokens = self.config.max_num_batched_tokens - budget
        copies = self.blocks.take_copies()
        # What all tables lack in tokens is what the blocks in use lack, but for the blocks that forks share.
        unfilled = self.blocks.num_entries * block_size - self._num_held - self.blocks.num_overcounted
        used = self.blocks.num_used
        return StepPlan(
            rows, num_tokens, used, used * block_size - unfilled, copies, self._num_empty_rows, self._searches
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, tables and reference counts agree."""
        self.blocks.check_integrity()
        assert self._num_waiting == sum(s.status is Status.WAITING for _, s in self._waiting)
        assert list(self._running) == sorted(self._running), "running sequences are out of order"
        if self._running and not self.config.static_batches:
            newest = max(self._running)
            overtaken = [s for order, s in self._waiting if order < newest and s.status is Status.WAITING]
            assert not overtaken, "a waiting one was overtaken"
        for sequence in self._running.values():
            assert sequence.status is Status.RUNNING
            for beam in [sequence] if sequence.beams is None else sequence.beams.members:
                assert beam.num_tokens == len(beam.token_ids) + beam.num_in_flight
                needed = blocks_for(beam.num_computed, self.config.block_size)
                taken = max(needed, blocks_for(self._taken_at_once(beam), self.config.block_size))
                assert len(beam.block_table) == taken
        assert self._num_held == sum(map(_num_held, self._running.values()))
        groups = [s.beams for s in self._running.values() if s.beams is not None]
        assert self._num_kept == sum(group.width - 1 for group in groups)
        assert len(self._running) + self._num_kept <= self.config.max_num_seqs, "more run than there are places"
        if not self._running:
            assert self.blocks.num_used == 0, "blocks are in use though nothing runs"

    def _checked_max_tokens(self, sequence: Sequence) -> int:
        c, prompt = self.config, sequence.num_prompt_tokens
        width = 1 if sequence.beams is None or sequence.max_tokens == 1 else sequence.beams.width
        common = prompt // c.block_size  # full blocks of the prompt, which beams share
        pool_tokens = max(common + (c.num_blocks - common) // width, 0) * c.block_size  # of each beam
        if prompt >= c.max_model_len:
            raise ValueError(
                f"the prompt has {prompt} tokens, which leaves no room for output in max_model_len={c.max_model_len}"
            )
        # The last token that is sampled needs no slot: its KV is never computed.
        if prompt > c.num_blocks * c.block_size:
            raise ValueError(
                f"the prompt has {prompt} tokens, but the whole KV pool has {c.num_blocks} blocks of {c.block_size} "
                f"({c.num_blocks * c.block_size} tokens); raise num_kv_blocks or the memory for it"
            )
        most = pool_tokens - prompt + 1
        if not sequence.max_tokens and most > 0:
            return min(c.max_model_len - prompt, most)
        max_tokens = sequence.max_tokens or 1
        total = prompt + max_tokens
        if total > c.max_model_len:
            raise ValueError(
                f"the prompt's {prompt} tokens + max_tokens={max_tokens} are {total}, more than "
                f"max_model_len={c.max_model_len}; shorten the prompt or lower max_tokens to {c.max_model_len - prompt}"
            )
        if total - 1 > pool_tokens:
            needed = common + width * (blocks_for(total - 1, c.block_size) - common)
            beams = f" for beam_width={width}" if width > 1 else ""
            lower = f"max_tokens to {most}" if most > 0 else "beam_width"
            raise ValueError(
                f"the prompt's {prompt} tokens + max_tokens={max_tokens} need {needed} KV blocks{beams}, but "
                f"the whole pool has {c.num_blocks}; lower {lower} or raise num_kv_blocks"
            )
        return sequence.max_tokens

    def _check_beams(self, group: BeamGroup) -> None:
        c = self.config
        if group.width > c.max_num_seqs:
            raise ValueError(
                f"beam_width={group.width} is more than the max_num_seqs={c.max_num_seqs} sequences that run at once; "
                "lower it or raise max_num_seqs"
            )
        if c.kv_reservation != "none" or c.static_batches:
            raise ValueError(
                f"beam search shares blocks among its beams, which kv_reservation={c.kv_reservation!r} with "
                f"static_batches={c.static_batches} has no way to do; leave both options out"
            )

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._num_waiting += 1

    def _enqueue_unforked(self, sequence: Sequence) -> None:
        """Lets those that are left begin as any sequence does."""
        for sample in sequence.unforked:
            if sample.status is Status.UNFORKED:
                self._enqueue(sample)
        sequence.unforked = []

    def _taken_at_once(self, sequence: Sequence) -> int:
        """Tokens whose blocks the sequence takes at its admission, whenever they are computed."""
        c, prompt = self.config, sequence.num_prompt_tokens
        reserved = reserved_tokens(c.kv_reservation, prompt, sequence.max_tokens, c.max_model_len)
        # A static batch is chosen at once, also where its prompts take several steps.
        return max(reserved, prompt) if c.static_batches else reserved

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grows the block table, preempting later arrivals as needed; False if the sequence gets no row in this step.

        The samples of a request are preempted together, for they share blocks: one alone would free few. But the
        oldest request, once all others have gone, gives up its last sample, and so on until one is left. And where a
        later request's samples have rows in this step already, which can't be taken back, the sequence keeps its blocks
        and waits: in one of the next steps its request's first sample needs a block, or that of an older one.
        """
        request = sequence.request
        while not self.blocks.grow(sequence, num_tokens):
            newest = next(reversed(self._running.values()))
            if newest.request is not request:
                self._preempt_samples(newest)
            elif next(iter(self._running.values())).request is request:
                self._preempt(newest)
                if newest is sequence:
                    return False
            else:
                if self._first_sample(newest) is sequence:
                    self._preempt_samples(newest)
                return False
        return True

    def _first_sample(self, newest: Sequence) -> Sequence:
        """The first running sample of the request whose last one is `newest`, the newest of all that run."""
        first = newest
        for sequence in reversed(self._running.values()):
            if sequence.request is not newest.request:
                break
            first = sequence
        return first

    def _preempt_samples(self, newest: Sequence) -> None:
        """Preempts `newest`, the newest of all that run, and all that run for the same request."""
        request = newest.request
        while self._running and (newest := next(reversed(self._running.values()))).request is request:
            self._preempt(newest)

    def _give_up(self, sequence: Sequence) -> None:
        """Takes a sequence out of those that run, and frees its blocks and those of the beams that it stands for."""
        del self._running[sequence.order]
        self._num_held -= _num_held(sequence)
        if sequence.beams is None:
            self.blocks.free(sequence)
        else:
            sequence.beams.clear(self.blocks)
            self._num_kept -= sequence.beams.width - 1

    def _preempt(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _take(self, sequence: Sequence, end: int, rows: list[Row]) -> None:
        """Makes a row of the tokens before `end`: they count as computed, and the next as in flight if it samples."""
        start = sequence.num_computed
        samples = end == sequence.num_tokens
        source = sequence.in_flight_row if sequence.num_in_flight else -1
        sequence.num_computed = end
        self._num_held += end - start
        is_prefill = end - start > 1 or end <= sequence.num_prompt_tokens
        if is_prefill:  # a decode's block is published when its token was read
            self.blocks.publish(sequence)
        if samples:
            sequence.num_in_flight += 1
            sequence.num_tokens += 1
            sequence.in_flight_row = len(rows)
        # As Row(...), in half the time.
        rows.append(tuple.__new__(Row, (sequence, start, end - start, samples, source)))
        if is_prefill and samples and sequence.unforked:
            self._fork(sequence, end, source, rows)

    def _fork(self, parent: Sequence, end: int, source: int, rows: list[Row]) -> None:
        """Forks the other samples from a sequence whose prompt ends with the last row; those without a place wait."""
        newest = next(reversed(self._running))
        while parent.unforked and self._num_places:
            sample = parent.unforked.pop(0)
            if sample.status is not Status.UNFORKED:  # it was aborted
                continue
            self.blocks.fork(parent, sample)
            sample.num_computed = end
            self._num_held += end
            sample.status = Status.RUNNING
            sample.num_in_flight, sample.num_tokens, sample.in_flight_row = 1, parent.num_tokens, len(rows)
            self._running[sample.order] = sample
            rows.append(Row(sample, end, 0, True, source))
            self._num_empty_rows += 1
        self._enqueue_unforked(parent)
        if newest != parent.order:  # later ones run already
            self._running = dict(sorted(self._running.items()))

    def _schedule_beams(self, group: BeamGroup, rows: list[Row], budget: int) -> int:
        """Adds a group's rows, all that it needs or none; returns what is left of the budget."""
        if group.is_apart:
            self._num_held -= group.num_held
            group.join(self.blocks)
            self._num_held += group.num_held
        ends = group.next_ends(budget)
        for beam, end in ends:
            while not self.blocks.grow(beam, end):
                newest = next(reversed(self._running.values()))
                self._preempt_samples(newest)
                if newest is group.leader:
                    return budget
        first = len(rows)
        for beam, end in ends:
            budget -= end - beam.num_computed
            self._take(beam, end, rows)
        if ends and rows[first].samples:
            self._searches.append((group, first))
        return budget

    def advance_beams(self, group: BeamGroup, survivors: list[tuple[int, int]]) -> None:
        """Takes in what the beams' candidates came to: see `BeamGroup.advance`."""
        if group.leader.status is Status.RUNNING:
            self._num_held -= group.num_held
        group.advance(self.blocks, survivors)
        if group.leader.status is Status.RUNNING:
            self._num_held += group.num_held

    def _find_shared(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning of a waiting sequence: cached ones, or what another sample of its request has.

        The latter needs no cache: a request's prompt is its own.
        """
        cached = self.blocks.find_prefix(sequence)
        if sequence.request.params.n == 1 or self.config.kv_reservation != "none":
            return cached
        most = min(sequence.num_prompt_tokens, len(sequence.token_ids) - 1)
        for other in self._running.values():
            if other.request is sequence.request and other.cache_epoch == sequence.cache_epoch:
                shared = min(other.num_computed, most) // self.config.block_size
                return cached if shared <= len(cached) else other.block_table[:shared].tolist()
        return cached

    @property
    def _num_places(self) -> int:
        """For how many more sequences there is a place among those that run."""
        return self.config.max_num_seqs - len(self._running) - self._num_kept

    def _admit(self, rows: list[Row], budget: int) -> int:
        """Starts waiting sequences; returns what is left of the budget."""
        c = self.config
        while self._waiting and (budget or c.static_batches) and self._num_places:
            order, sequence = self._waiting[0]
            if sequence.is_finished:
                heapq.heappop(self._waiting)
                continue
            group: BeamGroup | None = sequence.beams
            if group is not None and self._num_places < group.width:
                break
            taken = self._taken_at_once(sequence)
            needed = blocks_for(max(sequence.num_tokens, taken), c.block_size)
            if group is not None:
                needed = group.num_blocks_to_resume(c.block_size)
            num_running = c.max_num_seqs - self._num_places
            num_more = len(sequence.unforked) if group is None else group.width - 1
            num_others = num_running and num_running + min(num_more, self._num_places - 1)
            reserve = c.growth_reserve * num_others
            own = needed - (sequence.num_tokens - 1) // c.block_size  # if all that can be shared is
            if sequence.num_in_flight or own + reserve > self.blocks.num_free:
                break
            cached = self._find_shared(sequence)
            if group is not None:
                del cached[group.num_alone // c.block_size :]
            in_use = len(cached) - self.blocks.num_idle(cached)
            if needed - in_use + reserve > self.blocks.num_free:
                break
            heapq.heappop(self._waiting)
            self._num_waiting -= 1
            sequence.status = Status.RUNNING
            self._running[order] = sequence
            self.blocks.share(sequence, cached)
            sequence.num_computed = len(cached) * c.block_size
            self._num_held += sequence.num_computed
            if not (sequence.num_preemptions or sequence.index):
                sequence.num_cached = sequence.num_computed
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_tokens += sequence.num_cached
            if group is not None:
                self._num_kept += group.width - 1
                budget = self._schedule_beams(group, rows, budget)
                continue
            end = min(sequence.num_tokens, sequence.num_computed + budget)
            grown = self.blocks.grow(sequence, max(end, taken))
            assert grown, "admission checked the free blocks"
            if end > sequence.num_computed:
                budget -= end - sequence.num_computed
                self._take(sequence, end, rows)
        return budget


def _num_held(sequence: Sequence) -> int:
    """Tokens computed of a sequence, or of all beams that it stands for."""
    return sequence.num_computed if sequence.beams is None else sequence.beams.num_held
