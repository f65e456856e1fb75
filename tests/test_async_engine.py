"""The asyncio front on a tiny model: the same tokens as in-process, and whatever happens, nothing hangs or leaks.

`Gate` holds the engine before each step until the test lets it go on, so that a request can be caught in any phase.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import threading
import time

import pytest
import tiny
from tiny import EOS, GREEDY, PROMPT, TOKENS, fresh_engine, tokens_of

from jaxpaged import SamplingParams, async_engine
from jaxpaged.async_engine import AsyncEngine, EngineClosedError, EngineDeadError
from jaxpaged.completion import Completion
from jaxpaged.request import Status

SHORT = tiny.prompt(5)
SAMPLED = SamplingParams(temperature=1, seed=7, max_tokens=40, ignore_eos=True)
CATALOGUE = [
    (tiny.prompt(1), GREEDY),
    (PROMPT, GREEDY),
    ("the user and the system", SamplingParams(temperature=0, max_tokens=30)),
    (tiny.prompt(20), SAMPLED),
    (tiny.prompt(66, 1), SamplingParams(seed=2, max_tokens=20, logprobs=2, prompt_logprobs=1)),
    (tiny.prompt(30, 2), SamplingParams(temperature=0, max_tokens=30, presence_penalty=1)),
    (tiny.prompt(12, 4), SamplingParams(seed=4, max_tokens=25, logit_bias={EOS: 4.0}, min_tokens=6)),
    (tiny.prompt(3, 5), SamplingParams(seed=15, max_tokens=40, stop=["a", "the"])),
]


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture(scope="module")
def alone(tiny_llm):
    """What each request of the catalogue gives in-process, without neighbours."""
    return [tiny_llm.generate([p], params, use_tqdm=False)[0] for p, params in CATALOGUE]


def run(coroutine):
    """Runs a test's coroutine to its end; one that hangs fails."""

    async def limited():
        async with asyncio.timeout(20):
            await coroutine

    asyncio.run(limited())


@contextlib.asynccontextmanager
async def serving(llm, **limits):
    """An AsyncEngine on an engine of its own, whose books are in order at the end."""
    engine = AsyncEngine(fresh_engine(llm, **limits))
    async with engine:
        yield engine
    assert_left_empty(engine)
    assert not engine.is_alive


def assert_left_empty(engine):
    assert engine.num_requests == 0
    assert not engine.engine.has_unfinished
    assert engine.engine.scheduler.blocks.num_used == 0
    engine.engine.scheduler.check_integrity()


async def collect(iterator):
    return [output async for output in iterator]


async def last_of(iterator):
    return (await collect(iterator))[-1]


