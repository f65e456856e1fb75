"""What serving costs the host, and how full the KV pool is: the real engine without a model or a device.

    python scripts/bench_host.py host     time of schedule(), pack() and bookkeeping in a step
    python scripts/bench_host.py usage    share of the allocated KV slots that hold a token, on a trace
    python scripts/bench_host.py padding  what padding steps to buckets costs, on a trace

`host` drives the engine one step ahead, as in service, with a runner that packs each step and then makes tokens up.
Figures are medians over many steps, the smallest in brackets; run it on a machine that does little else. `usage` and
`padding` need nothing but the scheduler and its block manager.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxpaged.batch import Buckets, StepShape, pack
from jaxpaged.bench.memory.usage import serve
from jaxpaged.bench.workload import Lengths, read_trace
from jaxpaged.config import SchedulerConfig
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.scheduler import Scheduler, StepPlan

if TYPE_CHECKING:
    from jaxpaged.engine import Engine
    from jaxpaged.runner import StepResult
    from jaxpaged.tokenizer import Tokenizer

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
BUDGET = 2048
MAX_LOGPROBS = 20
TRACE = Path(__file__).parent.parent / "workloads" / "sharegpt_like.csv"
TEXT = """The lighthouse was built in 1874 and stands forty metres tall. Its keeper, Mara, climbs 206 steps every \
evening; storms come from the west in winter and can last for a week. “Déjà vu”, says the naïve visitor — 日本語 too 👍.

def area(radius: float) -> float:
    return 3.14159 * radius ** 2  # no units

