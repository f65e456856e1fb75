"""The in-process API on a tiny model: what it takes, in which order it answers, and what an interruption leaves."""

import concurrent.futures
import functools
import re
import time

import numpy as np
import pytest
import tiny
from tiny import GOLDEN, GREEDY, PROMPT, TOKENS, tokens_of

from jaxpaged import LLM, SamplingParams

TEXT = "the user and the system"
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=20, ignore_eos=True)
QUESTION = [{"role": "user", "content": "the end?"}]


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def test_prompts_are_text_or_ids_one_or_many(llm):
    ids = llm.engine.tokenizer.encode(TEXT)
    text, as_ids = generate(llm, TEXT)[0], generate(llm, ids)[0]
    assert (text.prompt, as_ids.prompt) == (TEXT, None)
    assert text.prompt_token_ids == as_ids.prompt_token_ids == ids
    assert text.finished
    assert text.outputs == as_ids.outputs
    assert [text.outputs[0].index, len(text.outputs)] == [0, 1]
    for prompts in ([TEXT], [ids], (TEXT,), [tuple(ids)], [np.array(ids).tolist()], list(np.array(ids, np.int32))):
        assert [o.outputs for o in generate(llm, prompts)] == [text.outputs]
    mixed = generate(llm, [ids, TEXT, [5]])
    assert [o.prompt_token_ids for o in mixed] == [ids, ids, [5]]
    assert generate(llm, []) == []


def test_outputs_come_in_the_order_of_the_prompts_however_long_they_take(llm):
    prompts = [tiny.prompt(n, n) for n in (60, 1, 33, 2, 9, 17)]
    params = [SamplingParams(temperature=0, max_tokens=m, ignore_eos=True) for m in (30, 2, 1, 40, 3, 20)]
    outputs = generate(llm, prompts, params)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(tokens_of(o)) for o in outputs] == [p.max_tokens for p in params]
    assert len({o.request_id for o in outputs}) == 6
    for prompt, p, output in zip(prompts, params, outputs, strict=True):
        assert tokens_of(generate(llm, prompt, p)[0]) == tokens_of(output)


