"""KV memory as systems without paging hand it out, behind the interface of `BlockManager`.

`Scheduler` runs with either of these in the place of its block manager, with blocks of one slot.
"""

from __future__ import annotations

from jaxpaged.block_manager import BlockManager
from jaxpaged.request import Sequence


class BuddySpace:
    """A range of slots that is handed out in chunks of a power of two (Knowlton, 1965).

    A chunk is halved until it is the smallest that holds what is wanted; freed, it merges with its other half as soon
    as that is free too. A range whose length is no power of two begins as one chunk for each bit of the length, the
    largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_used = 0
        """Slots of all chunks that are handed out, also what their owners did not ask for."""
        self._free: list[set[int]] = [set() for _ in range(num_slots.bit_length())]  # starts, by the size's exponent
        start = 0
        for exponent in reversed(range(num_slots.bit_length())):
            if num_slots >> exponent & 1:
                self._free[exponent].add(start)
                start += 1 << exponent

    @property
    def largest_free(self) -> int:
        """Slots of the largest chunk that can be handed out."""
        return max((1 << exponent for exponent, starts in enumerate(self._free) if starts), default=0)

    def allocate(self, num_slots: int) -> int:
        """The first slot of a chunk for `num_slots` slots, of which `largest_free` has enough."""
        wanted = _exponent(num_slots)
        exponent = next(e for e in range(wanted, len(self._free)) if self._free[e])
        start = min(self._free[exponent])
        self._free[exponent].remove(start)
        while exponent > wanted:
            exponent -= 1
            self._free[exponent].add(start + (1 << exponent))
        self.num_used += 1 << wanted
        return start

    def release(self, start: int, num_slots: int) -> None:
        """Takes back the chunk that `allocate(num_slots)` gave."""
        exponent = _exponent(num_slots)
        self.num_used -= 1 << exponent
        while (buddy := start ^ 1 << exponent) in self._free[exponent]:
            self._free[exponent].remove(buddy)
            start = min(start, buddy)
            exponent += 1
        self._free[exponent].add(start)


def _exponent(num_slots: int) -> int:
    """Of the smallest power of two that is no less."""
    return (num_slots - 1).bit_length()


class ContiguousBlocks(BlockManager):
    """Each sequence has one chunk of a `BuddySpace`, of the size that it reserves at its admission (Orca)."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, block_size=1, caches_prefixes=False)
        self._space = BuddySpace(num_slots)

    @property
    def num_free(self) -> int:
        """What the largest request may be that fits; there may be more in smaller chunks."""
        return self._space.largest_free

    @property
    def num_used(self) -> int:
        return self._space.num_used

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        if self.num_missing(sequence, num_tokens) <= 0:
            return True
        assert not sequence.block_table, "a chunk does not grow"
        if num_tokens > self._space.largest_free:
            return False
        start = self._space.allocate(num_tokens)
        sequence.block_table.extend(range(start, start + num_tokens))
        self.num_entries += num_tokens
        return True

    def free(self, sequence: Sequence) -> None:
        table = sequence.block_table
        if table:
            self._space.release(table[0], len(table))
            self.num_entries -= len(table)
            del table[:]


class PaddedBlocks(BlockManager):
    """A static batch is one rectangle: a row for each of its sequences, as wide as the longest prompt and what was
    generated so far, until the last of them ends (`generate` of Hugging Face Transformers)."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, block_size=1, caches_prefixes=False)
        self._batch: set[Sequence] = set()
        self._longest_prompt = 0
        self._generated = 0

    @property
    def num_used(self) -> int:
        return len(self._batch) * (self._longest_prompt + self._generated)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        self._batch.add(sequence)
        self._longest_prompt = max(self._longest_prompt, sequence.num_prompt_tokens)
        self._generated = max(self._generated, num_tokens - sequence.num_prompt_tokens)
        return super().grow(sequence, num_tokens)

    def free(self, sequence: Sequence) -> None:
        super().free(sequence)
        if not self.num_entries:  # the last one of the batch
            self._batch.clear()
            self._longest_prompt = self._generated = 0
