"""Several samples of a prompt through the whole engine: each is what a request of its own gives, in shared blocks."""

import asyncio
import dataclasses
import itertools

import pytest
import tiny
from test_engine import Interrupts
from tiny import EOS, GREEDY, PROMPT, TOKENS, fresh_engine, serve, tokens_of

from jaxpaged import SamplingParams
from jaxpaged.async_engine import AsyncEngine

N = 4
PLAIN = SamplingParams(n=N, seed=7, max_tokens=20, ignore_eos=True)
KINDS = {
    "plain": (tiny.prompt(20), PLAIN),
    "full blocks": (tiny.prompt(24), PLAIN),
    "one token": (tiny.prompt(1), PLAIN),
    "in chunks": (tiny.prompt(70, 1), dataclasses.replace(PLAIN, max_tokens=6)),
    "logprobs": (tiny.prompt(30, 2), dataclasses.replace(PLAIN, max_tokens=8, logprobs=2, prompt_logprobs=1)),
    "penalties": (tiny.prompt(9, 3), dataclasses.replace(PLAIN, presence_penalty=1, repetition_penalty=1.2)),
    "stops": (tiny.prompt(11, 4), SamplingParams(n=N, seed=15, max_tokens=30, stop=["a", "e"], stop_token_ids=[50])),
    "bias": (tiny.prompt(12, 5), SamplingParams(n=N, seed=4, max_tokens=20, logit_bias={EOS: 4.0}, min_tokens=3)),
    "at its first token": (tiny.prompt(13, 6), SamplingParams(n=N, seed=2, allowed_token_ids=[EOS])),
    "max_tokens=1": (tiny.prompt(14, 7), dataclasses.replace(PLAIN, max_tokens=1)),
    "greedy": (PROMPT, dataclasses.replace(GREEDY, n=N, max_tokens=8)),
}
LIMITS = {
    "roomy": {},
    "fewer places": {"max_num_seqs": 3, "max_num_batched_tokens": 7},
    "one place": {"max_num_seqs": 1},
    "no cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
    "little memory": {"num_blocks": 12},
}


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture
def engine(llm):
    return fresh_engine(llm)


@pytest.fixture(scope="module")
def alone(tiny_llm):
    """What the samples of each kind give as requests of their own."""

    def ones(prompt, params):
        seed = params.seed or 0
        requests = [(prompt, dataclasses.replace(params, n=1, seed=seed + i)) for i in range(N)]
        return serve(fresh_engine(tiny_llm), *requests)

    return {kind: ones(*request) for kind, request in KINDS.items()}


def check_samples(output, ones):
    assert [o.index for o in output.outputs] == list(range(N))
    assert output.finished
    for sample, one in zip(output.outputs, ones, strict=True):
        expected = one.outputs[0]
        assert (sample.token_ids, sample.text) == (expected.token_ids, expected.text)
        assert (sample.finish_reason, sample.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert sample.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
        assert (sample.logprobs is None) == (expected.logprobs is None)
        check_ratings(sample.logprobs or [], expected.logprobs or [])
    rated, expected = output.prompt_logprobs, ones[0].prompt_logprobs
    assert (rated is None) == (expected is None)
    for entry, other in list(zip(rated or [], expected or [], strict=True))[1:]:
        assert {k: pytest.approx(v.logprob, abs=1e-4) for k, v in entry.items()} == {
            k: v.logprob for k, v in other.items()
        }


def check_ratings(entries, expected):
    for entry, other in zip(entries, expected, strict=True):
        logprobs = {token: rating.logprob for token, rating in other.items()}
        assert {token: rating.logprob for token, rating in entry.items()} == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("limits", LIMITS)
def test_each_sample_is_what_a_request_with_its_seed_gives(llm, alone, limits):
    engine = fresh_engine(llm, **LIMITS[limits])
    for output, ones in zip(serve(engine, *KINDS.values()), alone.values(), strict=True):
        check_samples(output, ones)
    assert (engine.cache_stats().num_preemptions > 0) == (limits == "little memory")


def test_samples_differ(alone):
    for kind in ("plain", "full blocks", "one token", "penalties"):
        assert len({tuple(tokens_of(one)) for one in alone[kind]}) == N


def test_without_a_seed_the_first_sample_is_what_one_gives(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (one,) = serve(fresh_engine(llm), (PROMPT, params))
    (several,) = serve(fresh_engine(llm), (PROMPT, dataclasses.replace(params, n=3)))
    assert several.outputs[0] == one.outputs[0]
    assert len({tuple(o.token_ids) for o in several.outputs}) == 3


def test_the_blocks_of_the_prompt_are_held_once(llm):
    """60 tokens lie in 7 full blocks and half of an eighth, which is copied for all samples but one."""
    params = dataclasses.replace(PLAIN, max_tokens=6)  # 5 of which are computed: 65 tokens, 9 blocks of a sequence
    together = fresh_engine(llm)
    serve(together, (tiny.prompt(60), params))
    assert together.cache_stats().peak_blocks_used == 7 + N * 2
    assert together.step_stats().num_tokens == 60 + N * 5
    apart = fresh_engine(llm, enable_prefix_caching=False)
    one = dataclasses.replace(params, n=1)
    serve(apart, (tiny.prompt(60), one), (tiny.prompt(60), one))
    assert apart.cache_stats().peak_blocks_used == 2 * 9


def test_more_samples_than_places_are_served_in_turn(llm):
    engine = fresh_engine(llm)
    (output,) = serve(engine, (tiny.prompt(20), dataclasses.replace(PLAIN, n=11, max_tokens=5)))
    assert len({tuple(o.token_ids) for o in output.outputs}) == 11
    assert (output.num_cached_tokens, engine.cache_stats().num_prompt_tokens) == (0, 20)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 8])
