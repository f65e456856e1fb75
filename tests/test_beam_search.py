"""Beam search through the engine on a tiny model: the beams of a search on its raw logits, whatever runs beside it."""

import pytest
import tiny
from test_engine import Interrupts
from tiny import EOS, GREEDY, PROMPT, TOKENS, VOCAB, fresh_engine, serve, tokens_of
from toy_beams import search

from jaxpaged import BeamSearchParams, SamplingParams
from jaxpaged.beam_candidates import find_candidates

LONG = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)
PARAMS = BeamSearchParams(beam_width=4, max_tokens=12)
SEARCHES = [
    (tiny.prompt(20), PARAMS),
    (tiny.prompt(9, 1), BeamSearchParams(beam_width=3, max_tokens=14, length_penalty=2.0, early_stopping="never")),
    (tiny.prompt(33, 2), BeamSearchParams(beam_width=2, max_tokens=9, length_penalty=0.6, early_stopping=True)),
    (tiny.prompt(1), BeamSearchParams(beam_width=1, max_tokens=8)),
    (tiny.prompt(8, 3), BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)),
    (tiny.prompt(16, 4), BeamSearchParams(beam_width=4, max_tokens=1)),
]


@pytest.fixture
def llm(tiny_llm):
    yield from tiny.leaves_nothing_behind(tiny_llm)


@pytest.fixture
def engine(llm):
    return fresh_engine(llm)


@pytest.fixture(scope="module")
def expected(tiny_llm):
    """Of each of SEARCHES (tokens, sum, score), from dense attention and a sort of everything."""
    return [search_on_raw_logits(*request) for request in SEARCHES]


def search_on_raw_logits(prompt, params):
    known = {}

    def logprobs(output):
        if output not in known:
            known[output] = tiny.log_softmax(tiny.raw_logits([*prompt, *output])[-1]).tolist()
        return known[output]

    return [(h.token_ids, h.logprob, h.score) for h in search(logprobs, params, params.max_tokens, (EOS,))]


def check(output, found) -> None:
    assert [s.token_ids for s in output.sequences] == [tokens for tokens, _, _ in found]
    assert [s.cumulative_logprob for s in output.sequences] == pytest.approx([x for _, x, _ in found], abs=1e-3)
    assert [s.score for s in output.sequences] == pytest.approx([x for _, _, x in found], abs=1e-3)


def add_searches(engine, requests=SEARCHES):
    return [engine.add_beam_search(f"search {i}", *request) for i, request in enumerate(requests)]


def run(engine) -> None:
    while engine.has_unfinished:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0


@pytest.mark.parametrize("index", range(len(SEARCHES)))
def test_alone(engine, expected, index):
    (search,) = add_searches(engine, SEARCHES[index : index + 1])
    run(engine)
    check(search.output(), expected[index])


def test_together_with_ordinary_requests_each_gives_what_it_gives_alone(engine, expected):
    sampled = SamplingParams(temperature=1, seed=7, max_tokens=20, ignore_eos=True, n=2, presence_penalty=0.5)
    (alone,) = serve(engine, (tiny.prompt(20), sampled))
    first = engine.add_request("first", PROMPT, GREEDY)
    searches = add_searches(engine)
    last = engine.add_request("last", tiny.prompt(20), sampled)
    run(engine)
    assert tokens_of(first.output()) == TOKENS
    assert [o.token_ids for o in last.output().outputs] == [o.token_ids for o in alone.outputs]
    for one, found in zip(searches, expected, strict=True):
        check(one.output(), found)


@pytest.mark.parametrize("caches", [True, False])
def test_preempted_in_a_small_pool_the_beams_are_the_same(llm, expected, caches):
    engine = fresh_engine(llm, num_blocks=12, enable_prefix_caching=caches)
    old = engine.add_request("old", tiny.prompt(36, 9), LONG)
    searches = [engine.add_beam_search(f"again {i}", *SEARCHES[1]) for i in range(4)]
    run(engine)
    assert old.finish_reason == "length"
    outputs = [one.output() for one in searches]
    assert any(output.num_preemptions for output in outputs)
    for output in outputs:
        check(output, expected[1])


def test_a_prompt_that_is_in_the_cache_gives_the_same(engine, expected):
    for cached in (0, 16):
        (search,) = add_searches(engine, SEARCHES[:1])
        run(engine)
        output = search.output()
        assert output.num_cached_tokens == cached
        check(output, expected[0])


