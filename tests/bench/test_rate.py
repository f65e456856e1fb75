"""`jaxpaged bench rate` on the tiny model: arrivals, the arithmetic by hand, figures that hold together, errors."""

import asyncio
import itertools
import math
import statistics

import pytest
import tiny
from one_line import assert_one_line_error
from typer.testing import CliRunner

from jaxpaged.async_engine import AsyncEngine, EngineDeadError
from jaxpaged.bench import rate
from jaxpaged.bench.rate import (
    RateResult,
    RequestTimes,
    Verdict,
    arrival_times,
    conclusion,
    highest_sustained,
    parse_rates,
)
from jaxpaged.bench.workload import BenchRequest
from jaxpaged.cli import app

TRACE = ["prompt_tokens,output_tokens", "5,4", "12,6", "20,1", "3,8", "30,3", "9,5"]


def result_of(rate: float, *normalized_ms: float) -> RateResult:
    """A result of requests with one token each, which took so long; they came one a second."""
    times = [RequestTimes(float(i), [i + ms / 1e3], 3, 1) for i, ms in enumerate(normalized_ms)]
    return RateResult.of(rate, times, 0, max_num_seqs=4)


def test_arrivals_follow_from_the_seed_and_scale_with_the_rate():
    once = arrival_times(50, 2.0, seed=3)
    assert once == arrival_times(50, 2.0, seed=3)
    assert once != arrival_times(50, 2.0, seed=4)
    assert arrival_times(50, 8.0, seed=3) == pytest.approx([t / 4 for t in once])
    assert arrival_times(20, 2.0, seed=3) == once[:20]
    assert once[0] == 0
    assert once == sorted(once)
    assert arrival_times(1, 2.0, seed=0) == [0.0]


def test_the_gaps_are_those_of_a_poisson_process():
    arrivals = arrival_times(20_001, 5.0, seed=0)
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)  # as an exponential distribution's mean
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)


def test_the_summary_of_two_requests_by_hand():
    times = [
        RequestTimes(due=10.0, outputs=[10.5, 11.0, 12.0], num_input=7, num_output=3),
        RequestTimes(due=11.0, outputs=[12.5, 15.0], num_input=5, num_output=4),  # its reader missed two
    ]
    summary = RateResult.of(2.0, times, num_preemptions=1, max_num_seqs=4)
    assert (summary.arrival_seconds, summary.num_unanswered, summary.served_share) == (1.0, 2, 0.0)
    assert (summary.num_requests, summary.input_tokens, summary.output_tokens) == (2, 12, 7)
    assert summary.seconds == pytest.approx(5.0)
    assert summary.request_rate == pytest.approx(0.4)
    assert summary.output_rate == pytest.approx(1.4)
    assert summary.first_token_ms == pytest.approx((1000, 1400, 1490))  # of 500 and 1500
    assert summary.end_to_end_ms == pytest.approx((3000, 3800, 3980))  # of 2000 and 4000
    assert summary.normalized_ms == pytest.approx((833.3333, 966.6667, 996.6667))  # of 2000 / 3 and 4000 / 4
    assert summary.mean_normalized_ms == pytest.approx(833.3333)
    assert summary.between_tokens_ms == pytest.approx((1000, 2200, 2470))  # of 500, 1000 and 2500
    assert summary.as_json()["normalized_ms"]["p90"] == pytest.approx(966.6667)


def test_requests_of_one_token_have_nothing_between_tokens():
    summary = result_of(1.0, 20.0, 40.0)
    assert summary.between_tokens_ms is None
    assert "between tokens" not in summary.figures()
    assert summary.as_json()["between_tokens_ms"] is None


def test_a_rate_is_sustained_if_it_and_all_below_stay_under_the_limit():
    results = [
        result_of(1, *[10] * 20),
        result_of(2, *[20] * 19, 49),
        result_of(4, *[10] * 14, *[70] * 6),
        result_of(8, *[30] * 20),
    ]
    assert highest_sustained(results, 50) == 2
    assert highest_sustained(results[::-1], 50) == 2
    assert highest_sustained(results, 100) == 8
    assert highest_sustained(results, 10) is None  # below it, not at it
    assert highest_sustained([result_of(3, *[50] * 20)], 50) is None
    # p90 and not the worst: one slow request in a hundred does no harm
    assert highest_sustained([result_of(3, *[10] * 99, 900)], 50) == 3


def served(rate: float, num: int, capacity: float, latency: float = 1.0, slots: int = 4) -> RateResult:
    """What becomes of requests of 100 tokens that come evenly, where no more than `capacity` end a second."""
    times, end = [], 0.0
    for i in range(num):
        due = i / rate
        end = max(due + latency, end + 1 / capacity)
        times.append(RequestTimes(due, [end], 3, 100))
    return RateResult.of(rate, times, 0, slots)


