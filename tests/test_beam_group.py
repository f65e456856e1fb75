"""Beams in the scheduler: they advance together, share what they have in common, and come out as in a search alone."""

import pytest
from host import VOCAB, make_sequence, next_token, samples_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pretend_device import Device, make_device
from toy_beams import EOS, ToyModel, search

from jaxpaged.beam_group import BeamGroup
from jaxpaged.beams import BeamSearch
from jaxpaged.request import Request, Status
from jaxpaged.sampling_params import BeamSearchParams

TOKENS = 25
"""In the pretend model's vocabulary."""


def add_search(
    device: Device, prompt: int | list[int], arrival: int, width: int = 4, max_tokens: int = 16, eos_bias: float = -9.0
) -> BeamGroup:
    """Adds a search to the scheduler and to the device, which knows the model that the candidates come from."""
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    if isinstance(prompt, int):
        prompt = [(arrival * 31 + i) % VOCAB for i in range(prompt)]
    words = make_sequence(1).sampling_words
    group = BeamGroup(Request(str(arrival), prompt, params.as_sampling, arrival, sampling_words=words), width)
    device.scheduler.add(group.leader)
    model = ToyModel(TOKENS, arrival, eos_bias)
    device.searches[group] = BeamSearch(params, group.leader.max_tokens, (EOS,)), model
    return group


