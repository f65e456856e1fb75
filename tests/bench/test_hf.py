"""`--engine hf`: what can be checked without PyTorch, and all of it where PyTorch is installed."""

import importlib.util
import sys

import pytest
from one_line import assert_one_line_error

from jaxpaged.bench import hf
from jaxpaged.bench.workload import fixed_lengths, random_requests
from jaxpaged.models.llama import llama_config
from jaxpaged.models.shapes import SHAPES

FIXED = ["--input-len", 6, "--output-len", 3]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_without_pytorch_the_error_is_one_line(run, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run(command, "--engine", "hf", "--model", "tiny", *FIXED)
    assert_one_line_error(result, "engine='hf' needs PyTorch, which is not installed; run: pip install torch")
    assert run.options is None  # this engine was not started


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_gets_the_same_shape(name):
    config = hf._llama_config(SHAPES[name]).to_dict()
    assert llama_config({**config, "dtype": "bfloat16"}, name) == SHAPES[name]


@needs_torch
def test_throughput_in_both_ways(run, trace):
    path = trace("prompt_tokens,output_tokens", "30,5", "4,40", "9,1", "7,7", "2,3")
    result = run("throughput", "--engine", "hf", "--model", "tiny", "--trace", path, "--hf-batch-sizes", "2")
    assert result.exit_code == 0, result.output
    written = run.json()
    assert written["engine"] == {"dtype": "float32"}
    assert written["options"] == {"dtype": "auto", "hf_mode": "both", "hf_batch_sizes": [2]}
    static, continuous = written["runs"].values()
    for figures in (static, continuous):
        assert (figures["num_requests"], figures["input_tokens"], figures["output_tokens"]) == (5, 52, 56)
    # Batches of 2, 2 and 1 in the trace's order, each as wide as its longest prompt and output.
    assert static["num_steps"] == 40 + 7 + 3
    assert static["mean_batch"] == pytest.approx(56 / 50)
    computed = 2 * (30 + 40 - 1) + 2 * (9 + 7 - 1) + (2 + 3 - 1)
    assert static["padding_share"] == pytest.approx(1 - (52 + 56 - 5) / computed)
    assert static["details"]["batch_size"] == 2
    assert continuous["padding_share"] is None


@needs_torch
def test_the_best_batch_size_serves(monkeypatch):
    rates = {1: 5.0, 2: 9.0, 4: None}
    monkeypatch.setattr(hf, "_trial", lambda model, batch, temperature: rates[len(batch)])
    model = hf.load("random:tiny", "auto", seed=0)
    requests = random_requests(fixed_lengths(3, 2, 4), model.vocab_size, 0)
    measured = hf.measure_static(model, requests, [1, 2, 4], temperature=1.0, use_tqdm=False)
    assert measured.details == {"batch_size": 2, "trials": {"1": 5.0, "2": 9.0}}
    with pytest.raises(ValueError, match="hf_batch_sizes=4: the memory holds none of these batches"):
        hf.measure_static(model, requests, [4], temperature=0.0, use_tqdm=False)


def test_batch_sizes_above_the_number_of_requests_are_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(hf, "_trial", lambda model, batch, temperature: tried.append(len(batch)) or 1.0 + len(batch))

    class Model:
        def generate(self, batch, temperature):
            assert len(batch) == 5

    requests = random_requests(fixed_lengths(3, 2, 5), 288, 0)
    measured = hf.measure_static(Model(), requests, [2, 5, 16, 64], temperature=0.0, use_tqdm=False)  # type: ignore
    assert tried == [2, 5]
    assert measured.details == {"batch_size": 5, "trials": {"2": 3.0, "5": 6.0}}


@needs_torch
def test_latency(run):
    args = ["--engine", "hf", "--model", "tiny", "--batch-size", 3, "--iters", 2, *FIXED]
    result = run("latency", *args)
    assert result.exit_code == 0, result.output
    assert (run.json()["engine"], run.json()["options"]) == ({"dtype": "float32"}, {"dtype": "auto"})
    figures = run.json()["runs"]["hf generate"]
    assert (figures["batch_size"], figures["num_iterations"]) == (3, 2)
    assert 0 < figures["first_token_ms"]["median"] < 1e3 * figures["seconds"]["median"]
    assert figures["output_token_ms"]["median"] > 0


@needs_torch
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "demo", *FIXED], "model='demo': engine='hf' takes the name of a shape, or a folder"),
        (["--model", "tiny", "--input-len", 500, "--output-len", 13], "more than max_position_embeddings=512"),
    ],
)
def test_errors_are_one_line(run, args, message):
    assert_one_line_error(run("throughput", "--engine", "hf", *args), message)
