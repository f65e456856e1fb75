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
    assert blocks.grow(first, 17)
    assert len(first.block_table) == 2


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


def forked(blocks: BlockManager, parent, count: int) -> list:
    children = [make_sequence(parent.token_ids.tolist()) for _ in range(count)]
    for child in children:
        blocks.fork(parent, child)
        child.num_computed = parent.num_computed
        blocks.check_integrity()
    return children


def write(blocks: BlockManager, sequence) -> bool:
    """Makes room for the sequence's next token, and computes it."""
    grown = blocks.grow(sequence, sequence.num_computed + 1)
    sequence.num_computed += grown
    blocks.check_integrity()
    return grown


def test_a_fork_shares_every_block_and_takes_none():
    blocks = BlockManager(num_blocks=3, block_size=16)
    parent = make_sequence(40)
    fill(blocks, parent, 40)
    children = forked(blocks, parent, 5)
    assert all(child.block_table == parent.block_table for child in children)
    assert (blocks.num_used, blocks.num_entries) == (3, 18)
    assert blocks.take_copies() == ()
    for sequence in (parent, *children):
        blocks.free(sequence)
        blocks.check_integrity()
    assert (blocks.num_used, blocks.num_overcounted) == (0, 0)


def test_writers_copy_the_last_block_alone_and_the_last_of_them_writes_in_place():
    blocks = BlockManager(num_blocks=8, block_size=16)
    parent = make_sequence(40)
    fill(blocks, parent, 40)
    shared = parent.block_table.tolist()
    first, second = forked(blocks, parent, 2)
    assert write(blocks, parent)
    assert write(blocks, first)
    assert write(blocks, second)
    copies = blocks.take_copies()
    assert copies == ((shared[2], parent.block_table[2]), (shared[2], first.block_table[2]))
    assert second.block_table.tolist() == shared
    assert parent.block_table[:2].tolist() == first.block_table[:2].tolist() == shared[:2]
    assert len({s.block_table[2] for s in (parent, first, second)}) == 3
    for sequence in (parent, first, second):
        assert write(blocks, sequence)
    assert blocks.take_copies() == ()
    assert blocks.num_used == 5


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    blocks = BlockManager(num_blocks=8, block_size=16)
    parent = make_sequence(32)
    fill(blocks, parent, 32)
    (child,) = forked(blocks, parent, 1)
    assert write(blocks, parent)
    assert write(blocks, child)
    assert blocks.take_copies() == ()
    assert (blocks.num_used, parent.block_table[:2]) == (4, child.block_table[:2])


def test_without_a_block_for_the_copy_nothing_changes():
    blocks = BlockManager(num_blocks=2, block_size=16)
    parent = make_sequence(20)
    fill(blocks, parent, 20)
    (child,) = forked(blocks, parent, 1)
    assert not write(blocks, child)
    assert child.block_table == parent.block_table
    blocks.free(parent)
    assert write(blocks, child)  # alone it needs no copy
    assert blocks.take_copies() == ()


def test_a_source_given_up_in_the_same_plan_is_not_handed_out_in_it():
    blocks = BlockManager(num_blocks=3, block_size=16)
    parent = make_sequence(20)
    fill(blocks, parent, 20)
    source = parent.block_table[1]
    (child,) = forked(blocks, parent, 1)
    assert write(blocks, parent)
    blocks.free(child)
    assert blocks.num_free == 0
    assert blocks.take_copies() == ((source, parent.block_table[1]),)
    blocks.check_integrity()
    assert blocks.num_free == 1


def test_a_copy_for_a_sequence_that_is_gone_is_not_made():
    blocks = BlockManager(num_blocks=4, block_size=16)
    parent = make_sequence(20)
    fill(blocks, parent, 20)
    first, second = forked(blocks, parent, 2)
    assert write(blocks, first)
    blocks.free(first)
    blocks.check_integrity()
    assert blocks.take_copies() == ()
    assert write(blocks, second)
    blocks.free(parent)
    blocks.free(second)
    blocks.check_integrity()
    assert (blocks.num_free, blocks.take_copies()) == (4, ())


def test_what_forks_share_is_published_once_and_what_they_write_by_each():
    blocks = BlockManager(num_blocks=8, block_size=16)
    parent = make_sequence(TOKENS[:30])
    assert blocks.grow(parent, 30)
    parent.num_computed = 30
    blocks.publish(parent)
    (child,) = forked(blocks, parent, 1)
    for sequence, token in ((parent, 7), (child, 8)):
        sequence.token_ids.extend([token] * 2)
        assert blocks.grow(sequence, 32)
        sequence.num_computed = 32
        blocks.publish(sequence)
        blocks.check_integrity()
        assert blocks.find_prefix(make_sequence([*sequence.token_ids, 0])) == sequence.block_table.tolist()
    assert parent.block_table[0] == child.block_table[0]
    assert parent.block_table[1] != child.block_table[1]


def test_forks_publish_after_a_reset_if_their_parent_does():
    blocks = BlockManager(num_blocks=8, block_size=16)
    old = make_sequence(TOKENS[:20])
    fill(blocks, old, 20)
    blocks.forget_prefixes()
    new = make_sequence(TOKENS[:20])
    assert not blocks.find_prefix(new)
    fill(blocks, new, 20)
    for parent in (old, new):
        (child,) = forked(blocks, parent, 1)
        child.token_ids.extend(TOKENS[20:32])
        fill(blocks, child, 32)
        assert len(blocks.find_prefix(make_sequence(TOKENS[:33]))) == (2 if parent is new else 1)
        blocks.free(child)
        blocks.free(parent)


def test_a_full_block_that_forks_share_may_be_published_by_either():
    blocks = BlockManager(num_blocks=8, block_size=16)
    parent = make_sequence(TOKENS[:20])
    assert blocks.grow(parent, 20)
    parent.num_computed = 20  # and not published yet, as the blocks of a decode are not until its tokens were read
    (child,) = forked(blocks, parent, 1)
    blocks.publish(child)
    blocks.publish(parent)
    blocks.check_integrity()
    assert blocks.find_prefix(make_sequence(TOKENS[:20])) == parent.block_table[:1].tolist()