def check_search(device: Device, group: BeamGroup) -> None:
    found, model = device.searches[group]
    params = BeamSearchParams(beam_width=group.width)
    assert found.is_over
    assert found.finished() == search(model.logprobs, params, group.leader.max_tokens)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("eos_bias", [-9.0, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_search_alone(width, eos_bias, ahead):
    device = make_device(block_size=8)
    group = add_search(device, 13, 0, width, eos_bias=eos_bias)
    device.run(ahead=ahead)
    check_search(device, group)


def test_beams_share_the_blocks_of_what_they_have_in_common():
    device = make_device(block_size=8, num_blocks=40)
    add_search(device, 80, 0, width=4, max_tokens=24)
    most = 0
    while device.scheduler.has_unfinished:
        device.step(ahead=True)
        most = max(most, device.scheduler.blocks.num_used)
    assert 10 + 3 <= most <= 10 + 4 * 3
    assert device.num_copies > 0


def test_a_step_has_all_beams_or_none():
    device = make_device(max_num_seqs=6, budget=6)
    add_search(device, 3, 1)
    ordinary = make_sequence(88, 4, arrival=0)  # its last chunk leaves room for two of the four beams
    device.scheduler.add(ordinary)
    while device.scheduler.has_unfinished:
        plan = device.step(ahead=False)
        assert plan is not None
        sampled = [row for row in plan.rows if row.samples and row.sequence.request is not ordinary.request]
        assert len(sampled) in (0, 1, 4)


def test_places_are_kept_for_the_beams_that_there_will_be():
    device = make_device(max_num_seqs=9, num_blocks=200)
    groups = [add_search(device, 5 + i, i) for i in range(8)]
    last = make_sequence(5, 4, arrival=8)
    device.scheduler.add(last)
    device.step(ahead=True)
    assert [g.leader.status for g in groups] == [Status.RUNNING] * 2 + [Status.WAITING] * 6
    assert last.status is Status.WAITING, "the ninth place is for one sequence, but nobody is overtaken"
    device.run(ahead=True)
    for group in groups:
        check_search(device, group)


@pytest.mark.parametrize("caches", [False, True])
def test_a_preempted_search_computes_what_its_beams_have_in_common_once(caches):
    device = make_device(block_size=8, num_blocks=18, budget=64, enable_prefix_caching=caches)
    old = make_sequence(50, 70, arrival=0)
    device.scheduler.add(old)
    group = add_search(device, 40, 1, max_tokens=20)
    while not group.leader.num_preemptions:
        assert device.step(ahead=False) is not None
    assert all(not beam.block_table and not beam.num_computed for beam in group.members)
    assert len(group.members) == 4
    num_tokens, common = group.leader.num_tokens, group.num_alone
    assert 40 <= common < num_tokens
    device.scheduler.finish(old)
    computed = 0
    for _ in range(9):
        plan = device.step(ahead=False)
        if plan.searches:
            break
        computed += plan.num_tokens
    cached = common // 8 * 8 if caches else 0
    assert computed == common - cached + 4 * (num_tokens - 1 - common)
    device.run()
    check_search(device, group)


def test_a_preempted_search_waits_until_there_is_room_for_all_its_beams():
    device = make_device(block_size=8, num_blocks=18)
    device.scheduler.add(make_sequence(50, 70, arrival=0))
    group = add_search(device, 40, 1, max_tokens=20)
    device.run()
    assert group.leader.num_preemptions == 1
    check_search(device, group)


def test_a_search_preempted_before_its_first_candidates_were_read_computes_the_prompt_once_more():
    device = make_device(enable_prefix_caching=False)
    group = add_search(device, 40, 0)
    device.step(ahead=True)
    device.scheduler._preempt_samples(group.leader)
    assert device.step(ahead=True) is None, "its candidates are still to be read"
    assert len(group.members) == 4
    plan = device.step(ahead=True)
    assert [(row.sequence, row.start, row.count) for row in plan.rows] == [(group.leader, 0, 40)]
    device.run(ahead=True)
    check_search(device, group)


def test_what_beams_computed_is_found_by_the_next_prompt():
    device = make_device(block_size=8)
    group = add_search(device, 10, 0, max_tokens=30)
    prompt = list(group.leader.request.prompt_token_ids)
    device.run(ahead=True)
    best = device.searches[group][0].finished()[0].token_ids
    turn = make_sequence([*prompt, *best, 5], 4)
    device.scheduler.add(turn)
    device.run(ahead=True)
    assert turn.num_cached == 32  # 39 of the 40 tokens were computed, and the last block's when they were all read


def test_fewer_beams_may_live_on_than_there_were():
    """As where the model rules out all other tokens; the sequence that stands for the request stays."""
    device = make_device(block_size=8)
    group = add_search(device, 13, 0)
    for _ in range(4):
        device.step(ahead=True)
    old, output = list(group.members), group.members[3].output_token_ids
    assert group.leader is not old[3]
    assert not any(beam.num_in_flight for beam in old)
    assert group.next_ends(3) == [], "one of the four would have to wait"
    assert [beam for beam, _ in group.next_ends(4)] == old
    device.scheduler.advance_beams(group, [(3, 7)])
    device.scheduler.check_integrity()
    assert group.members == [group.leader]
    assert group.leader.output_token_ids == [*output, 7]
    assert [len(beam.block_table) for beam in old if beam is not group.leader] == [0, 0, 0]
    device.scheduler.finish(group.leader)
    assert device.scheduler.blocks.num_used == 0


def test_a_search_preempted_with_its_candidates_on_their_way_takes_them_in():
    num_in_flight = 0
    for length in range(20, 36):  # so that the old one needs a block now in an even step, now in an odd one
        device = make_device(block_size=8, num_blocks=11, max_num_seqs=5)
        device.scheduler.add(make_sequence(length, 50, arrival=0))
        group = add_search(device, 15, 1, max_tokens=10)
        for _ in range(200):
            before = group.leader.num_preemptions
            is_in_flight = device.in_flight is not None and bool(device.in_flight.searches)
            device.step(ahead=True)
            num_in_flight += is_in_flight and group.leader.num_preemptions > before
        check_search(device, group)
    assert num_in_flight > 0


@pytest.mark.parametrize(
    ("options", "prompt", "width", "max_tokens", "message"),
    [
        (
            {"max_num_seqs": 3},
            5,
            4,
            5,
            "beam_width=4 is more than the max_num_seqs=3 .* lower it or raise",
        ),
        ({}, 250, 2, 7, r"250 tokens \+ max_tokens=7 are 257, more than max_model_len=256"),
        ({}, 256, 2, 7, "no room for output in max_model_len=256"),
        # 30 tokens: 1 full block is shared; 2 of a beam's own are 1 + 4 * 2
        ({"num_blocks": 8}, 30, 4, 19, "need 9 KV blocks for beam_width=4, .* has 8; lower max_tokens to 3 or raise"),
        ({"num_blocks": 4}, 40, 4, 2, "need 6 KV blocks for beam_width=4, .* has 4; lower beam_width or raise"),
        ({"num_blocks": 4}, 40, 4, None, r"max_tokens=1 need 6 KV blocks for beam_width=4, .* has 4; lower beam_width"),
        ({"kv_reservation": "max"}, 5, 2, 5, "kv_reservation='max' with static_batches=False has no way to do"),
        ({"static_batches": True}, 5, 2, 5, "static_batches=True has no way to do; leave both options out"),
    ],
)
def test_what_could_never_be_served_is_refused_with_the_numbers(options, prompt, width, max_tokens, message):
    device = make_device(**{"num_blocks": 64, "budget": 64, "max_num_seqs": 8, **options})
    with pytest.raises(ValueError, match=message):
        add_search(device, prompt, 0, width, max_tokens)
    assert not device.scheduler.has_unfinished


@pytest.mark.parametrize(("num_blocks", "prompt", "max_tokens"), [(9, 30, 19), (9, 30, None), (4, 40, 1), (3, 47, 1)])
def test_what_just_fits_is_served(num_blocks, prompt, max_tokens):
    device = make_device(num_blocks=num_blocks)
    group = add_search(device, prompt, 0, 4, max_tokens)
    assert group.leader.max_tokens == (max_tokens or 19)
    device.run()
    check_search(device, group)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_searches_among_other_requests_come_out_as_alone(data):
    """Whatever is added, aborted or preempted, and every row reads what its own tokens would have written."""
    device = make_device(
        num_blocks=data.draw(st.integers(10, 24)),
        block_size=8,
        max_num_seqs=data.draw(st.integers(4, 9)),
        budget=data.draw(st.integers(9, 40)),
        max_model_len=48,
        growth_reserve=data.draw(st.integers(0, 1)),
        enable_prefix_caching=data.draw(st.booleans()),
    )
    ahead = data.draw(st.booleans())
    groups: list[BeamGroup] = []
    samples = []
    operations = st.sampled_from(["search", "search", "add", "step", "step", "step", "step", "abort", "reset"])
    for arrival, operation in enumerate(data.draw(st.lists(operations, max_size=60))):
        if operation == "search":
            beginning = [1] * data.draw(st.integers(1, 20))
            width, most = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
            try:
                groups.append(add_search(device, beginning, arrival, width, most, data.draw(st.sampled_from([-9, 1]))))
            except ValueError as error:
                assert "KV blocks" in str(error)  # noqa: PT017
        elif operation == "add":
            first = make_sequence(
                data.draw(st.integers(1, 20)), data.draw(st.integers(1, 12)), arrival, n=data.draw(st.integers(1, 3))
            )
            samples += samples_of(first)
            device.scheduler.add(first)
        elif operation == "abort" and groups:
            device.scheduler.finish(groups.pop(data.draw(st.integers(0, len(groups) - 1))).leader)
        elif operation == "reset":
            device.scheduler.blocks.forget_prefixes()
        else:
            device.step(ahead=ahead)
        device.scheduler.check_integrity()
    device.run(ahead=ahead)
    for group in groups:
        check_search(device, group)
    for sample in samples:
        first = sample.num_prompt_tokens
        assert sample.token_ids[first:].tolist() == [next_token(sample, first + i) for i in range(sample.max_tokens)]
