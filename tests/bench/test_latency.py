"""`jaxpaged bench latency` on the tiny model: the arithmetic by hand, figures that hold together, errors."""

import dataclasses

import pytest
import tiny
from one_line import assert_one_line_error
from typer.testing import CliRunner

from jaxpaged import LLM
from jaxpaged.bench.latency import Iteration, Latency, check_pool, measure
from jaxpaged.bench.workload import fixed_lengths, random_requests
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
    assert run.json()["engine"] == {"dtype": "float32", **dataclasses.asdict(llm.engine.scheduler.config)}
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


def test_a_batch_of_one_output_token_prefills(run):
    result = run("latency", "--model", "tiny", "--batch-size", 4, "--input-len", 20, "--output-len", 1, "--iters", 1)
    assert result.exit_code == 0, result.output
    assert run.options["max_num_seqs"] == 4  # the batch, where nothing else is asked for
    figures = run.json()["runs"]["jaxpaged"]
    assert figures["prefill_tokens_per_second"] == pytest.approx(80 / figures["seconds"]["median"])
    assert figures["first_token_ms"]["p99"] <= 1e3 * figures["seconds"]["median"]


def test_a_batch_that_does_not_run_at_once_is_refused(run):
    result = run("latency", "--model", "tiny", "--batch-size", 9, "--max-num-seqs", 8)
    assert_one_line_error(result, "batch_size=9 is more than max_num_seqs=8, the sequences that run at once")
    assert run.options is None  # before the model is loaded
    result = run("latency", "--model", "tiny", "--batch-size", 4, "--input-len", 33, "--output-len", 8)
    message = (
        "batch_size=4 of 33 input and 8 output tokens takes 20 blocks of 8, and 6 that admission leaves free, but the "
        "KV pool has 24"
    )
    assert_one_line_error(result, message)


@pytest.mark.parametrize(("input_len", "output_len"), [(32, 1), (25, 8), (1, 32), (31, 2)])
def test_the_largest_batch_that_is_let_through_is_served_together(tiny_llm, input_len, output_len):
    """Four sequences of 32 stored tokens and what admission leaves free take 4 * 4 + 6 of 22 blocks."""
    llm = LLM.__new__(LLM)
    llm.engine = engine = tiny.fresh_engine(tiny_llm, num_blocks=22, growth_reserve=2)
    check_pool(4, input_len, output_len, engine.scheduler.config)
    with pytest.raises(ValueError, match="the KV pool has 21"):
        check_pool(4, input_len, output_len, dataclasses.replace(engine.scheduler.config, num_blocks=21))
    running = []
    step = engine.step
    engine.step = lambda: (step(), running.append(engine.scheduler.num_running))[0]
    batches = [random_requests(fixed_lengths(input_len, output_len, 4), tiny.VOCAB, seed) for seed in range(3)]
    measured = measure(llm, batches, use_tqdm=False)
    assert measured.num_preemptions == 0
    assert measured.figures()["preemptions"] == "0"
    assert max(running) == 4 or output_len == 1


def test_preemptions_of_the_iterations_are_told(tiny_llm):
    llm = LLM.__new__(LLM)
    llm.engine = tiny.fresh_engine(tiny_llm)  # without a reserve: 4 * 11 of 24 blocks
    batches = [random_requests(fixed_lengths(24, 60, 4), tiny.VOCAB, seed) for seed in range(3)]
    one = measure(llm, batches[:2], use_tqdm=False).num_preemptions
    two = measure(llm, batches, use_tqdm=False).num_preemptions
    assert one
    assert two == 2 * one  # and not those of the warm-up


def test_errors_are_one_line(run):
    result = run("latency", "--model", "tiny", "--input-len", 100, "--output-len", 29, "--batch-size", 1)
    assert_one_line_error(result, "request 1 has 100 prompt and 29 output tokens, more than max_model_len=128")
    for name in ("--batch-size", "--input-len", "--output-len", "--iters"):
        assert run("latency", "--model", "tiny", name, 0).exit_code == 2


def test_a_json_file_that_can_not_be_written_is_refused_before_the_model_is_loaded():
    result = CliRunner().invoke(app, ["bench", "latency", "--model", "nowhere", "--json", "/nowhere/results.json"])
    assert_one_line_error(result, "json='/nowhere/results.json' must be a file in a folder that exists")