def test_the_default_parameters_are_those_of_sampling_params(llm):
    (output,) = llm.generate(TEXT, use_tqdm=False)
    assert len(tokens_of(output)) <= SamplingParams().max_tokens


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, None, "prompts=5 must be text, token ids, or a list of either"),
        (None, None, "prompts=None must be text"),
        (b"text", None, "prompts=b'text' must be text"),
        ({"prompt": "a"}, None, "prompts={'prompt': 'a'} must be text"),
        (["a", 5], None, r"prompts\[1\]=5 must be text or token ids"),
        (["a", b"b"], None, r"prompts\[1\]=b'b' must be text or token ids"),
        (QUESTION, None, r"prompts\[0\]={'role': 'user', .* must be text or token ids"),
        ([5, "a"], None, r"prompt 0: prompt\[1\]='a' must be a token id"),
        ([[5], [[6]]], None, r"prompt 1: prompt\[0\]=\[6\] must be a token id"),
        (["a", ""], None, "prompt 1: prompt='' has no tokens"),
        (["a", "b"], [SAMPLED], "sampling_params has 1 entries for 2 prompts; give one, or one each"),
        ("a", [SAMPLED] * 2, "sampling_params has 2 entries for 1 prompts"),
        ("a", 5, "sampling_params=5 must be a SamplingParams, or a list of them"),
        ("a", [{"temperature": 0}], "must be a SamplingParams, or a list of them"),
        ("a", {"temperature": 0}, "sampling_params={'temperature': 0} must be a SamplingParams"),
    ],
)
def test_bad_arguments_are_refused(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        generate(llm, prompts, params)


def test_a_bad_prompt_among_good_ones_means_that_nothing_is_generated(llm):
    steps = llm.cache_stats().num_steps
    with pytest.raises(ValueError, match=r"^prompt 2: the prompt has 200 tokens, which leaves no room"):
        generate(llm, [PROMPT, TEXT, [5] * 200, PROMPT])
    with pytest.raises(ValueError, match=r"^prompt 1: logprobs=21 is above the engine's max_logprobs=20"):
        generate(llm, [PROMPT, TEXT], [GREEDY, SamplingParams(logprobs=21)])
    assert llm.cache_stats().num_steps == steps
    assert not llm.engine.has_unfinished
    assert not llm.engine.scheduler.has_unfinished
    assert tokens_of(generate(llm, PROMPT)[0]) == TOKENS


def test_chat_takes_one_conversation_or_several(llm):
    long = GOLDEN["tokenizer"]["chat"]["messages"]
    (one,) = llm.chat(QUESTION, GREEDY, use_tqdm=False)
    two = llm.chat([long, QUESTION], [GREEDY, GREEDY], use_tqdm=False)
    assert two[0].prompt_token_ids == GOLDEN["tokenizer"]["chat"]["ids"]
    assert two[1].prompt_token_ids == one.prompt_token_ids == llm.chat_prompt(QUESTION)
    assert [o.token_ids for o in two[1].outputs] == [o.token_ids for o in one.outputs]
    (closed,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert closed.prompt_token_ids == llm.chat_prompt(QUESTION, add_generation_prompt=False)
    assert len(closed.prompt_token_ids) < len(one.prompt_token_ids)
    shouted = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    (own,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, chat_template_kwargs={"chat_template": shouted})
    assert own.prompt_token_ids == llm.engine.tokenizer.encode("THE END?")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "conversation 0: messages must be a non-empty list"),
        (None, "conversation 0: messages must be a non-empty list"),
        (5, "conversation 0: messages must be a non-empty list"),
        ("hello", "conversation 0: messages must be a non-empty list"),
        (QUESTION[0], "conversation 0: messages must be a non-empty list"),
        ([{"content": "a"}], r"conversation 0: messages\[0\]\['role'\] must be a string"),
        ([{"role": "user"}], r"conversation 0: messages\[0\]\['content'\] must be a string"),
        ([*QUESTION, "a"], r"conversation 0: messages\[1\] must be a mapping"),
        ([QUESTION, []], "conversation 1: messages must be a non-empty list"),
        ([QUESTION, [{"role": "user", "content": 5}]], r"conversation 1: messages\[0\]\['content'\] must be a string"),
    ],
)
def test_malformed_conversations_are_refused(llm, messages, message):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_streamed_pieces_join_to_the_text(llm):
    for params in (GREEDY, SAMPLED, SamplingParams(max_tokens=30, seed=4, stop=["s"], min_tokens=3)):
        expected = generate(llm, TEXT, params)[0].outputs[0].text
        pieces = list(llm.stream(TEXT, params))
        assert "".join(pieces) == expected
        assert all(pieces)
        assert len(pieces) > 1
    with pytest.raises(ValueError, match="prompt 0: sampling_params=5 must be a SamplingParams"):
        next(llm.stream(TEXT, 5))


def test_a_closed_stream_gives_its_blocks_back(llm):
    stream = llm.stream(PROMPT, SAMPLED)
    next(stream)
    assert llm.cache_stats().num_blocks_used > 0
    stream.close()
    assert llm.cache_stats().num_blocks_used == 0
    llm.engine.scheduler.check_integrity()
    llm.stream(PROMPT, SAMPLED).close()  # never begun
    assert not llm.engine.has_unfinished
    assert tokens_of(generate(llm, PROMPT)[0]) == TOKENS


def test_a_stream_goes_on_while_generate_runs_and_loses_no_text(llm):
    expected = generate(llm, TEXT, SAMPLED)[0].outputs[0].text
    stream = llm.stream(TEXT, SAMPLED)
    first = next(stream)
    assert tokens_of(generate(llm, PROMPT)[0]) == TOKENS  # takes more steps than the stream has left
    assert first + "".join(stream) == expected


@pytest.mark.parametrize("during", ["step", "dispatch"])
def test_ctrl_c_in_the_middle_leaves_nothing_and_the_next_call_is_right(llm, monkeypatch, during):
    owner = llm.engine if during == "step" else llm.engine.runner
    original, calls = getattr(owner, during), iter(range(100))

    def interrupted(*args):
        if next(calls) == 7:
            raise KeyboardInterrupt
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, during, interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [PROMPT] * 6, SAMPLED)
    assert not llm.engine.has_unfinished
    assert llm.cache_stats().num_blocks_used == 0
    llm.engine.scheduler.check_integrity()
    assert [tokens_of(o) for o in generate(llm, [PROMPT] * 3)] == [TOKENS] * 3


