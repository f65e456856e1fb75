"""The pool's books: which blocks are free, how many references each one has, and what is known to lie in them.

No JAX, no KV. Block 0 is the null block: padding points at it, nobody owns it, and it is never handed out.

A block may be published under a key, which stands for its contents. With its last reference gone such a block is idle:
free, but not forgotten. `find` and `retain` bring it back until `allocate` needs it; the one idle longest goes first.
"""

from __future__ import annotations

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids `1..num_blocks` and counts references to them; every operation is O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))  # a stack: the block freed last, likely in cache, goes first
        self._idle: dict[int, None] = {}  # published blocks without references, the one idle longest first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def num_published(self) -> int:
        return len(self._key_of)

    def allocate(self) -> int:
        """A free block, now with one reference, whose contents nobody knows. The caller has checked `num_free`."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a block that is in use, or idle."""
        if not self._references[block]:
            assert block in self._idle, f"block {block} is not in use"
            del self._idle[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drops a reference; the last one frees the block."""
        assert self._references[block] > 0, f"block {block} is not in use"
        self._references[block] -= 1
        if not self._references[block]:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._free.append(block)

    def references(self, block: int) -> int:
        return self._references[block]

    def publish(self, block: int, key: bytes) -> None:
        """Makes a block in use findable; does nothing if another block is known to hold the same."""
        assert self._references[block] > 0, f"block {block} is not in use"
        assert block not in self._key_of, f"block {block} is published already"
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def is_published(self, block: int) -> bool:
        return block in self._key_of

    def find(self, key: bytes) -> int | None:
        """The block published under a key, in use or idle."""
        return self._block_of.get(key)

    def unpublish_all(self) -> None:
        """Forgets what lies in the blocks; references stay."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError unless free + idle + referenced = all and the null block is untouched."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._idle.keys(), "a block is both free and idle"
        assert NULL_BLOCK not in free | self._idle.keys(), "the null block is free"
        assert self._references[NULL_BLOCK] == 0, "the null block has an owner"
        for block in range(1, self.num_blocks + 1):
            unused = block in free or block in self._idle
            assert (self._references[block] == 0) == unused, f"block {block} is both free and in use, or lost"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys and blocks disagree"
        assert self._idle.keys() <= self._key_of.keys(), "an idle block has no key"
        assert not free & self._key_of.keys(), "a free block has a key"
