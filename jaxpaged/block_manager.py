"""Block tables: which block of the pool holds which tokens of a sequence.

Blocks are taken one at a time, when a token needs a slot that no block of the sequence has yet, so a sequence
never holds more than one partly filled block. Full blocks are published under the hash of all tokens up to their end;
a sequence that begins with the same tokens shares them instead of computing them anew (prefix caching). Nobody else
changes a block table or a reference count.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from jaxpaged.block_pool import BlockPool
from jaxpaged.config import blocks_for
from jaxpaged.request import Sequence


class BlockManager:
    """Owns the pool's books and every sequence's block table."""

    def __init__(self, num_blocks: int, block_size: int, *, caches_prefixes: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.num_entries = 0
        """Entries of all block tables: more than the blocks in use where blocks are shared."""
        self._caches_prefixes = caches_prefixes
        self._epoch = 0  # of the prefix cache; part of every key
        self._owners: set[Sequence] = set()

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
        """Makes the block table cover the first `num_tokens` tokens.

        Returns:
          False, with nothing changed, if the pool has too few free blocks.
        """
        missing = self.num_missing(sequence, num_tokens)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        self._owners.add(sequence)
        self.num_entries += missing
        for _ in range(missing):
            sequence.block_table.append(self.pool.allocate())
        return True

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references and empties its block table."""
        # The end first, so that of a chain of idle blocks the end is lost first: the beginning is of use without it.
        for block in reversed(sequence.block_table):
            self.pool.release(block)
        self.num_entries -= len(sequence.block_table)
        del sequence.block_table[:]
        self._owners.discard(sequence)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the beginning of a sequence without blocks; its last token is never among it."""
        if sequence.cache_epoch != self._epoch:
            sequence.cache_epoch = self._epoch
            sequence.block_keys.clear()
        if not self._caches_prefixes or sequence.request.params.prompt_logprobs is not None:
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

    def publish(self, sequence: Sequence) -> None:
        """Makes the sequence's full blocks findable, as far as the host knows their tokens.

        Their KV must be written by a step that has been planned: whoever finds them reads them in that step or a later
        one, and a step writes the KV of a layer before it reads any.
        """
        if not self._caches_prefixes or sequence.cache_epoch != self._epoch:
            return
        known = min(sequence.num_computed, len(sequence.token_ids))
        for index in range(sequence.num_published, known // self.block_size):
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
            counted = self.pool.references(block)
            assert counted == held[block], f"block {block}: {counted} references, {held[block]} table entries"
        assert self.num_entries == held.total(), f"{self.num_entries} entries counted, {held.total()} there"
        assert not any(s.is_finished for s in self._owners), "a finished sequence holds blocks"

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