def test_an_abort_ends_all_samples_whatever_they_do(llm, num_steps):
    engine = fresh_engine(llm, max_num_seqs=3, max_num_batched_tokens=16)
    completion = engine.add_request("a", tiny.prompt(20), dataclasses.replace(PLAIN, n=5))
    for _ in range(num_steps):
        engine.step()
    engine.abort_request("a")
    engine.scheduler.check_integrity()
    assert [o.finish_reason for o in completion.output().outputs] == ["abort"] * 5
    assert not engine.has_unfinished
    assert (engine.scheduler.blocks.num_used, engine.scheduler.num_waiting) == (0, 0)
    follower = engine.add_request("a", PROMPT, dataclasses.replace(GREEDY, n=2))  # the old ones' step is in flight
    while engine.has_unfinished:
        engine.step()
    assert [o.token_ids for o in follower.output().outputs] == [TOKENS] * 2
    assert completion.output().outputs[4].token_ids == []


def test_samples_end_one_by_one_and_the_request_with_the_last(engine):
    params = SamplingParams(n=N, seed=15, max_tokens=30, stop=["a", "e"])
    completion = engine.add_request("a", tiny.prompt(11, 4), params)
    ended = []
    while engine.has_unfinished:
        ended += [c.sequence.index for c in engine.step() if c.finish_reason is not None]
        output = completion.output()
        assert output.finished == (len(ended) == N)
        assert completion.num_read == sum(len(o.token_ids) for o in output.outputs)
        assert engine.is_running("a") == (len(ended) < N)
    assert sorted(ended) == list(range(N))
    assert len({len(o.token_ids) for o in completion.output().outputs}) > 1


@pytest.mark.parametrize("operation", ["add", "abort", "fork", "copy"])
def test_an_interrupt_at_any_line_leaves_an_engine_that_serves(llm, operation):
    line, came = 1, True
    golden = dataclasses.replace(GREEDY, n=2, max_tokens=3)
    while came:
        engine = fresh_engine(llm)
        engine.add_request("0", tiny.prompt(20), dataclasses.replace(PLAIN, n=3))
        for _ in range({"fork": 0, "copy": 1}.get(operation, 2)):
            engine.step()
        with Interrupts(line) as interrupts:
            if operation == "add":
                engine.add_request("1", tiny.prompt(9), dataclasses.replace(PLAIN, n=2))
            elif operation == "abort":
                engine.abort_request("0")
            else:
                engine.step()
        for name in ("0", "1"):
            engine.abort_request(name)
        assert not engine.has_unfinished
        engine.scheduler.check_integrity()
        (output,) = serve(engine, (PROMPT, golden))
        assert [o.token_ids for o in output.outputs] == [TOKENS[:3]] * 2
        came = interrupts.num_came > 0
        line += 5
        assert line < 1500
    assert line > 20


def test_streamed_pieces_carry_their_sample(llm):
    params = dataclasses.replace(PLAIN, max_tokens=10)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    texts = [""] * N
    order = []
    for piece in llm.stream(PROMPT, params):
        texts[piece.index] += piece
        order.append(piece.index)
    assert texts == [o.text for o in output.outputs]
    assert order != sorted(order), "the samples run at once"


def test_chat_and_the_progress_bar(llm, capsys):
    params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
    conversation = [{"role": "user", "content": "the end?"}]
    first, second = llm.chat([conversation, conversation], params)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len(first.outputs) == 3
    assert "2/2" in capsys.readouterr().err


def test_async_outputs_grow_sample_by_sample(llm):
    params = SamplingParams(n=5, seed=15, max_tokens=30, stop=["a", "e"])
    (expected,) = llm.generate([tiny.prompt(11, 4)], params, use_tqdm=False)

    async def main():
        async with AsyncEngine(fresh_engine(llm)) as engine:
            outputs = []
            async for output in engine.generate(tiny.prompt(11, 4), params):
                outputs.append(output)
                assert len(outputs) <= 2 * 30 + 1, "as many as steps bring a token, and the last"
            long = dataclasses.replace(PLAIN, n=5, max_tokens=100)
            ended = asyncio.create_task(anext(engine.generate(tiny.prompt(20), long, only_final=True)))
            while not engine.num_requests:
                await asyncio.sleep(0)
            engine.abort("request-1")
            aborted = await ended
        return outputs, aborted, engine.engine.scheduler.blocks.num_used

    outputs, aborted, num_used = asyncio.run(asyncio.wait_for(main(), 30))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        grown = [
            (a.text, a.token_ids) == (b.text[: len(a.text)], b.token_ids[: len(a.token_ids)])
            for a, b in zip(earlier.outputs, later.outputs, strict=True)
        ]
        assert all(grown)
    assert any({o.finish_reason is None for o in output.outputs} == {True, False} for output in outputs), (
        "some have ended before others"
    )
    assert outputs[-1].outputs == expected.outputs
    assert [o.finish_reason for o in aborted.outputs] == ["abort"] * 5
    assert num_used == 0