def test_the_progress_bar_shows_requests_tokens_and_blocks(llm, capsys):
    llm.generate([PROMPT, TEXT, TEXT], GREEDY)
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert re.search(r"Requests: 100%.* 3/3 .*\d+ tok/s, KV blocks 0/24", last)
    llm.chat(QUESTION, GREEDY)
    assert " 1/1 " in capsys.readouterr().err
    generate(llm, PROMPT)
    assert capsys.readouterr().err == ""


def test_the_progress_bar_moves_on_while_no_request_finishes(llm, capsys, monkeypatch):
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: time.sleep(0.02) or step())
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate([[5]] * 3 + [PROMPT], [SamplingParams(max_tokens=1)] * 3 + [long])
    drawn = re.findall(r" 3/4 .*?(\d+/24)", capsys.readouterr().err)
    assert len(drawn) > 3
    assert len(set(drawn)) > 1  # blocks in use


def test_stats_add_up_over_calls(llm):
    before = llm.cache_stats()
    assert (before.num_blocks, before.block_size) == (24, 8)
    generate(llm, [tiny.prompt(30, i) for i in range(6)], SAMPLED)
    after = llm.cache_stats()
    assert after.num_steps - before.num_steps >= 2 * 20
    assert 4 * 4 <= after.peak_blocks_used <= 24
    assert 0.5 < after.slots_held_share <= 1
    assert after.num_blocks_used == 0
    assert after.num_preemptions >= before.num_preemptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel": 2, "foo": 1},
            "unknown option foo, tensor_parallel; LLM takes model, dtype, max_model_len",
        ),
        ({"block_size": 12}, "block_size=12 must be one of 8, 16, 32, 64, 128"),
        ({"model": ""}, "model='' must be a path, or 'demo'"),
        ({"model": 5}, "model=5 must be a path, or 'demo'"),
        ({"model": "/nowhere"}, "model='/nowhere': .* there is nothing at this path"),
        ({"max_model_len": 257}, "max_model_len=257 is more than the 256 positions .* lower it"),
        (
            {"kv_cache_memory_bytes": 10, "dtype": "float32"},
            "kv_cache_memory_bytes=10 is given, but the least KV pool.*24576 bytes; raise",
        ),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens=4 must be at least max_num_seqs=8"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": tiny.PATH, **options})


def test_ctrl_c_between_the_donation_of_the_pool_and_its_return(tiny_llm, monkeypatch):
    """Python raises it right after the compiled call, before its result is bound: the donated pool is gone."""
    forward = tiny_llm.engine.runner._executables.forward
    with monkeypatch.context() as patch:
        for bucket in forward:
            patch.setitem(forward, bucket, functools.partial(interrupted, forward[bucket]))
        with pytest.raises(KeyboardInterrupt):
            tiny_llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert tokens_of(tiny_llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]) == TOKENS


def interrupted(forward, *args):
    forward(*args)
    raise KeyboardInterrupt


def test_threads_take_turns(llm):
    """Four threads generate at once, each with its own prompts; all get what they would get alone."""
    prompts = [tiny.prompt(5 + i, i) for i in range(4)]
    alone = [tokens_of(llm.generate([p], GREEDY, use_tqdm=False)[0]) for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda p: llm.generate([p] * 3, GREEDY, use_tqdm=False), prompts))
    assert [[tokens_of(o) for o in group] for group in outputs] == [[tokens] * 3 for tokens in alone]


def test_a_misspelt_option_of_chat_is_refused(llm):
    with pytest.raises(TypeError, match="max_tokens"):
        llm.chat([{"role": "user", "content": "hi"}], max_tokens=5)


def test_text_with_tokens_that_the_model_lacks_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "encode", lambda text: [5, 288])
    with pytest.raises(ValueError, match=r"prompt\[1\]=288 must be a token id from 0 to 287, the model's vocabulary"):
        llm.generate("extra", GREEDY, use_tqdm=False)


def test_an_abort_by_another_call_is_an_error_and_not_a_short_answer(llm, monkeypatch):
    pieces = llm.stream(PROMPT, GREEDY)
    next(pieces)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "dispatch", interrupted_dispatch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="aborted: a step failed or was interrupted in another call"):
        "".join(pieces)


def interrupted_dispatch(plan):
    raise KeyboardInterrupt