class Gate:
    """Counts the engine's steps, and lets it make no more than it was given."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.num_steps = 0
        self._num_begun = 0
        self._allowed = threading.Semaphore(0)
        self._open = False
        self._engine = engine
        self._step = engine.engine.step
        engine.engine.step = self._gated

    def _gated(self):
        self._num_begun += 1
        assert self._open or self._allowed.acquire(timeout=15), "the test has forgotten the engine"
        advanced = self._step()
        self.num_steps += 1
        return advanced

    async def let(self, num_steps: int) -> None:
        """Lets the engine make these steps, and waits until it stands before the next one or has nothing to do."""
        wanted = self.num_steps + num_steps
        self._allowed.release(num_steps)
        while self.num_steps < wanted or not (self._num_begun > wanted or self._engine.stalled_for == 0):
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self._open = True
        self._allowed.release()


# --- what is served


def check_same(output, expected):
    mine, theirs = output.outputs[0], expected.outputs[0]
    assert (output.prompt, output.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
    assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
    assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    assert (mine.logprobs is None, output.prompt_logprobs is None) == (
        theirs.logprobs is None,
        expected.prompt_logprobs is None,
    )


def test_many_streams_at_once_give_what_generate_gives(llm, alone):
    async def main():
        async with serving(llm, num_blocks=20) as engine:
            kinds = [i % len(CATALOGUE) for i in range(40)]
            streams = await asyncio.gather(*(collect(engine.generate(*CATALOGUE[kind])) for kind in kinds))
        for kind, outputs in zip(kinds, streams, strict=True):
            check_same(outputs[-1], alone[kind])
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            for earlier, later in itertools.pairwise(outputs):
                assert tokens_of(later)[: len(tokens_of(earlier))] == tokens_of(earlier)
                assert later.outputs[0].text.startswith(earlier.outputs[0].text)
        assert sum(len(outputs) for outputs in streams) > 40 * 5
        assert any(outputs[-1].num_preemptions for outputs in streams)
        assert len({outputs[-1].request_id for outputs in streams}) == 40

    run(main())


def test_every_output_is_a_whole_state(llm, monkeypatch):
    """Readers make outputs beside the thread that changes them: text, ids and ratings must be of one moment."""
    kinds = [2, 4, 6, 7]
    states = [states_of(llm, *CATALOGUE[kind]) for kind in kinds]
    append = Completion.append
    pause = random.Random(0)

    def slow_append(*args):
        time.sleep(0.001)  # the sequence has the token, and the completion has not
        return append(*args)

    monkeypatch.setattr(Completion, "append", slow_append)

    async def read(engine, kind, expected):
        async for output in engine.generate(*CATALOGUE[kind]):
            assert state(output) == expected[len(tokens_of(output))]
            await asyncio.sleep(pause.random() * 0.006)

    async def main():
        async with serving(llm) as engine:
            await asyncio.gather(*(read(engine, kind, states[i]) for i, kind in enumerate(kinds)))

    run(main())


def state(output):
    o = output.outputs[0]
    logprobs = None if o.logprobs is None else [list(entry) for entry in o.logprobs]
    return o.text, o.token_ids, logprobs, o.finish_reason, pytest.approx(o.cumulative_logprob, abs=1e-3)


def states_of(llm, prompt, params):
    """What a request has come to after each of its tokens, by their number."""
    engine = fresh_engine(llm)
    completion = engine.add_request("alone", prompt, params)
    states = {}
    while engine.has_unfinished:
        engine.step()
        states[len(completion.sequence.output_token_ids)] = state(completion.output())
    return states


def test_two_hundred_requests_at_once(llm):
    async def main():
        async with serving(llm) as engine:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            outputs = await asyncio.gather(*(last_of(engine.generate(PROMPT, params)) for _ in range(200)))
        assert [tokens_of(o) for o in outputs] == [TOKENS[:4]] * 200

    run(main())


def test_only_the_final_output_where_no_other_is_wanted(llm):
    async def main():
        async with serving(llm) as engine:
            (output,) = await collect(engine.generate(PROMPT, GREEDY, only_final=True))
        assert (tokens_of(output), output.finished) == (TOKENS, True)

    run(main())


def test_parameters_default_to_those_of_sampling_params(llm):
    async def main():
        async with serving(llm) as engine:
            output = await last_of(engine.generate("the user"))
        assert 0 < len(tokens_of(output)) <= SamplingParams().max_tokens

    run(main())


def test_a_long_text_is_tokenised_beside_the_event_loop(llm, monkeypatch):
    threads = []
    encode = llm.engine.tokenizer.encode
    monkeypatch.setattr(
        llm.engine.tokenizer, "encode", lambda x: threads.append(threading.current_thread()) or encode(x)
    )
    monkeypatch.setattr(async_engine, "_LONG_TEXT", 10)

    async def main():
        async with serving(llm) as engine:
            for text in ("short", "a text of some length"):
                assert (await last_of(engine.generate(text, GREEDY))).prompt == text

    run(main())
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


def test_an_id_is_free_again_as_soon_as_its_last_output_is_there(llm):
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

    async def main():
        async with serving(llm) as engine:
            for _ in range(100):
                output = await last_of(engine.generate(PROMPT, params, "mine"))
                assert output.request_id == "mine"

    run(main())


# --- the two threads


def test_a_slow_reader_finds_the_newest_state_and_skips_the_others(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            stream = engine.generate(PROMPT, GREEDY)
            first = asyncio.create_task(anext(stream))
            while engine.num_requests == 0:
                await asyncio.sleep(0)
            await gate.let(3)  # two chunks of the prompt, and the step that reads the first token
            assert tokens_of(await first) == TOKENS[:1]
            await gate.let(7)
            assert tokens_of(await anext(stream)) == TOKENS[:8]
            gate.open()
            while engine.num_requests:
                await asyncio.sleep(0.001)
            assert [tokens_of(o) for o in await collect(stream)] == [TOKENS]  # the last, and no other

    run(main())


def test_the_event_loop_is_called_once_a_step_however_many_advance(llm, monkeypatch):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            gate.open()
            calls = []
            loop = asyncio.get_running_loop()
            threadsafe = loop.call_soon_threadsafe
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *x: calls.append(x) or threadsafe(*x))
            streams = await asyncio.gather(*(collect(engine.generate(SHORT, GREEDY)) for _ in range(4)))
            assert sum(map(len, streams)) > 2 * gate.num_steps
            assert len(calls) <= gate.num_steps

    run(main())


def test_an_event_loop_that_stands_still_is_called_once_and_piles_nothing_up(llm, monkeypatch):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            calls = []
            loop = asyncio.get_running_loop()
            threadsafe = loop.call_soon_threadsafe
            monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *x: calls.append(x) or threadsafe(*x))
            tasks = [asyncio.create_task(collect(engine.generate(PROMPT, GREEDY))) for _ in range(4)]
            while engine.num_requests < 4:
                await asyncio.sleep(0)
            gate.open()
            until = time.monotonic() + 10
            while engine.num_requests and time.monotonic() < until:
                time.sleep(0.001)  # the loop is not running
            assert len(calls) == 1
            for outputs in await asyncio.gather(*tasks):
                assert [tokens_of(o) for o in outputs] == [TOKENS]

    run(main())


def test_the_thread_sleeps_when_idle_and_wakes_for_work(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            gate.open()
            await last_of(engine.generate(PROMPT, GREEDY))
            steps = gate.num_steps
            await asyncio.sleep(0.05)
            assert gate.num_steps == steps
            assert tokens_of(await last_of(engine.generate(PROMPT, GREEDY))) == TOKENS
            assert gate.num_steps > steps

    run(main())


def test_a_burst_of_arrivals_is_let_in_over_several_steps(llm, monkeypatch):
    monkeypatch.setattr(async_engine, "_LET_IN_SECONDS", 0)

    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            tasks = [asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY))) for _ in range(3)]
            while engine.num_requests < 3:
                await asyncio.sleep(0)
            await gate.let(1)
            assert engine.engine.scheduler.num_running == 1
            await gate.let(1)
            assert engine.engine.scheduler.num_running == 2
            gate.open()
            assert [tokens_of(o) for o in await asyncio.gather(*tasks)] == [TOKENS] * 3

    run(main())


def test_the_heartbeat_tells_a_step_that_hangs_from_an_idle_engine(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            await asyncio.sleep(0.02)
            assert engine.stalled_for == 0
            began = time.monotonic()
            task = asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY)))
            await asyncio.sleep(0.05)
            assert 0.01 < engine.stalled_for <= time.monotonic() - began
            at = engine.last_step_at
            assert at >= began
            await gate.let(1)
            await asyncio.sleep(0.01)
            assert at < engine.last_step_at < time.monotonic()
            gate.open()
            await task
            await asyncio.sleep(0.02)
            assert engine.stalled_for == 0
            assert engine.is_alive

    run(main())


# --- requests that are ended


async def left_in(engine: AsyncEngine, gate: Gate, phase: str):
    """Requests of which the last, called "victim", is in the phase; returns the others' tasks and the victim's."""
    num_others = 2 if phase == "waiting" else 1
    others = [asyncio.create_task(last_of(engine.generate(SHORT, GREEDY))) for _ in range(num_others)]
    while engine.engine.scheduler.num_waiting == 0:  # the first has begun, and the engine waits in its step
        await asyncio.sleep(0.001)
    prompt = tiny.prompt(10) if phase == "decode" else tiny.prompt(70)
    victim = asyncio.create_task(collect(engine.generate(prompt, SAMPLED, "victim")))
    while engine.num_requests <= num_others:
        await asyncio.sleep(0)
    while not is_in(phase, engine._streams["victim"].completion):
        assert gate.num_steps < 15
        await gate.let(1)
    return others, victim


def is_in(phase, completion) -> bool:
    if completion is None:
        return phase == "arriving"
    sequence = completion.sequence
    return {
        "arriving": False,
        "waiting": sequence.status is Status.WAITING,
        "prefill": 0 < sequence.num_computed < 70,
        "decode": len(sequence.output_token_ids) > 1 and sequence.num_in_flight == 1,
    }[phase]


@pytest.mark.parametrize("phase", ["arriving", "waiting", "prefill", "decode"])
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_a_request_that_is_ended_in_any_phase_leaves_no_block(llm, phase, how):
    async def main():
        async with serving(llm, max_num_seqs=2, max_num_batched_tokens=16) as engine:
            gate = Gate(engine)
            others, victim = await left_in(engine, gate, phase)
            if how == "abort":
                engine.abort("victim")
                engine.abort("victim")  # a second time is nothing
            else:
                victim.cancel()
            await asyncio.sleep(0.01)
            await gate.let(2)  # the step that was under way, and one after the boundary
            assert "victim" not in engine._streams
            assert "victim" not in engine.engine._completions
            if phase == "waiting":
                assert engine.engine.scheduler.num_running == 2
            held = engine.engine.scheduler.blocks.num_used
            assert held == sum(len(s.completion.sequence.block_table) for s in engine._streams.values())
            gate.open()
            if how == "abort":
                last = (await victim)[-1]
                assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
                assert bool(tokens_of(last)) == (phase == "decode")
            else:
                with pytest.raises(asyncio.CancelledError):
                    await victim
            assert [tokens_of(o) for o in await asyncio.gather(*others)] == [expected] * len(others)

    expected = tokens_of(llm.generate([SHORT], GREEDY, use_tqdm=False)[0])
    run(main())


@pytest.mark.parametrize("how", ["close", "forget", "break"])
def test_an_iterator_that_is_closed_or_forgotten_ends_its_request(llm, how):
    async def main():
        async with serving(llm) as engine:
            stream = engine.generate(PROMPT, SAMPLED)
            await anext(stream)
            if how == "close":
                await stream.aclose()
                await stream.aclose()
            elif how == "break":
                async for _ in stream:
                    break
            del stream
            gc.collect()
            while engine.num_requests:
                await asyncio.sleep(0.001)
            assert engine.engine.scheduler.blocks.num_used == 0
            await engine.generate(PROMPT, SAMPLED).aclose()  # never begun
            assert tokens_of(await last_of(engine.generate(PROMPT, GREEDY))) == TOKENS

    run(main())


def test_an_abort_of_what_is_not_there_is_nothing(llm):
    async def main():
        async with serving(llm) as engine:
            engine.abort("unknown")
            await last_of(engine.generate(PROMPT, GREEDY, "ended"))
            engine.abort("ended")
            assert tokens_of(await last_of(engine.generate(PROMPT, GREEDY, "ended"))) == TOKENS

    run(main())


def test_a_bad_request_that_is_aborted_before_the_engine_has_seen_it_is_refused(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            good = asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY)))
            await asyncio.sleep(0.02)
            bad = asyncio.create_task(last_of(engine.generate([5], SamplingParams(logprobs=21), "bad")))
            await asyncio.sleep(0)
            engine.abort("bad")
            engine.abort("bad")
            gate.open()
            with pytest.raises(ValueError, match="logprobs=21"):
                await bad
            assert tokens_of(await good) == TOKENS

    run(main())


def test_requests_cancelled_at_random_leave_the_others_as_they_are(llm, alone):
    async def main():
        rng = random.Random(0)
        async with serving(llm, num_blocks=20) as engine:
            kinds = [rng.randrange(len(CATALOGUE)) for _ in range(80)]
            tasks = [asyncio.create_task(last_of(engine.generate(*CATALOGUE[kind]))) for kind in kinds]
            doomed = rng.sample(tasks, 40)
            for task in doomed:
                await asyncio.sleep(rng.random() * 0.01)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            num_cancelled = 0
            for kind, task, result in zip(kinds, tasks, results, strict=True):
                if isinstance(result, asyncio.CancelledError):
                    assert task in doomed
                    num_cancelled += 1
                else:
                    check_same(result, alone[kind])
            assert num_cancelled > 10

    run(main())


# --- what is refused


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (5, None, "prompt=5 must be text or a list of token ids"),
        (None, None, "prompt=None must be text or a list of token ids"),
        (b"text", None, "prompt=b'text' must be text or a list of token ids"),
        ("", None, "prompt='' has no tokens; give at least one"),
        ([], None, r"prompt=\[\] has no tokens"),
        ([5, 288], None, r"prompt\[1\]=288 must be a token id from 0 to 287"),
        ([5] * 128, None, "the prompt has 128 tokens, which leaves no room for output in max_model_len=128"),
        ([5] * 100, SamplingParams(max_tokens=50), "more than max_model_len=128; shorten the prompt"),
        ("\ud800", None, "prompt"),
        (PROMPT, 5, "sampling_params=5 must be a SamplingParams"),
        (PROMPT, SamplingParams(logprobs=21), "logprobs=21 is above the engine's max_logprobs=20"),
        (PROMPT, SamplingParams(stop_token_ids=[288]), "stop_token_ids"),
    ],
)
def test_a_bad_request_is_its_own_callers_error(llm, prompt, params, message):
    async def main():
        async with serving(llm) as engine:
            good = asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY)))
            with pytest.raises(ValueError, match=message):
                await anext(engine.generate(prompt, params))
            assert tokens_of(await good) == TOKENS
            assert engine.is_alive

    run(main())


def test_a_cache_salt_goes_along(llm, monkeypatch):
    async def main():
        async with serving(llm) as engine:
            salts = []
            add = engine.engine.add_request
            monkeypatch.setattr(engine.engine, "add_request", lambda *args: salts.append(args[3:]) or add(*args))
            for salt in (None, "pepper"):
                assert tokens_of(await last_of(engine.generate(PROMPT, GREEDY, cache_salt=salt))) == TOKENS
            assert salts == [(None,), ("pepper",)]
            with pytest.raises(ValueError, match="cache_salt=5 must be a string"):
                await anext(engine.generate(PROMPT, GREEDY, cache_salt=5))

    run(main())


def test_an_id_that_is_in_use_or_no_string_is_refused(llm):
    async def main():
        async with serving(llm) as engine:
            first = engine.generate(PROMPT, GREEDY, "a")
            await anext(first)
            with pytest.raises(ValueError, match="request_id='a' is in use by a request that still runs"):
                await anext(engine.generate(PROMPT, GREEDY, "a"))
            with pytest.raises(ValueError, match="request_id=5 must be a string"):
                await anext(engine.generate(PROMPT, GREEDY, 5))
            assert tokens_of(await last_of(first)) == TOKENS  # as if nothing had been

    run(main())


# --- the end


@pytest.mark.parametrize("failing", ["step", "dispatch", "read"])
def test_a_step_that_raises_ends_all_readers_with_its_error(llm, monkeypatch, failing):
    def broken(*_):
        raise FloatingPointError("the device is on fire")

    async def main():
        engine = AsyncEngine(fresh_engine(llm))
        engine.start()
        tasks = [asyncio.create_task(collect(engine.generate(PROMPT, SAMPLED))) for _ in range(8)]
        begun = engine.generate(PROMPT, SAMPLED)
        await anext(begun)
        with monkeypatch.context() as patch:
            if failing == "read":
                patch.setattr("jaxpaged.runner.StepHandle.read", broken)
            else:
                owner = engine.engine if failing == "step" else engine.engine.runner
                patch.setattr(owner, failing, broken)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            with pytest.raises(EngineDeadError):
                await collect(begun)
        assert [type(e) for e in errors] == [EngineDeadError] * 8
        assert len(set(map(id, errors))) == 8  # each reader may add its own traceback
        assert "FloatingPointError: the device is on fire" in str(errors[0])
        assert errors[0].__cause__ is engine.dead_error
        assert isinstance(engine.dead_error, FloatingPointError)
        with pytest.raises(EngineDeadError, match="the device is on fire"):
            await anext(engine.generate(PROMPT, GREEDY))
        await engine.shutdown()
        assert not engine.is_alive
        assert_left_empty(engine)

    run(main())


def test_an_engine_that_somebody_else_steps_dies_and_says_why(llm):
    async def main():
        engine = AsyncEngine(fresh_engine(llm))
        engine.start()
        gate = Gate(engine)
        task = asyncio.create_task(collect(engine.generate(PROMPT, GREEDY)))
        await asyncio.sleep(0.02)
        while engine.engine.has_unfinished:
            gate._step()
        gate.open()
        with pytest.raises(EngineDeadError, match="somebody else steps the engine"):
            await task
        await engine.shutdown()
        assert_left_empty(engine)

    run(main())


def test_shutdown_lets_what_runs_end_and_takes_nothing_new(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            tasks = [asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY))) for _ in range(9)]
            while engine.num_requests < 9:
                await asyncio.sleep(0)
            await gate.let(3)
            stopping = asyncio.create_task(engine.shutdown())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosedError, match="shutting down"):
                await anext(engine.generate(PROMPT, GREEDY))
            gate.open()
            await stopping
            assert [tokens_of(o) for o in await asyncio.gather(*tasks)] == [TOKENS] * 9
            await engine.shutdown()  # a second time is nothing

    run(main())


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_shutdown_aborts_what_does_not_end_in_time(llm, timeout):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            tasks = [asyncio.create_task(last_of(engine.generate(SHORT, SAMPLED))) for _ in range(9)]
            while engine.num_requests < 9:
                await asyncio.sleep(0)
            await gate.let(5)
            stopping = asyncio.create_task(engine.shutdown(timeout))
            await asyncio.sleep(timeout + 0.02)
            await gate.let(1)
            await stopping
            outputs = await asyncio.gather(*tasks)
            assert {o.outputs[0].finish_reason for o in outputs} == {"abort"}
            assert [bool(tokens_of(o)) for o in outputs] == [True] * 4 + [False] * 5

    run(main())


def test_an_error_in_the_block_of_the_engine_aborts_what_runs(llm):
    async def main():
        engine = AsyncEngine(fresh_engine(llm))
        with contextlib.suppress(ZeroDivisionError):
            async with engine:
                task = asyncio.create_task(last_of(engine.generate(PROMPT, SAMPLED)))
                while engine.num_requests == 0:
                    await asyncio.sleep(0)
                raise ZeroDivisionError
        assert (await task).outputs[0].finish_reason == "abort"
        assert_left_empty(engine)

    run(main())


def test_shutdown_of_an_engine_that_hangs_says_so(llm, monkeypatch):
    monkeypatch.setattr(async_engine, "_LAST_STEP_SECONDS", 0.05)

    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            task = asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY)))
            await asyncio.sleep(0.02)
            with pytest.raises(TimeoutError, match="the engine hangs: its last step has not returned"):
                await engine.shutdown(0)
            gate.open()
            assert (await task).outputs[0].finish_reason == "abort"

    run(main())


def test_an_event_loop_that_ends_first_leaves_nothing_in_the_engine(llm):
    engine = AsyncEngine(fresh_engine(llm))
    kept = []

    async def main():
        engine.start()
        kept.append(engine.generate(PROMPT, SAMPLED))
        await anext(kept[0])

    run(main())  # which closes the generator
    until = time.monotonic() + 10
    while engine.num_requests and time.monotonic() < until:
        time.sleep(0.001)
    assert_left_empty(engine)


def test_an_event_loop_that_is_closed_in_the_middle_ends_the_thread(llm):
    engine = AsyncEngine(fresh_engine(llm))
    gate = Gate(engine)
    kept = []

    async def main():
        engine.start()
        kept.append(engine.generate(SHORT, SAMPLED))
        first = asyncio.create_task(anext(kept[0]))
        while not engine.num_requests:
            await asyncio.sleep(0)
        await gate.let(2)
        await first

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), 20))
    loop.close()
    gate.open()
    engine._thread.join(timeout=10)
    assert not engine.is_alive
    assert engine.dead_error is None
    assert_left_empty(engine)


@pytest.mark.parametrize("reading", [False, True])
def test_a_closed_event_loop_ends_the_thread_whether_it_sleeps_or_has_nothing_to_tell_yet(llm, monkeypatch, reading):
    monkeypatch.setattr(async_engine, "_IDLE_SECONDS", 0.01)
    engine = AsyncEngine(fresh_engine(llm))
    gate = Gate(engine)
    kept = []

    async def main():
        engine.start()
        if reading:  # whose reader would be told of the end alone
            kept.append(engine.generate(SHORT, SAMPLED, only_final=True))
            kept.append(asyncio.ensure_future(anext(kept[0])))
            while not engine.num_requests:
                await asyncio.sleep(0)
        else:
            gate.open()
            await last_of(engine.generate(SHORT, GREEDY))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(main(), 20))
    loop.close()
    gate.open()
    engine._thread.join(timeout=10)
    assert not engine.is_alive
    assert engine.dead_error is None
    assert gate.num_steps < 40 or not reading  # it did not run to its end first
    assert_left_empty(engine)


@pytest.mark.parametrize("timeout", [None, 0])
@pytest.mark.parametrize("closed", [True, False])
def test_shutdown_works_in_another_event_loop(llm, timeout, closed):
    """One after the loop that was served has ended, or beside it."""
    engine = AsyncEngine(fresh_engine(llm))

    async def main():
        engine.start()
        assert tokens_of(await last_of(engine.generate(PROMPT, GREEDY))) == TOKENS
        if not closed:
            reading = asyncio.create_task(last_of(engine.generate(SHORT, SAMPLED)))
            while not engine.num_requests:
                await asyncio.sleep(0)
            await asyncio.to_thread(run, engine.shutdown(timeout))
            output = await reading
            assert output.outputs[0].finish_reason == ("length" if timeout is None else "abort")

    run(main())
    run(engine.shutdown(timeout))
    assert not engine.is_alive
    assert engine.dead_error is None
    assert_left_empty(engine)


def test_who_gives_up_waiting_for_shutdown_may_wait_again(llm):
    async def main():
        async with serving(llm) as engine:
            gate = Gate(engine)
            task = asyncio.create_task(last_of(engine.generate(PROMPT, GREEDY)))
            await gate.let(1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await engine.shutdown()
            gate.open()
            await engine.shutdown()
            assert tokens_of(await task) == TOKENS

    run(main())


def test_an_engine_is_started_once_and_serves_one_event_loop(llm):
    engine = AsyncEngine(fresh_engine(llm))

    async def before():
        with pytest.raises(EngineClosedError, match=r"has not been started; call start\(\) first"):
            await anext(engine.generate(PROMPT, GREEDY))
        assert not engine.is_alive

    async def main():
        async with engine:
            with pytest.raises(RuntimeError, match="started once"):
                engine.start()
            elsewhere = asyncio.to_thread(asyncio.run, last_of(engine.generate(PROMPT, GREEDY)))
            with pytest.raises(RuntimeError, match="this is another"):
                await elsewhere
        with pytest.raises(RuntimeError, match="started once"):
            engine.start()

    async def never_started():
        idle = AsyncEngine(fresh_engine(llm))
        await idle.shutdown()
        with pytest.raises(RuntimeError, match="started once"):
            idle.start()

    run(before())
    run(main())
    run(never_started())
    assert_left_empty(engine)
