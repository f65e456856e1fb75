"""`jaxpaged bench`: its commands and their options. What they measure is in the modules beside this one."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxpaged.bench.options import (
    BenchModel,
    BenchSeed,
    Engine,
    EngineName,
    HFBatchSizes,
    HFMode,
    HFModeOption,
    Json,
    KvReservation,
    Plot,
    Reservation,
    StaticBatches,
    Temperature,
    work_option,
)
from jaxpaged.cli_options import (
    BlockSize,
    DType,
    Dtype,
    MaxModelLen,
    MaxNumSeqs,
    MemoryShare,
    NumKvBlocks,
    PrefixCaching,
    TokenBudget,
    Verbose,
    load_llm,
    one_line_errors,
    prepare_process,
)
from jaxpaged.models.shapes import with_random_weights

if TYPE_CHECKING:
    from jaxpaged.bench.hf import HFModel
    from jaxpaged.bench.throughput import Throughput
    from jaxpaged.bench.workload import Lengths
    from jaxpaged.llm import LLM

app = typer.Typer(
    help="Measure throughput, latency and sustained rate, with real or random weights.", no_args_is_help=True
)


@app.command()
def throughput(
    model: BenchModel,
    trace: Annotated[
        Path | None, work_option("CSV with the columns prompt_tokens and output_tokens, a request a line.")
    ] = None,
    input_len: Annotated[int | None, work_option("Prompt tokens of every request; without a trace.")] = None,
    output_len: Annotated[int | None, work_option("Output tokens of every request; without a trace.")] = None,
    num_prompts: Annotated[int | None, work_option("Requests; all of a trace, else 256, if not given.", min=1)] = None,
    temperature: Temperature = 0.0,
    seed: BenchSeed = 0,
    engine: Engine = EngineName.jaxpaged,
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: TokenBudget = None,
    enable_prefix_caching: PrefixCaching = True,
    kv_reservation: KvReservation = Reservation.none,
    static_batches: StaticBatches = False,
    hf_mode: HFModeOption = HFMode.both,
    hf_batch_sizes: HFBatchSizes = "16,32,64,128",
    json: Json = None,
    verbose: Verbose = False,
) -> None:
    """Serve all requests at once, each to its exact length, and tell tokens and requests a second."""
    from jaxpaged.bench import report, workload
    from jaxpaged.bench.throughput import measure

    with one_line_errors():
        report.check_writable("json", json)
        lengths = _lengths(trace, input_len, output_len, num_prompts)
        sizes = _batch_sizes(hf_batch_sizes)
        if engine is EngineName.hf and (kv_reservation is not Reservation.none or static_batches):
            raise ValueError("--kv-reservation and --static-batches are options of this engine, not of hf")
    model = with_random_weights(model)
    source = trace.name if trace else f"{input_len} in, {output_len} out"
    about = {"benchmark": "throughput", "model": model, "requests": source, "seed": seed, "temperature": temperature}
    title = f"{model}, {source}"
    if engine is EngineName.hf:
        with one_line_errors():
            runs, startup, hf = _hf_throughput(model, dtype.value, lengths, seed, temperature, hf_mode, sizes)
            asked = {"dtype": dtype.value, "hf_mode": hf_mode.value, "hf_batch_sizes": sizes}
            about |= {"options": asked, "engine": {"dtype": hf.dtype_name}}
            report.publish(title, hf.device_name, runs, startup, json, about)
        return
    options = {
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
        "kv_reservation": kv_reservation.value,
        "static_batches": static_batches,
    }
    llm, startup = _load(verbose, model, options)
    with one_line_errors():
        config = llm.engine.scheduler.config
        workload.check_lengths(lengths, config.max_model_len, "max_model_len")
        requests = workload.random_requests(lengths, llm.engine.vocab_size, seed)
        warm_up = workload.random_requests(lengths[: config.max_num_seqs], llm.engine.vocab_size, seed + 1)
        measured = measure(llm, requests, warm_up, temperature=temperature, use_tqdm=sys.stderr.isatty())
        about |= {"options": options, "engine": _resolved(llm)}
        report.publish(title, _device_name(), {"jaxpaged": measured}, startup, json, about)


@app.command()
def latency(
    model: BenchModel,
    batch_size: Annotated[int, work_option("Requests of a batch, all there at once.", min=1)] = 8,
    input_len: Annotated[int, work_option("Prompt tokens of a request.", min=1)] = 128,
    output_len: Annotated[int, work_option("Output tokens of a request; 1 measures prefill.", min=1)] = 256,
    iters: Annotated[int, work_option("Batches to measure, after one to warm up.", min=1)] = 10,
    temperature: Temperature = 0.0,
    seed: BenchSeed = 0,
    engine: Engine = EngineName.jaxpaged,
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: TokenBudget = None,
    enable_prefix_caching: PrefixCaching = True,
    json: Json = None,
    verbose: Verbose = False,
) -> None:
    """Serve one batch again and again, and tell how long it, its first tokens and its other tokens take."""
    from jaxpaged.bench import report, workload
    from jaxpaged.bench.latency import check_batch_size, check_pool, measure

    with one_line_errors():
        report.check_writable("json", json)
        if engine is EngineName.jaxpaged:
            max_num_seqs = batch_size if max_num_seqs is None else max_num_seqs
            check_batch_size(batch_size, max_num_seqs)
    model = with_random_weights(model)
    lengths = workload.fixed_lengths(input_len, output_len, batch_size)
    about = {"benchmark": "latency", "model": model, "seed": seed, "temperature": temperature}
    title = f"{model}, batch {batch_size}, {input_len} in, {output_len} out, {iters} iterations, median / p90 / p99"

    def batches(vocab_size: int, longest: int, limit: str) -> list[list[workload.BenchRequest]]:
        workload.check_lengths(lengths, longest, limit)
        return [workload.random_requests(lengths, vocab_size, seed + i) for i in range(iters + 1)]

    if engine is EngineName.hf:
        from jaxpaged.bench import hf as transformers_engine

        with one_line_errors():
            start = time.perf_counter()
            hf = transformers_engine.load(model, dtype.value, seed)
            startup = {"load": time.perf_counter() - start}
            work = batches(hf.vocab_size, hf.longest, "max_position_embeddings")
            measured = transformers_engine.measure_latency(hf, work, temperature, sys.stderr.isatty())
            about |= {"options": {"dtype": dtype.value}, "engine": {"dtype": hf.dtype_name}}
            report.publish(title, hf.device_name, {"hf generate": measured}, startup, json, about)
        return
    options = {
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
    }
    llm, startup = _load(verbose, model, options)
    with one_line_errors():
        config = llm.engine.scheduler.config
        work = batches(llm.engine.vocab_size, config.max_model_len, "max_model_len")
        check_pool(batch_size, input_len, output_len, config)
        measured = measure(llm, work, temperature=temperature, use_tqdm=sys.stderr.isatty())
        about |= {"options": options, "engine": _resolved(llm)}
        report.publish(title, _device_name(), {"jaxpaged": measured}, startup, json, about)


@app.command()
def rate(
    model: BenchModel,
    trace: Annotated[Path, work_option("CSV with the columns prompt_tokens and output_tokens, a request a line.")],
    rates: Annotated[str, work_option("Requests a second to try, with commas between them.")] = "1,2,4,8",
    num_prompts: Annotated[
        int | None, work_option("Requests at each rate; all of the trace if not given.", min=1)
    ] = None,
    slo_ms: Annotated[
        float, work_option("What p90 of the normalised latency must stay below, in ms an output token.", min=0)
    ] = 50.0,
    temperature: Temperature = 0.0,
    seed: BenchSeed = 0,
    dtype: Dtype = DType.auto,
    max_model_len: MaxModelLen = None,
    block_size: BlockSize = 16,
    num_kv_blocks: NumKvBlocks = None,
    gpu_memory_utilization: MemoryShare = 0.90,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: TokenBudget = None,
    enable_prefix_caching: PrefixCaching = True,
    json: Json = None,
    plot: Plot = None,
    verbose: Verbose = False,
) -> None:
    """Let requests arrive at random, rate by rate, and tell latencies and the highest rate that is sustained."""
    from jaxpaged.bench import rate as rate_benchmark
    from jaxpaged.bench import report, workload

    with one_line_errors():
        report.check_writable("json", json)
        rate_benchmark.check_plot(plot)
        tried = rate_benchmark.parse_rates(rates)
        lengths = workload.read_trace(trace, num_prompts)
    model = with_random_weights(model)
    options = {
        "dtype": dtype.value,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": enable_prefix_caching,
    }
    llm, startup = _load(verbose, model, options)
    with one_line_errors():
        config, vocab_size = llm.engine.scheduler.config, llm.engine.vocab_size
        workload.check_lengths(lengths, config.max_model_len, "max_model_len")
        warm_up = workload.random_requests(lengths[: config.max_num_seqs], vocab_size, seed)
        # Prompts of their own for each rate, so that none finds another's in the cache.
        runs = [(r, workload.random_requests(lengths, vocab_size, seed + i)) for i, r in enumerate(tried, 1)]
        results = rate_benchmark.measure(
            llm.engine, runs, warm_up, seed=seed, temperature=temperature, use_tqdm=sys.stderr.isatty()
        )
    shown = {f"{result.rate:g}/s": result for result in results}
    about = {"benchmark": "rate", "model": model, "requests": trace.name, "seed": seed, "temperature": temperature}
    about |= {
        "slo_ms": slo_ms,
        "sustained_rate": rate_benchmark.highest_sustained(results, slo_ms),
        "verdicts": {name: result.verdict(slo_ms).value for name, result in shown.items()},
        "options": options,
        "engine": _resolved(llm),
    }
    title = f"{model}, {trace.name}, {len(lengths)} requests a rate, median / p90 / p99"
    with one_line_errors():
        report.publish(title, _device_name(), shown, startup, json, about)
        typer.echo(rate_benchmark.conclusion(results, slo_ms))
        if plot is not None:
            rate_benchmark.plot(plot, results, slo_ms, f"{model}, {trace.name}")


def _lengths(
    trace: Path | None, input_len: int | None, output_len: int | None, num_prompts: int | None
) -> list[Lengths]:
    from jaxpaged.bench import workload

    fixed = (input_len, output_len)
    if trace is not None:
        if fixed != (None, None):
            raise ValueError("--trace brings its own lengths; leave out --input-len and --output-len")
        return workload.read_trace(trace, num_prompts)
    if input_len is None or output_len is None:
        raise ValueError("give --trace FILE, or both --input-len and --output-len")
    return workload.fixed_lengths(input_len, output_len, num_prompts or 256)


def _batch_sizes(listed: str) -> list[int]:
    entries = [entry.strip() for entry in listed.split(",")]
    if not all(entry.isdecimal() and int(entry) for entry in entries):
        raise ValueError(f"hf_batch_sizes={listed!r} must be positive integers, with commas between them")
    return sorted({int(entry) for entry in entries})


def _load(verbose: bool, model: str, options: dict[str, Any]) -> tuple[LLM, dict[str, float]]:
    """The engine, and the seconds of its start by phase, importing JAX and the engine's own modules included."""
    start = time.perf_counter()
    llm = load_llm(verbose, model=model, **options)
    whole = time.perf_counter() - start
    return llm, {"imports": max(0.0, whole - llm.startup.total), **llm.startup.seconds}


