"""The pool's books: which blocks are free, and how many references each one has. No JAX, no KV.

Block 0 is the null block: padding points at it, nobody owns it, and it is never handed out.
"""

from __future__ import annotations

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids `1..num_blocks` and counts references to them; every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))  # a stack: the block freed last, likely in cache, goes first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A free block, now with one reference. The caller has checked `num_free`."""
        block = self._free.pop()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a block that is in use."""
        assert self._references[block] > 0, f"block {block} is not in use"
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drops a reference; the last one frees the block."""
        assert self._references[block] > 0, f"block {block} is not in use"
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def references(self, block: int) -> int:
        return self._references[block]

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + referenced = all and the null block is untouched."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert self._references[NULL_BLOCK] == 0, "the null block has an owner"
        for block in range(1, self.num_blocks + 1):
            assert (self._references[block] == 0) == (block in free), f"block {block} is both free and in use, or lost"
