"""The engine on a tiny model: a request's tokens do not depend on what runs beside it, and nothing leaks."""

import random
import sys

import numpy as np
import pytest
import tiny
from tiny import EOS, GREEDY, PROMPT, TOKENS, fresh_engine, serve, tokens_of

from jaxpaged import SamplingParams

SAMPLED = SamplingParams(temperature=1, seed=7, max_tokens=40, ignore_eos=True)
LONG = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture
def engine(llm):
    return fresh_engine(llm)


@pytest.fixture(scope="module")
def sampled_alone(tiny_llm):
    (output,) = serve(fresh_engine(tiny_llm), (tiny.prompt(20), SAMPLED))
    return tokens_of(output)


def test_greedy_alone_gives_the_golden_tokens(engine):
    (output,) = serve(engine, (PROMPT, GREEDY))
    assert tokens_of(output) == TOKENS


@pytest.mark.parametrize("position", range(4))
def test_greedy_in_a_batch_gives_the_golden_tokens(engine, position):
    others = [(tiny.prompt(n, n), LONG) for n in (5, 17, 3)]
    outputs = serve(engine, *others[:position], (PROMPT, GREEDY), *others[position:])
    assert tokens_of(outputs[position]) == TOKENS


def test_greedy_after_a_preemption_gives_the_golden_tokens(llm):
    engine = fresh_engine(llm, num_blocks=18)
    *_, output = serve(engine, (tiny.prompt(20, 1), LONG), (tiny.prompt(20, 2), LONG), (PROMPT, GREEDY))
    assert output.num_preemptions > 0
    assert tokens_of(output) == TOKENS
    assert engine.cache_stats().num_preemptions >= output.num_preemptions


def test_golden_prompts_that_never_fit_together_are_all_served(llm):
    outputs = serve(fresh_engine(llm, num_blocks=12), *[(PROMPT, GREEDY)] * 5)
    assert [tokens_of(o) for o in outputs] == [TOKENS] * 5


def test_the_next_step_is_dispatched_before_the_last_one_is_read(engine):
    completion = engine.add_request("a", [5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    assert len(completion.sequence.output_token_ids) == 1
    assert completion.sequence.num_in_flight == 1  # the second token is being sampled from the first, on the device
    engine.step()
    engine.step()
    assert completion.finish_reason == "length"
    assert not engine.has_unfinished


@pytest.mark.parametrize("position", range(4))
def test_sampled_tokens_do_not_depend_on_the_batch(engine, sampled_alone, position):
    others = [
        (tiny.prompt(50, 4), SamplingParams(temperature=2, top_k=5, seed=7, max_tokens=30)),
        (tiny.prompt(9, 5), SamplingParams(temperature=0, max_tokens=12, logprobs=3)),
        (tiny.prompt(2, 6), SamplingParams(top_p=0.5, min_p=0.01, max_tokens=20, presence_penalty=1)),
    ]
    outputs = serve(engine, *others[:position], (tiny.prompt(20), SAMPLED), *others[position:])
    assert tokens_of(outputs[position]) == sampled_alone


def test_sampled_tokens_do_not_depend_on_a_preemption(llm, sampled_alone):
    engine = fresh_engine(llm, num_blocks=14)
    output = serve(engine, (tiny.prompt(24, 1), LONG), (tiny.prompt(20), SAMPLED))[1]
    assert output.num_preemptions > 0
    assert tokens_of(output) == sampled_alone


def test_sampled_tokens_do_not_depend_on_the_engine(llm, sampled_alone):
    engine = fresh_engine(llm, seed=5, max_num_seqs=2, max_num_batched_tokens=7)
    serve(engine, (tiny.prompt(3), SAMPLED))
    outputs = serve(engine, (tiny.prompt(20), SAMPLED), (tiny.prompt(20), SAMPLED))
    assert [tokens_of(o) for o in outputs] == [sampled_alone] * 2


def test_seeds_decide(engine):
    seeds = [7, 8, 7 + 2**32, -7, 2**64 - 7]
    outputs = [
        tokens_of(serve(engine, (tiny.prompt(4), SamplingParams(max_tokens=12, ignore_eos=True, seed=seed)))[0])
        for seed in seeds
    ]
    assert len({tuple(o) for o in outputs[:4]}) == 4
    assert outputs[3] == outputs[4]  # modulo 2**64


def test_requests_without_a_seed_follow_from_the_engines_seed_and_their_order(llm):
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True)

    def run(seed: int) -> list[list[int]]:
        return [tokens_of(o) for o in serve(fresh_engine(llm, seed=seed), *[([9, 8], unseeded)] * 3)]

    first = run(0)
    assert len({tuple(o) for o in first}) == 3
    assert run(0) == first
    assert run(1) != first
    engine = fresh_engine(llm)
    assert [tokens_of(serve(engine, ([9, 8], unseeded))[0]) for _ in range(3)] == first  # one by one, the same


def test_an_aborted_request_frees_its_blocks_whatever_it_was_doing(engine):
    kept = engine.add_request("kept", PROMPT, GREEDY)
    chunked = engine.add_request("chunked", tiny.prompt(70), SAMPLED)
    for _ in range(2):
        engine.step()
    assert 0 < chunked.sequence.num_computed < 70
    engine.abort_request("chunked")
    decoding = engine.add_request("decoding", tiny.prompt(10), SAMPLED)
    while len(decoding.sequence.output_token_ids) < 3:
        engine.step()
    assert decoding.sequence.num_in_flight == 1
    for i in range(3):
        waiting = engine.add_request(f"waiting {i}", tiny.prompt(60), SAMPLED)
    assert not waiting.sequence.block_table
    for name in ("decoding", "waiting 0", "waiting 1", "waiting 2", "waiting 2", "unknown"):
        engine.abort_request(name)
        engine.scheduler.check_integrity()
    assert {c.finish_reason for c in (chunked, decoding, waiting)} == {"abort"}
    assert engine.scheduler.blocks.num_used == len(kept.sequence.block_table)
    assert len(decoding.output().outputs[0].token_ids) == 3
    follower = engine.add_request("decoding", PROMPT, GREEDY)  # an id may be used again, and its old step is in flight
    while engine.has_unfinished:
        engine.step()
    assert tokens_of(kept.output()) == tokens_of(follower.output()) == TOKENS
    assert len(decoding.output().outputs[0].token_ids) == 3
    assert engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("moment", ["planned", "dispatched", "reading"])
def test_a_step_that_breaks_off_ends_all_requests_and_the_engine_goes_on(engine, monkeypatch, moment, error):
    completions = [engine.add_request(str(i), tiny.prompt(30, i), LONG) for i in range(5)]
    for _ in range(3):
        engine.step()
    dispatch = engine.runner.dispatch

    def break_off(plan):
        if moment == "planned":
            raise error
        handle = dispatch(plan)
        if moment == "dispatched":
            raise error
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "dispatch", break_off)
        if moment == "reading":
            patch.setattr(engine, "_take_in", lambda *_: break_off_reading(error))
        with pytest.raises(error):
            engine.step()
    assert {c.finish_reason for c in completions} == {"abort"}
    assert not engine.has_unfinished
    assert engine.cache_stats().num_blocks_used == 0
    assert tokens_of(serve(engine, (PROMPT, GREEDY))[0]) == TOKENS