def _resolved(llm: LLM) -> dict[str, Any]:
    """What the engine runs with, whatever the options left to it."""
    config = dataclasses.asdict(llm.engine.scheduler.config)
    return {"dtype": llm.engine.runner._cache[0].k.dtype.name, **config}


def _device_name() -> str:
    import jax

    return jax.devices()[0].device_kind


def _hf_throughput(
    model: str, dtype: str, lengths: list[Lengths], seed: int, temperature: float, mode: HFMode, sizes: list[int]
) -> tuple[dict[str, Throughput], dict[str, float], HFModel]:
    """The runs by name, the seconds of the start by phase, and what ran."""
    from jaxpaged.bench import hf as transformers_engine
    from jaxpaged.bench import workload

    prepare_process(verbose=False)
    start = time.perf_counter()
    hf = transformers_engine.load(model, dtype, seed)
    startup = {"load": time.perf_counter() - start}
    workload.check_lengths(lengths, hf.longest, "max_position_embeddings")
    requests = workload.random_requests(lengths, hf.vocab_size, seed)
    runs: dict[str, Throughput] = {}
    use_tqdm = sys.stderr.isatty()
    if mode is not HFMode.continuous:
        measured = transformers_engine.measure_static(hf, requests, sizes, temperature, use_tqdm)
        runs[f"hf generate, batches of {measured.details['batch_size']}"] = measured
    if mode is not HFMode.static:
        measured, seconds = transformers_engine.measure_continuous(hf, requests, temperature, use_tqdm)
        runs["hf continuous batching"] = measured
        startup["continuous batching"] = seconds
    return runs, startup, hf
