"""Beam search on the demo model against HF Transformers (`scripts/make_beam_goldens.py`), through the whole engine."""

import json
from pathlib import Path

import pytest

from jaxpaged import BeamSearchParams

DOCUMENT = json.loads((Path(__file__).parent / "data" / "goldens_beams.json").read_text())
GOLDENS, WIDTH = DOCUMENT["prompts"], DOCUMENT["header"]["num_beams"]
CASES = [(golden, run) for golden in GOLDENS for run in golden["runs"]]
EOS = 2
TOLERANCE = 1e-3


def params(run: dict) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=WIDTH,
        max_tokens=DOCUMENT["header"]["new_tokens"],
        length_penalty=run["length_penalty"],
        early_stopping=run["early_stopping"],
        ignore_eos=run["ignore_eos"],
    )


def check(golden: dict, run: dict, output) -> None:
    assert [s.token_ids for s in output.sequences] == [golden["sequences"][i] for i in run["sequences"]]
    assert [s.score for s in output.sequences] == pytest.approx(run["scores"], abs=TOLERANCE)
    assert [s.cumulative_logprob for s in output.sequences] == pytest.approx(run["totals"], abs=TOLERANCE)
    for sequence in output.sequences:
        is_ended = sequence.token_ids[-1] == EOS and not run["ignore_eos"]
        assert sequence.finish_reason == ("stop" if is_ended else "length")


def test_the_goldens_cover_what_they_should():
    assert len(GOLDENS) >= 8
    for ignore_eos in (False, True):
        for penalty in (0.6, 1.0, 2.0):
            for golden in GOLDENS:
                assert any(r["ignore_eos"] == ignore_eos and r["length_penalty"] == penalty for r in golden["runs"])
    assert {str(run["early_stopping"]) for _, run in CASES} == {"False", "True", "never"}
    ends = [golden["sequences"][i][-1] == EOS for golden, run in CASES for i in run["sequences"]]
    assert any(ends)
    assert not all(ends)


def test_one_prompt_alone(demo_llm):
    golden, run = CASES[1]
    (output,) = demo_llm.beam_search(golden["prompt_ids"], params(run), use_tqdm=False)
    check(golden, run, output)
    assert output.sequences[0].text == "The capital of France is Paris."
    assert output.num_preemptions == 0


def chosen() -> list[tuple[dict, dict]]:
    """Of each prompt's runs that give the same sequences, with or without EOS, one; from prompt to prompt another."""
    cases = []
    for i, golden in enumerate(GOLDENS):
        seen = {}
        for run in golden["runs"]:
            seen.setdefault((run["ignore_eos"], tuple(run["sequences"])), []).append(run)
        cases += [(golden, runs[i % len(runs)]) for runs in seen.values()]
    return cases


def test_many_together(demo_llm):
    """Two searches at a time; all the others wait for their places."""
    cases = chosen()
    for ignore_eos in (False, True):
        settings = {run["length_penalty"] for _, run in cases if run["ignore_eos"] == ignore_eos}
        assert settings == {0.6, 1.0, 2.0}
    outputs = demo_llm.beam_search(
        [golden["prompt_ids"] for golden, _ in cases], [params(run) for _, run in cases], use_tqdm=False
    )
    for (golden, run), output in zip(cases, outputs, strict=True):
        check(golden, run, output)
    assert demo_llm.cache_stats().num_blocks_used == 0
    demo_llm.engine.scheduler.check_integrity()
