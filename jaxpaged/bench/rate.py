"""Latency under load: requests arrive at random times, as from many users who know nothing of each other.

Arrivals are a Poisson process: gaps drawn from an exponential distribution, the same for every rate but for their
scale. They wait for no answers (open loop), and a request's times count from when it was due, so that an engine or a
host which falls behind can't hide it. The requests go through `AsyncEngine`, as a server's do, and each is read by a
coroutine of its own.

Normalised latency is a request's end-to-end latency divided by its output tokens, the measure of Figure 12 in Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023).

A finite number of requests can hide that an engine falls behind: its latencies grow, and the arrivals end before they
are long. So a rate counts as sustained only if requests were answered as fast as they came while they came, for long
enough that an engine which keeps pace has answered nearly all of them by the last arrival (`Verdict`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxpaged.async_engine import AsyncEngine
from jaxpaged.bench.report import Percentiles, check_writable, percentiles, spread
from jaxpaged.bench.throughput import request_params
from jaxpaged.bench.workload import BenchRequest
from jaxpaged.engine import Engine

_WARM_UP_TOKENS = 8
_SERVED_SHARE = 0.9
"""Share of the requests that must be answered by the last arrival."""
_LONG = 10
"""The arrivals last so many times the median end-to-end latency, or they are too few to tell."""


class Verdict(StrEnum):
    """Whether an engine sustains a rate."""

    sustained = "sustained"
    """Latencies stay below the limit, and requests are answered as fast as they come."""
    missed = "not sustained"
    """Latencies do not stay below the limit; or requests pile up, more of them than can run at once."""
    unclear = "too few requests to tell"


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """What one request lived through, in seconds of one clock."""

    due: float
    """When it arrived."""
    outputs: list[float]
    """When its reader got each of its outputs, which bring a token each unless the reader is late."""
    num_input: int
    num_output: int


@dataclasses.dataclass(frozen=True)
class RateResult:
    """What one rate came to."""

    rate: float
    """Requests a second that were due."""
    num_requests: int
    input_tokens: int
    output_tokens: int
    seconds: float
    """From the first arrival to the last token."""
    first_token_ms: Percentiles
    """From a request's arrival to its first token (TTFT)."""
    between_tokens_ms: Percentiles | None
    """Between two outputs of a request, over all of all requests (ITL); None if none has two."""
    end_to_end_ms: Percentiles
    """From a request's arrival to its last token."""
    normalized_ms: Percentiles
    """The same, divided by the request's output tokens."""
    mean_normalized_ms: float
    num_preemptions: int
    arrival_seconds: float
    """From the first arrival to the last."""
    num_unanswered: int
    """Requests whose last token had not come at the last arrival."""
    max_num_seqs: int
    """Requests that run at once."""

    @classmethod
    def of(cls, rate: float, times: Sequence[RequestTimes], num_preemptions: int, max_num_seqs: int) -> RateResult:
        """Summarises the requests of one rate."""
        last_arrival = max(t.due for t in times)
        gaps = [1e3 * (b - a) for t in times for a, b in itertools.pairwise(t.outputs)]
        normalized = [1e3 * (t.outputs[-1] - t.due) / t.num_output for t in times]
        return cls(
            rate=rate,
            num_requests=len(times),
            input_tokens=sum(t.num_input for t in times),
            output_tokens=sum(t.num_output for t in times),
            seconds=max(t.outputs[-1] for t in times) - min(t.due for t in times),
            first_token_ms=percentiles([1e3 * (t.outputs[0] - t.due) for t in times]),
            between_tokens_ms=percentiles(gaps) if gaps else None,
            end_to_end_ms=percentiles([1e3 * (t.outputs[-1] - t.due) for t in times]),
            normalized_ms=percentiles(normalized),
            mean_normalized_ms=statistics.fmean(normalized),
            num_preemptions=num_preemptions,
            arrival_seconds=last_arrival - min(t.due for t in times),
            num_unanswered=sum(t.outputs[-1] > last_arrival for t in times),
            max_num_seqs=max_num_seqs,
        )

    @property
    def request_rate(self) -> float:
        """Requests served a second; below `rate` also because the last ones are waited for."""
        return self.num_requests / self.seconds

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def served_share(self) -> float:
        """Share of the requests that were answered by the last arrival: throughput while they came, over the rate."""
        return 1 - self.num_unanswered / self.num_requests

    def verdict(self, slo_ms: float) -> Verdict:
        """Whether the rate is sustained with p90 of the normalised latency below `slo_ms`.

        In a steady state the requests that run or wait are the rate times the mean latency (Little's law), so that
        their share falls as the arrivals go on; where requests come faster than they are answered, it does not.
        """
        keeps_pace = self.served_share >= _SERVED_SHARE
        if self.normalized_ms.p90 >= slo_ms or (not keeps_pace and self.num_unanswered > self.max_num_seqs):
            return Verdict.missed
        long = self.arrival_seconds >= _LONG * self.end_to_end_ms.median / 1e3
        return Verdict.sustained if keeps_pace and long else Verdict.unclear

    def as_json(self) -> dict[str, Any]:
        """The fields and the rates, percentiles by name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {name: x._asdict() if isinstance(x, Percentiles) else x for name, x in fields.items()}
        rates = {"requests_per_second": self.request_rate, "output_tokens_per_second": self.output_rate}
        return {**plain, **rates}

    def figures(self) -> dict[str, str]:
        """The table's rows."""
        between = self.between_tokens_ms
        return {
            "requests": f"{self.num_requests:,}",
            "seconds": f"{self.seconds:,.2f}",
            "… until the last arrival": f"{self.arrival_seconds:,.2f}",
            "answered by then": f"{self.served_share:.1%}",
            "requests a second": f"{self.request_rate:,.2f}",
            "output tokens a second": f"{self.output_rate:,.1f}",
            "to the first token": spread(self.first_token_ms, "ms"),
            **({} if between is None else {"between tokens": spread(between, "ms")}),
            "end to end": spread(self.end_to_end_ms, "ms"),
            "end to end, an output token": spread(self.normalized_ms, "ms"),
            "… mean": f"{self.mean_normalized_ms:.4g} ms",
            "preemptions": f"{self.num_preemptions:,}",
        }


