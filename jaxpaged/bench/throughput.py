"""Throughput: all requests at once, each to its exact length, through the engine as `LLM.generate` drives it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpaged.bench.workload import BenchRequest
from jaxpaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxpaged.batch import Bucket
    from jaxpaged.llm import LLM

_WARM_UP_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Throughput:
    """What one run came to. A None is a figure that the run does not have."""

    num_requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    """From the first request's submission to the last token read."""
    num_steps: int | None = None
    mean_batch: float | None = None
    """Sequences a step."""
    padding_share: float | None = None
    """Share of the tokens computed that were padding, or came after a request's end."""
    decode_padding_share: float | None = None
    """The same of the steps in which every sequence has one token."""
    num_preemptions: int | None = None
    kv_slots_held_share: float | None = None
    """Share of the allocated KV slots that held a token, averaged over the steps."""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What else the JSON file tells."""

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Input and output tokens a second."""
        return (self.input_tokens + self.output_tokens) / self.seconds

    @property
    def request_rate(self) -> float:
        """Requests a second."""
        return self.num_requests / self.seconds

    def as_json(self) -> dict[str, Any]:
        """The fields and the rates."""
        rates = {
            "output_tokens_per_second": self.output_rate,
            "total_tokens_per_second": self.total_rate,
            "requests_per_second": self.request_rate,
        }
        return {**dataclasses.asdict(self), **rates}

    def figures(self) -> dict[str, str]:
        """The table's rows."""
        shown = {
            "requests": f"{self.num_requests:,}",
            "input tokens": f"{self.input_tokens:,}",
            "output tokens": f"{self.output_tokens:,}",
            "seconds": f"{self.seconds:,.2f}",
            "output tokens a second": f"{self.output_rate:,.1f}",
            "input and output tokens a second": f"{self.total_rate:,.1f}",
            "requests a second": f"{self.request_rate:,.2f}",
            "steps": None if self.num_steps is None else f"{self.num_steps:,}",
            "sequences a step": None if self.mean_batch is None else f"{self.mean_batch:,.1f}",
            "padding, of the tokens computed": _percent(self.padding_share),
            "padding, in steps of decodes alone": _percent(self.decode_padding_share),
            "preemptions": None if self.num_preemptions is None else f"{self.num_preemptions:,}",
            "allocated KV slots that held a token": _percent(self.kv_slots_held_share),
        }
        return {label: figure for label, figure in shown.items() if figure is not None}


def measure(
    llm: LLM,
    requests: Sequence[BenchRequest],
    warm_up: Sequence[BenchRequest],
    *,
    temperature: float = 0.0,
    use_tqdm: bool = True,
) -> Throughput:
    """Serves the requests and measures.

    Args:
      llm: the model; nobody else uses it meanwhile.
      requests: what to serve.
      warm_up: served before, a few tokens each, and not counted.
      temperature: 0 is greedy.
      use_tqdm: show a progress bar.

    Raises:
      ValueError: a request could never be served.
    """
    params = [request_params(r.num_output, temperature) for r in requests]
    short = [request_params(min(r.num_output, _WARM_UP_TOKENS), temperature) for r in warm_up]
    llm.generate([r.prompt for r in warm_up], short, use_tqdm=False)
    prompts = [r.prompt for r in requests]
    runner = llm.engine.runner
    before = llm.engine.step_stats()
    steps_before, tokens_before = runner.steps_by_bucket.copy(), runner.tokens_by_bucket.copy()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - start
    stats = llm.engine.step_stats() - before
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [r.num_output for r in requests], "requests run to their exact lengths"
    steps, tokens = runner.steps_by_bucket - steps_before, runner.tokens_by_bucket - tokens_before
    return Throughput(
        num_requests=len(requests),
        input_tokens=sum(map(len, prompts)),
        output_tokens=sum(lengths),
        seconds=seconds,
        num_steps=stats.num_steps,
        mean_batch=stats.num_rows / stats.num_steps,
        padding_share=1 - stats.num_tokens / stats.num_padded_tokens,
        decode_padding_share=_decode_padding(steps, tokens),
        num_preemptions=stats.num_preemptions,
        kv_slots_held_share=stats.slots_held / stats.slots_allocated,
        details={
            "num_kv_blocks": llm.engine.scheduler.config.num_blocks,
            "buckets": [{**b._asdict(), "steps": n, "tokens_used": tokens[b]} for b, n in sorted(steps.items())],
        },
    )


def request_params(num_output: int, temperature: float) -> SamplingParams:
    """Sampling of exactly so many tokens, without text."""
    return SamplingParams(temperature=temperature, max_tokens=num_output, ignore_eos=True, detokenize=False)


def _decode_padding(steps: dict[Bucket, int], tokens: dict[Bucket, int]) -> float | None:
    computed = sum(b.tokens * n for b, n in steps.items() if b.decode)
    return 1 - sum(n for b, n in tokens.items() if b.decode) / computed if computed else None


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
