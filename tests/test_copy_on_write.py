"""The block manager under random forks, writes, frees, shared prefixes and evictions, with a model of the contents.

The pool is an array of slots here, into which a plan's copies and writes are replayed when the plan is complete. A slot
holds all tokens up to its own. Each sequence must then find its own tokens, whatever was shared, copied, given up or
handed out again within the plan.
"""

from host import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.block_manager import BlockManager
from jaxpaged.request import Sequence

SIZE = 4


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = BlockManager(num_blocks, SIZE)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.alive: list[Sequence] = []
        self.num_copies = 0
        self._writes: dict[int, tuple[int, ...]] = {}
        self._settled: set[Sequence] = set()  # those that may write in this plan
        self._num_tokens = 0

    def begin(self, tokens: list[int]) -> None:
        """A sequence with the blocks that are known to hold its beginning; its last token is not computed."""
        sequence = make_sequence(tokens)
        found = self.blocks.find_prefix(sequence)
        self.blocks.share(sequence, found)
        sequence.num_computed = len(found) * SIZE
        self.alive.append(sequence)
        self._settled.add(sequence)

    def write(self, sequence: Sequence, count: int) -> None:
        """Computes up to `count` tokens, new ones where the sequence has no more; at most once a plan."""
        if sequence not in self._settled:
            return
        start = sequence.num_computed
        missing = start + count - len(sequence.token_ids)
        if not self.blocks.grow(sequence, start + count):
            return
        self._settled.discard(sequence)
        for _ in range(missing):
            self._num_tokens += 1
            sequence.token_ids.append(1000 + self._num_tokens)
        sequence.num_computed = start + count
        self.blocks.publish(sequence)
        for position in range(start, start + count):
            slot = self.slot(sequence, position)
            assert slot not in self._writes, "two sequences write into one slot"
            self._writes[slot] = self.tokens(sequence, position)

    def fork(self, parent: Sequence) -> None:
        """A fork of one that has written in this plan can't write before the next one: its KV is not there yet."""
        child = make_sequence(parent.token_ids[: parent.num_computed].tolist() or [0])
        self.blocks.fork(parent, child)
        child.num_computed = parent.num_computed
        self.alive.append(child)
        if parent in self._settled:
            self._settled.add(child)

    def free(self, sequence: Sequence) -> None:
        """One that wrote in this plan doesn't write after all, unless others may have found what it published."""
        own = set(sequence.block_table)
        if any(slot // SIZE in own and self.blocks.pool.is_published(slot // SIZE) for slot in self._writes):
            self.run()
        self.alive.remove(sequence)
        self._settled.discard(sequence)
        self.blocks.free(sequence)
        free = {block for block in range(self.blocks.pool.num_blocks + 1) if not self.blocks.pool.references(block)}
        self._writes = {slot: tokens for slot, tokens in self._writes.items() if slot // SIZE not in free}

    def run(self) -> None:
        """The device's part: copies, then writes. Every sequence finds its tokens afterwards."""
        copies = self.blocks.take_copies()
        self.blocks.check_integrity()
        assert len({d for _, d in copies}) == len(copies)
        assert not {s for s, _ in copies} & {d for _, d in copies}
        self.num_copies += len(copies)
        for source, destination in copies:
            for offset in range(SIZE):
                self.slots[destination * SIZE + offset] = self.slots.get(source * SIZE + offset, ())
        self.slots.update(self._writes)
        self._writes.clear()
        self._settled = set(self.alive)
        for sequence in self.alive:
            for position in range(sequence.num_computed):
                assert self.slots[self.slot(sequence, position)] == self.tokens(sequence, position)

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // SIZE] * SIZE + position % SIZE

    def tokens(self, sequence: Sequence, position: int) -> tuple[int, ...]:
        return tuple(sequence.token_ids[: position + 1])


operations = st.lists(
    st.tuples(
        st.sampled_from(["begin", "write", "write", "write", "fork", "fork", "free", "run", "run", "forget"]),
        st.integers(0, 20),
        st.integers(1, 6),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 12), operations)
def test_every_sequence_finds_its_own_tokens(num_blocks, operations):
    pool = Pool(num_blocks)
    for operation, pick, count in operations:
        sequence = pool.alive[pick % len(pool.alive)] if pool.alive else None
        if operation == "begin":
            pool.begin([pick % 2] * (pick + 1))
        elif operation == "run":
            pool.run()
        elif operation == "forget":
            pool.blocks.forget_prefixes()
        elif sequence is None:
            continue
        elif operation == "write":
            pool.write(sequence, count)
        elif operation == "fork":
            pool.fork(sequence)
        elif operation == "free":
            pool.free(sequence)
        pool.blocks.check_integrity()
    pool.run()
    for sequence in list(pool.alive):
        pool.free(sequence)
        pool.blocks.check_integrity()
    assert (pool.blocks.num_used, pool.blocks.num_entries, pool.blocks.num_overcounted) == (0, 0, 0)
    assert pool.blocks.take_copies() == ()
