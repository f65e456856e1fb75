"""All figures of the report: gathered, and shown as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from jaxpaged.bench.memory import lineages, paper
from jaxpaged.bench.memory.sharing import measure_sharing, spread
from jaxpaged.bench.memory.systems import SYSTEMS, Memory, paged
from jaxpaged.bench.memory.usage import serve
from jaxpaged.bench.workload import Lengths, check_lengths, read_trace

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)


class Options(NamedTuple):
    """What to simulate."""

    traces: Sequence[Path]
    lineages: Path
    """As `scripts/record_beam_lineages.py` writes them."""
    memory: Memory = Memory()
    num_prompts: int | None = None
    """The first ones of each trace; None: all."""
    beam_requests: int = 250
    """Those of beam search, a sample of the trace."""
    seed: int = 0
    """Draws the lineages."""


def read_traces(options: Options) -> dict[str, list[Lengths]]:
    """The traces by their files' names, without the ending.

    Raises:
      ValueError: an option or a trace is wrong, or has a request that the memory does not hold.
    """
    memory = options.memory
    counts = {**memory._asdict(), "beam_requests": options.beam_requests, "num_prompts": options.num_prompts}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    chunk = 1 << (memory.num_slots.bit_length() - 1)  # the largest of a buddy allocator
    most = max(memory.max_model_len, *BLOCK_SIZES)
    if chunk < most:
        raise ValueError(
            f"num_slots={memory.num_slots} give a buddy allocator no chunk larger than {chunk}, but the longest "
            f"sequence (max_model_len={memory.max_model_len}) and the largest block ({max(BLOCK_SIZES)}) need {most}; "
            "raise num_slots or lower max_model_len"
        )
    if memory.num_slots // memory.block_size * memory.block_size < memory.max_model_len:
        raise ValueError(
            f"block_size={memory.block_size} leaves the {memory.num_slots} slots no room for a sequence of "
            f"max_model_len={memory.max_model_len}; lower it or raise num_slots"
        )
    traces = {}
    for path in options.traces:
        if path.stem in traces:
            raise ValueError(f"trace {path}: there is another one with the name {path.stem}; give each its own")
        traces[path.stem] = read_trace(path, options.num_prompts)
        check_lengths(traces[path.stem], memory.max_model_len, "max_model_len")
    return traces


def make(options: Options, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Simulates everything; the result can be written as JSON.

    Args:
      options: what to simulate.
      say: is told what comes next.

    Raises:
      ValueError: as `read_traces`, or the lineages can't be read.
    """
    traces = read_traces(options)
    beams = {width: _lineages(options.lineages, width) for width in WIDTHS}
    memory, results = options.memory, {}
    for name, trace in traces.items():
        systems, sizes = {}, {}
        for system, make_scheduler in SYSTEMS.items():
            say(f"{name}: {system}")
            systems[system] = serve(make_scheduler(memory, trace), trace).as_json()
        for size in BLOCK_SIZES:
            say(f"{name}: blocks of {size}")
            usage = serve(paged(memory._replace(block_size=size), trace), trace).as_json()
            sizes[str(size)] = {key: value for key, value in usage.items() if key != "moments"}
        parallel, beam, sample = {}, {}, spread(trace, options.beam_requests)
        for width in WIDTHS:
            say(f"{name}: {width} sequences a request")
            apart = lineages.Apart(width)
            parallel[str(width)] = measure_sharing(trace, width, apart, block_size=memory.block_size)._asdict()
            for model, source in beams[width].items():
                say(f"{name}: {width} beams, {model}")
                sharing = measure_sharing(sample, width, source, block_size=memory.block_size, seed=options.seed)
                beam.setdefault(model, {})[str(width)] = sharing._asdict()
        results[name] = {
            "num_requests": len(trace),
            "systems": systems,
            "block_sizes": sizes,
            "sharing": {"parallel": parallel, "beam": beam},
        }
    return {**memory._asdict(), "seed": options.seed, "lineages": str(options.lineages), "traces": results}


def _lineages(path: Path, width: int) -> dict[str, Any]:
    """By the names that the report shows: what counts, and to what it is sensitive."""
    recorded = lineages.Recorded.read(path, width)
    return {
        "recorded": recorded,
        "recorded at half speed": lineages.HalfSpeed(recorded),
        "independent": lineages.Independent(width),
    }


def tables(report: dict[str, Any]) -> list[Table]:
    """Three for each trace."""
    shown = []
    for name, trace in report["traces"].items():
        shown += [
            _systems_table(name, report, trace),
            _block_sizes_table(name, trace),
            _sharing_table(name, trace),
        ]
    return shown


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _systems_table(name: str, report: dict[str, Any], trace: dict[str, Any]) -> Table:
    table = _table(
        f"{name}: {trace['num_requests']} requests in {report['num_slots']:,} slots",
        "",
        *("hold a token", "paper", "to come", "never used", "free or lost"),
        *("of allocated", "running", "paper", "preemptions", "steps"),
    )
    for system, u in trace["systems"].items():
        published = paper.USAGE.get(name, {}).get(system)
        parts = (u["coming_of_pool"], u["wasted_of_pool"], u["free_of_pool"], u["held_of_allocated"])
        table.add_row(
            system,
            f"{u['held_of_pool']:.1%}",
            f"{published.held_of_pool:.1%}" if published else "",
            *(f"{share:.1%}" for share in parts),
            f"{u['mean_running']:.1f}",
            f"{published.mean_running:.1f}" if published else "",
            f"{u['num_preemptions']:,}",
            f"{u['num_steps']:,}",
        )
    return table


def _block_sizes_table(name: str, trace: dict[str, Any]) -> Table:
    table = _table(
        f"{name}: paged, by block size", "block", "of allocated", "of all", "running", "preemptions", "steps"
    )
    for size, u in trace["block_sizes"].items():
        counts = (f"{u['mean_running']:.1f}", f"{u['num_preemptions']:,}", f"{u['num_steps']:,}")
        table.add_row(size, f"{u['held_of_allocated']:.1%}", f"{u['held_of_pool']:.1%}", *counts)
    return table


def _sharing_table(name: str, trace: dict[str, Any]) -> Table:
    sharing = trace["sharing"]
    table = _table(
        f"{name}: blocks saved by sharing (paper)", "", "requests", *(f"{width} sequences" for width in WIDTHS)
    )
    rows = {"parallel sampling": (sharing["parallel"], paper.PARALLEL)}
    rows |= {f"beams, lineages {model}": (by_width, paper.BEAM) for model, by_width in sharing["beam"].items()}
    for label, (by_width, published) in rows.items():
        beside = published.get(name, {})
        shares = (
            f"{by_width[str(width)]['saved']:.1%}" + (f" ({beside[width]:.1%})" if width in beside else "")
            for width in WIDTHS
        )
        table.add_row(label, f"{by_width[str(WIDTHS[0])]['num_requests']:,}", *shares)
    return table
