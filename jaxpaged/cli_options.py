"""What the commands of the command line share: options, loading a model, errors of one line.

Nothing here imports JAX before a model is loaded, so that `--help` is quick.
"""

from __future__ import annotations

import logging
import os
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jaxpaged.llm import LLM
    from jaxpaged.sampling_params import SamplingParams

_ENGINE = "Engine"
_SAMPLING = "Sampling"


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def engine_option(help: str, *names: str, **rules: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=_ENGINE, **rules)


def sampling_option(help: str, **rules: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=_SAMPLING, **rules)


Model = Annotated[str, engine_option("Folder with safetensors, a .gguf file, or 'demo' (SmolLM2-135M-Instruct).")]
Dtype = Annotated[DType, engine_option("Dtype of weights, activations and KV cache.")]
MaxModelLen = Annotated[
    int | None, engine_option("Longest prompt + output, tokens; the model's own limit if not given.")
]
BlockSize = Annotated[int, engine_option("Tokens a KV block: 8, 16, 32, 64 or 128.")]
NumKvBlocks = Annotated[int | None, engine_option("Blocks of the KV pool; as many as fit if not given.")]
MemoryShare = Annotated[float, engine_option("Share of the GPU memory for weights, pool and temporaries, in (0, 1].")]
MaxNumSeqs = Annotated[int | None, engine_option("Most sequences at once; 256 if not given, 32 on a CPU.")]
TokenBudget = Annotated[int | None, engine_option("Token budget of a step; 2048 if not given, 256 on a CPU.")]
PrefixCaching = Annotated[
    bool,
    engine_option(
        "Share the KV of a prompt's beginning with earlier prompts that begin alike.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what loads and how long it takes.")]

MaxTokens = Annotated[int, sampling_option("Most tokens to generate.", min=1)]
NumCompletions = Annotated[int, sampling_option("Completions a prompt.", min=1)]
TopK = Annotated[int, sampling_option("Sample among the k best tokens; 0 = all.")]
TopP = Annotated[float, sampling_option("Sample among the best tokens of this probability mass, in (0, 1].")]
Seed = Annotated[int | None, sampling_option("Makes sampling reproducible.")]


def sampling_params(**fields: Any) -> SamplingParams:
    """SamplingParams of these fields; what is out of range ends the program."""
    from jaxpaged.sampling_params import SamplingParams

    with one_line_errors():
        return SamplingParams(**fields)


def load_llm(verbose: bool, **options: Any) -> LLM:
    """The model with these fields of EngineConfig, in a process that has the GPU to itself."""
    prepare_process(verbose)
    if sys.stderr.isatty():
        typer.secho(f"Loading {options['model']} ...", fg="bright_black", err=True)
    with one_line_errors():
        from jaxpaged.llm import LLM

        return LLM(**options)


def prepare_process(verbose: bool) -> None:
    """Sets up logging, and gives JAX's allocator the GPU; must be called before JAX starts."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("jaxpaged").setLevel(logging.INFO if verbose else logging.WARNING)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


class one_line_errors:
    """Turns an error that the user can mend into one line and exit code 2."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from jaxpaged.checkpoints.demo import DemoModelError

        if isinstance(error, ValueError | DemoModelError):
            typer.secho(f"jaxpaged: {error}", fg="red", err=True)
            raise typer.Exit(2) from error
