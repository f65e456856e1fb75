"""Prefix caching through the scheduler: what a row reads is always what its own tokens would have written."""

import pytest
from host import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_device import make_device, prompts_that_begin_alike

PROMPT = [(17 * i) % 1000 for i in range(100)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_second_request_computes_what_is_left(length, cached, ahead):
    device = make_device()
    for _ in range(2):
        sequence = make_sequence(PROMPT[:length], 4)
        device.scheduler.add(sequence)
        device.run(ahead=ahead)
    assert sequence.num_cached == cached
    assert (device.scheduler.num_prompt_tokens, device.scheduler.num_cached_tokens) == (2 * length, cached)


def test_identical_prompts_in_one_step_share_from_the_first_on():
    device = make_device(budget=200)
    sequences = [make_sequence(PROMPT[:50], 4) for _ in range(32)]
    for sequence in sequences:
        device.scheduler.add(sequence)
    plan = device.step(ahead=False)
    assert [row.count for row in plan.rows] == [50] + [2] * 31
    assert device.scheduler.blocks.num_used == 3 + 32
    assert plan.num_tokens_held == 48 + 2 * 32
    device.run()


def test_a_prompt_in_chunks_is_shared_chunk_by_chunk_and_survives_an_abort():
    device = make_device(budget=40)
    first, second = make_sequence(PROMPT, 4), make_sequence(PROMPT, 4)
    device.scheduler.add(first)
    device.step(ahead=True)
    device.scheduler.finish(first)  # aborted after 40 of its 100 tokens were dispatched
    device.scheduler.add(second)
    device.step(ahead=True)
    assert second.num_cached == 32
    device.run(ahead=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_turn_of_a_conversation_finds_the_answer_too(ahead):
    device = make_device()
    first = make_sequence(PROMPT[:20], 40)
    device.scheduler.add(first)
    device.run(ahead=ahead)
    turn = make_sequence([*first.token_ids, *PROMPT[:9]], 4)
    device.scheduler.add(turn)
    device.run(ahead=ahead)
    assert turn.num_cached == 48  # 59 tokens were computed, of which three blocks are full


def test_a_preempted_sequence_finds_its_own_blocks_again():
    device = make_device(num_blocks=12, max_num_seqs=2)
    old, new = make_sequence(90, 60), make_sequence(60, 60)
    device.scheduler.add(old)
    device.scheduler.add(new)
    while not new.num_preemptions:
        assert device.step(ahead=False) is not None
    device.scheduler.finish(old)
    full = (new.num_tokens - 1) // 16 * 16
    plan = device.step(ahead=False)
    assert [(row.sequence, row.start) for row in plan.rows] == [(new, full)]
    assert new.num_cached == 0, "counts what others had computed"
    device.run()


def test_reset_makes_every_prompt_new_and_keeps_what_runs():
    device = make_device()
    running = make_sequence(PROMPT, 30)
    device.scheduler.add(running)
    for _ in range(5):
        device.step(ahead=True)
    device.scheduler.blocks.forget_prefixes()
    waiting = make_sequence(PROMPT, 4)
    device.scheduler.add(waiting)
    device.run(ahead=True)
    assert waiting.num_cached == 0


def test_after_a_reset_nothing_is_shared_that_depends_on_what_came_before():
    device = make_device(budget=32)
    old = make_sequence(PROMPT, 4)
    device.scheduler.add(old)
    device.step(ahead=False)  # 32 of its 100 tokens
    device.scheduler.blocks.forget_prefixes()
    device.run()
    beginning, whole = make_sequence(PROMPT[:40], 4), make_sequence(PROMPT, 4)
    device.scheduler.add(beginning)
    device.run()
    device.scheduler.add(whole)
    device.run()
    assert (beginning.num_cached, whole.num_cached) == (0, 32), "the old one's blocks must not continue the new chain"


def test_a_prompt_in_chunks_of_one_token_is_shared_too():
    device = make_device(budget=2, max_num_seqs=2)
    device.scheduler.add(make_sequence(20, 60))
    device.step(ahead=False)
    for _ in range(2):
        sequence = make_sequence(PROMPT[:17], 4)
        device.scheduler.add(sequence)
        while not sequence.is_finished:
            device.step(ahead=False)
    assert sequence.num_cached == 16


def test_without_prefix_caching_nothing_is_shared():
    device = make_device(enable_prefix_caching=False)
    for _ in range(2):
        sequence = make_sequence(PROMPT, 4)
        device.scheduler.add(sequence)
        device.run()
    assert sequence.num_cached == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_reads_what_its_own_tokens_would_have_written(data):
    ahead = data.draw(st.booleans())
    policy = data.draw(st.sampled_from(["none", "none", "oracle"]))
    device = make_device(
        num_blocks=data.draw(st.integers(6, 12)),
        block_size=8,
        max_num_seqs=4,
        budget=data.draw(st.integers(4, 40)),
        max_model_len=48,
        kv_reservation=policy,
        static_batches=data.draw(st.booleans()),
    )
    alive = []
    operations = st.sampled_from(["add", "add", "step", "step", "step", "abort", "reset"])
    for operation in data.draw(st.lists(operations, max_size=60)):
        if operation == "add":
            options = {"salt": data.draw(st.sampled_from(["", "", "s"]))}
            if data.draw(st.integers(0, 5)) == 0:
                options["prompt_logprobs"] = 0
            if data.draw(st.integers(0, 5)) == 0:
                options["presence_penalty"] = 0.5
            sequence = make_sequence(data.draw(prompts_that_begin_alike(30)), data.draw(st.integers(1, 10)), **options)
            device.scheduler.add(sequence)
            alive.append(sequence)
        elif operation == "abort" and alive:
            device.scheduler.finish(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        elif operation == "reset":
            device.scheduler.blocks.forget_prefixes()
        else:
            device.step(ahead=ahead)
            alive = [s for s in alive if not s.is_finished]
    device.run(ahead=ahead)
