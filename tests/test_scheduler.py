import pytest
from host import is_done, make_sequence, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.config import SchedulerConfig
from jaxpaged.request import Status
from jaxpaged.scheduler import Scheduler, StepPlan


def make_scheduler(
    num_blocks=64, block_size=16, max_model_len=256, max_num_seqs=8, budget=64, reserve=0, **options
) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            growth_reserve=reserve,
            **options,
        )
    )


def take_in(scheduler: Scheduler, plan: StepPlan | None) -> None:
    """What the engine does with a step's result: append, finish what is done."""
    for row in plan.rows if plan else ():
        if row.samples and not row.sequence.is_finished:
            scheduler.append(row.sequence, next_token(row.sequence, row.start + row.count))
            if is_done(row.sequence):
                scheduler.finish(row.sequence)


def run(scheduler: Scheduler, *, ahead: bool, limit: int = 3000) -> int:
    """Steps until all is served, one step ahead or not; returns the number of steps."""
    in_flight, steps = None, 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.check_integrity()
        assert plan is not None or in_flight is not None, "nothing runs, and nothing is scheduled"
        if ahead:
            take_in(scheduler, in_flight)
            in_flight = plan
        else:
            take_in(scheduler, plan)
        scheduler.check_integrity()
        steps += 1
        assert steps < limit, "no progress"
    assert scheduler.blocks.num_used == 0
    return steps


def counts(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(r.sequence.request.request_id, r.start, r.count, r.samples) for r in plan.rows]


def test_decodes_and_prefill_chunks_share_one_budget():
    scheduler = make_scheduler(budget=32)
    first, second = make_sequence(20, arrival=0), make_sequence(40, arrival=1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert counts(plan) == [("0", 0, 20, True), ("1", 0, 12, False)]
    take_in(scheduler, plan)
    plan = scheduler.schedule()
    assert counts(plan) == [("0", 20, 1, True), ("1", 12, 28, True)]
    assert plan.num_tokens == 29


def test_admission_is_first_come_first_served_and_bounded_by_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    for arrival in range(3):
        scheduler.add(make_sequence(4, arrival=arrival))
    assert [r.sequence.request.arrival for r in scheduler.schedule().rows] == [0, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_a_full_pool_preempts_the_latest_arrival_and_the_oldest_advances():
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=4)
    old, new = make_sequence(31, 30, arrival=0), make_sequence(31, 30, arrival=1)
    scheduler.add(old)
    scheduler.add(new)
    while not scheduler.num_preemptions:
        take_in(scheduler, scheduler.schedule())
    assert new.status is Status.WAITING
    assert (new.num_computed, len(new.block_table), new.num_preemptions) == (0, 0, 1)
    assert old.status is Status.RUNNING
    tokens = len(new.token_ids)
    run(scheduler, ahead=False)
    assert len(new.token_ids) == 61 > tokens
    assert new.token_ids[31:].tolist() == [next_token(new, p) for p in range(31, 61)]


def test_admission_leaves_room_for_the_running_ones_to_grow():
    scheduler = make_scheduler(num_blocks=6, reserve=2)
    first, second = make_sequence(31, 30, arrival=0), make_sequence(48, 3, arrival=1)
    scheduler.add(first)
    scheduler.add(second)
    assert [r.sequence for r in scheduler.schedule().rows] == [
        first
    ]  # 2 of 6 blocks; 3 + 2 for the second are too many
    scheduler.finish(first)
    assert [r.sequence for r in scheduler.schedule().rows] == [second]  # alone, it needs no reserve


def test_one_step_ahead_takes_the_input_from_the_step_in_flight():
    scheduler = make_scheduler()
    first, second = make_sequence(3, arrival=0), make_sequence(5, arrival=1)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.schedule()
    ahead = scheduler.schedule()
    assert [(r.start, r.count, r.samples, r.source) for r in ahead.rows] == [(3, 1, True, 0), (5, 1, True, 1)]
    scheduler.finish(first)
    take_in(scheduler, plan)
    assert second.num_in_flight == 1
    assert [r.source for r in scheduler.schedule().rows] == [1]  # the second's row in the step before


def test_nothing_is_scheduled_past_max_tokens():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(3, max_tokens=1))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None