def parse_rates(listed: str) -> list[float]:
    """Rates with commas between them, in requests a second, as a list in ascending order.

    Raises:
      ValueError: an entry is no positive number.
    """
    rates = set()
    for entry in listed.split(","):
        try:
            rate = float(entry)
        except ValueError:
            rate = math.nan
        if not 0 < rate < math.inf:
            raise ValueError(f"rates={listed!r}: {entry.strip()!r} must be a positive number of requests a second")
        rates.add(rate)
    return sorted(rates)


def arrival_times(num: int, rate: float, seed: int) -> list[float]:
    """When requests arrive, in seconds: the first at 0, then with exponential gaps of 1 / rate on average."""
    draw = random.Random(f"arrivals {seed}")
    gaps = (draw.expovariate(1.0) / rate for _ in range(num - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


def highest_sustained(results: Sequence[RateResult], slo_ms: float) -> float | None:
    """The highest rate that is sustained, as are all measured below it."""
    ordered = sorted(results, key=lambda r: r.rate)
    kept = itertools.takewhile(lambda r: r.verdict(slo_ms) is Verdict.sustained, ordered)
    return max((r.rate for r in kept), default=None)


def conclusion(results: Sequence[RateResult], slo_ms: float) -> str:
    """What `highest_sustained` comes to in words; and the rates that had too few requests, with the reason."""
    highest = highest_sustained(results, slo_ms)
    up_to = "none of these rates" if highest is None else f"up to {highest:g} requests a second"
    lines = [
        f"p90 of the latency an output token stays below {slo_ms:g} ms, and requests are answered as fast as they "
        f"come, at: {up_to}"
    ]
    for r in sorted(results, key=lambda r: r.rate):
        if r.verdict(slo_ms) is Verdict.unclear:
            lines.append(
                f"too few requests to tell at {r.rate:g} requests a second: they came within "
                f"{r.arrival_seconds:.3g} s, and one takes {r.end_to_end_ms.median / 1e3:.3g} s (median); "
                f"{r.num_unanswered:,} of {r.num_requests:,} had no answer at the last arrival"
            )
    return "\n".join(lines)


def measure(
    engine: Engine,
    runs: Sequence[tuple[float, Sequence[BenchRequest]]],
    warm_up: Sequence[BenchRequest],
    *,
    seed: int = 0,
    temperature: float = 0.0,
    use_tqdm: bool = True,
) -> list[RateResult]:
    """Serves the requests of each rate, one rate after the other, and measures.

    Args:
      engine: what serves; nobody else uses it meanwhile.
      runs: rates in requests a second, and what is asked for at each.
      warm_up: served before, a few tokens each, and not counted.
      seed: decides the gaps between arrivals.
      temperature: 0 is greedy.
      use_tqdm: show a progress bar for each rate.

    Raises:
      ValueError: a request could never be served.
    """
    return asyncio.run(_measure(engine, runs, warm_up, seed, temperature, use_tqdm))


async def _measure(
    engine: Engine,
    runs: Sequence[tuple[float, Sequence[BenchRequest]]],
    warm_up: Sequence[BenchRequest],
    seed: int,
    temperature: float,
    use_tqdm: bool,
) -> list[RateResult]:
    results = []
    async with AsyncEngine(engine) as serving:
        short = [r._replace(num_output=min(r.num_output, _WARM_UP_TOKENS)) for r in warm_up]
        await _serve_all(serving, short, [0.0] * len(short), temperature, tqdm(disable=True))
        for rate, requests in runs:
            preempted = engine.scheduler.num_preemptions
            arrivals = arrival_times(len(requests), rate, seed)
            with tqdm(total=len(requests), desc=f"{rate:g}/s", unit="req", disable=not use_tqdm) as progress:
                times = await _serve_all(serving, requests, arrivals, temperature, progress)
            preempted = engine.scheduler.num_preemptions - preempted
            results.append(RateResult.of(rate, times, preempted, engine.scheduler.config.max_num_seqs))
    return results


async def _serve_all(
    engine: AsyncEngine, requests: Sequence[BenchRequest], arrivals: Sequence[float], temperature: float, progress: tqdm
) -> list[RequestTimes]:
    """Submits each request when it is due, and waits for all."""
    tasks = []
    start = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for request, arrival in zip(requests, arrivals, strict=True):
                due = start + arrival
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(_serve(engine, request, due, temperature, progress)))
    except ExceptionGroup as errors:  # the first has cancelled all others
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _serve(
    engine: AsyncEngine, request: BenchRequest, due: float, temperature: float, progress: tqdm
) -> RequestTimes:
    outputs = []
    async for _ in engine.generate(request.prompt, request_params(request.num_output, temperature)):
        outputs.append(time.perf_counter())
    progress.update()
    return RequestTimes(due, outputs, len(request.prompt), request.num_output)


def check_plot(path: Path | None) -> None:
    """Refuses a plot that can't be drawn before anything is measured for it.

    Raises:
      ValueError: matplotlib is missing, or the file can't be one or can't be written.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'jaxpaged[bench]'")
    if path.suffix != ".png":
        raise ValueError(f"plot={str(path)!r} must be a .png file in a folder that exists")
    check_writable("plot", path)


def plot(path: Path, results: Sequence[RateResult], slo_ms: float, title: str) -> None:
    """Draws normalised latency against the rate as a PNG.

    Raises:
      ValueError: the file can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(
        xlabel="requests a second", ylabel="end-to-end latency an output token, ms", title=title, yscale="log"
    )
    rates = [r.rate for r in results]
    axes.plot(rates, [r.mean_normalized_ms for r in results], "o-", label="mean")
    for name in Percentiles._fields:
        axes.plot(rates, [getattr(r.normalized_ms, name) for r in results], ".--", label=name)
    axes.axhline(slo_ms, color="grey", linewidth=0.8, label=f"{slo_ms:g} ms")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise ValueError(f"plot={str(path)!r} can't be written: {error}") from error
