"""Block tables: which block of the pool holds which tokens of a sequence.

Blocks are taken one at a time, when a token needs a slot that no block of the sequence has yet, so a sequence
never holds more than one partly filled block. Full blocks are published under the hash of all tokens up to their end;
a sequence that begins with the same tokens shares them instead of computing them anew (prefix caching).

A fork shares all blocks of its parent, the last, partly filled one too. Who writes into it gets a copy of it first
(copy-on-write), until the last one to hold it writes in place: n sequences cost n - 1 copies of one block. The copies
are noted here, and made on the device by the step that writes, before it writes.

Nobody else changes a block table or a reference count.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from jaxpaged.block_pool import NULL_BLOCK, BlockPool
from jaxpaged.config import blocks_for
from jaxpaged.request import Sequence


class BlockManager:
    """Owns the pool's books and every sequence's block table."""

    def __init__(self, num_blocks: int, block_size: int, *, caches_prefixes: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_entries = 0
        """Entries of all block tables: more than the blocks in use where blocks are shared."""
        self.num_overcounted = 0
        """Slots without a token of blocks that forks share, once for every entry but the first."""
        self._caches_prefixes = caches_prefixes
        self._epoch = 0  # of the prefix cache; part of every key
        self._owners: set[Sequence] = set()
        self._copies: dict[int, int] = {}  # destination to source: what the step being planned has to copy
        self._pins: Counter[int] = Counter()  # references that its sources have on top of those in tables

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the sequence lacks to hold its first `num_tokens` tokens."""
        return blocks_for(num_tokens, self.block_size) - len(sequence.block_table)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the slots of the first `num_tokens` tokens the sequence's own to write, from `num_computed` on.

        The block table covers them, and a shared block that would be written into is replaced by a copy: the step that
        writes must make what `take_copies` gives first.

        Returns:
          False, with nothing changed, if the pool has too few free blocks.
        """
        if num_tokens <= sequence.num_writable:
            return True
        missing = max(0, self.num_missing(sequence, num_tokens))
        copies = self._shares_end(sequence)
        if missing + copies > self.pool.num_free:
            return False
        if copies:
            self._copy_end(sequence)
        self._owners.add(sequence)
        self.num_entries += missing
        for _ in range(missing):
            sequence.block_table.append(self.pool.allocate())
        sequence.num_writable = len(sequence.block_table) * self.block_size
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begins the block table of a sequence without blocks with all of `parent`'s, by reference: no block is needed.

        The child's tokens begin with the `num_computed` ones that the parent has computed, and the caller sets its
        `num_computed` to the same number before it grows. Their KV must be written by a step that has been planned.
        """
        assert not child.block_table, "a fork begins without blocks"
        num_full, filled = divmod(parent.num_computed, self.block_size)
        assert len(parent.block_table) == num_full + (filled > 0), "a fork would share blocks without tokens"
        for block in parent.block_table:
            self.pool.retain(block)
        child.block_table.extend(parent.block_table)
        child.block_keys[:] = parent.block_keys[:num_full]
        child.cache_epoch, child.num_published = parent.cache_epoch, parent.num_published
        self.num_entries += len(child.block_table)
        if child.block_table:
            self._owners.add(child)
        parent.num_writable = child.num_writable = parent.num_computed
        if filled:
            self.num_overcounted += self.block_size - filled

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of the blocks that the step just planned must copy before it writes; empties the list.

        No destination appears twice, and none is a source: the copies can be made in any order, or at once.
        """
        if not self._copies:
            return ()
        copies = tuple((source, destination) for destination, source in self._copies.items())
        self._copies.clear()
        for source, _ in copies:
            self._unpin(source)
        return copies

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references and empties its block table."""
        if self._shares_end(sequence):
            self.num_overcounted -= self.block_size - sequence.num_computed % self.block_size
        sequence.num_writable = 0
        # The end first, so that of a chain of idle blocks the end is lost first: the beginning is of use without it.
        for block in reversed(sequence.block_table):
            self.pool.release(block)
        self.num_entries -= len(sequence.block_table)
        del sequence.block_table[:]
        self._owners.discard(sequence)
        if self._copies:
            self._drop_idle_copies()

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the beginning of a sequence without blocks; its last token is never among it."""
        if sequence.cache_epoch != self._epoch:
            sequence.cache_epoch = self._epoch
            sequence.block_keys.clear()
        if not self._caches_prefixes or sequence.wants_prompt_logprobs:
            return []  # each prompt token's distribution is wanted, so each is computed
        found = []
        for index in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self.pool.find(self._key(sequence, index))
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free until they are shared."""
        return sum(self.pool.references(block) == 0 for block in blocks)

    def share(self, sequence: Sequence, blocks: list[int]) -> None:
        """Begins the block table of a sequence without blocks with those that `find_prefix` gave."""
        if blocks:
            self._owners.add(sequence)
        for block in blocks:
            self.pool.retain(block)
        self.num_entries += len(blocks)
        sequence.block_table.extend(blocks)
        sequence.num_published = len(blocks)
        sequence.num_writable = len(blocks) * self.block_size

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks findable, as far as the host knows their tokens.

        Their KV must be written by a step that has been planned: whoever finds them reads them in that step or a later
        one, and a step writes the KV of a layer before it reads any.
        """
        if not self._caches_prefixes or sequence.cache_epoch != self._epoch:
            return
        known = min(sequence.num_computed, len(sequence.token_ids))
        for index in range(sequence.num_published, known // self.block_size):
            if not self.pool.is_published(sequence.block_table[index]):  # by a sequence that shares it
                self.pool.publish(sequence.block_table[index], self._key(sequence, index))
            sequence.num_published = index + 1

    def forget_prefixes(self) -> None:
        """Unpublishes all blocks. Sequences that have blocks keep them, and publish nothing any more: what they compute
        depends on what lies in those."""
        self.pool.unpublish_all()
        self._epoch += 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tables and the pool's reference counts agree."""
        self.pool.check_integrity()
        held = Counter(block for sequence in self._owners for block in sequence.block_table)
        for block in range(1, self.pool.num_blocks + 1):
            counted, expected = self.pool.references(block), held[block] + self._pins[block]
            assert counted == expected, (
                f"block {block}: {counted} references, {held[block]} table entries, {self._pins[block]} copies to make"
            )
        assert Counter(self._copies.values()) == +self._pins, "the sources of copies and their pins disagree"
        assert not self._copies.keys() & self._pins.keys(), "a block is both source and destination"
        assert all(held[block] for block in self._copies), "a copy is to be made for nobody"
        ends = Counter((self._end(s), -s.num_computed % self.block_size) for s in self._owners if self._end(s))
        assert len({block for block, _ in ends}) == len(ends), "who shares a block has filled different parts of it"
        overcounted = sum((count - 1) * unfilled for (_, unfilled), count in ends.items())
        assert self.num_overcounted == overcounted, f"{self.num_overcounted} overcounted, not {overcounted}"
        for sequence in self._owners:
            writable = sequence.num_writable
            assert writable <= len(sequence.block_table) * self.block_size, "tokens would be written past the table"
            assert held[self._end(sequence)] <= 1 or writable <= sequence.num_computed, (
                "a shared block would be written"
            )
        assert self.num_entries == held.total(), f"{self.num_entries} entries counted, {held.total()} there"
        assert not any(s.is_finished for s in self._owners), "a finished sequence holds blocks"

    def _end(self, sequence: Sequence) -> int:
        """The partly filled block that the sequence's next token goes into, or the null block if there is none."""
        index, filled = divmod(sequence.num_computed, self.block_size)
        return sequence.block_table[index] if filled and index < len(sequence.block_table) else NULL_BLOCK

    def _shares_end(self, sequence: Sequence) -> bool:
        """Whether others hold the block that the sequence's next token goes into."""
        block = self._end(sequence)
        return block != NULL_BLOCK and self.pool.references(block) - self._pins[block] > 1

    def _copy_end(self, sequence: Sequence) -> None:
        """Replaces the block that the sequence shares by a new one, and notes the copy.

        The source stays allocated until the plan is complete: were it given up and handed out again within it, it could
        become the destination of another copy.
        """
        index, filled = divmod(sequence.num_computed, self.block_size)
        source, destination = sequence.block_table[index], self.pool.allocate()
        assert source not in self._copies, "a block is copied before the step that makes it"
        self._copies[destination] = source
        self._pins[source] += 1  # the sequence's own reference goes over
        sequence.block_table[index] = destination
        self.num_overcounted -= self.block_size - filled

    def _drop_idle_copies(self) -> None:
        """Takes back the copies whose destination nobody holds any more."""
        for destination in [block for block in self._copies if not self.pool.references(block)]:
            self._unpin(self._copies.pop(destination))

    def _unpin(self, source: int) -> None:
        self._pins[source] -= 1
        if not self._pins[source]:
            del self._pins[source]
        self.pool.release(source)

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """SHA-256 over the chain of blocks up to `index`: the key of the one before, and the tokens of this one."""
        keys, size = sequence.block_keys, self.block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else self._root(sequence.request.cache_salt)
            keys.append(hashlib.sha256(parent + sequence.token_ids[start : start + size].tobytes()).digest())
        return keys[index]

    def _root(self, salt: str) -> bytes:
        # JSON can bring half of a surrogate pair, which is a character like any other here.
        return hashlib.sha256(f"{self._epoch} {salt}".encode("utf-8", "surrogatepass")).digest()