def test_a_sequence_with_penalties_waits_for_its_token():
    scheduler = make_scheduler()
    sequence = make_sequence(3, presence_penalty=0.5)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert scheduler.schedule() is None
    take_in(scheduler, plan)
    assert [r.source for r in scheduler.schedule().rows] == [-1]


@pytest.mark.parametrize(
    ("num_blocks", "prompt", "max_tokens", "message"),
    [
        (4, 60, 5, r"60 tokens \+ max_tokens=5 are 65, more than max_model_len=64.*lower max_tokens to 4"),
        (4, 64, None, "64 tokens.*no room for output in max_model_len=64"),
        (3, 40, 10, "need 4 KV blocks, but the whole pool has 3.*lower max_tokens to 9"),
        (3, 49, None, "49 tokens, but the whole KV pool has 3 blocks"),
    ],
)
def test_what_could_never_fit_is_refused_with_the_numbers(num_blocks, prompt, max_tokens, message):
    scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=64)
    with pytest.raises(ValueError, match=message):
        scheduler.add(make_sequence(prompt, max_tokens))
    assert not scheduler.has_unfinished


@pytest.mark.parametrize(("prompt", "max_tokens"), [(40, 9), (48, 1), (1, 48), (48, None), (1, None)])
def test_what_just_fits_is_served(prompt, max_tokens):
    scheduler = make_scheduler(num_blocks=3, max_model_len=64)
    sequence = make_sequence(prompt, max_tokens)
    scheduler.add(sequence)
    run(scheduler, ahead=False)
    assert len(sequence.token_ids) == (prompt + max_tokens if max_tokens else min(49, 64))


def test_a_budget_below_max_num_seqs_is_refused():
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 must be at least max_num_seqs=8"):
        make_scheduler(budget=4)


def test_aborted_ones_leave_at_once_wherever_they_are():
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting, last = (make_sequence(20, arrival=i) for i in range(3))
    for sequence in (running, waiting, last):
        scheduler.add(sequence)
    scheduler.schedule()
    scheduler.finish(waiting)
    scheduler.finish(running)
    scheduler.finish(running)  # once more: no effect
    scheduler.check_integrity()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.blocks.num_used) == (0, 1, 0)
    assert [r.sequence for r in scheduler.schedule().rows] == [last]


