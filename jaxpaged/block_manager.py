"""Block tables: which block of the pool holds which tokens of a sequence.

Blocks are taken one at a time, when a token needs a slot that no block of the sequence has yet, so a sequence
never holds more than one partly filled block. Nobody else changes a block table or a reference count.
"""

from __future__ import annotations

from collections import Counter

from jaxpaged.block_pool import BlockPool
from jaxpaged.config import blocks_for
from jaxpaged.request import Sequence


class BlockManager:
    """Owns the pool's books and every sequence's block table."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
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
        for _ in range(missing):
            sequence.block_table.append(self.pool.allocate())
        return True

    def free(self, sequence: Sequence) -> None:
        """Drops the sequence's references and empties its block table."""
        for block in reversed(sequence.block_table):
            self.pool.release(block)
        del sequence.block_table[:]
        self._owners.discard(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tables and the pool's reference counts agree."""
        self.pool.check_integrity()
        held = Counter(block for sequence in self._owners for block in sequence.block_table)
        for block in range(1, self.pool.num_blocks + 1):
            counted = self.pool.references(block)
            assert counted == held[block], f"block {block}: {counted} references, {held[block]} table entries"
        assert not any(s.is_finished for s in self._owners), "a finished sequence holds blocks"
