"""The host benchmark runs, and its figures mean what it says; nothing is timed here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxpaged.batch import Buckets
from jaxpaged.config import SchedulerConfig

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "bench_host.py"
TINY = ROOT / "tests" / "data" / "tiny" / "llama_tied_sharded"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_host", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_host"] = module
    spec.loader.exec_module(module)
    return module


def config(num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=16,
        max_model_len=256,
        max_num_seqs=4,
        growth_reserve=0,
        max_num_batched_tokens=64,
    )


def test_the_usage_of_one_request_by_hand(bench):
    # 15 prompt tokens in one step, then a step for each output token but the last: 15, 16 and 17 slots hold a token.
    usage = bench.measure_usage([(15, 3)], config(8))
    assert (usage.num_steps, usage.peak_blocks, usage.num_preemptions, usage.mean_running) == (3, 2, 0, 1)
    assert usage.held_share == pytest.approx((15 / 16 + 16 / 16 + 17 / 32) / 3)
    assert usage.lowest_share == pytest.approx(17 / 32)


def test_a_small_pool_preempts_and_a_large_one_does_not(bench):
    trace = [(30, 40)] * 6
    small, large = bench.measure_usage(trace, config(10)), bench.measure_usage(trace, config(64))
    assert small.num_preemptions > 0 == large.num_preemptions
    assert small.peak_blocks <= 10 < large.peak_blocks
    assert small.num_steps > large.num_steps


def test_the_bundled_trace_fills_the_slots_it_allocates(bench):
    trace = bench.read_trace(bench.TRACE)
    assert len(trace) == 1000
    pool = SchedulerConfig(
        num_blocks=981,
        block_size=16,
        max_model_len=8192,
        max_num_seqs=256,
        growth_reserve=0,
        max_num_batched_tokens=2048,
    )
    assert bench.measure_usage(trace[:60], pool).held_share >= 0.96


def test_padding_of_steps_that_fit_their_buckets_or_do_not(bench):
    pool = SchedulerConfig(num_blocks=99, block_size=16, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=400)
    requests = [(100, 3)] * 4  # one step of 400 tokens, two of 4 decodes
    exact = bench.measure_padding(requests, pool, Buckets([4], [400]))
    assert exact == (0, 0, 3, 1)
    padded = bench.measure_padding(requests, pool, Buckets([16], [800]))
    alone = 2 * (3.45 + 0.55) + 9 + 0.55 + 3 * 0.39 * 4 / 256
    rows = 0.39 * 12 / 256
    assert padded.decode_share == pytest.approx(2 * rows / alone)
    assert padded.mixed_share == pytest.approx((9 + rows) / alone)


@pytest.mark.parametrize("trace", ["sharegpt", "alpaca"])
def test_fine_buckets_cost_less_than_five_percent_on_the_committed_traces(bench, trace):
    pool = SchedulerConfig(
        num_blocks=1 << 16, block_size=16, max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048
    )
    requests = bench.read_trace(ROOT / "workloads" / f"{trace}_like.csv")
    padding = bench.measure_padding(requests, pool, Buckets.fine(256, 2048))
    assert padding.decode_share + padding.mixed_share < 0.05


@pytest.mark.parametrize("variant", ["token ids only", "text", "text, stop strings, logprobs=5"])
@pytest.mark.parametrize("mixed", [False, True])
def test_steps_are_of_the_kind_that_is_measured(bench, variant, mixed):
    measurement = bench.Measurement(
        bench.load_tokenizer(str(TINY)), 4, 0 if mixed else 3, bench.VARIANTS[variant], mixed
    )
    times = measurement.run(5)
    assert len(times) == 5
    assert all(part > 0 for step in times for part in step)
    plan = measurement.last_plan
    counts = [row.count for row in plan.rows]
    assert counts == ([1, 1, 1, bench.BUDGET - 3] if mixed else [1] * 4)
    assert set(bench.summary(times)) == {"schedule", "pack", "bookkeeping", "total"}


def test_the_usage_table_comes_from_the_command_line_without_jax(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n20,5\n30,7\n")
    script = (
        f"import runpy, sys; sys.argv = ['bench_host.py', 'usage', '--trace', {str(trace)!r}, '--num-blocks', '9']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "2 requests at once" in done.stdout