requests = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(4, 12), st.sampled_from([8, 16]), st.integers(1, 4), st.integers(0, 24), st.data())
def test_everything_is_served_with_the_same_tokens_in_any_pool(work, num_blocks, block_size, seqs, extra, data):
    ahead, reserve = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    scheduler = make_scheduler(num_blocks, block_size, 80, seqs, seqs + extra, reserve)
    accepted = []
    for prompt, output in work:
        sequence = make_sequence(prompt, output)
        try:
            scheduler.add(sequence)
            accepted.append(sequence)
        except ValueError:
            assert prompt + output - 1 > num_blocks * block_size
    run(scheduler, ahead=ahead)
    for sequence in accepted:
        first = sequence.num_prompt_tokens
        assert sequence.token_ids[first:].tolist() == [
            next_token(sequence, first + i) for i in range(sequence.max_tokens)
        ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_adds_steps_and_aborts_keep_every_invariant(data):
    scheduler = make_scheduler(num_blocks=data.draw(st.integers(3, 10)), block_size=8, max_num_seqs=4, budget=16)
    alive, in_flight = [], None
    for operation in data.draw(st.lists(st.sampled_from(["add", "step", "step", "step", "abort"]), max_size=60)):
        if operation == "add":
            sequence = make_sequence(data.draw(st.integers(1, 20)), data.draw(st.integers(1, 10)))
            if sequence.num_prompt_tokens + sequence.max_tokens <= 24:
                scheduler.add(sequence)
                alive.append(sequence)
        elif operation == "abort" and alive:
            scheduler.finish(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        elif operation == "step":
            oldest = next((s for s in alive if s.status is Status.RUNNING), None)
            computed = oldest.num_computed if oldest else 0
            plan = scheduler.schedule()
            if oldest and not (oldest.num_in_flight and oldest.num_output_tokens > oldest.max_tokens):
                assert oldest.status is Status.RUNNING, "the oldest was preempted"
                assert oldest.num_computed > computed or oldest.num_output_tokens == oldest.max_tokens
            check_plan(scheduler, plan)
            take_in(scheduler, in_flight)
            in_flight = plan
            alive = [s for s in alive if not s.is_finished]
        scheduler.check_integrity()


def check_plan(scheduler: Scheduler, plan: StepPlan | None) -> None:
    if plan is None:
        return
    c = scheduler.config
    assert 0 < plan.num_tokens <= c.max_num_batched_tokens
    assert len(plan.rows) <= c.max_num_seqs
    assert len({r.sequence for r in plan.rows}) == len(plan.rows)
    slots = set()
    for sequence, start, count, samples, source in plan.rows:
        assert count > 0
        assert sequence.num_computed == start + count
        assert samples == (start + count == sequence.num_tokens - samples)
        assert source == -1 or (samples and count >= 1)
        new = {
            sequence.block_table[p // c.block_size] * c.block_size + p % c.block_size
            for p in range(start, start + count)
        }
        assert len(new) == count
        assert not slots & new, "two tokens share a slot"
        slots |= new
    assert plan.num_tokens_held <= plan.num_blocks_used * c.block_size


@pytest.mark.parametrize(("policy", "blocks"), [("none", 2), ("max", 16), ("pow2", 6), ("oracle", 5)])
def test_a_reservation_is_taken_at_admission_and_kept(policy, blocks):
    scheduler = make_scheduler(kv_reservation=policy)
    scheduler.add(make_sequence(20, 50))  # 20 + 64 slots take 6 blocks, 20 + 50 take 5
    take_in(scheduler, scheduler.schedule())
    assert scheduler.blocks.num_used == blocks
    for _ in range(49):
        take_in(scheduler, scheduler.schedule())
        scheduler.check_integrity()
        assert policy == "none" or scheduler.blocks.num_used in (blocks, 0)
    assert scheduler.blocks.num_used == 0


def test_a_reservation_larger_than_the_pool_is_refused():
    scheduler = make_scheduler(num_blocks=15, kv_reservation="max")
    with pytest.raises(ValueError, match="kv_reservation='max' takes 256 tokens of KV space for the request, but the"):
        scheduler.add(make_sequence(4, 4))


@pytest.mark.parametrize("policy", ["none", "max", "pow2", "oracle"])
@pytest.mark.parametrize("ahead", [False, True])
def test_static_batches_start_when_the_one_before_has_ended(policy, ahead):
    scheduler = make_scheduler(num_blocks=48, max_num_seqs=3, budget=16, kv_reservation=policy, static_batches=True)
    sequences = [make_sequence(5 + 9 * i, 3 + 7 * i, arrival=i) for i in range(7)]
    for sequence in sequences:
        scheduler.add(sequence)
    batches, admit = [], scheduler._admit

    def watched(*args):
        before = scheduler.num_running
        left = admit(*args)
        batches.append((before, scheduler.num_running))
        return left

    scheduler._admit = watched
    run(scheduler, ahead=ahead)
    # None joins a batch that runs, and each is chosen at once, though prompts may exceed a step's budget.
    assert batches == [(0, 3), (0, 3), (0, 1)]
    for sequence in sequences:
        assert len(sequence.token_ids) - sequence.num_prompt_tokens == sequence.max_tokens
