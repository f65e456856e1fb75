"""`jaxpaged bench latency` on the tiny model: the arithmetic by hand, figures that hold together, errors."""

import pytest
from one_line import assert_one_line_error
from typer.testing import CliRunner

from jaxpaged.bench.latency import Iteration, Latency
from jaxpaged.cli import app


def test_the_summary_of_two_iterations_by_hand():
    iterations = [Iteration(5.0, [1.0, 2.0], [5.0, 4.0]), Iteration(7.0, [3.0, 3.0], [7.0, 6.0])]
    summary = Latency.of(iterations, input_len=10, output_len=5)
    assert (summary.batch_size, summary.num_iterations) == (2, 2)
    assert summary.seconds == pytest.approx((6.0, 6.8, 6.98))
    assert summary.first_token_ms.median == pytest.approx(2500)  # of 1, 2, 3, 3
    # 4 s, 2 s, 4 s and 3 s for the four tokens after the first
    assert summary.output_token_ms is not None
    assert summary.output_token_ms.median == pytest.approx(875)
    assert summary.output_rate == pytest.approx(2 * 5 / 6)
    assert summary.prefill_rate is None


def test_one_output_token_measures_prefill():
    summary = Latency.of([Iteration(2.0, [1.0, 2.0], [1.0, 2.0])], input_len=100, output_len=1)
    assert summary.output_token_ms is None
    assert summary.prefill_rate == pytest.approx(100)
    assert "prefill tokens a second" in summary.figures()
    assert "time an output token" not in summary.figures()


def test_the_figures_of_a_run_hold_together(run, llm):
    before = llm.engine.step_stats()
    args = ["--batch-size", 3, "--input-len", 8, "--output-len", 6, "--iters", 2, "--max-num-seqs", 5]
    result = run("latency", "--model", "tiny", *args)
    assert result.exit_code == 0, result.output
    assert "random:tiny, batch 3, 8 in, 6 out, 2 iterations, median / p90 / p99, on cpu:" in result.stdout
    assert "start-up: " in result.stdout
    assert (run.options["model"], run.options["max_num_seqs"]) == ("random:tiny", 5)
    figures = run.json()["runs"]["jaxpaged"]
    assert (figures["batch_size"], figures["input_len"], figures["output_len"]) == (3, 8, 6)
    assert figures["num_iterations"] == 2
    assert figures["prefill_tokens_per_second"] is None
    for name in ("seconds", "first_token_ms", "output_token_ms"):
        assert 0 < figures[name]["median"] <= figures[name]["p90"] <= figures[name]["p99"]
    assert figures["output_tokens_per_second"] == pytest.approx(18 / figures["seconds"]["median"])
    slowest = figures["first_token_ms"]["p99"] + 5 * figures["output_token_ms"]["p99"]
    assert slowest >= 1e3 * figures["seconds"]["median"] * 0.99  # the last token of all ends the iteration
    stats = llm.engine.step_stats() - before
    assert stats.num_tokens == 3 * 3 * (8 + 6 - 1)  # warm-up and two iterations


def test_batches_larger_than_the_engine_takes_at_once_are_served(run):
    result = run("latency", "--model", "tiny", "--batch-size", 9, "--input-len", 20, "--output-len", 1, "--iters", 1)
    assert result.exit_code == 0, result.output
    figures = run.json()["runs"]["jaxpaged"]
    assert figures["prefill_tokens_per_second"] == pytest.approx(180 / figures["seconds"]["median"])
    assert figures["first_token_ms"]["p99"] <= 1e3 * figures["seconds"]["median"]


def test_errors_are_one_line(run):
    result = run("latency", "--model", "tiny", "--input-len", 100, "--output-len", 29)
    assert_one_line_error(result, "request 1 has 100 prompt and 29 output tokens, more than max_model_len=128")
    for name in ("--batch-size", "--input-len", "--output-len", "--iters"):
        assert run("latency", "--model", "tiny", name, 0).exit_code == 2


def test_a_json_file_that_can_not_be_written_is_refused_before_the_model_is_loaded():
    result = CliRunner().invoke(app, ["bench", "latency", "--model", "nowhere", "--json", "/nowhere/results.json"])
    assert_one_line_error(result, "json='/nowhere/results.json' must be a file in a folder that exists")
