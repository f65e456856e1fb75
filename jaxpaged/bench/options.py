"""Options that the benchmarks' commands have beside those of every command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxpaged.cli_options import engine_option

_WORK = "Work"
_OUTPUT = "Output"


class EngineName(StrEnum):
    jaxpaged = "jaxpaged"
    hf = "hf"


class HFMode(StrEnum):
    both = "both"
    static = "static"
    continuous = "continuous"


class Reservation(StrEnum):
    none = "none"
    max = "max"
    pow2 = "pow2"
    oracle = "oracle"


def work_option(help: str, **rules: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=_WORK, **rules)


BenchModel = Annotated[
    str,
    engine_option(
        "Name of a published shape (llama-3.1-8b, llama-13b, ...) for random weights, a folder with safetensors, a "
        ".gguf file, or 'demo'."
    ),
]
Engine = Annotated[EngineName, engine_option("What serves: this engine, or Hugging Face Transformers on PyTorch.")]
Temperature = Annotated[float, work_option("0 is greedy.", min=0.0)]
BenchSeed = Annotated[int, work_option("Seeds the prompts' random tokens.", min=0)]
Json = Annotated[Path | None, typer.Option("--json", help="File for the results.", rich_help_panel=_OUTPUT)]
Plot = Annotated[
    Path | None,
    typer.Option(help="PNG of normalised latency against rate; needs matplotlib.", rich_help_panel=_OUTPUT),
]
KvReservation = Annotated[
    Reservation,
    engine_option("KV space that each request takes at its admission, as systems without paging do; none is paging."),
]
StaticBatches = Annotated[
    bool, engine_option("Run each batch to its end before the next, as systems without continuous batching do.")
]
HFModeOption = Annotated[HFMode, engine_option("With --engine hf: static batches, continuous batching, or both.")]
HFBatchSizes = Annotated[
    str, engine_option("With --engine hf: sizes of a static batch; the best in a trial serves all.")
]