def test_up_to_max_model_len(engine):
    prompt = tiny.prompt(120)
    search = engine.add_beam_search("a", prompt, BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True))
    run(engine)
    assert [len(s.token_ids) for s in search.output().sequences] == [8, 8]
    check(search.output(), search_on_raw_logits(prompt, BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)))


def test_text_and_reasons(llm, monkeypatch):
    """With an end-of-sequence token that the tiny model is likely to give."""
    prompt = tiny.prompt(20)
    likely = search_on_raw_logits(prompt, PARAMS)[0][0][2]
    monkeypatch.setattr(llm.engine, "_eos_token_ids", (likely,))
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.2)
    (output,) = llm.beam_search(prompt, params, use_tqdm=False)
    ended = [s for s in output.sequences if s.finish_reason == "stop"]
    assert ended
    tokenizer = llm.engine.tokenizer
    for sequence in output.sequences:
        is_ended = sequence.token_ids[-1] == likely
        assert sequence.finish_reason == ("stop" if is_ended else "length")
        assert likely not in sequence.token_ids[:-1]
        assert len(sequence.token_ids) == 12 or is_ended
        assert sequence.text == tokenizer.decode(sequence.token_ids[: -1 if is_ended else None])
        assert sequence.score == pytest.approx(sequence.cumulative_logprob / len(sequence.token_ids) ** 0.2)
    scores = [s.score for s in output.sequences]
    assert scores == sorted(scores, reverse=True)
    (bare,) = llm.beam_search(prompt, BeamSearchParams(beam_width=2, detokenize=False), use_tqdm=False)
    assert [s.text for s in bare.sequences] == [None, None]


def test_the_in_process_api(llm, expected, capsys):
    prompts, params = [p for p, _ in SEARCHES], [p for _, p in SEARCHES]
    outputs = llm.beam_search(prompts, params)
    assert " 6/6 " in capsys.readouterr().err
    for (prompt, _), output, found in zip(SEARCHES, outputs, expected, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (None, prompt)
        check(output, found)
    text, ids = "the user and the system", llm.engine.tokenizer.encode("the user and the system")
    by_text, by_ids = (llm.beam_search(p, PARAMS, use_tqdm=False)[0] for p in (text, ids))
    assert (by_text.prompt, by_text.prompt_token_ids) == (text, ids)
    assert by_text.sequences == by_ids.sequences
    assert llm.beam_search([], PARAMS) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (5, PARAMS, "prompts=5 must be text"),
        ("a", 4, "params=4 must be a BeamSearchParams, or a list of them"),
        ("a", GREEDY, "params=SamplingParams.* must be a BeamSearchParams"),
        ("a", None, "params=None must be a BeamSearchParams"),
        (["a", "b"], [PARAMS], "params has 1 entries for 2 prompts"),
        (["a", ""], PARAMS, "prompt 1: prompt='' has no tokens"),
        (["a", [VOCAB]], PARAMS, r"prompt 1: prompt\[0\]=288 must be a token id"),
        ("a", BeamSearchParams(beam_width=5), "prompt 0: beam_width=5 is more than the max_num_seqs=4 sequences"),
        (
            "a",
            BeamSearchParams(beam_width=200),
            "beam_width=200 chooses among 512 candidates, more than the 288",
        ),
        ([[5] * 120], BeamSearchParams(beam_width=2, max_tokens=9), "129, more than max_model_len=128"),
        ([[5] * 60], BeamSearchParams(beam_width=4, max_tokens=68), "need 43 KV blocks for beam_width=4, .* has 24"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_searched(llm, prompts, params, message):
    steps = llm.cache_stats().num_steps
    with pytest.raises(ValueError, match=message):
        llm.beam_search(prompts, params, use_tqdm=False)
    assert llm.cache_stats().num_steps == steps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 is out of range: give an int, at least 1"),
        ({"beam_width": 2.0}, "beam_width=2.0 is not an int"),
        ({"beam_width": True}, "beam_width=True is not an int"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range"),
        ({"length_penalty": float("nan")}, "length_penalty=nan is out of range"),
        ({"length_penalty": 11}, "length_penalty=11 is out of range: give a float at least -10 and at most 10"),
        ({"early_stopping": "always"}, "early_stopping='always' is unknown: give True, False or \"never\""),
        ({"early_stopping": None}, "early_stopping=None is unknown"),
        ({"early_stopping": 1}, "early_stopping=1 is unknown"),
        ({"ignore_eos": 1}, "ignore_eos=1 is not a bool"),
        ({"detokenize": None}, "detokenize=None is not a bool"),
    ],
)
def test_bad_parameters_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, **fields})