@pytest.mark.parametrize(
    ("result", "slo_ms", "verdict"),
    [
        (served(2, 100, capacity=3), 50, Verdict.sustained),
        (served(2, 22, capacity=3), 50, Verdict.sustained),  # 10.5 s of arrivals, answered within 1 s each
        (served(2, 20, capacity=3), 50, Verdict.unclear),  # 9.5 s
        (served(2, 1, capacity=3), 50, Verdict.unclear),
        # A burst: all latencies are below the limit, and still it comes twice as fast as it is answered.
        (served(6, 20, capacity=3), 50, Verdict.missed),
        (served(6, 20, capacity=3, slots=64), 50, Verdict.unclear),  # nobody had to wait for a slot yet
        (served(6, 200, capacity=3, slots=64), 1e6, Verdict.missed),
        (served(6, 200, capacity=3, slots=64), 50, Verdict.missed),
        (served(2, 20, capacity=3, latency=6), 50, Verdict.missed),  # too slow for the limit, however few there are
    ],
)
def test_what_a_burst_gives_is_not_taken_for_a_sustained_rate(result, slo_ms, verdict):
    assert result.verdict(slo_ms) is verdict


def test_the_conclusion_names_the_rates_that_had_too_few_requests():
    results = [served(r, 40, capacity=100, slots=16) for r in (8, 1, 2)]
    assert conclusion(results, 50).splitlines() == [
        "p90 of the latency an output token stays below 50 ms, and requests are answered as fast as they come, at: up "
        "to 2 requests a second",
        "too few requests to tell at 8 requests a second: they came within 4.88 s, and one takes 1 s (median); 8 of 40 "
        "had no answer at the last arrival",
    ]
    assert highest_sustained(results, 50) == 2
    assert conclusion(results, 5).endswith("at: none of these rates")


def test_rates_are_positive_numbers():
    assert parse_rates("4, 0.5,1,4") == [0.5, 1, 4]
    for listed in ("", "1,", "0", "-1", "inf", "nan", "1;2", "fast"):
        with pytest.raises(ValueError, match="must be a positive number of requests a second"):
            parse_rates(listed)


def test_times_count_from_when_a_request_was_due(tiny_llm):
    """Requests that the engine can't serve as fast as they come wait, and their latencies tell."""
    engine = tiny.fresh_engine(tiny_llm, max_num_seqs=1)
    requests = [BenchRequest(tiny.prompt(5, i), 6) for i in range(20)]
    (flood,) = rate.measure(engine, [(1e6, requests)], requests[:1], use_tqdm=False)
    assert flood.end_to_end_ms.p99 == pytest.approx(1e3 * flood.seconds, rel=0.15)  # the last waited for all others
    assert flood.end_to_end_ms.median == pytest.approx(1e3 * flood.seconds / 2, rel=0.4)
    assert flood.first_token_ms.median > 5 * flood.between_tokens_ms.median
    assert not engine.has_unfinished


def test_requests_come_at_their_times(tiny_llm):
    requests = [BenchRequest(tiny.prompt(3, i), 2) for i in range(8)]
    arrivals = arrival_times(8, 20.0, seed=5)
    (slow,) = rate.measure(tiny.fresh_engine(tiny_llm), [(20.0, requests)], requests[:1], seed=5, use_tqdm=False)
    assert arrivals[-1] < slow.seconds < arrivals[-1] + 0.5
    assert slow.first_token_ms.median < 200


def test_an_engine_that_dies_ends_the_measurement_with_its_error(tiny_llm, monkeypatch):
    engine = tiny.fresh_engine(tiny_llm)
    requests = [BenchRequest(tiny.prompt(5, i), 6) for i in range(5)]
    steps = iter(range(30))
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if next(steps) < 12 else 1 / 0)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        rate.measure(engine, [(1e6, requests)], requests[:1], use_tqdm=False)
    assert engine.scheduler.blocks.num_used == 0


def test_the_figures_of_a_run_hold_together(run, trace, llm):
    before = llm.engine.step_stats()
    args = ["--trace", trace(*TRACE), "--rates", "200,50", "--num-prompts", 5, "--slo-ms", 1e6, "--max-num-seqs", 3]
    result = run("rate", "--model", "tiny", *args)
    assert result.exit_code == 0, result.output
    assert "random:tiny, trace.csv, 5 requests a rate, median / p90 / p99, on cpu:" in result.stdout
    assert "p90 of the latency an output token stays below 1e+06 ms, and requests are answered as fast" in result.stdout
    assert (run.options["model"], run.options["max_num_seqs"]) == ("random:tiny", 3)
    written = run.json()
    assert (written["benchmark"], written["slo_ms"]) == ("rate", 1e6)
    assert written["verdicts"].keys() == written["runs"].keys()
    assert written["engine"]["num_blocks"] == 24
    assert list(written["runs"]) == ["50/s", "200/s"]
    for name, figures in written["runs"].items():
        assert f"{figures['rate']:g}/s" == name
        assert (figures["num_requests"], figures["input_tokens"], figures["output_tokens"]) == (5, 70, 22)
        for kind in ("first_token_ms", "between_tokens_ms", "end_to_end_ms", "normalized_ms"):
            assert 0 < figures[kind]["median"] <= figures[kind]["p90"] <= figures[kind]["p99"]
        assert figures["first_token_ms"]["median"] <= figures["end_to_end_ms"]["median"]
        assert figures["requests_per_second"] == pytest.approx(5 / figures["seconds"])
        assert figures["output_tokens_per_second"] == pytest.approx(22 / figures["seconds"])
    stats = llm.engine.step_stats() - before
    warm_up = sum(prompt + min(output, 8) - 1 for prompt, output in [(5, 4), (12, 6), (20, 1), (3, 8)])
    assert stats.num_tokens == warm_up + 2 * (70 + 22 - 5)


