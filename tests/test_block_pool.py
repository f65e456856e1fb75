import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpaged.block_pool import NULL_BLOCK, BlockPool


def test_hands_out_every_block_once_and_never_the_null_block():
    pool = BlockPool(7)
    blocks = [pool.allocate() for _ in range(7)]
    assert sorted(blocks) == list(range(1, 8))
    assert NULL_BLOCK not in blocks
    assert (pool.num_free, pool.num_used) == (0, 7)
    pool.check_integrity()


def test_a_block_is_free_only_after_its_last_reference():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.retain(block)
    pool.release(block)
    assert pool.references(block) == 1
    assert pool.num_free == 1
    pool.release(block)
    assert pool.num_free == 2


@pytest.mark.parametrize("operation", ["retain", "release"])
def test_a_free_block_has_no_references_to_change(operation):
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="not in use"):
        getattr(pool, operation)(1)


def test_check_integrity_sees_a_lost_block():
    pool = BlockPool(3)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()


def test_a_published_block_is_found_in_use_and_idle_until_it_is_allocated_again():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.publish(block, b"k")
    assert pool.find(b"k") == block
    pool.release(block)
    assert (pool.find(b"k"), pool.num_free, pool.num_published) == (block, 2, 1)
    pool.retain(block)
    assert (pool.references(block), pool.num_free) == (1, 1)
    pool.release(block)
    assert pool.allocate() != block, "one that nobody knows goes first"
    assert pool.allocate() == block
    assert pool.find(b"k") is None
    pool.check_integrity()


def test_the_block_idle_longest_is_allocated_first():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.publish(block, bytes([block]))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.retain(blocks[1])
    pool.release(blocks[1])  # used again: no longer the oldest
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_of_two_blocks_with_the_same_contents_the_first_is_found():
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.find(b"k") == first
    pool.release(second)
    pool.release(first)
    pool.check_integrity()
    assert pool.find(b"k") == first


def test_unpublished_blocks_are_free_and_found_no_more():
    pool = BlockPool(3)
    idle, used = pool.allocate(), pool.allocate()
    pool.publish(idle, b"i")
    pool.publish(used, b"u")
    pool.release(idle)
    pool.unpublish_all()
    pool.check_integrity()
    assert (pool.find(b"i"), pool.find(b"u"), pool.num_free, pool.references(used)) == (None, None, 2, 1)


operations = st.sampled_from(["allocate", "retain", "release", "publish", "find", "unpublish_all"])


@given(st.lists(st.tuples(operations, st.integers(0, 9)), max_size=80))
def test_any_sequence_of_operations_keeps_the_books(operations):
    pool = BlockPool(5)
    held: list[int] = []
    published: set[int] = set()
    for operation, pick in operations:
        if operation == "allocate" and pool.num_free:
            held.append(pool.allocate())
            published.discard(held[-1])
        elif operation == "find" and (block := pool.find(bytes([pick]))) is not None:
            pool.retain(block)
            held.append(block)
        elif operation == "unpublish_all":
            pool.unpublish_all()
            published.clear()
        elif held and operation == "retain":
            pool.retain(held[pick % len(held)])
            held.append(held[pick % len(held)])
        elif held and operation == "release":
            pool.release(held.pop(pick % len(held)))
        elif held and operation == "publish" and held[-1] not in published:
            pool.publish(held[-1], bytes([pick]))
            if pool.find(bytes([pick])) == held[-1]:
                published.add(held[-1])
        pool.check_integrity()
        assert pool.num_used == len(set(held))
        assert pool.num_published == len(published)
