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


@given(st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 9)), max_size=60))
def test_any_sequence_of_operations_keeps_the_books(operations):
    pool = BlockPool(5)
    held: list[int] = []
    for operation, pick in operations:
        if operation == "allocate" and pool.num_free:
            held.append(pool.allocate())
        elif held and operation == "retain":
            pool.retain(held[pick % len(held)])
            held.append(held[pick % len(held)])
        elif held and operation == "release":
            pool.release(held.pop(pick % len(held)))
        pool.check_integrity()
        assert pool.num_used == len(set(held))