def test_an_id_in_use_is_refused_across_both_kinds(engine):
    engine.add_beam_search("a", PROMPT, PARAMS)
    engine.add_request("b", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="request_id='a' is in use"):
        engine.add_request("a", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="request_id='b' is in use"):
        engine.add_beam_search("b", PROMPT, PARAMS)
    assert engine.is_running("a")
    run(engine)
    assert not engine.is_running("a")


def test_an_aborted_search_frees_its_blocks_whatever_it_was_doing(engine, expected):
    for steps in range(8):
        search = engine.add_beam_search("a", *SEARCHES[2])
        for _ in range(steps):
            engine.step()
        engine.abort_request("a")
        assert search.finish_reason == "abort"
        engine.scheduler.check_integrity()
        assert engine.scheduler.blocks.num_used == 0
        follower = engine.add_beam_search("a", *SEARCHES[0])  # the id may be used again, with the old step in flight
        run(engine)
        check(follower.output(), expected[0])


@pytest.mark.parametrize("moment", ["dispatch", "read", "advance_beams"])
def test_an_error_in_a_step_ends_all_requests_and_the_engine_goes_on(engine, expected, monkeypatch, moment):
    ordinary, searches = engine.add_request("a", tiny.prompt(5), LONG), add_searches(engine, SEARCHES[1:])
    for _ in range(6):
        engine.step()
    owner = {"dispatch": engine.runner, "read": engine._in_flight, "advance_beams": engine.scheduler}[moment]
    if moment == "advance_beams" and not engine._in_flight.plan.searches:
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, broken)
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    assert {c.finish_reason for c in [ordinary, *searches]} == {"abort"}
    assert not engine.has_unfinished
    assert engine.scheduler.blocks.num_used == 0
    (search,) = add_searches(engine, SEARCHES[:1])
    run(engine)
    check(search.output(), expected[0])


def broken(*_):
    raise RuntimeError("broken")


def test_an_abort_by_another_call_is_an_error_and_not_a_short_list(llm, monkeypatch):
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: llm.engine._start_over() or step())
    with pytest.raises(RuntimeError, match="aborted: a step failed or was interrupted in another call"):
        llm.beam_search(PROMPT, PARAMS, use_tqdm=False)


OPERATIONS = {
    "add": lambda engine: engine.add_beam_search("new", tiny.prompt(30, 9), PARAMS),
    "abort": lambda engine: engine.abort_request("search 0"),
    "step": lambda engine: engine.step(),
}


@pytest.mark.parametrize(("operation", "steps"), [("add", 4), ("abort", 5), ("step", 4), ("step", 5)])
def test_an_interrupt_at_any_line_leaves_an_engine_that_serves(llm, expected, monkeypatch, operation, steps):
    """The step after an even number of them plans the beams' rows, the one after that takes in what they came to."""
    monkeypatch.setattr(Interrupts, "MODULES", (*Interrupts.MODULES, "/beam_group.py", "/beams.py"))
    for line in range(1, 2000, 7):
        engine = fresh_engine(llm)
        add_searches(engine, SEARCHES[:1])
        for _ in range(steps):
            engine.step()
        with Interrupts(line) as interrupts:
            OPERATIONS[operation](engine)
        for name in ("search 0", "new"):
            engine.abort_request(name)
        assert not engine.has_unfinished
        engine.scheduler.check_integrity()
        assert engine.scheduler.blocks.num_used == 0
        (output,) = serve(engine, (PROMPT, GREEDY))
        assert tokens_of(output) == TOKENS
        if not interrupts.num_came:
            break
    assert line > 7
    assert not interrupts.num_came
    (search,) = add_searches(engine, SEARCHES[:1])
    run(engine)
    check(search.output(), expected[0])


def test_a_width_is_compiled_once(engine):
    add_searches(engine)
    run(engine)
    before = find_candidates._cache_size()
    engine.add_request("a", tiny.prompt(5), GREEDY)
    add_searches(engine)
    run(engine)
    assert find_candidates._cache_size() == before


def test_steps_without_beams_look_for_no_candidates(engine, monkeypatch):
    monkeypatch.setattr("jaxpaged.runner.start_search", broken)
    (output,) = serve(engine, (PROMPT, GREEDY))
    assert tokens_of(output) == TOKENS