"""

PLAIN = {"temperature": 0, "ignore_eos": True, "max_tokens": None}
VARIANTS = {
    "token ids only": {**PLAIN, "detokenize": False},
    "text": PLAIN,
    "text, stop strings, logprobs=5": {**PLAIN, "stop": ["\n\nUser:", "<|end|>"], "logprobs": 5},
}


# --- cost of a step


class StepTimes(NamedTuple):
    """Seconds of one step, by part."""

    schedule: float
    pack: float
    bookkeeping: float
    """All else that the engine does: taking in the tokens of the step before, text and stops included."""

    @property
    def total(self) -> float:
        return self.schedule + self.pack + self.bookkeeping


class TimedScheduler(Scheduler):
    """Notes how long the last `schedule` took."""

    seconds = 0.0

    def schedule(self) -> StepPlan | None:
        start = time.perf_counter()
        plan = super().schedule()
        self.seconds = time.perf_counter() - start
        return plan


class PretendHandle(NamedTuple):
    """Stands for a `runner.StepHandle`."""

    plan: StepPlan
    result: StepResult

    def read(self) -> StepResult:
        return self.result


class PretendRunner:
    """Packs steps as the runner does, notes how long that took, and lets every row go on in a given text."""

    plan: StepPlan
    """The last one."""

    def __init__(self, config: SchedulerConfig, text_ids: list[int]) -> None:
        self.seconds_packing = 0.0
        self.seconds_pretending = 0.0
        self._shape = StepShape(config.table_width, config.block_size, config.num_blocks * config.block_size)
        self._buckets = Buckets.fine(config.max_num_seqs, config.max_num_batched_tokens)
        self._text = np.array(text_ids, np.int32)
        self._num_steps = 0

    def dispatch(self, plan: StepPlan) -> PretendHandle:
        from jaxpaged.runner import StepResult
        from jaxpaged.sampler import Alternatives, Rating

        start = time.perf_counter()
        bucket = self._buckets.fit(plan.num_tokens, len(plan.rows))
        pack(plan, bucket, self._shape)
        packed = time.perf_counter()
        ids = self._text[(self._num_steps + 7 * np.arange(bucket.rows)) % len(self._text)]
        rating = Rating(logprobs=np.full(bucket.rows, -0.5, np.float32), ranks=np.ones(bucket.rows, np.int32))
        alternatives = None
        if any(row.sequence.request.params.logprobs for row in plan.rows):
            shape = (bucket.rows, MAX_LOGPROBS)
            alternatives = Alternatives(
                token_ids=self._text[np.arange(MAX_LOGPROBS) + np.zeros(shape, np.int32)],
                logprobs=np.full(shape, -1.0, np.float32),
            )
        self._num_steps += 1
        self.plan = plan
        self.seconds_packing = packed - start
        self.seconds_pretending = time.perf_counter() - packed
        return PretendHandle(plan, StepResult(ids, rating, alternatives, None))


class Measurement:
    """An engine with `num_running` sequences of a few hundred tokens, all prefilled, and others that wait."""

    def __init__(self, tokenizer: Tokenizer, num_running: int, num_waiting: int, params: dict, mixed: bool) -> None:
        from jaxpaged.engine import Engine

        assert not (mixed and num_waiting), "the prompts of mixed steps would queue behind those that wait"
        most_blocks = num_running * MAX_MODEL_LEN // BLOCK_SIZE
        self._config = SchedulerConfig(
            num_blocks=most_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_running,
            max_num_batched_tokens=max(BUDGET, num_running),
        )
        self._scheduler = TimedScheduler(self._config)
        self._runner = PretendRunner(self._config, tokenizer.encode(TEXT, add_special_tokens=False))
        self._engine: Engine = Engine(
            scheduler=self._scheduler,
            runner=self._runner,
            tokenizer=tokenizer,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=[],
            seed=0,
            max_logprobs=MAX_LOGPROBS,
        )
        self._params = SamplingParams(**params)
        self._mixed = mixed
        self._names = map(str, itertools.count())
        lengths = random.Random(0)
        num_decoding = num_running - mixed  # a mixed step has a prefill for its last row
        self._add(*(lengths.randint(100, 500) for _ in range(num_decoding)))
        while self._scheduler.num_waiting or self._runner.plan.num_tokens > num_decoding:
            self._engine.step()
        self._add(*(lengths.randint(100, 500) for _ in range(num_waiting)))

    @property
    def last_plan(self) -> StepPlan:
        return self._runner.plan

    def run(self, num_steps: int) -> list[StepTimes]:
        """Times of steps of the wanted kind, after the same number of rounds to warm up."""
        steps = self._mixed_steps() if self._mixed else self._steps()
        next(itertools.islice(steps, 20, 20), None)
        return list(itertools.islice(steps, num_steps))

    def _add(self, *lengths: int) -> str:
        name = ""
        for length in lengths:
            name = next(self._names)
            own = [int(name) % 97, int(name) // 97 % 97]  # so that no two prompts share a prefix
            self._engine.add_request(name, own + [1] * (length - 2), self._params)
        return name

    def _steps(self) -> Iterator[StepTimes]:
        while True:
            start = time.perf_counter()
            self._engine.step()
            whole = time.perf_counter() - start
            scheduling, packing = self._scheduler.seconds, self._runner.seconds_packing
            yield StepTimes(scheduling, packing, whole - scheduling - packing - self._runner.seconds_pretending)

    def _mixed_steps(self) -> Iterator[StepTimes]:
        """Steps that use the budget up: one long prompt after the other is prefilled beside the decodes."""
        name = self._add(MAX_MODEL_LEN - 1)
        for times in self._steps():
            if self._runner.plan.num_tokens == self._config.max_num_batched_tokens:
                yield times
            else:
                self._engine.abort_request(name)
                name = self._add(MAX_MODEL_LEN - 1)


def summary(times: list[StepTimes]) -> dict[str, tuple[float, float]]:
    """Median and minimum of each part and of the sum, in ms."""
    parts = {name: [getattr(t, name) for t in times] for name in (*StepTimes._fields, "total")}
    return {name: (1e3 * statistics.median(p), 1e3 * min(p)) for name, p in parts.items()}


def load_tokenizer(model: str) -> Tokenizer:
    from jaxpaged.checkpoints.demo import demo_model_path
    from jaxpaged.checkpoints.reader import open_checkpoint
    from jaxpaged.tokenizer import Tokenizer

    return Tokenizer.from_checkpoint(open_checkpoint(demo_model_path() if model == "demo" else Path(model)))


def host(args: argparse.Namespace) -> Table:
    tokenizer = load_tokenizer(args.model)
    columns = ("schedule", "pack", "bookkeeping", "total")
    table = Table(*("running", "waiting", "step", "requests"), title="ms a step: median (smallest)")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for num_running, mixed, (variant, params) in itertools.product(args.running, (False, True), VARIANTS.items()):
        if mixed and num_running >= BUDGET:
            continue
        waiting = 0 if mixed else args.waiting
        measured = summary(Measurement(tokenizer, num_running, waiting, params, mixed).run(args.steps))
        kind = f"{num_running - 1} decodes, prefill to {BUDGET}" if mixed else f"{num_running} decodes"
        figures = (f"{measured[c][0]:.3f} ({measured[c][1]:.3f})" for c in columns)
        table.add_row(str(num_running), str(waiting), kind, variant, *figures)
    return table


# --- usage of the pool


class Usage(NamedTuple):
    """What a trace did to a pool."""

    num_blocks: int
    held_share: float
    """Share of the allocated slots that hold a token, averaged over the steps."""
    lowest_share: float
    peak_blocks: int
    mean_running: float
    num_preemptions: int
    num_steps: int


def measure_usage(trace: list[Lengths], config: SchedulerConfig) -> Usage:
    """Serves the trace, all of it there at once, one step ahead."""
    served = serve(Scheduler(config), trace)
    shares = [moment.held / moment.allocated for moment in served.moments]
    return Usage(
        config.num_blocks,
        statistics.fmean(shares),
        min(shares),
        max(moment.allocated for moment in served.moments) // config.block_size,
        statistics.fmean(moment.running for moment in served.moments),
        served.num_preemptions,
        len(shares),
    )


def usage(args: argparse.Namespace) -> Table:
    trace = read_trace(args.trace)
    table = Table(
        *("blocks", "slots", "slots holding a token", "lowest", "peak blocks", "running", "preemptions", "steps"),
        title=f"{len(trace)} requests at once, blocks of {args.block_size}, at most {args.max_num_seqs} running",
    )
    for num_blocks in args.num_blocks:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=args.block_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=BUDGET,
        )
        u = measure_usage(trace, config)
        table.add_row(
            f"{u.num_blocks:,}",
            f"{u.num_blocks * args.block_size:,}",
            f"{u.held_share:.2%}",
            f"{u.lowest_share:.2%}",
            f"{u.peak_blocks:,}",
            f"{u.mean_running:.1f}",
            f"{u.num_preemptions:,}",
            f"{u.num_steps:,}",
        )
    return table


# --- padding


class RecordingScheduler(Scheduler):
    """Notes how many tokens, rows and empty rows the steps have."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.steps: list[tuple[int, int, int]] = []

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None:
            self.steps.append((plan.num_tokens, len(plan.rows), plan.num_empty_rows))
        return plan


