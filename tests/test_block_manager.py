import pytest
from host import make_sequence

from jaxpaged.block_manager import BlockManager


def test_blocks_are_taken_one_at_a_time_as_tokens_need_them():
    blocks = BlockManager(num_blocks=4, block_size=16)
    sequence = make_sequence(33)
    for num_tokens, expected in [(1, 1), (16, 1), (17, 2), (32, 2), (33, 3)]:
        assert blocks.grow(sequence, num_tokens)
        assert len(sequence.block_table) == expected
        blocks.check_integrity()
    assert len(set(sequence.block_table)) == 3


def test_a_table_grows_wholly_or_not_at_all():
    blocks = BlockManager(num_blocks=2, block_size=16)
    sequence = make_sequence(40)
    assert blocks.grow(sequence, 16)
    assert not blocks.grow(sequence, 48)
    assert len(sequence.block_table) == 1
    assert blocks.num_free == 1


def test_free_gives_back_all_and_only_its_own():
    blocks = BlockManager(num_blocks=4, block_size=16)
    first, second = make_sequence(17), make_sequence(17)
    assert blocks.grow(first, 17)
    assert blocks.grow(second, 17)
    blocks.free(first)
    blocks.check_integrity()
    assert (blocks.num_free, len(first.block_table), len(second.block_table)) == (2, 0, 2)
    blocks.free(first)  # nothing left to free
    blocks.check_integrity()


def test_check_integrity_sees_a_table_that_others_changed():
    blocks = BlockManager(num_blocks=4, block_size=16)
    sequence = make_sequence(17)
    blocks.grow(sequence, 17)
    sequence.block_table.pop()
    with pytest.raises(AssertionError, match="references"):
        blocks.check_integrity()
