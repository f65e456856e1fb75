"""Traces and fixed lengths, and the requests that are made of them."""

import statistics
from pathlib import Path

import pytest

from jaxpaged.bench.workload import Lengths, check_lengths, fixed_lengths, random_requests, read_trace

WORKLOADS = Path(__file__).parents[2] / "workloads"


def test_a_trace_is_read_in_its_order_and_other_columns_are_left_out(trace):
    path = trace("day,output_tokens,prompt_tokens", "1,5,30", "2, 7 ,4")
    assert read_trace(path) == [Lengths(30, 5), Lengths(4, 7)]
    assert read_trace(path, 1) == [Lengths(30, 5)]


@pytest.mark.parametrize(
    ("name", "means"), [("sharegpt_like.csv", (161.31, 337.99)), ("alpaca_like.csv", (19.31, 58.45))]
)
def test_the_bundled_traces_have_the_means_of_the_paper(name, means):
    lengths = read_trace(WORKLOADS / name)
    assert len(lengths) == 1000
    assert tuple(map(statistics.fmean, zip(*lengths, strict=True))) == pytest.approx(means, abs=0.01)


@pytest.mark.parametrize(
    ("lines", "num", "message"),
    [
        (["a,b", "1,2"], None, "first line lacks the column prompt_tokens and the column output_tokens"),
        (["prompt_tokens,b", "1,2"], None, "first line lacks the column output_tokens"),
        ([""], None, "lacks the column prompt_tokens"),
        (["prompt_tokens,output_tokens"], None, "it has no requests"),
        (["prompt_tokens,output_tokens", "3,4", "x,4"], None, "request 2: 'x' must be a positive integer"),
        (["prompt_tokens,output_tokens", "3,0"], None, "request 1: '0' must be a positive integer"),
        (["prompt_tokens,output_tokens", "3,-1"], None, "request 1: '-1' must be a positive integer"),
        (["prompt_tokens,output_tokens", "3"], None, "request 1: None must be a positive integer"),
        (["prompt_tokens,output_tokens", "3,4"], 2, "num_prompts=2 is more than the 1 requests"),
    ],
)
def test_a_trace_at_fault_is_named_with_its_fault(trace, lines, num, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_trace(trace(*lines), num)
    assert "trace.csv" in str(caught.value)


def test_a_trace_that_is_not_there_or_is_no_text_is_a_value_error(tmp_path):
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.csv", tmp_path, binary):
        with pytest.raises(ValueError, match="it can't be read"):
            read_trace(path)


def test_fixed_lengths():
    assert fixed_lengths(3, 4, 2) == [Lengths(3, 4), Lengths(3, 4)]
    for wrong in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="=0 must be at least 1"):
            fixed_lengths(*wrong)


def test_requests_have_their_lengths_and_depend_on_the_seed_alone():
    lengths = [Lengths(50, 3), Lengths(200, 1)]
    requests = random_requests(lengths, 10, seed=1)
    assert [(len(r.prompt), r.num_output) for r in requests] == lengths
    assert set(requests[1].prompt) == set(range(10))
    assert requests == random_requests(lengths, 10, seed=1)
    assert requests != random_requests(lengths, 10, seed=2)


def test_requests_that_are_too_long_are_refused_with_the_limit():
    check_lengths([Lengths(6, 4)], 10, "max_model_len")
    with pytest.raises(ValueError, match="request 2 has 7 prompt and 4 output tokens, more than max_model_len=10"):
        check_lengths([Lengths(6, 4), Lengths(7, 4)], 10, "max_model_len")
