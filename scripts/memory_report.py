"""How full the KV memory is: paging against what serving systems did before it, and what sharing blocks saves.

    python scripts/memory_report.py [--json report.json] [--plots DIR]

The figures of the PagedAttention paper (Kwon et al., SOSP 2023), simulated on the CPU with the engine's scheduler and
block manager and no model; docs/benchmarks.md tells what is assumed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from jaxpaged.bench.memory import plots, report
from jaxpaged.bench.memory.systems import Memory
from jaxpaged.bench.report import check_writable, write_json

WORKLOADS = Path(__file__).parent.parent / "workloads"
DEFAULTS = report.Options(
    [WORKLOADS / "sharegpt_like.csv", WORKLOADS / "alpaca_like.csv"], WORKLOADS / "beam_lineages.json"
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    memory = DEFAULTS.memory
    parser.add_argument(
        "--trace", type=Path, nargs="+", default=DEFAULTS.traces, help="CSV files (default: both of workloads/)"
    )
    parser.add_argument("--num-prompts", type=int, help="the first ones of each trace (default: all)")
    parser.add_argument(
        "--num-slots", type=int, default=memory.num_slots, help="KV slots (default: 15700, OPT-13B on 40 GB)"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=memory.max_model_len, help="what Orca (Max) reserves (default: 2048)"
    )
    parser.add_argument("--block-size", type=int, default=memory.block_size, help="tokens a block (default: 16)")
    parser.add_argument(
        "--beam-requests",
        type=int,
        default=DEFAULTS.beam_requests,
        help=f"most beam searches of a trace, short and long in its proportions (default: {DEFAULTS.beam_requests})",
    )
    parser.add_argument("--lineages", type=Path, default=DEFAULTS.lineages, help="recorded beams, a JSON file")
    parser.add_argument("--seed", type=int, default=DEFAULTS.seed, help="draws the lineages (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for PNG plots; needs matplotlib")
    return parser.parse_args(arguments)


def memory_of(args: argparse.Namespace) -> Memory:
    return Memory(args.num_slots, args.max_model_len, args.block_size)


def run(args: argparse.Namespace) -> None:
    """Simulates, prints, and writes what is wanted.

    Raises:
      ValueError: an option or a file is wrong.
    """
    check_writable("json", args.json)
    plots.check_plots(args.plots)
    options = report.Options(
        traces=args.trace,
        lineages=args.lineages,
        memory=memory_of(args),
        num_prompts=args.num_prompts,
        beam_requests=args.beam_requests,
        seed=args.seed,
    )
    with Console(stderr=True).status("reading") as status:
        results = report.make(options, status.update)
    console = Console(width=None if sys.stdout.isatty() else 150)
    for table in report.tables(results):
        console.print(table)
    if args.json is not None:
        write_json(args.json, results)
    if args.plots is not None:
        for path in plots.draw(args.plots, results):
            console.print(path, highlight=False)


def main() -> None:
    try:
        run(parse())
    except ValueError as error:
        print(f"memory_report: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