def break_off_reading(error):
    raise error


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, r"prompt=\[\] has no tokens; give at least one"),
        ("", GREEDY, "prompt='' has no tokens"),
        ([5, 288], GREEDY, r"prompt\[1\]=288 must be a token id from 0 to 287"),
        ([-1], GREEDY, r"prompt\[0\]=-1 must be a token id"),
        ([5, True], GREEDY, r"prompt\[1\]=True must be a token id"),
        ([5, 1.0], GREEDY, r"prompt\[1\]=1.0 must be a token id"),
        ([5, "a"], GREEDY, r"prompt\[1\]='a' must be a token id"),
        (None, GREEDY, "prompt=None must be text or a list of token ids"),
        (b"abc", GREEDY, "prompt=b'abc' must be text or a list of token ids"),
        ("\ud800", GREEDY, "prompt: lone surrogate"),
        ([5], {"temperature": 0}, "sampling_params={'temperature': 0} must be a SamplingParams"),
        ([5], SamplingParams(logprobs=21), "logprobs=21 is above the engine's max_logprobs=20"),
        ([5], SamplingParams(prompt_logprobs=21), "prompt_logprobs=21 is above"),
        ([5], SamplingParams(logit_bias={288: 1}), "logit_bias=288 is not in the vocabulary"),
        ([5], SamplingParams(allowed_token_ids=[288]), "allowed_token_ids=288 is not in the vocabulary"),
        ([5], SamplingParams(stop_token_ids=[300]), "stop_token_ids=300 is not in the vocabulary"),
        ([5] * 128, SamplingParams(), "the prompt has 128 tokens, which leaves no room .* max_model_len=128"),
        ([5] * 120, SamplingParams(max_tokens=9), "120 tokens .* max_tokens=9 are 129, more than max_model_len=128"),
    ],
)
def test_a_bad_request_is_refused_and_leaves_nothing(engine, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", prompt, params)
    assert not engine.has_unfinished
    assert engine.scheduler.num_waiting == 0
    assert tokens_of(serve(engine, (PROMPT, GREEDY))[0]) == TOKENS


def test_what_the_pool_can_never_hold_is_refused_and_what_it_can_is_served(llm):
    engine = fresh_engine(llm, num_blocks=10)
    with pytest.raises(ValueError, match="need 11 KV blocks, but the whole pool has 10; lower max_tokens to 11"):
        engine.add_request("bad", PROMPT, SamplingParams(max_tokens=12))
    with pytest.raises(ValueError, match="81 tokens, but the whole KV pool has 10 blocks of 8"):
        engine.add_request("bad", tiny.prompt(81), SamplingParams(max_tokens=1))
    (output,) = serve(engine, (PROMPT, SamplingParams(temperature=0, max_tokens=11)))
    assert tokens_of(output) == TOKENS[:11]


def test_an_id_of_a_running_request_is_refused_and_that_one_goes_on(engine):
    completion = engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="request_id='a' is in use by a request that still runs; choose another"):
        engine.add_request("a", [5], GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert tokens_of(completion.output()) == TOKENS


def test_stats_add_up(engine):
    zero = engine.cache_stats()
    assert (zero.num_blocks, zero.block_size, zero.num_steps, zero.slots_held_share) == (24, 8, 0, 0)
    serve(engine, (tiny.prompt(8), SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)))
    stats = engine.cache_stats()
    # One step of 8 tokens in 1 block, eight of 9 to 16 tokens in 2, one of 17 in 3: the tenth token is never computed.
    assert stats.num_steps == 10
    assert stats.peak_blocks_used == 3
    assert stats.slots_held_share == pytest.approx((8 + sum(range(9, 17)) + 17) / (8 * (1 + 2 * 8 + 3)))
    assert (stats.num_blocks_used, stats.num_preemptions) == (0, 0)


