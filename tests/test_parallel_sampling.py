"""Several samples of a prompt through the scheduler: forks, copies, queues and preemptions, on the pretend device."""

import random

import pytest
from host import make_sequence, next_token, samples_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_device import Device, make_device, prompts_that_begin_alike

from jaxpaged.request import Sequence, Status


def add(device: Device, prompt: int | list[int], max_tokens: int, n: int, **options) -> list[Sequence]:
    samples = samples_of(make_sequence(prompt, max_tokens, n=n, **options))
    device.scheduler.add(samples[0])
    return samples


def check_outputs(samples: list[Sequence]) -> None:
    """Each sample has its own tokens, all of them."""
    for sample in samples:
        first = sample.num_prompt_tokens
        expected = [next_token(sample, first + i) for i in range(sample.max_tokens)]
        assert sample.token_ids[first:].tolist() == expected


def counts(plan) -> list[tuple[int, int, bool]]:
    return [(row.sequence.index, row.count, row.samples) for row in plan.rows]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("length", "copies"), [(40, 3), (48, 0), (49, 3), (1, 3)])
def test_one_prefill_then_a_copy_of_the_last_block_for_all_but_one(length, copies, ahead):
    device = make_device()
    samples = add(device, length, 6, 4)
    plan = device.step(ahead=ahead)
    assert counts(plan) == [(0, length, True), (1, 0, True), (2, 0, True), (3, 0, True)]
    assert (plan.num_tokens, plan.num_empty_rows) == (length, 3)
    num_blocks = -(-length // 16)
    assert plan.num_blocks_used == num_blocks
    plan = device.step(ahead=ahead)
    assert counts(plan) == [(i, 1, True) for i in range(4)]
    assert [row.source for row in plan.rows] == ([0, 1, 2, 3] if ahead else [-1] * 4)
    assert (len(plan.copies), plan.num_empty_rows) == (copies, 0)
    assert plan.num_blocks_used == length // 16 + 4
    device.run(ahead=ahead)
    assert device.num_copies == copies
    check_outputs(samples)


def test_a_prompt_in_chunks_is_forked_at_its_end():
    device = make_device(budget=32)
    samples = add(device, 70, 4, 3)
    assert counts(device.step(ahead=True)) == [(0, 32, False)]
    assert counts(device.step(ahead=True)) == [(0, 32, False)]
    assert counts(device.step(ahead=True)) == [(0, 6, True), (1, 0, True), (2, 0, True)]
    device.run(ahead=True)
    check_outputs(samples)


def test_what_follows_in_the_step_comes_after_the_forks():
    device = make_device()
    first, other = add(device, 20, 4, 3), add(device, 10, 4, 1)
    assert counts(device.step(ahead=True)) == [(0, 20, True), (1, 0, True), (2, 0, True), (0, 10, True)]
    device.run(ahead=True)
    check_outputs([*first, *other])


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_samples_without_a_place_wait_ahead_of_later_requests_and_share_the_prompt(caches, ahead):
    device = make_device(max_num_seqs=2, enable_prefix_caching=caches)
    samples, later = add(device, 40, 5, 5), add(device, 8, 3, 1)
    assert counts(device.step(ahead=ahead)) == [(0, 40, True), (1, 0, True)]
    assert device.scheduler.num_waiting == 4
    starts = {}
    while device.scheduler.has_unfinished:
        plan = device.step(ahead=ahead)
        for row in plan.rows if plan else ():
            starts.setdefault(row.sequence, (row.start, device.scheduler.num_waiting))
    check_outputs([*samples, *later])
    # The third and later samples find the two full blocks of the prompt: in the cache, or with a sample that runs. Two
    # samples that end together leave none, so without a cache the next one computes the prompt.
    assert [starts[sample][0] for sample in samples[2:]] == ([32, 32, 32] if caches else [0, 32, 0])
    assert starts[later[0]][1] == 0


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_samples(max_tokens):
    device = make_device()
    samples = add(device, 20, max_tokens, 4)
    device.run(ahead=True)
    check_outputs(samples)
    assert device.num_copies == (3 if max_tokens == 2 else 0)


def test_samples_that_wait_for_their_token_fork_alike():
    device = make_device()
    samples = add(device, 20, 8, 3, presence_penalty=0.5)
    device.run(ahead=True)
    check_outputs(samples)


def test_an_older_request_preempts_all_samples_of_a_later_one_together():
    device = make_device(num_blocks=11, max_num_seqs=8)
    (old,), new = add(device, 60, 60, 1), add(device, 40, 30, 3)
    device.step(ahead=True)
    while not device.scheduler.num_preemptions:
        assert device.step(ahead=True) is not None
    assert [sample.num_preemptions for sample in new] == [1, 1, 1]
    assert {sample.status for sample in new} == {Status.WAITING}
    assert old.status is Status.RUNNING
    device.run(ahead=True)
    check_outputs([old, *new])


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_whose_samples_never_fit_together_is_served_by_and_by(caches, ahead):
    device = make_device(num_blocks=5, enable_prefix_caching=caches)
    samples, later = add(device, 40, 40, 6), add(device, 40, 40, 2)
    device.run(ahead=ahead)
    check_outputs([*samples, *later])
    assert samples[0].num_preemptions == 0, "the oldest always advances"
    assert samples[5].num_preemptions > 0


def test_a_sample_whose_request_has_rows_already_waits_for_a_block_with_those_that_it_has():
    device = make_device(num_blocks=4, block_size=8, max_num_seqs=8, enable_prefix_caching=False)
    (old,), new = add(device, 6, 24, 1), add(device, 7, 8, 2)
    device.step(ahead=False)
    device.step(ahead=False)
    assert device.scheduler.blocks.num_free == 1
    plan = device.step(ahead=False)  # the new ones need a block each, and the first one gets the last
    assert [row.sequence for row in plan.rows] == [old, new[0]]
    assert (new[1].status, len(new[1].block_table)) == (Status.RUNNING, 1)
    plan = device.step(ahead=False)  # the old one needs one too
    assert [row.sequence for row in plan.rows] == [old]
    assert [sample.num_preemptions for sample in new] == [1, 1]
    device.run()
    check_outputs([old, *new])


@pytest.mark.parametrize("policy", ["max", "pow2", "oracle"])
def test_without_paging_each_sample_has_space_of_its_own(policy):
    device = make_device(kv_reservation=policy, enable_prefix_caching=False)
    samples = add(device, 20, 10, 3)
    plan = device.step(ahead=False)
    assert counts(plan) == [(0, 20, True), (1, 20, True), (2, 20, True)]
    assert plan.num_blocks_used == 3 * len(samples[0].block_table)
    device.run()
    check_outputs(samples)
    assert device.num_copies == 0


def test_a_static_batch_forks_among_those_that_run():
    device = make_device(budget=16, max_num_seqs=4, static_batches=True)
    requests = [add(device, 30, 8, 3), add(device, 5, 3, 1), add(device, 6, 4, 2)]
    device.run(ahead=True)
    for samples in requests:
        check_outputs(samples)


def test_after_a_reset_samples_that_waited_compute_the_prompt_anew():
    device = make_device(max_num_seqs=2)
    samples = add(device, 40, 12, 4)
    device.step(ahead=True)
    device.scheduler.finish(samples[1])
    device.scheduler.blocks.forget_prefixes()
    plan = device.step(ahead=True)
    assert [(row.sequence.index, row.start) for row in plan.rows] == [(0, 40), (2, 0)]
    device.run(ahead=True)
    check_outputs([samples[0], *samples[2:]])


def test_prompt_logprobs_are_the_first_samples_alone():
    device = make_device(max_num_seqs=2)
    add(device, [7] * 40, 4, 1)
    device.run()
    samples = add(device, [7] * 40, 4, 3, prompt_logprobs=1)
    plan = device.step(ahead=False)
    assert counts(plan) == [(0, 40, True), (1, 0, True)]
    device.run()
    check_outputs(samples)
    assert [sample.wants_prompt_logprobs for sample in samples] == [True, False, False]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_row_reads_what_its_own_tokens_would_have_written(data):
    """Random requests, steps, aborts of a request or of one sample, and resets, in pools of any size."""
    ahead = data.draw(st.booleans())
    static = data.draw(st.integers(0, 5)) == 0
    device = make_device(
        num_blocks=data.draw(st.integers(6, 14)),
        block_size=8,
        max_num_seqs=data.draw(st.integers(1, 6)),
        budget=data.draw(st.integers(6, 40)),
        max_model_len=48,
        growth_reserve=data.draw(st.integers(0, 2)),
        enable_prefix_caching=data.draw(st.booleans()),
        kv_reservation=data.draw(st.sampled_from(["none"] * 5 + ["oracle"])),
        static_batches=static,
        stop=data.draw(st.sampled_from([0, 5])),
    )
    alive: list[list[Sequence]] = []
    operations = st.sampled_from(["add", "add", "step", "step", "step", "step", "abort", "end one", "reset"])
    for operation in data.draw(st.lists(operations, max_size=50)):
        if operation == "add":
            options = {"presence_penalty": 0.5} if data.draw(st.integers(0, 5)) == 0 else {}
            n = data.draw(st.integers(1, 5))
            prompt = data.draw(prompts_that_begin_alike(24))
            alive.append(add(device, prompt, data.draw(st.integers(1, 14)), n, **options))
        elif operation == "abort" and alive:
            for sample in alive.pop(data.draw(st.integers(0, len(alive) - 1))):
                device.scheduler.finish(sample)
        elif operation == "end one" and alive:
            samples = data.draw(st.sampled_from(alive))
            sample = data.draw(st.sampled_from(samples))
            if samples[0].unforked == []:  # else its first sample must go on
                device.scheduler.finish(sample)
        elif operation == "reset":
            device.scheduler.blocks.forget_prefixes()
        else:
            device.step(ahead=ahead)
        device.scheduler.check_integrity()
    device.run(ahead=ahead)
    assert all(sample.is_finished for samples in alive for sample in samples)


def test_nothing_leaks_after_a_thousand_random_aborts():
    rng = random.Random(0)
    device = make_device(num_blocks=40, block_size=8, max_num_seqs=12, budget=48)
    alive: list[list[Sequence]] = []
    num_aborts = 0
    while num_aborts < 1000:
        if len(alive) < 8:
            prompt = [rng.randrange(2)] * rng.randrange(1, 40)
            alive.append(add(device, prompt, rng.randrange(1, 40), rng.randrange(1, 6)))
        if rng.random() < 0.3:
            device.step(ahead=True)
            alive = [samples for samples in alive if not all(sample.is_finished for sample in samples)]
        elif alive:
            for sample in alive.pop(rng.randrange(len(alive))):
                device.scheduler.finish(sample)
            num_aborts += 1
            device.scheduler.check_integrity()
    assert device.num_copies > 50
    for samples in alive:
        for sample in samples:
            device.scheduler.finish(sample)
    blocks = device.scheduler.blocks
    assert (blocks.num_used, blocks.num_entries, blocks.num_overcounted) == (0, 0, 0)
    device.scheduler.check_integrity()
    blocks.forget_prefixes()
    assert sorted(blocks.pool.allocate() for _ in range(40)) == list(range(1, 41))
