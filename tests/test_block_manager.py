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


def fill(blocks: BlockManager, sequence, num_tokens: int) -> None:
    """Computes the sequence's first `num_tokens` tokens."""
    assert blocks.grow(sequence, num_tokens)
    sequence.num_computed = num_tokens
    blocks.publish(sequence)
    blocks.check_integrity()


TOKENS = list(range(100))


@pytest.mark.parametrize(("length", "expected"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (48, 2), (49, 3)])
def test_full_blocks_are_found_and_the_last_token_is_always_left(length, expected):
    blocks = BlockManager(num_blocks=8, block_size=16)
    first = make_sequence(TOKENS[:50])
    fill(blocks, first, 50)
    found = blocks.find_prefix(make_sequence(TOKENS[:length]))
    assert found == first.block_table[:expected].tolist()


@pytest.mark.parametrize("num_computed", [0, 15, 16, 31, 40])
def test_blocks_are_found_once_they_are_full(num_computed):
    blocks = BlockManager(num_blocks=8, block_size=16)
    fill(blocks, make_sequence(TOKENS), num_computed)
    assert len(blocks.find_prefix(make_sequence(TOKENS))) == num_computed // 16


def test_a_block_counts_with_all_that_comes_before_it():
    blocks = BlockManager(num_blocks=8, block_size=16)
    fill(blocks, make_sequence(TOKENS[:64]), 64)
    assert len(blocks.find_prefix(make_sequence(TOKENS[:16] + [7] * 16 + TOKENS[32:64]))) == 1
    assert not blocks.find_prefix(make_sequence(TOKENS[16:64]))
    assert not blocks.find_prefix(make_sequence(TOKENS[:64], salt="another"))
    assert not blocks.find_prefix(make_sequence(TOKENS[:64], prompt_logprobs=0))
    assert len(blocks.find_prefix(make_sequence(TOKENS[:64], logprobs=1))) == 3


def test_output_tokens_count_when_the_host_knows_them():
    blocks = BlockManager(num_blocks=8, block_size=16)
    sequence = make_sequence(TOKENS[:30])
    fill(blocks, sequence, 33)  # the last three are in flight
    assert len(blocks.find_prefix(make_sequence(TOKENS[:40]))) == 1
    sequence.token_ids.extend(TOKENS[30:33])
    blocks.publish(sequence)
    assert len(blocks.find_prefix(make_sequence(TOKENS[:40]))) == 2


def test_shared_blocks_have_two_owners_and_outlive_the_first():
    blocks = BlockManager(num_blocks=8, block_size=16)
    first, second = make_sequence(TOKENS[:40]), make_sequence(TOKENS[:40])
    fill(blocks, first, 40)
    found = blocks.find_prefix(second)
    assert blocks.num_idle(found) == 0
    blocks.share(second, found)
    assert blocks.grow(second, 40)
    blocks.check_integrity()
    assert (blocks.num_used, blocks.num_entries) == (4, 6)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.free(first)
    blocks.check_integrity()
    assert blocks.num_used == 3
    blocks.free(second)
    assert (blocks.num_used, blocks.num_entries) == (0, 0)


def test_a_chain_is_forgotten_from_its_end():
    blocks = BlockManager(num_blocks=4, block_size=16)
    first = make_sequence(TOKENS[:64])
    fill(blocks, first, 64)
    blocks.free(first)
    assert blocks.num_idle(blocks.find_prefix(make_sequence(TOKENS))) == 4
    other = make_sequence(32, arrival=7)
    assert blocks.grow(other, 32)
    assert len(blocks.find_prefix(make_sequence(TOKENS))) == 2
    blocks.check_integrity()


def test_forgotten_prefixes_are_found_no_more():
    blocks = BlockManager(num_blocks=8, block_size=16)
    sequence = make_sequence(TOKENS[:50])
    fill(blocks, sequence, 33)
    blocks.forget_prefixes()
    fill(blocks, sequence, 50)
    assert not blocks.find_prefix(make_sequence(TOKENS))
    blocks.free(sequence)
    blocks.check_integrity()


def test_without_prefix_caching_nothing_is_found():
    blocks = BlockManager(num_blocks=8, block_size=16, caches_prefixes=False)
    fill(blocks, make_sequence(TOKENS[:50]), 50)
    assert not blocks.find_prefix(make_sequence(TOKENS[:50]))