class Padding(NamedTuple):
    """What padding a trace's steps to buckets costs, of the time that they would take without."""

    decode_share: float
    """In steps of decodes alone."""
    mixed_share: float
    """In all others."""
    num_steps: int
    num_mixed: int


def step_ms(tokens: int, rows: int) -> float:
    """About what a step of an 8B Llama takes on an H200: its matrix products, which read the weights as long as they
    take to compute 153 tokens; logits and sampling of the rows; a rest."""
    return max(3.45, 0.0225 * tokens) + 0.25 + 0.39 * rows / 256 + 0.3


def measure_padding(trace: list[Lengths], config: SchedulerConfig, buckets: Buckets) -> Padding:
    """Serves the trace, all of it there at once, one step ahead."""
    scheduler = RecordingScheduler(config)
    serve(scheduler, trace)
    exact, padding = 0.0, {True: 0.0, False: 0.0}
    for tokens, rows, empty in scheduler.steps:
        bucket = buckets.fit(tokens, rows, empty)
        exact += step_ms(tokens, rows)
        padding[bucket.decode] += step_ms(bucket.tokens, bucket.rows) - step_ms(tokens, rows)
    num_mixed = sum(tokens != rows or empty > 0 for tokens, rows, empty in scheduler.steps)
    return Padding(padding[True] / exact, padding[False] / exact, len(scheduler.steps), num_mixed)


def padding(args: argparse.Namespace) -> Table:
    trace = read_trace(args.trace)
    table = Table(
        *("running", "budget", "buckets", "steps", "mixed", "padding of decodes", "of mixed steps", "of all"),
        title=f"{args.trace.stem}, {len(trace)} requests at once: padding, of the time without it",
    )
    for running, budget in itertools.product(args.running, args.budget):
        config = SchedulerConfig(
            num_blocks=1 << 16,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=running,
            max_num_batched_tokens=budget,
        )
        for name, kind in (("coarse", Buckets.coarse), ("fine", Buckets.fine)):
            buckets = kind(running, budget)
            p = measure_padding(trace, config, buckets)
            table.add_row(
                str(running),
                str(budget),
                f"{name}, {len(buckets.decode)} + {len(buckets.mixed)}",
                f"{p.num_steps:,}",
                f"{p.num_mixed:,}",
                *(f"{share:.1%}" for share in (p.decode_share, p.mixed_share, p.decode_share + p.mixed_share)),
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="host | usage | padding")
    command = commands.add_parser("host", help="time of schedule(), pack() and bookkeeping in a step")
    command.add_argument("--running", type=int, nargs="+", default=[256, 1000], help="sequences (default: 256 1000)")
    command.add_argument("--waiting", type=int, default=0, help="requests that wait during decodes (default: 0)")
    command.add_argument("--steps", type=int, default=300, help="steps to measure (default: 300)")
    command.add_argument("--model", default="demo", help="whose tokenizer: folder, .gguf or 'demo' (default: demo)")
    command.set_defaults(run=host)
    command = commands.add_parser("usage", help="share of the allocated KV slots that hold a token, on a trace")
    command.add_argument("--trace", type=Path, default=TRACE, help="CSV with prompt_tokens and output_tokens")
    command.add_argument(
        "--num-blocks", type=int, nargs="+", default=[981, 65536], help="pools to try (default: 981 65536)"
    )
    command.add_argument("--block-size", type=int, default=BLOCK_SIZE, help="tokens a block (default: 16)")
    command.add_argument("--max-num-seqs", type=int, default=256, help="most that run at once (default: 256)")
    command.set_defaults(run=usage)
    command = commands.add_parser("padding", help="what padding steps to buckets costs, on a trace")
    command.add_argument("--trace", type=Path, default=TRACE, help="CSV with prompt_tokens and output_tokens")
    command.add_argument("--running", type=int, nargs="+", default=[256], help="most that run at once (default: 256)")
    command.add_argument("--budget", type=int, nargs="+", default=[2048], help="tokens of a step (default: 2048)")
    command.set_defaults(run=padding)
    args = parser.parse_args()
    Console(width=150).print(args.run(args))


if __name__ == "__main__":
    main()