CATALOGUE = [
    (tiny.prompt(1), GREEDY),
    (PROMPT, GREEDY),
    (tiny.prompt(20), SAMPLED),
    (tiny.prompt(66, 1), SamplingParams(seed=2, max_tokens=20, logprobs=2, prompt_logprobs=1)),
    (tiny.prompt(30, 2), SamplingParams(temperature=0, max_tokens=30, presence_penalty=1, frequency_penalty=0.3)),
    (tiny.prompt(7, 3), SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3, max_tokens=50)),
    (tiny.prompt(12, 4), SamplingParams(seed=4, max_tokens=25, logit_bias={EOS: 4.0}, min_tokens=6)),
    (tiny.prompt(3, 5), SamplingParams(seed=15, max_tokens=40, stop=["a", "the"], repetition_penalty=1.3)),
    (tiny.prompt(40, 6), SamplingParams(seed=6, max_tokens=8, allowed_token_ids=range(40, 60))),
    (tiny.prompt(16, 7), SamplingParams(seed=7, max_tokens=30, bad_words=["s", "user"], stop_token_ids=[50, 60])),
    (tiny.prompt(9, 8), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
    (tiny.prompt(19, 9), SamplingParams(n=3, seed=9, max_tokens=30, ignore_eos=True)),
    (tiny.prompt(30, 2), SamplingParams(n=6, seed=15, max_tokens=20, stop=["a", "e"], logprobs=1)),
]


def test_random_adds_aborts_and_steps(llm):
    """Whatever happens around a request, it gives what it gives alone."""
    alone = [serve(fresh_engine(llm), request)[0] for request in CATALOGUE]
    engine = fresh_engine(llm, num_blocks=18)
    rng = random.Random(0)
    running = {}
    for i in range(200):
        choice = rng.random()
        if choice < 0.3:
            kind = rng.randrange(len(CATALOGUE))
            running[str(i)] = (kind, engine.add_request(str(i), *CATALOGUE[kind]))
        elif choice < 0.36 and running:
            engine.abort_request(name := rng.choice(list(running)))
            kind, completion = running.pop(name)
            done = tokens_of(completion.output())
            assert done == tokens_of(alone[kind])[: len(done)]
        else:
            engine.step()
        engine.scheduler.check_integrity()
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    ended = list(running.values())
    assert len(ended) > 30
    assert len({kind for kind, _ in ended}) == len(CATALOGUE)
    assert sum(c.sequence.num_preemptions for _, c in ended) > 5
    for kind, completion in ended:
        check_same(completion.output(), alone[kind])
    assert engine.scheduler.blocks.num_used == 0


