"""`jaxpaged bench throughput` on the tiny model: figures against a count by hand, options, errors."""

import pytest
from one_line import assert_one_line_error

from jaxpaged.bench.throughput import Throughput, measure
from jaxpaged.bench.workload import fixed_lengths, random_requests


def test_the_figures_of_one_request_by_hand(llm):
    requests = random_requests(fixed_lengths(5, 3, 1), 288, seed=0)
    warm_up = random_requests(fixed_lengths(40, 20, 4), 288, seed=1)  # counts for nothing
    t = measure(llm, requests, warm_up, use_tqdm=False)
    assert (t.num_requests, t.input_tokens, t.output_tokens, t.num_steps, t.mean_batch) == (1, 5, 3, 3, 1)
    # The prompt in a step of 64 tokens, then two decodes in steps of 4; the third token is not computed.
    assert t.padding_share == pytest.approx(1 - (5 + 1 + 1) / (64 + 4 + 4))
    assert t.decode_padding_share == pytest.approx(1 - 2 / 8)
    assert t.kv_slots_held_share == pytest.approx((5 + 6 + 7) / 24)
    assert t.num_preemptions == 0
    assert t.details["num_kv_blocks"] == 24
    assert t.details["buckets"] == [
        {"tokens": 4, "rows": 4, "decode": True, "steps": 2, "tokens_used": 2},
        {"tokens": 64, "rows": 4, "decode": False, "steps": 1, "tokens_used": 5},
    ]


def test_preemptions_are_those_of_the_run(llm):
    lengths = fixed_lengths(24, 60, 4)  # four of 84 tokens in 24 blocks of 8
    warm_up = random_requests(lengths[:1], 288, seed=1)
    first, second = (measure(llm, random_requests(lengths, 288, seed), warm_up, use_tqdm=False) for seed in (2, 3))
    assert first.num_preemptions == second.num_preemptions > 0
    assert first.num_steps == second.num_steps


def test_rates():
    t = Throughput(num_requests=10, input_tokens=30, output_tokens=50, seconds=4.0)
    assert (t.output_rate, t.total_rate, t.request_rate) == (12.5, 20.0, 2.5)
    assert "steps" not in t.figures()  # a run that does not know them does not show them
    assert t.as_json()["num_steps"] is None


def test_a_trace_runs_to_its_exact_lengths(run, trace):
    path = trace("prompt_tokens,output_tokens", "30,5", "4,40", "90,1", "7,7", "2,3")
    result = run("throughput", "--model", "demo", "--trace", path, "--temperature", "0.8", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for part in ("demo, trace.csv, on cpu:", "output tokens a second", "padding", "allocated KV slots", "start-up: "):
        assert part in result.stdout
    written = run.json()
    assert (written["benchmark"], written["model"], written["seed"]) == ("throughput", "demo", 3)
    assert written["device"] == "cpu"
    assert written["options"]["block_size"] == 16  # what was asked for, and what the engine has
    ran = {"dtype": "float32", "max_model_len": 128, "block_size": 8, "num_blocks": 24, "max_num_seqs": 4}
    assert ran.items() <= written["engine"].items()
    assert written["engine"]["max_num_batched_tokens"] == 64
    phases = {"imports", "device", "checkpoint", "sizing", "weights", "loading", "tracing", "compiling", "pool"}
    assert set(written["startup_seconds"]) == phases
    figures = written["runs"]["jaxpaged"]
    assert (figures["num_requests"], figures["input_tokens"], figures["output_tokens"]) == (5, 133, 56)
    assert figures["output_tokens_per_second"] == pytest.approx(56 / figures["seconds"])
    assert figures["total_tokens_per_second"] == pytest.approx(189 / figures["seconds"])
    assert figures["requests_per_second"] == pytest.approx(5 / figures["seconds"])
    assert 0 < figures["padding_share"] < 1
    assert 0 < figures["kv_slots_held_share"] <= 1
    assert 1 <= figures["mean_batch"] <= 4


def test_fixed_lengths_and_the_options_of_the_engine(run):
    options = {
        "--dtype": "float16", "--max-model-len": 99, "--block-size": 32, "--num-kv-blocks": 9,
        "--gpu-memory-utilization": 0.5, "--max-num-seqs": 3, "--max-num-batched-tokens": 44,
        "--kv-reservation": "pow2",
    }  # fmt: skip
    lengths = ["--input-len", 6, "--output-len", 3, "--num-prompts", 7]
    flat = [x for pair in options.items() for x in pair]
    result = run(
        "throughput", "--model", "llama-13b", *lengths, *flat, "--static-batches", "--no-enable-prefix-caching"
    )
    assert result.exit_code == 0, result.output
    asked = {name[2:].replace("-", "_"): value for name, value in options.items()}
    asked |= {"static_batches": True, "enable_prefix_caching": False}
    assert run.options == {"model": "random:llama-13b", **asked}
    written = run.json()
    assert written["options"] == asked
    assert written["runs"]["jaxpaged"]["output_tokens"] == 21


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give --trace FILE, or both --input-len and --output-len"),
        (["--input-len", 3], "give --trace FILE, or both --input-len and --output-len"),
        (["--trace", "nowhere.csv", "--input-len", 3], "--trace brings its own lengths"),
        (["--trace", "nowhere.csv"], "trace nowhere.csv: it can't be read"),
        (["--input-len", 0, "--output-len", 1], "input_len=0 must be at least 1"),
        (["--input-len", 100, "--output-len", 29], "more than max_model_len=128"),
        (["--input-len", 3, "--output-len", 3, "--hf-batch-sizes", "4,x"], "hf_batch_sizes='4,x' must be positive"),
        (["--input-len", 3, "--output-len", 3, "--engine", "hf", "--static-batches"], "options of this engine, not of"),
    ],
)
def test_errors_are_one_line(run, args, message):
    assert_one_line_error(run("throughput", "--model", "demo", *args), message)


def test_a_trace_without_the_columns_is_one_line(run, trace):
    result = run("throughput", "--model", "demo", "--trace", trace("a,b", "1,2"))
    assert_one_line_error(result, "its first line lacks the column prompt_tokens and the column output_tokens")
    assert run.options is None  # before the model is loaded


def test_bad_options_are_refused_by_the_command_line(run):
    for args in (["--num-prompts", 0], ["--temperature", -1], ["--kv-reservation", "some"], ["--engine", "vllm"]):
        result = run("throughput", "--model", "demo", "--input-len", 3, "--output-len", 3, *args)
        assert result.exit_code == 2
        assert run.options is None