def test_no_rate_may_be_sustained(run, trace):
    result = run("rate", "--model", "tiny", "--trace", trace(*TRACE), "--rates", "100", "--slo-ms", 0)
    assert "at: none of these rates" in result.stdout
    assert run.json()["sustained_rate"] is None
    assert run.json()["verdicts"] == {"100/s": "not sustained"}


def test_a_rate_that_the_engine_keeps_pace_with_is_sustained(run, trace):
    path = trace("prompt_tokens,output_tokens", *["3,2"] * 40)
    result = run("rate", "--model", "tiny", "--trace", path, "--rates", "20", "--slo-ms", 1e4)
    assert result.exit_code == 0, result.output
    assert "at: up to 20 requests a second" in result.stdout
    assert (run.json()["sustained_rate"], run.json()["verdicts"]) == (20, {"20/s": "sustained"})


def test_a_plot_that_the_system_does_not_let_be_written_is_refused_before_the_model_is_loaded(run, trace, monkeypatch):
    monkeypatch.setattr(rate.importlib.util, "find_spec", lambda name: object())
    result = run("rate", "--model", "tiny", "--trace", trace(*TRACE), "--plot", "/proc/rate.png")
    assert_one_line_error(result, "plot='/proc/rate.png' can't be written: ")
    assert run.options is None


def test_the_plot_is_a_png(run, trace, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rate.png"
    args = ["--trace", trace(*TRACE), "--rates", "100,300", "--plot", path]
    result = run("rate", "--model", "tiny", *args)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5_000


def test_a_plot_without_matplotlib_is_refused_before_the_model_is_loaded(run, trace, tmp_path, monkeypatch):
    monkeypatch.setattr(rate.importlib.util, "find_spec", lambda name: None)
    result = run("rate", "--model", "tiny", "--trace", trace(*TRACE), "--plot", tmp_path / "rate.png")
    assert_one_line_error(result, "--plot needs matplotlib, which is not installed: pip install 'jaxpaged[bench]'")
    assert run.options is None


@pytest.mark.parametrize("name", ["nowhere/rate.png", "rate.pdf", ""])
def test_a_plot_that_is_no_png_in_a_folder_is_refused_before_the_model_is_loaded(
    run, trace, tmp_path, name, monkeypatch
):
    monkeypatch.setattr(rate.importlib.util, "find_spec", lambda name: object())
    result = run("rate", "--model", "tiny", "--trace", trace(*TRACE), "--plot", tmp_path / name)
    assert_one_line_error(result, "file in a folder that exists")
    assert run.options is None


def test_errors_are_one_line(run, trace):
    path = trace(*TRACE)
    result = run("rate", "--model", "tiny", "--trace", path, "--rates", "1,x")
    assert_one_line_error(result, "rates='1,x': 'x' must be a positive number of requests a second")
    result = run("rate", "--model", "tiny", "--trace", path, "--num-prompts", 7)
    assert_one_line_error(result, f"num_prompts=7 is more than the 6 requests of trace {path}")
    result = run("rate", "--model", "tiny", "--trace", trace("prompt_tokens,output_tokens", "100,29"))
    assert_one_line_error(result, "request 1 has 100 prompt and 29 output tokens, more than max_model_len=128")
    for args in (["--num-prompts", 0], ["--slo-ms", -1]):
        assert run("rate", "--model", "tiny", "--trace", path, *args).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "rate", "--model", "tiny"]).exit_code == 2  # no trace


def test_ctrl_c_ends_the_requests(tiny_llm, monkeypatch):
    """What a KeyboardInterrupt does: `asyncio.run` cancels the measurement."""
    engine = tiny.fresh_engine(tiny_llm)
    requests = [BenchRequest(tiny.prompt(5, i), 100) for i in range(8)]

    async def main():
        measuring = asyncio.create_task(rate._measure(engine, [(1e6, requests)], requests[:1], 0, 0.0, False))
        while not engine.has_unfinished or engine.scheduler.num_running < 4:
            await asyncio.sleep(0.001)
        measuring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await measuring

    async def limited():
        async with asyncio.timeout(20):
            await main()

    shutdowns = []
    shutdown = AsyncEngine.shutdown
    monkeypatch.setattr(
        AsyncEngine, "shutdown", lambda self, timeout: shutdowns.append(timeout) or shutdown(self, timeout)
    )
    asyncio.run(limited())
    assert shutdowns == [0]
    assert not engine.has_unfinished
    assert engine.scheduler.blocks.num_used == 0