def check_same(output, expected):
    for mine, theirs in zip(output.outputs, expected.outputs, strict=True):
        assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    for a, b in zip(output.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
        assert (a is None) == (b is None)
        assert a is None or [(i, pytest.approx(x.logprob, abs=1e-4)) for i, x in a.items()] == [
            (i, x.logprob) for i, x in b.items()
        ]


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 60])
def test_a_prefix_hit_equals_a_miss(llm, length):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    engine, prompt = fresh_engine(llm), tiny.prompt(length)
    (miss,) = serve(engine, (prompt, params))
    (hit,) = serve(engine, (prompt, params))
    size = engine.scheduler.config.block_size
    assert (miss.num_cached_tokens, hit.num_cached_tokens) == (0, (length - 1) // size * size)
    assert tokens_of(hit) == tokens_of(miss)
    for one, other in zip(hit.outputs[0].logprobs, miss.outputs[0].logprobs, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_allclose([x.logprob for x in one.values()], [x.logprob for x in other.values()], atol=1e-4)
    engine.reset_prefix_cache()
    (again,) = serve(engine, (prompt, params))
    assert again.num_cached_tokens == 0
    stats = engine.cache_stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (3 * length, hit.num_cached_tokens)


def test_identical_prompts_at_once_give_the_same_and_are_computed_once(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = serve(fresh_engine(llm), *[(tiny.prompt(40), params)] * 32)
    assert len({tuple(tokens_of(output)) for output in outputs}) == 1
    assert [output.num_cached_tokens for output in outputs] == [0] + [32] * 31


def test_prompt_logprobs_pass_the_cache_by(llm):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
    engine = fresh_engine(llm)
    first, second = (serve(engine, (tiny.prompt(40), params))[0] for _ in range(2))
    assert second.num_cached_tokens == 0
    assert len(second.prompt_logprobs) == 40
    assert [set(x) for x in second.prompt_logprobs[1:]] == [set(x) for x in first.prompt_logprobs[1:]]


def test_salts_keep_tenants_apart(llm):
    engine = fresh_engine(llm)
    cached = []
    for i, salt in enumerate([None, None, "a", "a", "b", "", None]):
        completion = engine.add_request(str(i), tiny.prompt(40), SamplingParams(max_tokens=1), cache_salt=salt)
        while engine.has_unfinished:
            engine.step()
        cached.append(completion.output().num_cached_tokens)
    assert cached == [0, 32, 0, 32, 0, 0, 32]
    with pytest.raises(ValueError, match="cache_salt=5 must be a string, or None"):
        engine.add_request("x", [5], SamplingParams(), cache_salt=5)


class Interrupts:
    """Ctrl-C, as it were, at the n-th of the lines that the engine's own modules run."""

    MODULES = ("/engine.py", "/scheduler.py", "/block_manager.py", "/completion.py")

    def __init__(self, *lines: int) -> None:
        self._left = list(lines)
        self._seen = 0
        self.num_came = 0

    def __enter__(self):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interrupts")
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.LINE, self._line)
        monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.LINE)
        return self

    def __exit__(self, kind, *_):
        sys.monitoring.set_events(sys.monitoring.DEBUGGER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)
        return kind is KeyboardInterrupt

    def _line(self, code, _):
        if code.co_filename.endswith(self.MODULES):
            self._seen += 1
            if self._left and self._seen >= self._left[0]:
                del self._left[0]
                self.num_came += 1
                raise KeyboardInterrupt


OPERATIONS = {
    "add": lambda engine: engine.add_request("new", tiny.prompt(30, 9), LONG),
    "abort": lambda engine: engine.abort_request("0"),
    "step": lambda engine: engine.step(),
}


@pytest.mark.parametrize("again", [None, 3, 10])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_an_engine_that_serves(llm, operation, again):
    """The second one comes while the engine puts itself in order after the first."""
    most = 0
    for line in range(1, 200, 4 if again else 1):
        engine = fresh_engine(llm)
        for i in range(3):
            engine.add_request(str(i), tiny.prompt(20, i), LONG)
        engine.step()
        engine.step()
        with Interrupts(line, *([line + again] if again else [])) as interrupts:
            OPERATIONS[operation](engine)
        (output,) = serve_alone(engine, (PROMPT, GREEDY))
        assert tokens_of(output) == TOKENS
        most = max(most, interrupts.num_came)
        if not interrupts.num_came:
            break
    assert line > 4
    assert most == (2 if again else 1)


def serve_alone(engine, *requests):
    """As `serve`, after whatever is left of others has been aborted."""
    for i in ("0", "1", "2", "new"):
        engine.abort_request(i)
    assert not engine.has_unfinished
    engine.scheduler.check_integrity()
    return serve(engine, *requests)


def test_a_salt_may_be_any_string(llm):
    engine = fresh_engine(llm)
    for i, salt in enumerate(["\ud800", "\0", "é" * 1000]):
        engine.add_request(str(i), tiny.prompt(30), SamplingParams(max_tokens=2), cache_salt=salt)
    while engine.has_unfinished:
        engine.step()
