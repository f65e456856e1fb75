"""Latency of a batch: the same requests, all there at once, again and again."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxpaged.bench.report import Percentiles, percentiles, spread
from jaxpaged.bench.throughput import request_params
from jaxpaged.bench.workload import BenchRequest
from jaxpaged.config import SchedulerConfig, blocks_for

if TYPE_CHECKING:
    from jaxpaged.llm import LLM


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Times of one batch, in seconds from the submission of its first request."""

    end: float
    """When the last token of all was read."""
    first: list[float]
    """When each request's first token was."""
    last: list[float]
    """When each request's last token was."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """What the iterations came to."""

    batch_size: int
    input_len: int
    output_len: int
    num_iterations: int
    seconds: Percentiles
    """Of an iteration."""
    first_token_ms: Percentiles
    """From the submission to a request's first token, over all requests of all iterations."""
    output_token_ms: Percentiles | None
    """A request's time from its first token to its last, divided by the tokens after the first; None for one token."""
    num_preemptions: int | None = None
    """In the iterations; each makes a request compute its tokens again. None where there are none by design."""

    @classmethod
    def of(
        cls, iterations: Sequence[Iteration], input_len: int, output_len: int, num_preemptions: int | None = None
    ) -> Latency:
        """Summarises iterations of one batch size."""
        token_ms = None
        if output_len > 1:
            token_ms = percentiles(
                [
                    1e3 * (last - first) / (output_len - 1)
                    for i in iterations
                    for first, last in zip(i.first, i.last, strict=True)
                ]
            )
        return cls(
            batch_size=len(iterations[0].first),
            input_len=input_len,
            output_len=output_len,
            num_iterations=len(iterations),
            seconds=percentiles([i.end for i in iterations]),
            first_token_ms=percentiles([1e3 * t for i in iterations for t in i.first]),
            output_token_ms=token_ms,
            num_preemptions=num_preemptions,
        )

    @property
    def output_rate(self) -> float:
        """Output tokens a second, of the median iteration, prefill included."""
        return self.batch_size * self.output_len / self.seconds.median

    @property
    def prefill_rate(self) -> float | None:
        """Input tokens a second, of the median iteration, if it does nothing but prefill."""
        return self.batch_size * self.input_len / self.seconds.median if self.output_len == 1 else None

    def as_json(self) -> dict[str, Any]:
        """The fields and the rates; percentiles by name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        named = {name: v._asdict() if isinstance(v, Percentiles) else v for name, v in fields.items()}
        rates = {
            "output_tokens_per_second": self.output_rate,
            "prefill_tokens_per_second": self.prefill_rate,
        }
        return {**named, **rates}

    def figures(self) -> dict[str, str]:
        """The table's rows."""
        shown = {
            "seconds an iteration": spread(self.seconds, "s"),
            "time to first token": spread(self.first_token_ms, "ms"),
        }
        if self.output_token_ms is not None:
            shown["time an output token"] = spread(self.output_token_ms, "ms")
        shown["output tokens a second"] = f"{self.output_rate:,.1f}"
        if self.prefill_rate is not None:
            shown["prefill tokens a second"] = f"{self.prefill_rate:,.1f}"
        if self.num_preemptions is not None:
            shown["preemptions"] = f"{self.num_preemptions:,}"
        return shown


def check_batch_size(batch_size: int, max_num_seqs: int) -> None:
    """Refuses a batch whose requests would wait for each other.

    Raises:
      ValueError: fewer sequences run at once.
    """
    if batch_size > max_num_seqs:
        raise ValueError(
            f"batch_size={batch_size} is more than max_num_seqs={max_num_seqs}, the sequences that run at once; raise "
            "that, or measure a smaller batch"
        )


def check_pool(batch_size: int, input_len: int, output_len: int, config: SchedulerConfig) -> None:
    """Refuses a batch that the KV pool does not hold all at once.

    Raises:
      ValueError: it has too few blocks.
    """
    tokens = batch_size * blocks_for(input_len + output_len - 1, config.block_size)  # the last one is not stored
    spare = (batch_size - 1) * config.growth_reserve  # without which the last request is not admitted
    if tokens + spare > config.num_blocks:
        raise ValueError(
            f"batch_size={batch_size} of {input_len} input and {output_len} output tokens takes {tokens} blocks of "
            f"{config.block_size}, and {spare} that admission leaves free, but the KV pool has {config.num_blocks}; "
            "raise num_kv_blocks or the memory for it, or measure a smaller batch"
        )


def measure(
    llm: LLM, batches: Sequence[Sequence[BenchRequest]], *, temperature: float = 0.0, use_tqdm: bool = True
) -> Latency:
    """Serves the batches one after the other; the first warms up and is not counted.

    Args:
      llm: the model; nobody else uses it meanwhile.
      batches: at least two, of the same size and lengths, with prompts of their own.
      temperature: 0 is greedy.
      use_tqdm: show a progress bar.

    Raises:
      ValueError: a request could never be served.
    """
    names = map("bench {}".format, itertools.count())
    bar = tqdm(batches, desc="Iterations", unit="it", dynamic_ncols=True, disable=not use_tqdm)
    iterations, preempted = [], [llm.engine.scheduler.num_preemptions]
    for batch in bar:
        iterations.append(_serve(llm, batch, names, temperature))
        preempted.append(llm.engine.scheduler.num_preemptions)
    first = batches[0][0]
    return Latency.of(iterations[1:], len(first.prompt), first.num_output, preempted[-1] - preempted[1])


def _serve(llm: LLM, batch: Sequence[BenchRequest], names: Any, temperature: float) -> Iteration:
    engine = llm.engine
    start = time.perf_counter()
    completions = [engine.add_request(next(names), r.prompt, request_params(r.num_output, temperature)) for r in batch]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while len(last) < len(completions):
        advanced = engine.step()
        now = time.perf_counter() - start
        if len(first) < len(completions):
            for completion in advanced:
                first.setdefault(id(completion), now)
        for completion in advanced:
            if completion.finish_reason is not None:
                last[id(completion)] = now
    order = [id(completion) for completion in completions]
    return Iteration(max(last.values()), [first[i] for i in order], [last[i] for i in order])
